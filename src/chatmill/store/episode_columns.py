"""Episodes on their way to disk: flat columns, checked before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chatmill.core.kinds import KINDS, PLAIN, RULE
from chatmill.core.texts import Texts
from chatmill.core.tokens import offsets_of
from chatmill.core.trees import Branches
from chatmill.errors import DataError

MAX_ID = 2**32 - 1
PER_TOKEN = ("ids", "mask", "kinds", "logprobs")


@dataclass(slots=True)
class SourceCodes:
    """Source names in the order in which they were first seen; a name's place is its code."""

    codes: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in code order."""
        return tuple(self.codes)

    def encode(self, names: str | Sequence[str], count: int) -> NDArray[np.uint32]:
        """Codes of `count` episodes, from one name for all or one each."""
        if isinstance(names, str):
            return np.full(count, self.codes.setdefault(names, len(self.codes)), dtype=np.uint32)
        return np.array([self.codes.setdefault(str(n), len(self.codes)) for n in names], dtype=np.uint32)

    def translate(self, codes: NDArray[np.uint32], names: Sequence[str]) -> NDArray[np.uint32]:
        """Our codes for those of another table with these names."""
        found, places = np.unique(codes, return_index=True)
        known = np.zeros(len(names), dtype=np.uint32)
        for code in found[np.argsort(places)].tolist():  # new names in the order in which the episodes show them
            known[code] = self.codes.setdefault(names[code], len(self.codes))
        return known[codes]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeColumns:
    """C episodes as flat columns; per-token columns have one value per token, the others one per episode."""

    ids: NDArray[np.uint32]
    lengths: NDArray[np.int64]
    mask: NDArray[Any] | None = None
    """Token-aligned weights: uint8 when all of them are whole numbers up to 255, else float32."""
    kinds: NDArray[np.uint8] | None = None
    source: NDArray[np.uint32] | None = None
    turns: NDArray[np.uint32] | None = None
    trained: NDArray[np.uint32] | None = None
    side: NDArray[np.uint8] | None = None
    margin: NDArray[np.float32] | None = None
    record_id: Texts | None = None
    """One text per episode."""
    branches: Branches | None = None
    """Those of each episode, where episodes are trees."""
    logprobs: NDArray[np.float32] | None = None
    """Of each token, NaN where none is known."""
    images: Texts | None = None
    """The pictures of each episode, as JSON."""
    image_bytes: Texts | None = None
    """Their bytes."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def names(self) -> tuple[str, ...]:
        """The optional columns that are there."""
        optional = [field.name for field in fields(self) if field.name not in ("ids", "lengths")]
        return tuple(name for name in optional if getattr(self, name) is not None)

    def part(self, first: int, last: int) -> EpisodeColumns:
        """Episodes `first` up to `last - 1` (views)."""
        if (first, last) == (0, len(self)):
            return self
        offsets = offsets_of(self.lengths)
        tokens = slice(int(offsets[first]), int(offsets[last]))
        cut: dict[str, Any] = {}
        for name in ("ids", "lengths", *self.names):
            value = getattr(self, name)
            if isinstance(value, Texts):
                cut[name] = value.part(first, last)
            elif isinstance(value, Branches):
                cut[name] = value.take(np.arange(first, last))
            else:
                cut[name] = value[tokens if name in PER_TOKEN else slice(first, last)]
        if self.mask is not None:
            cut["mask"] = as_bytes(cut["mask"])
        return EpisodeColumns(**cut)


def checked_columns(
    ids: ArrayLike,
    offsets: ArrayLike,
    weights: ArrayLike | None,
    kinds: ArrayLike | None,
    *,
    source: str | Sequence[str] | None,
    turns: ArrayLike | None,
    trained: ArrayLike | None,
    record_ids: Sequence[str] | None,
    branches: Sequence[Sequence[tuple[int, int]]] | None,
    first: int,
    sources: SourceCodes,
) -> EpisodeColumns:
    """Check and convert what a caller handed over; `first` is the number of its first episode, for errors."""
    borders = np.asarray(offsets)
    tokens = np.asarray(ids)
    _check_tokens(tokens, borders, first)
    count = len(borders) - 1
    lengths: NDArray[np.int64] = np.diff(borders).astype(np.int64)
    mask = None if weights is None else _weights(np.asarray(weights), tokens.size, first)
    per_episode = {"turns": turns, "trained": trained, "source": source, "record_ids": record_ids}
    per_episode["branches"] = branches
    for name, values in per_episode.items():
        if values is not None and not isinstance(values, str) and _size(values) != count:
            raise DataError(f"episode {first} and on: {name} needs one value for each of {count} episodes")
    if trained is None and mask is not None:
        trained = _counts(mask != 0, borders)
    return EpisodeColumns(
        ids=tokens.astype("<u4", copy=False),
        lengths=lengths,
        mask=mask,
        kinds=None if kinds is None else _kinds(np.asarray(kinds), tokens.size, first),
        turns=None if turns is None else _numbers(turns, "turns", first),
        trained=None if trained is None else _numbers(trained, "trained", first),
        record_id=None if record_ids is None else Texts.of(list(map(str, record_ids))),
        source=None if source is None else sources.encode(source, count),
        branches=None if branches is None else _branches(branches, tokens, lengths, mask, first),
    )


