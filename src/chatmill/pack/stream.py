"""The post-training stream: marker records laid end to end into fixed blocks, with re-injected context.

Masks are token-aligned: `loss_mask[b, t]` is 1 when token `input_ids[b, t]`, as a target, is trained.
Between two neighbouring markers nothing changes, so every rule becomes a question about a marker and the one
right after it, and is answered for all markers at once.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chatmill.core.shift import IGNORE_INDEX, ArrayT, inputs_and_targets
from chatmill.errors import ConfigError, DataError

_SYSTEM, _USER, _ASSISTANT, _END, _EOS = range(5)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamReport(Mapping[str, int]):
    """What packing a stream did, as counts; read as attributes or as a mapping of names to counts."""

    records: int
    """Records in the stream, after those with an eos inside were cut into one per eos."""
    blocks: int
    injected: int
    """Injected tokens in the blocks."""
    padded: int
    """Padding tokens in the last block."""
    left_out: int
    """Record tokens (eos included) that are in no block: rests of cut records, and a dropped last block."""
    records_cut: int
    """Records whose rest was not packed: a user span did not end within the block it was carried into."""
    system_not_injected: int
    """Blocks that got the user marker alone, because the system span would have left no room."""

    def __getitem__(self, name: str) -> int:
        if name not in tuple(self):
            raise KeyError(name)
        return int(getattr(self, name))

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStream:
    """N finished blocks of the stream.

    Block `b` is `injected[b]` injected tokens, then `tokens[b]` stream tokens, then padding (last block
    only). Its stream tokens are `stream[starts[b] : starts[b] + tokens[b]]`, where `stream` is all records
    laid end to end, an eos after each one that had none.
    """

    input_ids: NDArray[np.int64]
    """(N, block_size)"""
    loss_mask: NDArray[np.uint8]
    """(N, block_size), token-aligned: 1 on the tokens of assistant spans that train, markers included."""
    starts: NDArray[np.int64]
    """(N,) position in the stream of the first stream token of each block."""
    injected: NDArray[np.int64]
    """(N,) injected tokens at the start of each block."""
    tokens: NDArray[np.int64]
    """(N,) stream tokens in each block."""
    report: StreamReport
    assistant_tokens: int
    """Tokens, markers included, that would train if the stream had no block edges."""

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def trained_tokens(self) -> int:
        """Tokens that train."""
        return int(self.loss_mask.sum())

    @property
    def lost_at_edges(self) -> float:
        """The share of the assistant's tokens that block edges keep from training."""
        return 1 - self.trained_tokens / self.assistant_tokens if self.assistant_tokens else 0.0


def post_training_loss_mask(
    ids: ArrayLike, *, system_id: int, user_id: int, assistant_id: int, end_id: int, eos_id: int
) -> NDArray[np.uint8]:
    """Return the token-aligned mask of one block of ids, or of each row of an (N, block_size) array read alone.

    1 on every token of a whole assistant span, both markers included, that comes after a whole user span in
    the same block and conversation; 0 on everything else.
    """
    array = _integers(ids, "ids")
    if array.ndim not in (1, 2):
        raise DataError(f"ids must be one block or rows of blocks, not an array of {array.ndim} dimensions")
    mask = np.zeros(array.size + 1, dtype=np.int8)
    places, types = _events(array.reshape(-1), system_id, user_id, assistant_id, end_id, eos_id)
    if len(places) > 1:
        rows = places // array.shape[-1]
        # A span is whole when the very next marker of its row is an end marker.
        closed = np.zeros(len(places), dtype=bool)
        closed[:-1] = (types[1:] == _END) & (rows[1:] == rows[:-1])
        index = np.arange(len(places))
        # The latest user marker or reset up to each marker; marker 0 if there is none.
        back = np.maximum.accumulate(np.where((types <= _USER) | (types == _EOS), index, 0))
        after_user = (types[back] == _USER) & closed[back] & (rows[back] == rows)
        trained = np.flatnonzero((types == _ASSISTANT) & closed & after_user)
        mask[places[trained]] += 1
        mask[places[trained + 1] + 1] -= 1
    return np.cumsum(mask[:-1], dtype=np.int8).view(np.uint8).reshape(array.shape)


