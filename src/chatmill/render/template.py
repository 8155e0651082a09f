"""What a template is: it writes one conversation into an emitter, as control ids and text with kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.conversations import Conversations
from chatmill.core.kinds import Part, RoleCode, kind
from chatmill.core.texts import Texts
from chatmill.errors import RecordError, TokenizerError
from chatmill.render.emitter import Emitter
from chatmill.render.events import EventColumns
from chatmill.render.frames import Frame, FrameTable, literal_run
from chatmill.tokenizer.protocol import Tokenizer

Ints = NDArray[np.int64]
NOWHERE: Ints = np.empty(0, dtype=np.int64)
ROLE_CODES: dict[Role, RoleCode] = {role: RoleCode[role.name] for role in Role}
"""From a message's role to the role code in kinds."""


class Template:
    """Base of all templates; bound to one tokenizer when made, so that fixed texts are encoded once.

    A subclass names itself, says what it needs and declares, and writes messages in `emit`. See docs/templates.md.
    """

    name: ClassVar[str]
    control_tokens: ClassVar[tuple[str, ...]] = ()
    """Control tokens the tokenizer must have."""
    roles: ClassVar[frozenset[Role]] = frozenset(Role)
    """Roles it can write; another role is a `RecordError`."""
    has_channels: ClassVar[bool] = False
    """Whether it writes channels, recipients and Harmony system content; if not, they are a `RecordError`."""
    writes_tool_calls: ClassVar[bool] = False
    """Whether it writes tool calls and tool definitions; if not, a record with them is a `RecordError`."""
    prefix_stable: ClassVar[bool] = True
    """Whether the rendering of the first k messages is a prefix of the rendering of more of them."""
    writes_columns: ClassVar[bool] = False
    """Whether `write_messages` writes batches from their columns; if not, `emit` writes every conversation."""
    default_policy: ClassVar[str] = "assistant"
    """The policy that fits this format when none is chosen."""
    declares: ClassVar[str] = "Contents are written as they are."
    """What it trims, strips or adds, in words; the characters are counted in `Rendered.stripped`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Look up control tokens and encode what is fixed."""
        missing = [name for name in self.control_tokens if name not in tokenizer.control_ids]
        if missing:
            raise TokenizerError(
                f"template {self.name!r} needs control tokens that tokenizer {tokenizer.name!r} does not have: "
                f"{', '.join(missing)}. Load it with control_tokens=[...] to add them above the vocabulary "
                "(--add-control-tokens on the command line); the model's embedding must grow with it."
            )
        self.tokenizer = tokenizer
        self.table = FrameTable()

    def literal(self, *parts: str) -> int:
        """Make a literal of control tokens and texts (a part that is a needed control token becomes its id)."""
        ids: list[int] = []
        for part in parts:
            if part in self.control_tokens:
                ids.append(self.tokenizer.control(part))
            else:
                ids.extend(self.tokenizer.encode(part))
        return self.literal_ids(ids)

    def literal_ids(self, ids: Sequence[int]) -> int:
        """Make a literal of ids."""
        return self.table.literal(ids)

    def frame(
        self,
        kind: int,
        *,
        before: Sequence[tuple[int, int]] = (),
        head: tuple[str, int] = ("", 0),
        tail: tuple[str, int] = ("", 0),
        after: Sequence[tuple[int, int]] = (),
    ) -> Frame:
        """A frame for texts of this kind; `before` and `after` are (literal, kind), `head` and `tail` (text, kind)."""
        runs_before, runs_after = (tuple(literal_run(*pair) for pair in side) for side in (before, after))
        own = (*([head[1]] if head[0] else []), kind, *([tail[1]] if tail[0] else []))
        return Frame(self.table.add((*runs_before, *own, *runs_after), head[0], tail[0]), head[0], tail[0])

    def fixed(self, runs: Sequence[tuple[int, int]]) -> Frame:
        """A frame without a place for a text: (literal, kind) pairs alone, written by `Emitter.fixed`."""
        return Frame(self.table.add(tuple(literal_run(*pair) for pair in runs)), "")

    def column_messages(self, batch: Conversations) -> NDArray[np.bool_]:
        """Which messages `write_messages` can write; a conversation with another one is written by `emit`."""
        without: NDArray[np.bool_] = batch.messages.call_counts == 0
        return without

    def write_messages(self, batch: Conversations) -> EventColumns:
        """Write all messages of a batch at once, exactly as `emit` would: only with `writes_columns`."""
        raise NotImplementedError

    def write_framed(
        self,
        batch: Conversations,
        frames: Mapping[Role, Frame],
        contents: Texts | None = None,
        *,
        opened: Ints = NOWHERE,
        closed: Ints = NOWHERE,
    ) -> EventColumns:
        """Write every message as its content (or another text) in the frame of its role; reasoning is not shown.

        The messages `opened` get one event more before them, the messages `closed` one after them. These belong to no
        message, and are the caller's to write, at `first[opened]` and `first[closed + 1] - 1`.
        """
        messages = batch.messages
        counts = np.ones(len(messages), dtype=np.int64)
        counts[opened] += 1
        counts[closed] += 1
        out = EventColumns(self.table, counts)
        main = out.first[:-1].copy()
        main[opened] += 1
        out.put(main, numbers_of(frames)[messages.roles], messages.contents if contents is None else contents)
        out.of_no_message[out.first[opened]] = True
        out.of_no_message[out.first[closed + 1] - 1] = True
        hidden = np.flatnonzero(messages.has_reasoning)
        out.stripped[hidden] = messages.reasoning.take(hidden).characters()
        return out

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
        if cls.has_channels:
            return
        if message.structured is not None:
            cls._refuse_structured(index)
        if message.channel or message.recipient or message.content_type:
            cls._refuse_channel(index)

    @classmethod
    def _refuse_structured(cls, index: int) -> None:
        raise RecordError(
            f"template {cls.name!r} cannot write Harmony system or developer content; use the template 'harmony'",
            code="structured_not_in_template",
            path=f"messages[{index}].content",
        )

    @classmethod
    def _refuse_channel(cls, index: int) -> None:
        raise RecordError(
            f"template {cls.name!r} has no channels or recipients; use the template 'harmony', or remove the fields",
            code="channel_not_in_template",
            path=f"messages[{index}]",
        )

    @classmethod
    def _refuse_role(cls, role: Role, index: int) -> None:
        raise RecordError(
            f"template {cls.name!r} has no role {role.value!r}; it has: {', '.join(sorted(cls.roles))}",
            code="role_not_in_template",
            path=f"messages[{index}].role",
        )