def _branches(
    given: Sequence[Sequence[tuple[int, int]]],
    ids: NDArray[Any],
    lengths: NDArray[np.int64],
    mask: NDArray[Any] | None,
    first: int,
) -> Branches:
    """Check branches: each begins, at its position, with a copy of a token of the branch before, not trained."""
    pairs = [np.asarray(own) for own in given]
    wrong = [n for n, own in enumerate(pairs) if own.size and (own.shape[1:] != (2,) or own.dtype.kind not in "iu")]
    if wrong:
        raise DataError(f"episode {first + wrong[0]}: branches are pairs: where a branch begins, and its position")
    flat = np.concatenate([np.empty((0, 2), dtype=np.int64), *(own.reshape(-1, 2) for own in pairs)]).astype(np.int64)
    counts = np.array([len(own) for own in pairs], dtype=np.int64)
    branches = Branches(offsets=offsets_of(counts), starts=flat[:, 0].copy(), depths=flat[:, 1].copy())
    try:
        positions, _ = branches.positions_and_ends(lengths)
    except DataError:
        raise DataError(
            f"episode {first} and on: a branch does not fit its tree: branches begin inside of it, in order, each at "
            "the position of a token of the branch before"
        ) from None
    begins = np.repeat(offsets_of(lengths)[:-1], branches.counts)
    for begin, start, depth in zip(begins.tolist(), branches.starts.tolist(), branches.depths.tolist(), strict=True):
        shared = begin + int(np.flatnonzero(positions[begin : begin + start] == depth)[-1])
        at = begin + start
        if ids[at] != ids[shared] or (mask is not None and mask[at]):
            episode = first + int(np.searchsorted(offsets_of(lengths), at, side="right")) - 1
            raise DataError(
                f"episode {episode}: the branch at {start} must begin with a copy of token {shared - begin}, which is "
                f"the last that it shares (id {ids[shared]}), with the weight 0"
            )
    return branches


def _size(values: Any) -> int:
    """How many values a caller handed over; a number alone is one."""
    if isinstance(values, np.ndarray):
        return values.size
    return len(values) if hasattr(values, "__len__") else 1


def _check_tokens(tokens: NDArray[Any], borders: NDArray[Any], first: int) -> None:
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise DataError(
            f"episode {first}: token ids are {tokens.dtype} of shape {tokens.shape}; one row of integers is needed"
        )
    if borders.ndim != 1 or borders.dtype.kind not in "iu" or not len(borders) or borders[0] != 0:
        raise DataError(f"episode {first}: offsets must be a row of integers that begins with 0")
    if borders[-1] != tokens.size:
        raise DataError(f"episode {first} and on: offsets end at {borders[-1]}, but there are {tokens.size} token ids")
    short = np.flatnonzero(borders[1:] <= borders[:-1])
    if len(short):
        raise DataError(
            f"episode {first + int(short[0])}: an episode needs at least one token, and offsets must increase"
        )
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) > MAX_ID):
        bad = int(np.flatnonzero((tokens < 0) | (tokens > MAX_ID))[0])
        episode = int(np.searchsorted(borders, bad, side="right")) - 1
        raise DataError(
            f"episode {first + episode}: token {bad - int(borders[episode])} has the id {tokens[bad]}; "
            f"ids are stored as uint32, 0 to {MAX_ID}"
        )


def _per_token(values: NDArray[Any], tokens: int, what: str, first: int) -> None:
    if values.shape != (tokens,):
        raise DataError(
            f"episode {first} and on: {what} of shape {values.shape} for {tokens} tokens; one value per token is needed"
        )


def _weights(values: NDArray[Any], tokens: int, first: int) -> NDArray[Any]:
    _per_token(values, tokens, "weights", first)
    if values.dtype.kind not in "biuf":
        raise DataError(f"episode {first}: weights are {values.dtype}; numbers are needed")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError(f"episode {first} and on: a weight is not finite")
    if values.dtype.kind in "if" and tokens and values.min() < 0:
        raise DataError(f"episode {first} and on: a weight is {values.min()}; weights are 0 or more")
    return as_bytes(values)


def as_bytes(values: NDArray[Any]) -> NDArray[Any]:
    """Weights as uint8 when that loses nothing, else as float32."""
    if values.dtype == np.uint8:
        return values
    if values.dtype.kind == "b":
        return values.astype(np.uint8)
    if values.size == 0 or (values.max() <= 255 and bool((values == np.floor(values)).all())):
        return values.astype(np.uint8)
    return values.astype("<f4")


def _kinds(values: NDArray[Any], tokens: int, first: int) -> NDArray[np.uint8]:
    _per_token(values, tokens, "kinds", first)
    if tokens and (
        values.dtype.kind not in "iu"
        or values.min() < 0
        or values.max() > 255
        or (values.max() >= KINDS and bool(((values & PLAIN) >= KINDS).any()))
    ):
        raise DataError(f"episode {first} and on: {RULE} (chatmill.core.kinds)")
    return values.astype(np.uint8, copy=False)


def _numbers(values: ArrayLike, name: str, first: int) -> NDArray[np.uint32]:
    array = np.atleast_1d(np.asarray(values))
    if array.size and (array.dtype.kind not in "iu" or array.min() < 0 or array.max() > MAX_ID):
        raise DataError(f"episode {first} and on: {name} must be whole numbers from 0 to {MAX_ID}")
    return array.astype("<u4")


def _counts(flags: NDArray[np.bool_], borders: NDArray[Any]) -> NDArray[np.int64]:
    """How many flags are set in each piece."""
    if len(borders) < 2:
        return np.empty(0, dtype=np.int64)
    return np.add.reduceat(flags, borders[:-1], dtype=np.int64)