def pack_post_training_stream(
    records: Iterable[ArrayLike],
    *,
    block_size: int,
    system_id: int,
    user_id: int,
    assistant_id: int,
    end_id: int,
    eos_id: int,
    drop_last: bool = False,
) -> PackedStream:
    """Lay records (ids of one transcript each) end to end and cut the stream into blocks of `block_size`.

    A block that starts inside a user span opens with the latest whole system span of the conversation and the
    user marker; the stream continues after them. No stream token is lost, but see `StreamReport.left_out`.
    """
    size = operator.index(block_size)
    if size < 2:
        raise ConfigError(f"block_size is {size}; a block holds at least 2 tokens: a user marker and one of its text")
    markers = {
        "system_id": system_id,
        "user_id": user_id,
        "assistant_id": assistant_id,
        "end_id": end_id,
        "eos_id": eos_id,
    }
    stream = _one_stream(records, eos_id)
    places, types = _events(stream, **markers)
    plan = _plan_blocks(_user_spans(places, types), total=len(stream), block_size=size)
    if drop_last and plan and plan[-1].tokens + plan[-1].injected < size:
        plan.pop()
    blocks = np.full((len(plan), size), eos_id, dtype=np.int64)
    for row, block in zip(blocks, plan, strict=True):
        if block.injected:
            row[: block.injected - 1] = stream[block.system_start :][: block.injected - 1]
            row[block.injected - 1] = user_id
        row[block.injected : block.injected + block.tokens] = stream[block.start : block.start + block.tokens]
    starts, tokens, injected = np.array([block[:3] for block in plan], dtype=np.int64).reshape(len(plan), 3).T.copy()
    report = StreamReport(
        records=int((types == _EOS).sum()),
        blocks=len(blocks),
        injected=int(injected.sum()),
        padded=int(blocks.size - injected.sum() - tokens.sum()),
        left_out=len(stream) - int(tokens.sum()),
        records_cut=sum(block.cut for block in plan),
        system_not_injected=sum(block.crowded for block in plan),
    )
    return PackedStream(
        input_ids=blocks,
        loss_mask=post_training_loss_mask(blocks, **markers),
        starts=starts,
        injected=injected,
        tokens=tokens,
        report=report,
        assistant_tokens=int(post_training_loss_mask(stream, **markers).sum()),
    )


def post_training_targets(input_ids: ArrayT, loss_mask: Any, ignore_index: int = IGNORE_INDEX) -> tuple[ArrayT, ArrayT]:
    """`x, y` of blocks, both (N, block_size - 1): `y[:, t]` is token `t + 1`, or `ignore_index` if masked.

    The mask is token-aligned and shifted together with the targets. Numpy in, numpy out; torch in, torch out.
    """
    return inputs_and_targets(input_ids, loss_mask, ignore_index=ignore_index)


class _UserSpans(NamedTuple):
    """Every user span of the stream, in order; all values are positions in the stream."""

    markers: list[int]
    closers: list[int]
    """Where the next marker is: the end marker, or what interrupts the span."""
    insides: list[int]
    """One past the last token that lies inside: an end marker does, an interrupting marker does not."""
    record_ends: list[int]
    """One past the eos of the record."""
    system_starts: list[int]
    """Where the latest whole system span before it, in the same record, starts."""
    system_lengths: list[int]
    """Tokens of that system span, both markers included; 0 if there is none."""


class _Block(NamedTuple):
    """Which piece of the stream a block takes, and what is put in front of it."""

    start: int
    tokens: int
    injected: int
    system_start: int
    """Where the system span to inject starts; it has `injected - 1` tokens."""
    crowded: bool
    """Whether the system span would leave no room, so that only the user marker is injected."""
    cut: bool
    """Whether the rest of the record is left out."""


