"""Templates written in Python: each writes one conversation into an emitter, as control ids and text with kinds."""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.kinds import REPEATED, Part, RoleCode, role_of
from chatmill.core.kinds import kind as kind_of
from chatmill.errors import RecordError, TokenizerError
from chatmill.render.bound import BoundTemplate, Items, WrittenRecord
from chatmill.render.fragments import Fragment
from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.record_view import traced_conversation
from chatmill.render.jinja.traced import atoms_of, plain_text
from chatmill.render.jinja.turn_sequences import Counts
from chatmill.render.sequence_items import Ids, TextPart, encoded_piece
from chatmill.tokenizer.tokenizer import Tokenizer

ROLE_CODES: dict[Role, RoleCode] = {role: RoleCode[role.name] for role in Role}
"""From a message's role to the role code in kinds."""


def refuse_missing(name: str, control_tokens: Sequence[str], tokenizer: Tokenizer) -> None:
    """A `TokenizerError` for a vocabulary without the tokens that a template writes: it would write them as text."""
    missing = [token for token in control_tokens if token not in tokenizer.control_ids]
    if missing:
        raise TokenizerError(
            f"template {name!r} needs control tokens that tokenizer {tokenizer.name!r} does not have: "
            f"{', '.join(missing)}. Load it with control_tokens=[...] to add them above the vocabulary "
            "(--add-control-tokens on the command line); the model's embedding must grow with it."
        )


def refuse_channels(name: str, message: Message, index: int) -> None:
    """A `RecordError` for what only the Harmony format has: such a field would be lost."""
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


Literal = Sequence[int]
"""A fixed sequence of ids that a template made once: control tokens, encoded headers."""


class Frame(NamedTuple):
    """What is written around one text: fixed ids before and behind it, and fixed text that is encoded with it."""

    kind: int
    before: Sequence[tuple[Literal, int]] = ()
    """Literals and their kinds."""
    head: tuple[str, int] = ("", 0)
    """Text that is encoded together with the text behind it, and its kind."""
    tail: tuple[str, int] = ("", 0)
    after: Sequence[tuple[Literal, int]] = ()


class Emitter:
    """Takes what a template writes for one conversation. Control tokens that a text spells stay text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Nothing is written yet."""
        self.items: list[Ids | TextPart] = []
        self.stripped = 0
        """Ignored: what no sequence shows is counted for every template alike. Templates of version 0.1 add to it."""
        self._tokenizer, self._message = tokenizer, -1

    def message(self, index: int) -> None:
        """What follows belongs to this message of the conversation; -1 for no message."""
        self._message = index

    def put(self, literal: Literal, kind: int) -> None:
        """Write a literal."""
        if literal:
            self.items.append(Ids(tuple(literal), kind, self._message))

    def text(self, text: str, kind: int) -> None:
        """Write a text as a piece of its own."""
        self.joined([(text, kind)])

    def framed(self, frame: Frame, text: str) -> None:
        """Write a text in a frame."""
        for literal, kind in frame.before:
            self.put(literal, kind)
        self.joined([part for part in (frame.head, (text, frame.kind), frame.tail) if part[0] or part[0] is text])
        for literal, kind in frame.after:
            self.put(literal, kind)

    def turn(self, role: Role, opening: Literal, text: str, end: Literal) -> None:
        """Write what a role says between two literals, with the kinds of that role."""
        kinds = KINDS_OF[role]
        self.put(opening, kinds.header)
        self.text(text, kinds.content)
        self.put(end, kinds.terminator)

    def joined(self, parts: Sequence[tuple[str, int]]) -> None:
        """Write several (text, kind) parts as one piece; a token belongs to the part it starts in."""
        piece: list[TextPart] = []
        for text, kind in parts:
            at, whole = 0, plain_text(text)
            for size, expression in atoms_of(text):
                piece.append(TextPart(whole[at : at + size], expression, kind, self._message, not piece))
                at += size
        if any(part.expression is not None for part in piece):
            self.items += piece
        elif piece:
            self.items += encoded_piece(piece, self._tokenizer)


