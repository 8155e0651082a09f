"""A model's chat template, ready to write conversations: how it wants its input, its stops, its options, its rows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jinja2

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import ConfigError, RecordError
from chatmill.render.jinja.limits import LimitError
from chatmill.render.jinja.message_rows import Composed, MessageRows
from chatmill.render.jinja.names import names_read
from chatmill.render.jinja.notes import Notes
from chatmill.render.jinja.options import Expand, TemplateOptions, Thinking, Traces
from chatmill.render.jinja.pieces import Rendering
from chatmill.render.jinja.record import Arguments, Content, InputForm, RecordView
from chatmill.render.jinja.renderings import ITS_PARTS, Refusal, Renderer
from chatmill.render.jinja.rows import Counts, Row, prompt_row, rows_of
from chatmill.render.jinja.sandbox import MissingDateError, PlainSandbox
from chatmill.render.jinja.stops import FAMILIES
from chatmill.render.jinja.tracing_sandbox import TracingSandbox
from chatmill.render.jinja.turns import StopTokens, Turns

GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""What every template is given; everything else it reads is a special token or an option."""
TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
THINKING_SWITCHES: Mapping[str, tuple[Any, ...]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "reasoning_effort": ("high", "no_think"),
}
"""Options that switch thinking on and off, as model cards document them."""
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateText:
    """A template and what its tokenizer says about it."""

    name: str
    text: str
    special_tokens: tuple[str, ...] = ()
    """Names of all tokens that only a template may write."""
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    """`bos_token` and the like."""
    stop_tokens: tuple[str, ...] = ()
    """The stops that the model's files name: those of the generation config, and the tokenizer's eos."""


class Written(NamedTuple):
    """What a conversation became."""

    rows: tuple[Row, ...]
    """None yet where the conversation was put together."""
    counts: Counts
    options: tuple[tuple[str, Any], ...]
    """The options that were chosen for this record."""
    composed: Composed | None = None
    """The one row of a conversation that was put together, message by message."""


