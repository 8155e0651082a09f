"""A model's own chat template, bound to a tokenizer: Jinja in, items with kinds out, every mask proved."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import jinja2

from chatmill.core.conversation import MESSAGE_FIELDS, Conversation
from chatmill.errors import ConfigError, RecordError, TokenizerError
from chatmill.render.bound import BoundTemplate, Items, WrittenRecord
from chatmill.render.fragments import Fragment, Fragments
from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.hooked_sandbox import HookedSandbox
from chatmill.render.jinja.message_sequences import Composed, MessageSequences
from chatmill.render.jinja.names import fields_read, names_read
from chatmill.render.jinja.options import Expand, TemplateOptions, Thinking, Traces
from chatmill.render.jinja.probes import habitual_stop, probed_form
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import Renderer
from chatmill.render.jinja.sandbox import PlainSandbox
from chatmill.render.jinja.stops import StopTokens, families_of
from chatmill.render.jinja.tracing_sandbox import TracingSandbox
from chatmill.render.jinja.turn_sequences import Counts, TextSequence, prompt_sequence, sequences_of
from chatmill.render.jinja.turns import Turns
from chatmill.render.sequence_items import TokenRules, items_of
from chatmill.render.template import refuse_channels, refuse_missing
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
MENDED_BY_OPTIONS = ("prompt_not_in_history", "reasoning_not_closed", "no_stop", "template_refused", "no_prompt")
"""Errors of a record that may go away under another choice of options."""
DECLARES = "The template decides what it trims; reasoning and white space that it leaves out are counted."


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
    default_policy: str = "assistant"
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    """`bos_token` and the like, from the model's own files."""
    stop_ids: tuple[int, ...] = ()
    """`eos_token_id` of the model's generation config."""
    declares: ClassVar[str] = DECLARES


class TextSequences(NamedTuple):
    """The sequences of a conversation, as text."""

    sequences: tuple[TextSequence, ...]
    """None yet where the conversation was put together."""
    counts: Counts
    options: tuple[tuple[str, Any], ...]
    """The options that were chosen for this record."""
    composed: Composed | None = None
    """The one sequence of a conversation that was put together, message by message."""