def numbers_of(frames: Mapping[Role, Frame]) -> NDArray[np.int64]:
    """The number of each role's frame, by role code; -1 where a role has none."""
    numbers = np.full(len(RoleCode), -1, dtype=np.int64)
    for role, frame in frames.items():
        numbers[ROLE_CODES[role]] = frame.number
    return numbers


def reasoning_length(messages: Sequence[Message]) -> int:
    """Characters of reasoning in messages, for templates that have no place for it."""
    return sum([len(message.reasoning) for message in messages if message.reasoning])


class RoleKinds:
    """The kinds of one role, by part, as plain integers."""

    __slots__ = ("content", "header", "reasoning", "separator", "terminator", "tool_call")

    def __init__(self, role: RoleCode) -> None:
        """Compute each code once."""
        self.header = kind(role, Part.HEADER)
        self.content = kind(role, Part.CONTENT)
        self.reasoning = kind(role, Part.REASONING)
        self.tool_call = kind(role, Part.TOOL_CALL)
        self.terminator = kind(role, Part.TERMINATOR)
        self.separator = kind(role, Part.SEPARATOR)


KINDS_OF: dict[Role, RoleKinds] = {role: RoleKinds(code) for role, code in ROLE_CODES.items()}
DOCUMENT = kind(RoleCode.NONE, Part.DOCUMENT)