class ChatTemplate:
    """One template under the options of a recipe."""

    def __init__(self, source: TemplateText, given: TemplateOptions | None = None) -> None:
        """Compile and probe the template; a `ConfigError` where it is no template."""
        self.source, self.given = source, given or TemplateOptions()
        self._tracing, self._plain = TracingSandbox(self.given.today), PlainSandbox(self.given.today)
        try:
            self.reads = _names_read_by(source.text)
            """Names that the template reads without setting them."""
            self._renderers: dict[Any, Renderer] = {}
            self._lessons: dict[str, MessageRows] = {}
            self._renderer({})
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"template {source.name!r}, line {error.lineno}: {error.message}") from None
        except (RecursionError, SyntaxError, MemoryError):
            raise ConfigError(f"template {source.name!r} is nested too deeply to be compiled") from None
        unknown = sorted(set(self.given.options) - set(self.option_names))
        if unknown:
            raise ConfigError(
                f"the template {source.name!r} never reads the option {unknown[0]!r}. It reads: "
                f"{', '.join(self.option_names) or 'none'}"
            )

    @property
    def option_names(self) -> list[str]:
        """The options that the template reads."""
        known = set(self._plain.globals) | GIVEN | set(TOKEN_NAMES)
        return sorted(self.reads - known)

    @property
    def fingerprint(self) -> str:
        """sha256 of everything that decides the text."""
        given = self.given
        decisive = [
            *(self.source.text, self.source.special_tokens, sorted(self.source.named_tokens.items())),
            *(self.stops.names, sorted(given.options.items()), str(given.today), given.expand, given.unproved),
            *(given.thinking, given.last_turn_only),
        ]
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()

    @cached_property
    def specials(self) -> re.Pattern[str] | None:
        """Matches special tokens, the longest first."""
        names = sorted(self.source.special_tokens, key=lambda name: (-len(name), name))
        return re.compile("|".join(map(re.escape, names))) if names else None

    def _renderer(self, options: Mapping[str, Any]) -> Renderer:
        key = json.dumps(sorted(options.items()))
        found = self._renderers.get(key)
        if found is None:
            variables = {**self.source.named_tokens, **options}
            found = Renderer(self.source.text, self._tracing, self._plain, variables, self.source.name)
            self._renderers[key] = found
        return found

    @property
    def runs(self) -> int:
        """How often the template ran."""
        return sum(renderer.runs for renderer in self._renderers.values())

    # ---- what the template wants and writes, found by probing

    @cached_property
    def form(self) -> InputForm:
        """The input that shows all of a conversation with calls: strings before objects, null before empty."""
        names = tuple(name for name in REASONING_NAMES[:2])
        if "reasoning" in self._words and not {"reasoning_content", "thinking"} & self._words:
            names = REASONING_NAMES
        plain = [Message(Role.USER, "Q-one?"), Message(Role.ASSISTANT, "A-one.")]
        content = Content.TEXT
        if self._shows(plain, InputForm(reasoning_names=names)) == 0:
            content = next(
                (c for c in Content if self._shows(plain, InputForm(content=c, reasoning_names=names))), content
            )
        best, most = InputForm(content=content, reasoning_names=names), -1
        for arguments in Arguments:
            for empty in (None, ""):  # DeepSeek V3 writes calls only beside null, others fail on it
                form = InputForm(arguments, content, empty, names)
                score = sum(self._shows(probe, form) for probe in _call_probes())
                if score > most:
                    best, most = form, score
        return best

    @cached_property
    def _words(self) -> set[str]:
        return set(re.findall(r"[a-z_]+", self.source.text))

    def _shows(self, messages: Sequence[Message], form: InputForm) -> int:
        """2 where a rendering shows all texts of a probe as they are, 1 where it merely renders, else 0."""
        view = RecordView(Conversation(tuple(messages)), form)
        for options in self.choices({}):
            renderer = self._renderer(options)
            try:
                text = renderer.plain(view, len(messages), False)
            except LimitError as error:
                raise ConfigError(
                    f"the template {self.source.name!r} was stopped on {len(messages)} short messages: {error.message}"
                ) from None
            except jinja2.TemplateError:
                continue
            wanted = [text for message in messages for text in _probe_texts(message)]
            spoiled = "None" in text or '\\"city' in text or "{'city" in text or '{{"city' in text
            return 0 if spoiled or not all(one in text for one in wanted) else 2
        return 0

    @cached_property
    def stops(self) -> StopTokens:
        """The stop tokens: named by the model's files, by the table of families, or always written by the template."""
        names = list(self.source.stop_tokens)
        same: dict[str, tuple[str, ...]] = {}
        for family in FAMILIES:
            if all(mark in self.source.text for mark in family.marks):
                names += [name for name in family.stops if name in self.source.special_tokens]
                same |= family.same
        stops = StopTokens(tuple(dict.fromkeys(names)), same)
        habit = self._habit(stops)
        return stops if habit is None else StopTokens((*stops.names, habit), same)

    def _habit(self, stops: StopTokens) -> str | None:
        """A special token that the template writes behind every answer, where no known stop is."""
        found: set[str | None] = set()
        pattern = stops.pattern()
        for probe in _answer_probes():
            view = RecordView(Conversation(tuple(probe)), self.form)
            for options in self.choices({}):
                rendering = self._renderer(options).render(view, view.shape(), len(probe), False)
                if isinstance(rendering, Rendering):
                    found |= set(self._behind_answers(rendering, probe, pattern))
                    break
        found.discard(None)
        return next(iter(found)) if len(found) == 1 else None

    def _behind_answers(
        self, rendering: Rendering, probe: Sequence[Message], known: re.Pattern[str] | None
    ) -> Iterator[str | None]:
        """The first special token behind each answer of a probe; None where a known stop is there too."""
        for index, message in enumerate(probe):
            if message.role is not Role.ASSISTANT:
                continue
            last = max((p.stop for p in rendering.pieces if p.owner == index), default=None)
            if last is None:
                continue
            next_text = min((p.start for p in rendering.pieces if p.expression and p.start >= last), default=None)
            limit = len(rendering.text) if next_text is None else next_text
            if known is not None and known.search(rendering.text, last, limit):
                yield None
                continue
            special = self.specials.search(rendering.text, last, limit) if self.specials else None
            yield special.group() if special else None

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

    # ---- writing

    def write(self, conversation: Conversation, notes: Notes | None = None, *, by_messages: bool = False) -> Written:
        """The rows of a conversation; a `RecordError` where it cannot be written and proved.

        What the outcome depends on beside the shape goes into `notes`. With `by_messages` the rows may be put together
        from what other conversations have taught about single messages.
        """
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
        best: Written | None = None
        for number, options in enumerate(self.choices(own)):
            if number == 0 and by_messages:
                composed = self._composed(conversation, options, notes)
                if composed is not None:
                    return composed
            turns, outcome = self._by_turns(conversation, options)
            notes.add(turns.notes.answers)
            if isinstance(outcome, RecordError):
                first = first or outcome
                if outcome.code not in ("prompt_not_in_history", "no_stop", "template_refused", "no_prompt"):
                    break
                continue
            rows, counts = outcome
            if number == 0:
                self._message_rows(options).learn(turns.view, turns.shape, rows, counts, turns.notes.answers)
            written = Written(tuple(rows), counts, tuple(sorted(options.items())))
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
    ) -> tuple[Turns, tuple[list[Row], Counts] | RecordError]:
        """The rows of a conversation from its renderings, or why it has none."""
        turns = self.turns(conversation, options)
        try:
            return turns, rows_of(turns, self.given, self.specials)
        except RecordError as error:
            return turns, error

    def _message_rows(self, options: Mapping[str, Any]) -> MessageRows:
        key = json.dumps(options, sort_keys=True, default=repr)
        if key not in self._lessons:
            self._lessons[key] = MessageRows()
            whole = self.given.traces is Traces.WHOLE or self.given.expand is Expand.LAST or self.given.last_turn_only
            self._lessons[key].is_sound = not whole
        return self._lessons[key]

    def _composed(self, conversation: Conversation, options: Mapping[str, Any], notes: Notes) -> Written | None:
        """A conversation put together from what is known of its messages; None where that is not enough."""
        view = RecordView(conversation, self.form)
        shape = view.shape()
        lessons = self._message_rows(options)
        found = lessons.compose(view, shape)
        if found is None:
            return None
        renderer = self._renderer(options)
        plain = renderer.plain_if_any(view, len(shape), False)
        if plain is None:  # refused: the long way says why
            return None
        if plain != found.text:
            if not lessons.widen():
                raise renderer.unlike(view, ITS_PARTS)
            return None
        compared = found.compared_answer()
        if compared is not None and renderer.plain_if_any(view, compared[0], True) != compared[1]:
            raise renderer.unlike(view, ITS_PARTS)
        if found.compare_all:
            turns, outcome = self._by_turns(conversation, options)
            if outcome != ([found.row], found.counts):
                raise renderer.unlike(view, ITS_PARTS)
            lessons.learn(view, shape, [found.row], found.counts, turns.notes.answers)
        notes.add(found.answers)
        return Written((), found.counts, tuple(sorted(options.items())), found)

    def turns(self, conversation: Conversation, options: Mapping[str, Any] | None = None) -> Turns:
        """The renderings of a conversation, for a closer look; `options` are one of `choices`."""
        chosen = next(self.choices(conversation.options)) if options is None else options
        view = RecordView(conversation, self.form)
        return Turns(self._renderer(chosen), view, self.stops, self.source.named_tokens.get("bos_token"))

    @property
    def put_together(self) -> int:
        """How many conversations were put together from messages of others."""
        return sum(lessons.made for lessons in self._lessons.values())

    @property
    def asks_for_date(self) -> bool:
        """Whether the template has asked for today's date in a rendering so far."""
        return self._plain.asked_for_date or self._tracing.asked_for_date

    def plain(self, conversation: Conversation, options: Mapping[str, Any], count: int, *, prompt: bool) -> str:
        """The text of the first messages by plain Jinja, under options that `write` has chosen."""
        return self._renderer(options).plain(RecordView(conversation, self.form), count, prompt)

    def prompt(self, conversation: Conversation) -> tuple[Row, Notes]:
        """A conversation with the generation prompt behind it."""
        turns = self.turns(conversation)
        return prompt_row(turns, self.specials), turns.notes


