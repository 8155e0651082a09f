"""Many conversations as columns: every field of a record and of its messages, flat; objects on demand.

It is a sequence of `Conversation`, so whatever takes conversations takes columns. What knows about columns hardly ever
makes an object of one of them.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import NOTHING, Conversation
from chatmill.core.messages import MessageColumns, Objects, joined_columns, sparse_objects, taken
from chatmill.core.part_training import speaks_of_training
from chatmill.core.sides import Side
from chatmill.core.texts import TextJoiner, Texts
from chatmill.core.tokens import offsets_of, ranges
from chatmill.core.tools import listed_tools, tools_of
from chatmill.core.words import counted

Ints = NDArray[np.int64]
MOST_SHOWN = 12
"""Fields that are named in a sentence."""


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """The sources of many records, of which few differ."""

    names: tuple[str, ...]
    """All of them, each once."""
    codes: Ints
    """For each record the place of its source among the names."""

    @classmethod
    def of(cls, names: Sequence[str], numbers: Ints) -> Sources:
        """Make them from the number of each record's name in a list where names may come again."""
        places: dict[str, int] = {}
        codes = np.array([places.setdefault(name, len(places)) for name in names], dtype=np.int64)
        return cls(tuple(places), codes[numbers])

    def __getitem__(self, index: int) -> str:
        return self.names[int(self.codes[index])]

    def take(self, chosen: Ints) -> Sources:
        """Return those of the chosen records."""
        return Sources(self.names, self.codes[chosen])

    def counts(self) -> dict[str, int]:
        """Count the records of each source."""
        counts = np.bincount(self.codes, minlength=len(self.names)).tolist()
        return {name: count for name, count in zip(self.names, counts, strict=True) if count}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conversations(Sequence[Conversation]):
    """C conversations; message `m` of conversation `c` is at `offsets[c] + m` in `messages`."""

    messages: MessageColumns
    offsets: Ints
    """C + 1 offsets into `messages`."""
    ids: Texts
    """Empty where a record has none."""
    sources: Sources
    tools: Texts
    """The tool definitions of each conversation as JSON, a line each with a newline before it; empty for none."""
    options: Texts
    """The template options of each conversation as one JSON object; empty for none."""
    wheres: list[str]
    """The place of each record, for error messages."""
    metadata: Objects
    """For each record, a mapping of the fields without a meaning here; the scanner does not keep them."""
    sides: NDArray[np.uint8] | None = None
    """The `Side` of each conversation; None: all are ordinary ones."""
    margins: NDArray[np.float32] | None = None
    """The margin of the pair that each conversation is of, NaN if its record gives none; None: no record gives one."""
    unused: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(source, field) -> records that have something in that field, for those fields and those of messages
    (`messages[].name`); only of batches as they were read."""

    @classmethod
    def of(cls, conversations: Sequence[Conversation]) -> Conversations:
        """Objects as columns, pairs taken apart (`sides`); `UnicodeEncodeError` where a text has no UTF-8 form."""
        assert not any(item.rejected for item in conversations), "a pair is two documents: take its sides"
        metadata = {place: item.metadata for place, item in enumerate(conversations) if item.metadata}
        return cls(
            messages=MessageColumns.of([message for item in conversations for message in item.messages]),
            offsets=offsets_of(np.array([len(item.messages) for item in conversations], dtype=np.int64)),
            ids=Texts.of([item.id for item in conversations]),
            sources=Sources.of([item.source for item in conversations], np.arange(len(conversations))),
            tools=Texts.of([listed_tools(item.tools) if item.tools else "" for item in conversations]),
            options=Texts.of([options_json(item.options) if item.options else "" for item in conversations]),
            wheres=[item.where for item in conversations],
            metadata=sparse_objects(len(conversations), metadata),
            sides=np.array([item.side for item in conversations], dtype=np.uint8)
            if any(item.side for item in conversations)
            else None,
            margins=_margins([item.margin for item in conversations]),
        )

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Conversation: ...
    @overload
    def __getitem__(self, index: slice) -> list[Conversation]: ...
    def __getitem__(self, index: int | slice) -> Conversation | list[Conversation]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        first, last = self.offsets[index : index + 2].tolist()
        return Conversation(
            self.messages.objects(first, last),
            self.ids[index],
            self.sources[index],
            tools_of(self.tools[index]),
            self.wheres[index],
            self.metadata[index],
            json.loads(options) if (options := self.options[index]) else NOTHING,
            Side.NONE if self.sides is None else Side(self.sides[index]),
            margin=None if self.margins is None or np.isnan(self.margins[index]) else float(self.margins[index]),
        )

    @property
    def keys(self) -> Texts:
        """What each record is known by: its id, or its place where it has none."""
        unnamed = np.flatnonzero(self.ids.lengths == 0)
        if not len(unnamed):
            return self.ids
        return self.ids.replaced(unnamed, Texts.of([self.wheres[place] for place in unnamed.tolist()]))

    @property
    def records(self) -> Ints:
        """The first conversation of each one's record: the two of a pair, which are neighbours, have one."""
        every = np.arange(len(self), dtype=np.int64)
        return every if self.sides is None else every - (self.sides == Side.REJECTED)

    @property
    def heads(self) -> Ints:
        """The first conversation of each record."""
        records = self.records
        return np.flatnonzero(records == np.arange(len(records)))

    def owners(self, places: Ints) -> Ints:
        """Return the conversations that places in the columns belong to."""
        return np.searchsorted(self.offsets, places, side="right") - 1

    def take(self, chosen: Ints) -> Conversations:
        """Return the chosen conversations, in that order; one may be chosen more than once."""
        counts = np.diff(self.offsets)[chosen]
        return Conversations(
            messages=self.messages.take(ranges(self.offsets[chosen], counts)),
            offsets=offsets_of(counts),
            ids=self.ids.take(chosen),
            sources=self.sources.take(chosen),
            tools=self.tools.take(chosen),
            options=self.options.take(chosen),
            wheres=[self.wheres[place] for place in chosen.tolist()],
            metadata=taken(self.metadata, chosen),
            sides=None if self.sides is None else self.sides[chosen],
            margins=None if self.margins is None else self.margins[chosen],
        )

    @classmethod
    def joined(cls, parts: Sequence[Conversations]) -> Conversations:
        """Return the conversations of several batches, concatenated."""
        sources = [part.sources for part in parts]
        firsts = offsets_of(np.array([len(each.names) for each in sources], dtype=np.int64)).tolist()
        columns = [part.messages.text_columns() for part in parts]
        columns += [[part.ids, part.tools, part.options] for part in parts]
        texts = TextJoiner(itertools.chain.from_iterable(columns))
        return cls(
            messages=MessageColumns.joined([part.messages for part in parts], texts),
            offsets=offsets_of(np.concatenate([np.diff(part.offsets) for part in parts])),
            ids=texts.join([part.ids for part in parts]),
            sources=Sources.of(
                [name for each in sources for name in each.names],
                np.concatenate([each.codes + first for each, first in zip(sources, firsts, strict=False)]),
            ),
            tools=texts.join([part.tools for part in parts]),
            options=texts.join([part.options for part in parts]),
            wheres=[where for part in parts for where in part.wheres],
            metadata=joined_columns([part.metadata for part in parts], texts),
            sides=_joined_sides(parts),
            margins=_joined_margins(parts),
        )


