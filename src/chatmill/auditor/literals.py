"""What a template writes around messages, as token ids: learnt from its own renderings of probe conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chatmill.auditor.source import SourceRow, SourceRows, render_source
from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.kinds import Part, RoleCode, parts_of, roles_of
from chatmill.core.tokens import common_length
from chatmill.look.template_probes import ASKS, PROBES, SAYS, SYSTEM, WEATHER
from chatmill.render.model_template import ModelTemplate

Ints = NDArray[np.int64]
CHATS = (
    *(probe.conversation for probe in PROBES),
    Conversation((SYSTEM, ASKS, SAYS), tools=(WEATHER,)),
    Conversation((ASKS, SAYS), tools=(WEATHER,)),
    Conversation((Message(Role.DEVELOPER, "D-zero."), ASKS, SAYS)),
)
"""Conversations that a template is asked to write."""
UNUSUAL = {
    number: tuple(
        k
        for k, message in enumerate(chat.messages)
        if message.role is Role.ASSISTANT and (k == 0 or chat.messages[k - 1].role in (Role.ASSISTANT, Role.SYSTEM))
    )
    for number, chat in enumerate(CHATS)
}
"""Answers of each probe that follow no question: templates write odd things before them."""
OTHER_NAME = "find_road"
"""A second name of a function: what differs between two renderings is a text of the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Ids that a template writes before a message."""

    role: RoleCode
    ids: tuple[int, ...]
    borrowed: int
    """How many of them end the message before: some templates write nothing else before an answer."""
    solid: int
    """How many of them are sure to be there; white space after them may merge with the text that follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Literals:
    """The template's own ids."""

    openings: tuple[Opening, ...]
    stops: frozenset[int]
    """Ids that end an answer."""
    bos: int | None
    """The id that begins every document; None where the template writes none."""
    written: frozenset[int]
    """Special ids that the template may write."""
    specials: frozenset[int]
    """All ids that no text can have."""
    first_ids: frozenset[int]
    """Ids that a document can begin with; empty where that depends on the record."""
    closers: Mapping[int, int]
    """How many stop ids a message of each role has, at most."""
    odd: frozenset[int] = frozenset()
    """Special ids that the template writes at places where ids alone do not distinguish them from spelled ones."""
    asked_only: bool = False
    """Only answers that follow a message of somebody else can be found for sure."""
    unusable: str = ""
    """Why turns cannot be found by ids; empty where they can."""
    probes: SourceRows
    """What the template makes of the probes."""

    @property
    def ends_by_next(self) -> bool:
        """Whether the opening of the next message is what ends an answer, as GLM's is."""
        return any(opening.ids[0] in self.stops for opening in self.openings)


def special_ids(bound: ModelTemplate) -> frozenset[int]:
    """List the ids that no text can have."""
    ordinary = bound.tokenizer.ordinary
    return frozenset(i for name, i in bound.tokenizer.control_ids.items() if name not in ordinary)


def _renamed(conversation: Conversation) -> Conversation:
    """Rename the functions that a probe calls."""
    messages = []
    for message in conversation.messages:
        calls = tuple(call._replace(name=OTHER_NAME) for call in message.tool_calls)
        messages.append(message._replace(tool_calls=calls, name=OTHER_NAME if message.name else message.name))
    return Conversation(tuple(messages), tools=conversation.tools)