class ModelTemplate(BoundTemplate):
    """A Jinja template with a vocabulary, under the options of a recipe."""

    knows_by_value = False
    declares = DECLARES

    def __init__(self, source: JinjaSource, tokenizer: Tokenizer, given: TemplateOptions | None = None) -> None:
        """Bind, compile and probe the template.

        A `TokenizerError` where it belongs to another vocabulary; a `ConfigError` where it is no template, or never
        reads an option that is given.
        """
        refuse_missing(source.name, source.control_tokens, tokenizer)
        self.source, self.given = source, given or TemplateOptions()
        self.name, self.control_tokens = source.name, source.control_tokens
        self.default_policy = source.default_policy
        self.tokenizer = tokenizer.for_sequences()
        self.rules = TokenRules(self.tokenizer)
        self.named_tokens = _named_tokens(source, tokenizer)
        """`bos_token` and the like."""
        self.specials = self.rules.pattern
        """Matches the tokens that only a template may write, the longest first."""
        self._tracing, self._plain = TracingSandbox(self.given.today), PlainSandbox(self.given.today)
        self._hooked = HookedSandbox(self.given.today)
        self._words = set(re.findall(r"[a-z_]+", source.text))
        self._renderers: dict[str, Renderer] = {}
        self._lessons: dict[Renderer, MessageSequences] = {}
        self._fragments = Fragments(self.rules)
        try:
            self.reads, fields = _names_read_by(source.text)
            """Names that the template reads without setting them."""
            self._renderer({})
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"template {self.name!r}, line {error.lineno}: {error.message}") from None
        except (RecursionError, SyntaxError, MemoryError):
            raise ConfigError(f"template {self.name!r} is nested too deeply to be compiled") from None
        unknown = sorted(set(self.given.options) - set(self.option_names))
        if unknown:
            raise ConfigError(
                f"the template {self.name!r} never reads the option {unknown[0]!r}. It reads: "
                f"{', '.join(self.option_names) or 'none'}"
            )
        renderers = [self._renderer(options) for options in self.choices({})]
        self.form = probed_form(renderers, self._words)._replace(more_fields=fields - MESSAGE_FIELDS)
        self.stops = self._stop_tokens(renderers)
        """Named by the model's files, by the table of families, or always written by the template."""
        self._check_tokens()

    def _stop_tokens(self, renderers: list[Renderer]) -> StopTokens:
        controls = self.tokenizer.control_ids
        by_id = {token_id: name for name, token_id in controls.items()}
        named = [*self.source.stop_tokens, *(by_id[one] for one in self.source.stop_ids if one in by_id)]
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
                    "where no word is beside it (single_word): what is beside it differs from record to record. Take "
                    "single_word away from that token in tokenizer.json"
                )

    @property
    def option_names(self) -> list[str]:
        """The options that the template reads."""
        return sorted(self.reads - set(self._plain.globals) - GIVEN - set(TOKEN_NAMES))

    @property
    def fingerprint(self) -> str:
        """sha256 of everything that decides the text; datasets hold it, so its words stay as they are."""
        given = self.given
        decisive = [
            *(self.source.text, self.tokenizer.special_tokens, sorted(self.named_tokens.items())),
            *(self.stops.names, sorted(given.options.items()), str(given.today), given.expand, given.unproved),
            *(given.thinking, given.last_turn_only, *(["whole_row"] if given.whole_sequence else [])),
        ]
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()

    def _renderer(self, options: Mapping[str, Any], own: Iterable[str] = ()) -> Renderer:
        """What runs the template under some options; `own` are those that the record itself has."""
        key = json.dumps([sorted(options.items()), sorted(own)])
        found = self._renderers.get(key)
        if found is None:
            variables = {**self.named_tokens, **options}
            found = Renderer(self.source.text, self._tracing, self._plain, self._hooked, variables, self.name, own)
            self._renderers[key] = found
        return found

    def choices(self, own: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Options to try for a record, in order: as given first, then the switches for thinking."""
        given = {**self.given.options, **own}
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

    def write(
        self, conversation: Conversation, notes: Notes | None = None, *, by_messages: bool = False
    ) -> WrittenRecord:
        """The sequences of a conversation; a `RecordError` where it cannot be written and proved."""
        notes = Notes() if notes is None else notes
        sequences, counts, options, composed = self.text_sequences(conversation, notes, by_messages=by_messages)
        if composed is not None:
            fragments = self._fragments.of(composed.groups)
            if fragments is not None:
                return WrittenRecord((fragments,), counts, options)
            sequences = (composed.sequence,)
        return WrittenRecord(
            tuple((Fragment(items_of(sequence, self.rules, notes)),) for sequence in sequences), counts, options
        )

    def write_prompt(self, conversation: Conversation) -> Items:
        """The generation prompt behind a conversation."""
        self._check(conversation)
        turns = self.turns(conversation)
        return items_of(prompt_sequence(turns, self.specials), self.rules, turns.notes)

    def _check(self, conversation: Conversation) -> None:
        """Jinja templates are given no channels, recipients or Harmony contents: these must not be lost."""
        for index, message in enumerate(conversation.messages):
            refuse_channels(self.name, message, index)

    def text_sequences(
        self, conversation: Conversation, notes: Notes | None = None, *, by_messages: bool = False
    ) -> TextSequences:
        """The sequences of a conversation as text; a `RecordError` where it cannot be written and proved.

        What the outcome depends on beside the shape goes into `notes`. With `by_messages` the sequences may be put
        together from what other conversations have taught about single messages.
        """
        self._check(conversation)
        notes = Notes() if notes is None else notes
        own = conversation.options
        unknown = sorted(set(own) - set(self.option_names))
        if unknown:
            raise RecordError(
                f"the template never reads the option {unknown[0]!r}; it reads: "
                f"{', '.join(self.option_names) or 'none'}",
                code="unknown_option",
                path="chat_template_kwargs",
            )
        first: RecordError | None = None
        best: TextSequences | None = None
        for number, options in enumerate(self.choices(own)):
            if number == 0 and by_messages:
                composed = self._composed(conversation, options, notes)
                if composed is not None:
                    return composed
            turns, outcome = self._by_turns(conversation, options)
            notes.add(turns.notes.replies)
            if isinstance(outcome, RecordError):
                first = first or outcome
                if outcome.code not in MENDED_BY_OPTIONS:
                    break
                continue
            sequences, counts = outcome
            if number == 0 and turns.shape:  # nothing is learned of no messages
                lessons = self._message_sequences(self._renderer(options, own))
                lessons.learn(turns.view, turns.shape, sequences, counts, turns.notes.replies)
            written = TextSequences(tuple(sequences), counts, tuple(sorted(options.items())))
            if not counts.untrained:
                return written
            if best is None or counts.untrained < best.counts.untrained:
                best = written
        if best is not None:  # answers without a proof are context, under the options that leave the fewest
            return best
        assert first is not None
        raise first

    def _by_turns(
        self, conversation: Conversation, options: Mapping[str, Any]
    ) -> tuple[Turns, tuple[list[TextSequence], Counts] | RecordError]:
        """The sequences of a conversation from its renderings, or why it has none."""
        turns = self.turns(conversation, options)
        try:
            return turns, sequences_of(turns, self.given, self.specials)
        except RecordError as error:
            return turns, error

    def _message_sequences(self, renderer: Renderer) -> MessageSequences:
        if renderer not in self._lessons:
            lessons = self._lessons[renderer] = MessageSequences()
            whole = self.given.traces is Traces.WHOLE or self.given.expand is Expand.LAST
            whole = whole or self.given.last_turn_only or self.given.whole_sequence
            lessons.is_sound = not whole
        return self._lessons[renderer]

    def _composed(self, conversation: Conversation, options: Mapping[str, Any], notes: Notes) -> TextSequences | None:
        """A conversation put together from what is known of its messages; None where that is not enough."""
        view = RecordView(conversation, self.form)
        shape = view.shape()
        renderer = self._renderer(options, conversation.options)
        lessons = self._message_sequences(renderer)
        found = lessons.compose(view, shape) if shape else None
        if found is None:
            return None
        whole = renderer.text(view, len(shape), False)
        if whole is None:  # refused: the long way says why
            return None
        if whole != found.text:  # the long way writes it
            lessons.widen()
            return None
        for answer in found.answers():
            ended = whole if answer.message == len(shape) - 1 else renderer.text(view, answer.message + 1, False)
            is_whole = ended is not None and ended.startswith(answer.text)
            if not is_whole or renderer.text(view, answer.message, True) != answer.text[: answer.begin]:
                return None  # something far away decides: the long way sees it
        if found.compare_all:
            turns, outcome = self._by_turns(conversation, options)
            if outcome != ([found.sequence], found.counts):
                lessons.is_sound = False
                return None
            lessons.learn(view, shape, [found.sequence], found.counts, turns.notes.replies)
        notes.add(found.replies)
        return TextSequences((), found.counts, tuple(sorted(options.items())), found)

    def turns(self, conversation: Conversation, options: Mapping[str, Any] | None = None) -> Turns:
        """The renderings of a conversation, for a closer look; `options` are one of `choices`."""
        chosen = next(self.choices(conversation.options)) if options is None else options
        view = RecordView(conversation, self.form)
        return Turns(self._renderer(chosen, conversation.options), view, self.stops, self.named_tokens.get("bos_token"))

    @property
    def put_together(self) -> int:
        """How many conversations were put together from messages of others."""
        return sum(lessons.made for lessons in self._lessons.values())

    @property
    def asks_for_date(self) -> bool:
        """Whether the template has asked for today's date in a rendering so far."""
        return any(one.asked_for_date for one in (self._plain, self._tracing, self._hooked))

    def plain(self, conversation: Conversation, options: Mapping[str, Any], count: int, *, prompt: bool) -> str:
        """The text of the first messages by plain Jinja, under options that `text_sequences` has chosen."""
        return self._renderer(options, conversation.options).plain(RecordView(conversation, self.form), count, prompt)


def _named_tokens(source: JinjaSource, tokenizer: Tokenizer) -> dict[str, str]:
    """What a template is given as `bos_token` and the like: of the tokenizer's files before the template's own."""
    names = {token_id: name for name, token_id in tokenizer.control_ids.items()}
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    known = {key: names[token_id] for key, token_id in ids.items() if token_id in names}
    return {**known, **source.named_tokens, **tokenizer.named_tokens}


@lru_cache(maxsize=128)
def _names_read_by(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """What is read in a template's text, options and fields; parsing takes as long as all the rest of binding it."""
    parsed = PlainSandbox().parse(text)
    return names_read(parsed), fields_read(parsed)
