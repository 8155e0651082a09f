"""Overflow policies: what becomes of conversations longer than a row, and what that costs in tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import RoleCode, roles_of
from chatmill.core.native.gather import gathered
from chatmill.core.tokens import Tokens, offsets_of, ranges
from chatmill.errors import DataError, member
from chatmill.pack.plan import whole
from chatmill.pack.turns import outline
from chatmill.pack.windows import KeptSpan, Trains, first_turns, last_turns, newest_turns, windows

Ints = NDArray[np.int64]


class Overflow(StrEnum):
    """What to do with a conversation that is longer than the row."""

    ERROR = "error"
    """Fail, naming the conversations."""
    DROP = "drop"
    """Leave the conversation out."""
    DROP_OLDEST_TURNS = "drop_oldest_turns"
    """Keep the head and the newest turns that fit (the rules of the token-native format)."""
    TURNS = "turns"
    """Keep all up to the end of the last trained answer that fits; nothing where none does."""
    LAST_TURNS = "last_turns"
    """Keep the head, what comes before the first answer, and all from some answer on to the end."""
    WINDOWS = "windows"
    """Several episodes of whole turns; each assistant message trains once, the head comes again untrained."""
    CUT = "cut"
    """Keep the first tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverflowResult:
    """Episodes of at most `capacity` tokens, in the order of their conversations and windows."""

    tokens: Tokens
    """One conversation per episode; message indices (and weights) are those of the source conversation."""
    run_weights: NDArray[np.float32]
    """One weight per run of `tokens`; 0 on injected runs (a policy applied again would train them)."""
    source_index: Ints
    """Which conversation of the input each episode comes from."""
    window: NDArray[np.int32]
    """Number of the episode among those of its conversation, from 0."""
    dropped: Ints
    """Conversations of the input of which nothing is left."""
    kept_of_run: Ints
    """Tokens that are left of each run of the input, repetitions not counted."""
    injected_runs: NDArray[np.bool_]
    """Which runs of `tokens` are untrained repetitions."""
    later_runs: NDArray[np.bool_]
    """Which runs of `tokens` come after something that is left out: what is before them is not their whole context."""
    source_runs: Ints
    """The run of the input that each run of `tokens` is, or is a part of."""


def apply_overflow(
    tokens: Tokens,
    run_weights: NDArray[np.float32],
    capacity: int,
    policy: Overflow | str,
    records: Ints | None = None,
    *,
    name_of: Callable[[int], str] = "conversation {}".format,
) -> OverflowResult:
    """Make every conversation fit into `capacity` tokens, after the policy; shorter ones pass as they are.

    `run_weights` has one weight per run of `tokens` (`Policy.run_weights`). Python touches only over-long
    conversations. `records` has the record of each conversation: with the policy `drop` those of one record, the two
    answers of a pair, are dropped together. `name_of` says in an error which conversation has a number.
    """
    chosen = member(Overflow, "overflow policy", policy)
    room = whole(capacity, "the capacity of a row is a whole number of tokens, 1 or more")
    if run_weights.shape != tokens.run_kinds.shape:
        raise DataError(f"there are {len(tokens.run_kinds)} runs, and run_weights has shape {run_weights.shape}")
    over_long = np.flatnonzero(tokens.lengths > room)
    if chosen is Overflow.ERROR and len(over_long):
        raise DataError(_too_long(tokens, over_long, room, name_of))
    if chosen is Overflow.DROP and records is not None:
        over_long = np.flatnonzero(np.isin(records, records[over_long]))
    if not len(over_long):
        return OverflowResult(
            tokens=tokens,
            run_weights=run_weights,
            source_index=np.arange(len(tokens), dtype=np.int64),
            window=np.zeros(len(tokens), dtype=np.int32),
            dropped=over_long,
            kept_of_run=tokens.run_lengths,
            injected_runs=np.zeros(len(tokens.run_kinds), dtype=np.bool_),
            later_runs=np.zeros(len(tokens.run_kinds), dtype=np.bool_),
            source_runs=np.arange(len(tokens.run_kinds)),
        )
    starts, trained = tokens.run_offsets[:-1], (run_weights > 0) & (tokens.run_lengths > 0)

    def episodes_of(index: int) -> list[list[KeptSpan]]:
        first, runs = tokens.offsets[index], slice(*tokens.document_runs[index : index + 2])
        begins = (starts[runs] - first)[trained[runs]]
        ends = begins + tokens.run_lengths[runs][trained[runs]]
        return kept_spans(tokens, index, room, chosen, lambda start, end: bool(((begins < end) & (ends > start)).any()))

    return _result(tokens, run_weights, over_long, [episodes_of(index) for index in over_long.tolist()])