def _user_spans(places: NDArray[np.int64], types: NDArray[np.int8]) -> _UserSpans:
    """Find the user spans, each with its record and system span; the last marker of a stream is an eos."""
    is_closed = np.append(types[1:] == _END, False)[: len(types)]
    user, system = np.flatnonzero(types == _USER), np.flatnonzero((types == _SYSTEM) & is_closed)
    borders = np.append(0, places[types == _EOS] + 1)
    record = np.searchsorted(borders, places[user], side="right")
    starts, lengths = np.append(places[system], 0), np.append(places[system + 1] - places[system] + 1, 0)
    latest = np.searchsorted(places[system], places[user]) - 1  # -1: none, which is the last entry
    latest[starts[latest] < borders[record - 1]] = -1
    closers = places[user + 1]
    columns = (places[user], closers, closers + is_closed[user], borders[record], starts[latest], lengths[latest])
    return _UserSpans(*(column.tolist() for column in columns))


def _plan_blocks(spans: _UserSpans, *, total: int, block_size: int) -> list[_Block]:
    """Walk the stream block by block; one step of Python for each block."""
    blocks: list[_Block] = []
    position = 0
    while position < total:
        injected = system_start = 0
        crowded = cut = False
        span = bisect_left(spans.markers, position) - 1
        inside = span >= 0 and position < spans.insides[span]
        if inside:
            system_start, injected = spans.system_starts[span], spans.system_lengths[span] + 1
            crowded = injected >= block_size
            injected = 1 if crowded else injected
        resume = position + block_size - injected
        count = min(resume, total) - position
        if inside and spans.closers[span] >= resume:
            cut, resume = True, spans.record_ends[span]
        blocks.append(_Block(position, count, injected, system_start, crowded, cut))
        position = resume
    return blocks


def _one_stream(records: Iterable[ArrayLike], eos_id: int) -> NDArray[np.int64]:
    """Return all records end to end, an eos after each one that does not end in it."""
    eos = np.array([eos_id], dtype=np.int64)
    pieces: list[NDArray[np.integer]] = []
    for number, record in enumerate(records):
        array = _integers(record, f"record {number}")
        if array.ndim != 1:
            raise DataError(f"record {number} has {array.ndim} dimensions; a record is a flat list of token ids")
        pieces.append(array)
        if not len(array) or array[-1] != eos_id:
            pieces.append(eos)
    return np.concatenate(pieces, dtype=np.int64) if pieces else np.empty(0, dtype=np.int64)


def _events(
    ids: NDArray[np.integer], system_id: int, user_id: int, assistant_id: int, end_id: int, eos_id: int
) -> tuple[NDArray[np.int64], NDArray[np.int8]]:
    """Find the markers in flat ids, and which each is."""
    markers = (system_id, user_id, assistant_id, end_id, eos_id)
    if len(set(markers)) < len(markers):
        names = ("system_id", "user_id", "assistant_id", "end_id", "eos_id")
        listed = ", ".join(f"{name}={value}" for name, value in zip(names, markers, strict=True))
        raise ConfigError(f"the five markers need five different ids, but here some are equal: {listed}")
    hits = ids == eos_id
    for marker in markers[:-1]:
        hits |= ids == marker
    places = np.flatnonzero(hits)
    types = np.zeros(len(places), dtype=np.int8)
    for number, marker in enumerate(markers):
        types[ids[places] == marker] = number
    return places, types


def _integers(ids: ArrayLike, name: str) -> NDArray[np.integer]:
    """Convert ids to an integer array; an empty list counts as integers."""
    array = np.asarray(ids)
    if array.dtype.kind not in "iu":
        if array.size:
            raise DataError(f"{name} holds values of type {array.dtype}; token ids are integers")
        array = array.astype(np.int64)
    return array