def _joined_sides(parts: Sequence[Conversations]) -> NDArray[np.uint8] | None:
    if all(part.sides is None for part in parts):
        return None
    return np.concatenate([np.zeros(len(part), np.uint8) if part.sides is None else part.sides for part in parts])


def _joined_margins(parts: Sequence[Conversations]) -> NDArray[np.float32] | None:
    """Join the margins of several batches, with NaN for batches that have none."""
    if all(part.margins is None for part in parts):
        return None
    margins = []
    for part in parts:
        missing = np.full(len(part), np.nan, dtype=np.float32)
        margins.append(missing if part.margins is None else part.margins)
    return np.concatenate(margins)


def _margins(given: Sequence[float | None]) -> NDArray[np.float32] | None:
    """Make a column of margins; None if no record gives one."""
    if all(margin is None for margin in given):
        return None
    return np.array([np.nan if margin is None else margin for margin in given], dtype=np.float32)


def unused_by_source(conversations: Iterable[Conversation]) -> Counter[tuple[str, str]]:
    """Count records with a value in an unused field, of the record or of a message, by (source, field)."""
    return Counter((conversation.source, name) for conversation in conversations for name in _unused_in(conversation))


def unused_fields(conversations: Iterable[Conversation]) -> Counter[str]:
    """Count records with a value in an unused field, by field."""
    return Counter(name for conversation in conversations for name in _unused_in(conversation))


def _unused_in(conversation: Conversation) -> set[str]:
    names = {name for name, value in conversation.metadata.items() if holds(value)}
    for message in conversation.messages:
        if message.extra:
            names |= {f"messages[].{name}" for name, value in message.extra.items() if holds(value)}
    return names


def unused_in_columns(fields: Iterable[tuple[str, Ints]], sources: Sources) -> Counter[tuple[str, str]]:
    """Count how often each field is used, by (source, field), from the records that use each.

    The work is as large as what is used: there may be as many fields, and sources, as records.
    """
    totals: Counter[tuple[str, str]] = Counter()
    for name, records in fields:
        codes, counts = np.unique(sources.codes[records], return_counts=True)
        for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
            totals[sources.names[code], name] += count
    return totals


def holds(value: object) -> bool:
    """Return whether there is something in the value of a field: it is not null, and no empty text, list or object."""
    return value is not None and not (isinstance(value, str | list | dict) and not value)


UNUSED = "unused_field "
"""Prefix of ledger notes about unused fields; the name of the field follows."""


RECORD_WEIGHT = "nothing is trained by a field of the record: weight and train are fields of its messages"
"""Said where a record has a field that speaks of training."""
LACKS = "lacks "
"""What the names of fields begin with that say what the file of an agent does not hold."""


def unused_sentence(fields: Mapping[str, int]) -> str:
    """Name unused fields and how many records have them; empty if there are none."""
    lacking = sorted(name.removeprefix(LACKS) for name in fields if name.startswith(LACKS))
    first = f"Not in the files of agents: {', '.join(lacking)}. " if lacking else ""
    fields = {name: count for name, count in fields.items() if not name.startswith(LACKS)}
    return (first + _unused_sentence(fields)).rstrip()


def _unused_sentence(fields: Mapping[str, int]) -> str:
    if not fields:
        return ""
    ranked = sorted(fields.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = ", ".join(f"{name} ({counted(count, 'record')})" for name, count in ranked[:MOST_SHOWN])
    more = f" and {len(ranked) - MOST_SHOWN:,} more fields" if len(ranked) > MOST_SHOWN else ""
    hint = f" {RECORD_WEIGHT[0].upper()}{RECORD_WEIGHT[1:]}." if any(map(speaks_of_training, fields)) else ""
    return f"Fields that are not used: {shown}{more}.{hint}"


def options_json(options: Mapping[str, Any]) -> str:
    """Template options as the column holds them."""
    return json.dumps(options, ensure_ascii=False)


def record_key(conversation: Conversation) -> str:
    """Return what a record is known by in hashes and stored columns: its id, or its place where it has none."""
    return conversation.id or conversation.where