def kept_spans(tokens: Tokens, index: int, capacity: int, policy: Overflow, trains: Trains) -> list[list[KeptSpan]]:
    """Return the episodes of one over-long conversation, as spans of it."""
    match policy:
        case Overflow.DROP:
            return []
        case Overflow.CUT:
            episodes = [[KeptSpan(0, capacity)]]
        case Overflow.DROP_OLDEST_TURNS:
            episodes = [newest_turns(outline(tokens, index), capacity)]
        case Overflow.WINDOWS:
            episodes = windows(outline(tokens, index), capacity, trains)
        case Overflow.TURNS:
            episodes = [first_turns(outline(tokens, index), capacity, trains)]
        case Overflow.LAST_TURNS:
            episodes = [last_turns(outline(tokens, index), capacity, trains)]
        case Overflow.ERROR:
            raise DataError(
                f"the record has {tokens.lengths[index]:,} tokens, the limit is {capacity:,}, and overflow is an error"
            )
    return [spans for spans in without_cut_pictures(tokens, index, episodes) if spans]


def without_cut_pictures(tokens: Tokens, index: int, episodes: list[list[KeptSpan]]) -> list[list[KeptSpan]]:
    """Move the borders of an over-long conversation's spans out of the messages that show pictures.

    A span that would end in such a message, before its last picture has ended, ends before the message. One that would
    begin in the midst of the message begins after it.
    """
    messages = _pictured_messages(tokens, index)
    if not messages:
        return episodes
    moved = [[_moved(span, messages) for span in spans] for spans in episodes]
    return [[span for span in spans if span.start < span.end] for spans in moved]


def _moved(span: KeptSpan, messages: list[tuple[int, int, int]]) -> KeptSpan:
    start, end = span.start, span.end
    for first, shown, last in messages:
        if first < start < last:
            start = last
        if first < end < shown:
            end = first
    return KeptSpan(start, end, span.injected)


def _pictured_messages(tokens: Tokens, index: int) -> list[tuple[int, int, int]]:
    """Find messages with pictures: first token, end of the last picture, and end of each."""
    a, b = tokens.document_runs[index : index + 2].tolist()
    is_picture = roles_of(tokens.run_kinds[a:b]) == RoleCode.IMAGE
    if not is_picture.any():
        return []
    owners = tokens.run_messages[a:b]
    starts = tokens.run_offsets[a:b] - tokens.offsets[index]
    ends = tokens.run_offsets[a + 1 : b + 1] - tokens.offsets[index]
    borders = []
    for message in sorted(set(owners[is_picture].tolist())):
        inside = owners == message
        borders.append((int(starts[inside].min()), int(ends[inside & is_picture].max()), int(ends[inside].max())))
    return borders


def _too_long(tokens: Tokens, over_long: Ints, capacity: int, name_of: Callable[[int], str]) -> str:
    longest: dict[str, int] = {}  # documents of one record have one name
    for index in over_long.tolist():
        name = name_of(index)
        longest[name] = max(longest.get(name, 0), int(tokens.lengths[index]))
    shown = ", ".join(f"{name} ({length:,} tokens)" for name, length in list(longest.items())[:5])
    more = f" and {len(longest) - 5} more" if len(longest) > 5 else ""
    others = ", ".join(p for p in Overflow if p is not Overflow.ERROR)
    return (
        f"{len(over_long)} of {len(tokens)} documents are longer than the row of {capacity:,} tokens: "
        f"{shown}{more}. Choose another overflow policy ({others}) or a longer row."
    )