@lru_cache(maxsize=128)
def _names_read_by(text: str) -> frozenset[str]:
    """What `names_read` finds in a template's text; parsing takes as long as all the rest of binding it."""
    return names_read(PlainSandbox().parse(text))


def _probe_texts(message: Message) -> list[str]:
    texts = [message.content] if message.content else []
    return texts + [text for call in message.tool_calls for text in (call.name, "Oslo")]


def _call_probes() -> list[list[Message]]:
    call = ToolCall("get_weather", '{"city": "Oslo"}', "callid001")
    user, result = (
        Message(Role.USER, "Q-one?"),
        Message(Role.TOOL, "R-one", tool_call_id="callid001", name="get_weather"),
    )
    return [
        [user, Message(Role.ASSISTANT, "", tool_calls=(call,))],
        [user, Message(Role.ASSISTANT, "", tool_calls=(call,)), result],
        [user, Message(Role.ASSISTANT, "", tool_calls=(call,)), result, Message(Role.ASSISTANT, "A-one.")],
    ]


def _answer_probes() -> list[list[Message]]:
    user, answer = Message(Role.USER, "Q-one?"), Message(Role.ASSISTANT, "A-one.")
    return [[user, answer], [user, answer, Message(Role.USER, "Q-two?"), Message(Role.ASSISTANT, "A-two.")]]


__all__ = ["ChatTemplate", "MissingDateError", "Refusal", "TemplateOptions", "TemplateText", "Thinking", "Written"]
