"""A model's own chat template, bound to a tokenizer: Jinja in, items with kinds out, every mask proved."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2

from chatmill.core.conversation import Conversation, Message
from chatmill.core.conversations import Conversations
from chatmill.core.hashed_fields import hashed_fields
from chatmill.core.message_parser import MESSAGE_FIELDS
from chatmill.errors import ConfigError, RecordError, TokenizerError
from chatmill.images.expand import Expander
from chatmill.images.files import Pictures
from chatmill.images.find_rule import no_rule
from chatmill.images.rule import PictureRule
from chatmill.render.document_items import TokenRules
from chatmill.render.documents import Counts, DocumentWriter, TextDocument
from chatmill.render.fragment_walk import StepTable
from chatmill.render.jinja.answers import Answers
from chatmill.render.jinja.as_sampled import SampledAnswers, written_between
from chatmill.render.jinja.control_names import ControlNames
from chatmill.render.jinja.label_table import LabelTable
from chatmill.render.jinja.labels import TokenTexts
from chatmill.render.jinja.limits import LimitError
from chatmill.render.jinja.names import fields_read, names_read
from chatmill.render.jinja.options import AnswerText, TemplateOptions, Thinking
from chatmill.render.jinja.probes import habitual_stop, probed_form
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import Sandboxes, TemplateRunner, refuse_too_long
from chatmill.render.jinja.sandbox import PlainSandbox
from chatmill.render.jinja.stops import StopTokens, families_of
from chatmill.render.jinja.tracing_sandbox import TracingSandbox
from chatmill.render.jinja.turns import Turns
from chatmill.render.plan_store import PlanStore
from chatmill.render.record_keys import RecordKeys
from chatmill.tokenizer.tokenizer import Tokenizer

GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""What every template is given; everything else it reads is a special token or an option."""
TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
THINKING_SWITCHES: Mapping[str, tuple[Any, ...]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "reasoning_effort": ("high", "no_think"),
}
"""Options that switch thinking on and off, as model cards document them."""
OF_SAMPLED_ANSWERS = ("no_reasoning", "ambiguous_thinking")
OF_CHOICES = ("prompt_not_in_history", "template_refused", "no_prompt")
"""Errors under one choice of options that say nothing about the others."""
MENDED_BY_OPTIONS = (
    *("prompt_not_in_history", "reasoning_not_closed", "no_stop", "template_refused", "no_prompt"),
    *OF_SAMPLED_ANSWERS,
)
"""Errors of a record that may go away under another choice of options."""
_IN_WORDS = "hashed in words of its own, which datasets hold"
NOT_HASHED = {
    **dict.fromkeys(("options", "today", "expand", "unproved", "thinking", "last_turn_only"), _IN_WORDS),
    "whole_document": _IN_WORDS,
    "trust": "a key of the recipe, hashed with it",
    "only_drift": "a key of the recipe, hashed with it",
    "pictures": "their rule has a fingerprint of its own, and the rest are keys of the recipe",
}
"""Options of a template that its fingerprint has not by their names, with the reason; all others it has."""
READS_CHANNELS = re.compile(r"\.channel\b|\[['\"]channel['\"]\]")
"""A template that asks for the channel of a message writes the fields of Harmony."""


class AnswersBy(Enum):
    """Where the answers of a record are looked for."""

    HISTORY = auto()
    SAMPLING = auto()
    """History that shows the reasoning, or what a model writes after the prompt."""
    EITHER = auto()
    """What a model writes after the prompt, where history has no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JinjaSource:
    """A Jinja template before it is bound to a tokenizer."""

    name: str
    text: str
    path: str
    """Where it was found."""
    origin: str = ""
    licence: str = ""
    control_tokens: tuple[str, ...] = ()
    """Tokens that the template writes and a vocabulary may lack."""
    stop_tokens: tuple[str, ...] = ()
    document_end: str | None = None
    """The token that it writes after a whole conversation."""
    default_policy: str = "assistant"
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    """`bos_token` and the like, from the model's own files."""
    stop_ids: tuple[int, ...] = ()
    """`eos_token_id` of the model's generation config."""