class Template(BoundTemplate):
    """Base of templates written in Python; bound to one tokenizer when made, so that fixed texts are encoded once.

    A subclass names itself, says what it needs and declares, and writes messages in `emit`. See docs/templates.md.
    """

    control_tokens: tuple[str, ...] = ()
    stop_tokens: ClassVar[tuple[str, ...]] = ()
    """Those of them that end an answer, for people who ask."""
    text_options: ClassVar[tuple[str, ...]] = ()
    """Keyword arguments that a recipe may set as `template_options`; each is a text."""
    name = ""
    roles: ClassVar[frozenset[Role]] = frozenset(Role)
    """Roles it can write; another role is a `RecordError`."""
    has_channels: ClassVar[bool] = False
    """Whether it writes channels, recipients and Harmony system content; if not, they are a `RecordError`."""
    writes_tool_calls: ClassVar[bool] = False
    """Whether it writes tool calls and tool definitions; if not, a record with them is a `RecordError`."""
    prefix_stable: ClassVar[bool] = True
    """Whether the rendering of the first k messages is a prefix of the rendering of more of them."""
    frame = Frame
    """Makes what `Emitter.framed` writes around a text."""
    default_policy = "assistant"
    declares = "Contents are written as they are."
    last_answer_only: bool = False
    """Whether only the last answer is trained (`expand: last`)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Look up control tokens and encode what is fixed."""
        refuse_missing(self.name, self.control_tokens, tokenizer)
        self.tokenizer = tokenizer

    def literal(self, *parts: str) -> tuple[int, ...]:
        """The ids of control tokens and texts, to be made once (a needed control token becomes its id)."""
        ids: list[int] = []
        for part in parts:
            if part in self.control_tokens:
                ids.append(self.tokenizer.control(part))
            else:
                ids.extend(self.tokenizer.encode(part))
        return tuple(ids)

    def write(
        self, conversation: Conversation, notes: Notes | None = None, *, by_messages: bool = False
    ) -> WrittenRecord:
        """Run `emit` on a conversation whose texts are traced."""
        self.check(conversation)
        out = Emitter(self.tokenizer)
        self.emit(traced_conversation(conversation, Notes() if notes is None else notes), out)
        turns = sum(message.role is Role.ASSISTANT for message in conversation.messages)
        untrained = _untrained(conversation, last_only=self.last_answer_only)
        return WrittenRecord(((Fragment(_marked(out.items, untrained)),),), Counts(turns, 0, 0, 0))

    def write_prompt(self, conversation: Conversation) -> Items:
        """The conversation, and what `emit_generation_prompt` writes behind it."""
        self.check(conversation)
        out = Emitter(self.tokenizer)
        self.emit(conversation, out)
        while out.items and out.items[-1].message < 0 and out.items[-1].kind == DOCUMENT:
            del out.items[-1]  # a conversation that goes on has no end yet
        out.message(len(conversation.messages))
        self.emit_generation_prompt(conversation, out)
        return out.items

    @property
    def fingerprint(self) -> str:
        """sha256 of the template's source."""
        sources = [inspect.getsource(cls) for cls in type(self).__mro__ if cls not in (object, ABC, BoundTemplate)]
        return hashlib.sha256("\n".join(sources).encode()).hexdigest()

    def emit(self, conversation: Conversation, out: Emitter) -> None:
        """Write one conversation; the caller has checked roles, calls and tools."""
        raise NotImplementedError

    def emit_generation_prompt(self, conversation: Conversation, out: Emitter) -> None:
        """Write what stands before the first token of an assistant's answer."""
        raise NotImplementedError

    @classmethod
    def check(cls, conversation: Conversation) -> None:
        """Refuse what this template cannot write."""
        for index, message in enumerate(conversation.messages):
            if message.role not in cls.roles:
                cls._refuse_role(message.role, index)
            special = message.tool_calls or message.channel or message.recipient or message.content_type
            if special or message.structured is not None:
                cls._check_message(message, index)
        if conversation.options:
            raise RecordError(
                f"template {cls.name!r} reads no options of records, and this one has "
                f"{', '.join(map(repr, sorted(conversation.options)))}: remove them, or use a template that reads them",
                code="unknown_option",
                path="chat_template_kwargs",
            )
        if conversation.tools and not cls.writes_tool_calls:
            raise RecordError(
                f"template {cls.name!r} cannot write tool definitions; use one that does (qwen3, harmony), or remove "
                "'tools' from the record",
                code="tools_not_in_template",
                path="tools",
            )

    @classmethod
    def _check_message(cls, message: Message, index: int) -> None:
        if message.tool_calls and not cls.writes_tool_calls:
            raise RecordError(
                f"template {cls.name!r} cannot write tool calls; use one that does (qwen3, harmony)",
                code="tool_calls_not_in_template",
                path=f"messages[{index}].tool_calls",
            )
        if message.tool_calls and message.role is not Role.ASSISTANT:
            raise RecordError(
                f"a {message.role.value} message cannot make tool calls",
                code="bad_tool_call",
                path=f"messages[{index}].tool_calls",
            )
        if not cls.has_channels:
            refuse_channels(cls.name, message, index)

    @classmethod
    def _refuse_role(cls, role: Role, index: int) -> None:
        raise RecordError(
            f"template {cls.name!r} has no role {role.value!r}; it has: {', '.join(sorted(cls.roles))}",
            code="role_not_in_template",
            path=f"messages[{index}].role",
        )


def _untrained(conversation: Conversation, *, last_only: bool) -> set[int]:
    """Answers that no policy trains: those of weight 0, and with `last_only` all others but the last."""
    answers = [k for k, message in enumerate(conversation.messages) if message.role is Role.ASSISTANT]
    wanted = [k for k in answers if conversation.messages[k].weight != 0]
    return set(answers) - set(wanted[-1:] if last_only else wanted)


def _marked(items: Items, answers: set[int]) -> Items:
    """Items in which these answers have the flag that no policy trains, also one that is chosen at load."""
    if not answers:
        return items
    return [
        item._replace(kind=item.kind | REPEATED)
        if item.message in answers and role_of(item.kind) is RoleCode.ASSISTANT
        else item
        for item in items
    ]


class RoleKinds:
    """The kinds of one role, by part, as plain integers."""

    __slots__ = ("content", "header", "reasoning", "separator", "terminator", "tool_call")

    def __init__(self, role: RoleCode) -> None:
        """Compute each code once."""
        self.header = kind_of(role, Part.HEADER)
        self.content = kind_of(role, Part.CONTENT)
        self.reasoning = kind_of(role, Part.REASONING)
        self.tool_call = kind_of(role, Part.TOOL_CALL)
        self.terminator = kind_of(role, Part.TERMINATOR)
        self.separator = kind_of(role, Part.SEPARATOR)


KINDS_OF: dict[Role, RoleKinds] = {role: RoleKinds(code) for role, code in ROLE_CODES.items()}
DOCUMENT = kind_of(RoleCode.NONE, Part.DOCUMENT)