def _slices(tokens: Tokens, over_long: Ints, episodes: list[list[list[KeptSpan]]]) -> Ints:
    """Slices of the flat batch in output order, seven rows of numbers; a conversation that fits is one slice.

    The rows: conversation, window, start, end, first run, one past the last run that it touches, whether injected.
    """
    rows = [
        (source, window, piece.start, piece.end, piece.injected)
        for source, parts in zip(over_long.tolist(), episodes, strict=True)
        for window, pieces in enumerate(parts)
        for piece in pieces
    ]
    source, window, start, end, injected = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    start, end = start + tokens.offsets[source], end + tokens.offsets[source]
    # Of several runs that start at one place all but the last are empty.
    first_run = np.searchsorted(tokens.run_offsets, start, side="right") - 1
    last_run = np.searchsorted(tokens.run_offsets, end, side="left")
    whole = np.delete(np.arange(len(tokens)), over_long)
    nothing = np.zeros_like(whole)
    borders = (column[whole + more] for column in (tokens.offsets, tokens.document_runs) for more in (0, 1))
    fitting = np.stack([whole, nothing, *borders, nothing])
    every = np.concatenate([fitting, [source, window, start, end, first_run, last_run, injected]], axis=1)
    return every[:, np.argsort(every[0], kind="stable")]


def _result(
    tokens: Tokens, run_weights: NDArray[np.float32], over_long: Ints, episodes: list[list[list[KeptSpan]]]
) -> OverflowResult:
    """Copy the spans of over-long conversations, and the others whole, into a new batch."""
    sources, windows_, starts, ends, first_run, last_run, repeats = _slices(tokens, over_long, episodes)
    runs = last_run - first_run
    run = ranges(first_run, runs)
    start = np.maximum(tokens.run_offsets[run], np.repeat(starts, runs))
    end = np.minimum(tokens.run_offsets[run + 1], np.repeat(ends, runs))
    injected = np.repeat(repeats, runs).astype(np.bool_)
    opens = np.ones(len(sources), dtype=np.bool_)
    opens[1:] = (np.diff(sources) != 0) | (np.diff(windows_) != 0)
    first_piece = np.flatnonzero(opens)
    source = sources[first_piece]
    goes_on = starts == np.where(opens, tokens.offsets[sources], np.append(0, ends[:-1])[: len(ends)])
    gaps = np.cumsum(~goes_on)  # up to and with each piece
    before = (gaps - ~goes_on)[first_piece]  # its episode
    is_later = gaps > np.repeat(before, np.diff(np.append(first_piece, len(opens))))
    run_offsets = offsets_of(end - start)
    document_runs = np.append(offsets_of(runs)[first_piece], len(run))
    messages = np.diff(tokens.message_offsets)[source]
    weights = run_weights[run]
    weights[injected] = 0
    cut_tokens = Tokens(
        ids=gathered([tokens.ids], np.zeros_like(starts), starts, ends - starts),
        offsets=run_offsets[document_runs],
        run_offsets=run_offsets,
        run_kinds=tokens.run_kinds[run],
        run_messages=tokens.run_messages[run],
        document_runs=document_runs,
        message_offsets=offsets_of(messages),
        message_weights=tokens.message_weights[ranges(tokens.message_offsets[source], messages)],
        logprobs=None if tokens.logprobs is None else tokens.logprobs[ranges(starts, ends - starts)],
    )
    lengths = end - start
    kept = np.bincount(run[~injected], weights=lengths[~injected], minlength=len(tokens.run_kinds)).astype(np.int64)
    return OverflowResult(
        tokens=cut_tokens,
        run_weights=weights,
        source_index=source,
        window=windows_[first_piece].astype(np.int32),
        dropped=np.setdiff1d(over_long, source),
        kept_of_run=kept,
        injected_runs=injected,
        later_runs=np.repeat(is_later, runs),
        source_runs=run,
    )