def learn(bound: ModelTemplate) -> Literals:
    """Learn the literals of a template, without a proof that they suffice; `layout.find_literals` has one."""
    specials = special_ids(bound)
    openings: dict[tuple[RoleCode, tuple[int, ...]], Opening] = {}
    stops: set[int] = set()
    begins: set[int | None] = set()
    written: set[int] = set()
    first_ids: set[int] = set()
    closers: dict[int, int] = {}
    names = bound.tokenizer.control_ids
    stops |= {names[name] for name in bound.stops.names if name in names}
    probes = render_source(CHATS, bound)
    others = render_source(map(_renamed, CHATS), bound)
    for number in np.flatnonzero(~probes.doubtful).tolist():  # of other answers it is not known where they begin
        row, other = probes.row(number), _same_row(probes, others, number)
        written |= specials & set(row.ids.tolist())
        _count_closers(row, closers, stops)
        first_ids.add(int(row.ids[0]))
        begins.add(int(row.ids[0]) if row.kinds[0] == int(Part.DOCUMENT) else None)
        is_stop = (roles_of(row.kinds) == RoleCode.ASSISTANT) & (parts_of(row.kinds) == Part.TERMINATOR)
        stops |= set(row.ids[is_stop].tolist())
        theirs = dict(_headers(other))
        for message, (start, end) in _headers(row):
            begin, size = theirs.get(message, (start, end))
            opening = _opening(row, start, end, other.ids[begin:size], specials, bound, stops)
            if opening is not None and message not in UNUSUAL[int(probes.records[number])]:
                openings[opening.role, opening.ids] = opening
    written |= {i for name, i in names.items() if name in bound.source.text and i in specials}
    written |= {names[name] for key, name in bound.named_tokens.items() if name in names and key in bound.reads}
    rule = bound.pictures.rule
    written |= set() if isinstance(rule, str) else {names[name] for name in rule.written_names if name in names}
    bos = begins.pop() if len(begins) == 1 else None
    assistant = any(role is RoleCode.ASSISTANT for role, _ in openings)
    return Literals(
        openings=tuple(sorted(openings.values(), key=lambda opening: (-opening.solid, -len(opening.ids), opening.ids))),
        stops=frozenset(stops & specials),
        bos=bos,
        written=frozenset(written | stops),
        specials=specials,
        first_ids=frozenset(first_ids) if first_ids <= specials else frozenset(),
        closers=closers,
        unusable="" if assistant and stops & specials else "the template writes no special tokens around answers",
        probes=probes,
    )


def _same_row(probes: SourceRows, others: SourceRows, number: int) -> SourceRow:
    """Find the row of the same turn in a renamed probe; the probe's own row if the numbers of rows differ."""
    record = probes.records[number]
    ours, theirs = (np.flatnonzero((rows.records == record) & ~rows.doubtful) for rows in (probes, others))
    if len(ours) != len(theirs):
        return probes.row(number)
    return others.row(int(theirs[np.searchsorted(ours, number)]))


def _count_closers(row: SourceRow, closers: dict[int, int], stops: set[int]) -> None:
    """Count the stop ids from the opening of a message to that of the next one; keep the most by role."""
    starts = [start for _, (start, _) in _headers(row)]
    for start, end in zip(starts, [*starts[1:], len(row.ids)], strict=True):
        role = int(roles_of(row.kinds[start : start + 1])[0])
        count = sum(token in stops for token in row.ids[start:end].tolist())
        closers[role] = max(closers.get(role, 0), count)


def _headers(row: SourceRow) -> Iterator[tuple[int, tuple[int, int]]]:
    """(message, (start, end)) of what opens each message; empty where the message has no header."""
    is_message = row.messages >= 0
    for message in np.unique(row.messages[is_message]).tolist():
        mine = np.flatnonzero(row.messages == message)
        start = end = int(mine[0])
        while end < len(row.ids) and row.messages[end] == message and row.kinds[end] % 8 == Part.HEADER:
            end += 1
        yield message, (start, end)


def _opening(
    row: SourceRow,
    start: int,
    end: int,
    other: NDArray[np.integer],
    specials: frozenset[int],
    bound: ModelTemplate,
    stops: set[int],
) -> Opening | None:
    """Find the opening at a place of a probe; None if it has no special token."""
    role = RoleCode(int(roles_of(row.kinds[start : start + 1])[0]))
    header = row.ids[start:end]
    # headers of results may name a function
    same = common_length(header, other) if role is RoleCode.TOOL else len(header)
    varies = same < len(header)
    ids = [int(token) for token in header[:same]]
    borrowed = 0
    while not specials & set(ids) and start - borrowed > 0:
        before = start - borrowed - 1
        if row.kinds[before] % 8 not in (Part.TERMINATOR, Part.SEPARATOR, Part.DOCUMENT):
            break
        borrowed += 1
        ids.insert(0, int(row.ids[before]))
    if not specials & set(ids):
        return None
    first = next(n for n, token in enumerate(ids) if token in specials)
    if first > borrowed and role is RoleCode.ASSISTANT:  # text before the special token is part of the prompt
        return None
    ids, borrowed = ids[first:], max(0, borrowed - first)
    again = next((n for n, token in enumerate(ids) if n and token in specials), 0)
    if ids[0] in stops and again:  # the end of the message before is not part of what opens this one
        ids, borrowed = ids[again:], max(0, borrowed - again)
    solid = len(ids)
    while not varies and solid > 1 and not bound.tokenizer.token_bytes(ids[solid - 1]).strip():
        solid -= 1
    return Opening(role=role, ids=tuple(ids), borrowed=borrowed, solid=max(solid, borrowed))