class TextDocuments(NamedTuple):
    """The documents of a conversation, as text."""

    documents: tuple[TextDocument, ...]
    counts: Counts
    options: tuple[tuple[str, Any], ...]
    """The options that were chosen for this record."""


class WrittenRecord(NamedTuple):
    """The documents of a conversation, as steps of a `StepTable`."""

    writer: DocumentWriter
    options: tuple[tuple[str, Any], ...]
    """The options that were chosen for this record."""
    tried: tuple[Answers, ...] = ()
    """What was looked at under other options before."""

    def is_keyed(self) -> bool:
        """Return whether every record with the same key is written like this one."""
        return all(answers.view.is_keyed for answers in (self.writer.answers, *self.tried))

    def texts(self) -> TextDocuments:
        """Return the documents as text."""
        return TextDocuments(self.writer.texts(), self.writer.counts, self.options)


class ModelTemplate:
    """A Jinja template with a vocabulary, under the options of a recipe."""

    def __init__(self, source: JinjaSource, tokenizer: Tokenizer, given: TemplateOptions | None = None) -> None:
        """Bind, compile and probe the template.

        A `TokenizerError` where it belongs to another vocabulary; a `ConfigError` where it is no template, or never
        reads an option that is given.
        """
        _refuse_missing(source.name, source.control_tokens, tokenizer)
        self.source, self.given = source, given or TemplateOptions()
        self.name, self.control_tokens = source.name, source.control_tokens
        self.default_policy = source.default_policy
        """The policy that fits this format when none is chosen."""
        self.tokenizer = tokenizer.for_documents()
        self.pictures = self.given.pictures or Pictures.of(source.path or os.devnull)
        self.expander = None if isinstance(self.pictures.rule, str) else self._expander(self.pictures.rule)
        """Writes the tokens of pictures, where the model's processor is known."""
        self.rules = TokenRules(self.tokenizer, None if self.expander is None else self.expander.rule)
        self.named_tokens = _named_tokens(source, tokenizer)
        """`bos_token` and the like."""
        self.specials = self.rules.pattern
        """Matches the tokens that only a template may write, the longest first."""
        today = self.given.today
        controls = ControlNames({*self.tokenizer.special_tokens, *self.rules.placeholders})
        self._sandboxes = Sandboxes(TracingSandbox(today, controls), PlainSandbox(today))
        self._words = set(re.findall(r"[a-z_]+", source.text))
        self.reads_reasoning = not self._words.isdisjoint(("reasoning_content", "reasoning", "thinking"))
        """Whether the template knows reasoning by any of its names."""
        self._reads_channels = READS_CHANNELS.search(source.text) is not None
        try:
            self.reads, fields = _names_read_by(source.text)
            """Names that the template reads without setting them."""
            self._new_renderer({}, None)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"template {self.name!r}, line {error.lineno}: {error.message}") from None
        except LimitError as error:
            raise ConfigError(f"template {self.name!r} was stopped: {error.message}") from None
        except (RecursionError, MemoryError):
            raise ConfigError(f"template {self.name!r} is nested too deeply to be compiled") from None
        except SyntaxError as error:
            raise ConfigError(f"template {self.name!r} cannot be compiled to Python: {error.msg}") from None
        for name, value in self.given.options.items():
            if isinstance(value, str) and (match := self.specials.search(value)):
                raise ConfigError(f"the option {name!r} spells the control token {match.group()!r}, which is no text")
        unknown = sorted(set(self.given.options) - set(self.option_names))
        if unknown:
            raise ConfigError(
                f"the template {self.name!r} never reads the option {unknown[0]!r}. It reads: "
                f"{', '.join(self.option_names) or 'none'}"
            )
        renderers = [self._new_renderer(options, None) for options in self.choices({})]
        self.form = probed_form(renderers, self._words)._replace(more_fields=fields - MESSAGE_FIELDS)
        self.stops = self._stop_tokens(renderers)
        """Named by the model's files, by the table of families, or always written by the template."""
        self._check_tokens()

    def _expander(self, rule: PictureRule) -> Expander | None:
        """A vocabulary that lacks a token of the rule belongs to a model that takes no pictures."""
        missing = sorted(rule.names - self.tokenizer.control_ids.keys())
        if missing:
            why = f"the tokenizer {self.tokenizer.name!r} lacks {', '.join(missing)}"
            self.pictures = self.pictures._replace(rule=why)
            return None
        return Expander(rule, self.tokenizer)

    def _stop_tokens(self, renderers: list[TemplateRunner]) -> StopTokens:
        controls = self.tokenizer.control_ids
        by_id = {token_id: name for name, token_id in controls.items()}
        named = [*self.source.stop_tokens, *(by_id[stop_id] for stop_id in self.source.stop_ids if stop_id in by_id)]
        if "eos_token" in self.named_tokens:
            named.append(self.named_tokens["eos_token"])
        names = [name for name in named if name in controls] or named
        families = families_of(self.source.text)
        for family in families:
            names += [name for name in family.stops if name in self.tokenizer.special_tokens]
        in_history = tuple(name for family in families for name in family.in_history if name not in names)
        stops = StopTokens(tuple(dict.fromkeys(names)), in_history)
        if in_history:  # what stands there is known, and no stop
            return stops
        habit = habitual_stop(renderers, self.form, stops.pattern(), self.specials)
        return stops if habit is None else stops._replace(names=(*stops.names, habit))

    def _check_tokens(self) -> None:
        """Refuse a tokenizer that has no stop of the template, or that finds a token only between words."""
        for stops in (self.source.stop_tokens, self.stops.names):
            if stops and not any(name in self.tokenizer.control_ids for name in stops):
                raise TokenizerError(
                    f"the template {self.name!r} ends answers with {stops[0]!r}, which tokenizer "
                    f"{self.tokenizer.name!r} does not have as a token: template and tokenizer belong to different "
                    "models"
                )
        for name in self.tokenizer.single_words:
            if name in self.source.text:
                raise TokenizerError(
                    f"the template {self.name!r} writes {name!r}, which tokenizer {self.tokenizer.name!r} finds only "
                    "where no word is next to it (single_word): what is next to it differs from record to record. Take "
                    "single_word away from that token in tokenizer.json"
                )

    @property
    def option_names(self) -> list[str]:
        """The options that the template reads."""
        return sorted(self.reads - set(self._sandboxes.plain.globals) - GIVEN - set(TOKEN_NAMES))

    @property
    def fingerprint(self) -> str:
        """sha256 of everything that decides the text; datasets hold it, so its words stay as they are."""
        given = self.given
        decisive = [
            *(self.source.text, self.tokenizer.special_tokens, sorted(self.named_tokens.items())),
            *(self.stops.names, sorted(given.options.items()), str(given.today), given.expand, given.unproved),
            *(given.thinking, given.last_turn_only, *(["whole_row"] if given.whole_document else [])),
        ]
        as_given, usual = hashed_fields(given, NOT_HASHED), hashed_fields(type(given)(), NOT_HASHED)
        if later := {name: value for name, value in as_given.items() if value != usual[name]}:
            decisive.append(later)
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        """Another process remembers what it learns itself."""
        return {name: value for name, value in self.__dict__.items() if name != "_store"}

    @property
    def store(self) -> PlanStore:
        """What this process remembers of the template."""
        kept, process = vars(self), os.getpid()
        store: PlanStore = kept.get("_store") or kept.setdefault("_store", PlanStore(self.form, self.rules))
        if store.process != process:  # forked: a thread that is not here may have left its work half done
            store = kept["_store"] = PlanStore(self.form, self.rules) if store.lock.locked() else store
            store.process = process
        return store

    def _renderer(self, options: Mapping[str, Any], of_record: Iterable[str] = ()) -> TemplateRunner:
        """Return what runs the template under some options; `of_record` are those that the record itself has."""
        store, key = self.store, json.dumps([sorted(options.items()), sorted(of_record)])
        if key not in store.renderers:
            store.renderers[key] = self._new_renderer(options, store.keys, of_record)
        return store.renderers[key]

    def _new_renderer(
        self, options: Mapping[str, Any], keys: RecordKeys | None, of_record: Iterable[str] = ()
    ) -> TemplateRunner:
        return TemplateRunner(
            self.source.text, self._sandboxes, {**self.named_tokens, **options}, self.name, keys, of_record
        )

    def choices(self, of_record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Options to try for a record, in order: as given first, then the switches for thinking."""
        given = {**self.given.options, **of_record}
        yield given
        if self.given.thinking is not Thinking.AUTO:
            return
        for switch, values in THINKING_SWITCHES.items():
            if switch not in self.reads or switch in given:
                continue
            for value in values:
                if (
                    isinstance(value, bool) or {value, "no_think"} <= self._words
                ):  # Hunyuan; other efforts are no switch
                    yield {**given, switch: value}

    def view(self, conversation: Conversation | tuple[Conversations, int]) -> RecordView:
        """Return a conversation, or that at a place of a batch, as the template sees it."""
        return RecordView(conversation, self.form)

    def write(self, record: Conversation | RecordView) -> WrittenRecord:
        """Return the documents of a conversation; a `RecordError` where it cannot be written and proved."""
        view = record if isinstance(record, RecordView) else self.view(record)
        self.check(view)
        of_record = view.options
        unknown = sorted(set(of_record) - set(self.option_names)) if of_record else []
        if unknown:
            raise RecordError(
                f"the template never reads the option {unknown[0]!r}; it reads: "
                f"{', '.join(self.option_names) or 'none'}",
                code="unknown_option",
                path="chat_template_kwargs",
            )
        errors, opened = list[RecordError](), list[RecordError]()
        best: WrittenRecord | None = None
        tried: list[Answers] = []
        given = next(self.choices(of_record))
        for options, by in self._attempts(of_record, tried):
            answers = self._answers(view, options, by)
            writer = DocumentWriter(answers, self._table(answers.renderer), self.given)
            try:
                writer.write()
            except RecordError as error:
                errors.append(error)
                if answers.opens_reasoning and error.code not in OF_CHOICES and options == given:
                    opened.append(error)
                if error.code not in MENDED_BY_OPTIONS:
                    break
                tried.append(answers)
                continue
            written = WrittenRecord(writer, tuple(sorted(options.items())), tuple(tried))
            if not writer.counts.untrained:
                return written
            tried.append(answers)
            if best is None or writer.counts.untrained < best.writer.counts.untrained:
                best = written
        if best is not None:  # answers without a proof are context, under the options that leave the fewest
            return best._replace(tried=tuple(tried))
        raise (opened or errors)[0]

    def _attempts(
        self, of_record: Mapping[str, Any], tried: Sequence[Answers]
    ) -> Iterator[tuple[dict[str, Any], AnswersBy]]:
        """Yield options and rules to try for a record, in order; `tried` is what was looked at so far."""
        wanted = self.given.answers
        choices = list(self.choices(of_record))
        for options in choices:
            yield options, AnswersBy.SAMPLING if wanted is AnswerText.SAMPLED else AnswersBy.HISTORY
        if wanted is not AnswerText.HISTORY and any(answers.leaves_history for answers in tried):
            for options in choices:
                yield options, AnswersBy.EITHER

    def text_documents(self, conversation: Conversation) -> TextDocuments:
        """Return the documents of a conversation as text; a `RecordError` where it cannot be written and proved."""
        with self.store.lock:
            self.store.forget_if_full()
            return self.write(conversation).texts()

    def write_prompt(self, conversation: Conversation) -> WrittenRecord:
        """Return the generation prompt after a conversation."""
        view = self.view(conversation)
        self.check(view)
        answers = self._answers(view, next(self.choices(view.options)))
        writer = DocumentWriter(answers, self._table(answers.renderer), self.given)
        writer.write_prompt()
        return WrittenRecord(writer, ())

    def check(self, view: RecordView) -> None:
        """Refuse channels, recipients, Harmony contents and pictures that would be lost, and what is far too long."""
        refuse_too_long(view)
        if self.expander is None and view.has_pictures:
            raise no_rule(str(self.pictures.rule))
        if not self._reads_channels and view.is_of_harmony:
            for index, message in enumerate(view.conversation.messages):
                _refuse_channels(self.name, message, index)

    def _answers(self, view: RecordView, options: Mapping[str, Any], by: AnswersBy = AnswersBy.HISTORY) -> Answers:
        """Return what is found under some options."""
        renderer = self._renderer(options, view.options)
        rule = self._sampled_answers(renderer, by)
        return Answers(renderer, view.again(), self.stops, as_sampled=rule)

    def _sampled_answers(self, renderer: TemplateRunner, by: AnswersBy) -> SampledAnswers | None:
        """Return the rule for answers as they are sampled, if these are looked for."""
        if by is AnswersBy.HISTORY:
            return None
        between = self.store.between
        if renderer not in between:
            between[renderer] = written_between(renderer, self.form)
        is_strict = by is AnswersBy.SAMPLING
        return SampledAnswers(
            self.given, self.stops, between[renderer], is_strict=is_strict, reads_reasoning=self.reads_reasoning
        )

    def _table(self, renderer: TemplateRunner) -> StepTable:
        tables = self.store.tables
        if renderer not in tables:
            stops, ends, bos = self.stops.pattern(), self.stops.any_end(), self.named_tokens.get("bos_token")
            labels = LabelTable(TokenTexts(self.rules.borders, stops, ends, bos, self.source.document_end))
            tables[renderer] = StepTable(
                renderer.segments, labels, self.store.slots, self.stops, by_texts=self.rules.depends_on_texts
            )
        return tables[renderer]

    def turns(
        self, conversation: Conversation, options: Mapping[str, Any] | None = None, *, by_history: bool = False
    ) -> Turns:
        """Return the renderings of a conversation, for a closer look; `options` are one of `choices`.

        `by_history`: answers are those that history has.
        """
        chosen = next(self.choices(conversation.options)) if options is None else options
        renderer = self._renderer(chosen, conversation.options)
        is_history = by_history or self.given.answers is AnswerText.HISTORY
        rule = self._sampled_answers(renderer, AnswersBy.HISTORY if is_history else AnswersBy.EITHER)
        return Turns(renderer, RecordView(conversation, self.form), self.stops, rule)

    @property
    def asks_for_date(self) -> bool:
        """Whether the template has asked for today's date in a rendering so far."""
        return any(sandbox.asked_for_date for sandbox in self._sandboxes)

    def plain(self, conversation: Conversation, options: Mapping[str, Any], count: int, *, prompt: bool) -> str:
        """Return the text of the first messages by plain Jinja, under options that `text_documents` has chosen."""
        return self._renderer(options, conversation.options).plain(RecordView(conversation, self.form), count, prompt)


def _refuse_missing(name: str, control_tokens: Sequence[str], tokenizer: Tokenizer) -> None:
    """A `TokenizerError` for a vocabulary without the tokens that a template writes: it would write them as text."""
    missing = [token for token in control_tokens if token not in tokenizer.control_ids]
    if missing:
        raise TokenizerError(
            f"template {name!r} needs control tokens that tokenizer {tokenizer.name!r} does not have: "
            f"{', '.join(missing)}. Load it with control_tokens=[...] to add them above the vocabulary "
            "(--add-control-tokens on the command line); the model's embedding must grow with it."
        )


def _refuse_channels(name: str, message: Message, index: int) -> None:
    """Raise a `RecordError` for what only the Harmony format has: such a field would be lost."""
    if message.structured is not None:
        raise RecordError(
            f"template {name!r} cannot write Harmony system or developer content; use the template 'harmony'",
            code="structured_not_in_template",
            path=f"messages[{index}].content",
        )
    if message.channel or message.recipient or message.content_type:
        raise RecordError(
            f"template {name!r} has no channels or recipients; use the template 'harmony', or remove the fields",
            code="channel_not_in_template",
            path=f"messages[{index}]",
        )


def _named_tokens(source: JinjaSource, tokenizer: Tokenizer) -> dict[str, str]:
    """What a template is given as `bos_token` and the like: of the tokenizer's files before the template's own."""
    names = {token_id: name for name, token_id in tokenizer.control_ids.items()}
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    tokens = {key: names[token_id] for key, token_id in ids.items() if token_id in names}
    return {**tokens, **source.named_tokens, **tokenizer.named_tokens}


@lru_cache(maxsize=128)
def _names_read_by(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """What is read in a template's text, options and fields; parsing takes as long as all the rest of binding it."""
    parsed = PlainSandbox().parse(text)
    return names_read(parsed), fields_read(parsed)
