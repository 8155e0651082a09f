"""Texts to packed blocks of token ids with their document starts, for any tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from chatmill.core.special_ids import special_id
from chatmill.core.tokens import offsets_of, ranges
from chatmill.errors import ConfigError, DataError, TokenizerError, UnknownNameError
from chatmill.pack.plan import Strategy, plan
from chatmill.structs import Count
from chatmill.tokenizer.foreign import refuse_altering

Ints = NDArray[np.int64]
STRATEGIES = (Strategy.GREEDY, Strategy.BEST_FIT, Strategy.FIRST_FIT)
"""How documents may share blocks. Greedy with overflow is made here: the planner never splits a document."""


class PackOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How texts become blocks: the options of `block_tokenize_fn`."""

    max_length: Count = 512
    overflow: bool = True
    packed: bool = False
    packing_strategy: str = "greedy"
    shuffle_output: bool = False
    seed: Count = 42
    stride: Count = 0
    min_len: Count = 1
    max_len: Count | None = None
    add_bos: bool = True
    add_eos: bool = True
    truncate_at: Any = None


class _Splitting(NamedTuple):
    """How a document that is too long is cut into pieces."""

    max_length: int
    """Tokens of a block."""
    bos: int
    """1 where every later piece begins with a BOS of its own, else 0."""
    stride: int
    """Document tokens that a later piece repeats from the end of the piece before."""
    overflow: bool
    """Whether there are later pieces; else what does not fit is cut off."""

    @property
    def holds(self) -> int:
        """Document tokens of a later piece."""
        return self.max_length - self.bos

    @property
    def advance(self) -> int:
        """New document tokens of a later piece after the second."""
        return self.holds - self.stride


class _Pieces(NamedTuple):
    """Parts of documents, one value per piece; a document that fits is one piece."""

    first: Ints
    """Where the piece begins in the flat tokens; a later piece's BOS takes the place of the token there."""
    lengths: Ints
    """Tokens of the piece, its own BOS included."""
    later: NDArray[np.bool_]
    """True where the piece continues a document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReport:
    """What became of the texts, as counts; nothing is left out that is not here."""

    documents: int
    """Texts."""
    tokens: int
    """Their tokens, without BOS and EOS, after `truncate_at`."""
    truncated: int
    """Texts that `truncate_at` cut."""
    too_short: int
    """Documents under `min_len`, left out."""
    too_short_tokens: int
    too_long: int
    """Documents over `max_len`, left out."""
    too_long_tokens: int
    cut: int
    """Documents whose end was cut off, because `overflow` is off."""
    cut_tokens: int
    blocks: int
    blocks_too_short: int
    """Blocks under `min_len` tokens, left out."""
    blocks_too_short_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Packed rows of tokens with the starts of their documents, and what was left out."""

    input_ids: list[list[int]]
    document_starts: list[list[int]]
    report: BlockReport


def block_tokenize_fn(
    features: Mapping[str, Sequence[str]],
    tokenizer: Any,
    feature: str,
    max_length: int = 512,
    overflow: bool = True,
    packed: bool = False,
    packing_strategy: str = "greedy",
    shuffle_output: bool = False,
    seed: int = 42,
    stride: int = 0,
    min_len: int = 1,
    max_len: int | None = None,
    add_bos: bool = True,
    add_eos: bool = True,
    truncate_at: str | re.Pattern[str] | None = None,
) -> dict[str, list[list[int]]]:
    """Encode the texts of one column and lay them into blocks of at most `max_length` tokens.

    Returns `{"input_ids": [...], "document_starts": [...]}`, one list per block: every document, and every
    piece of a split one, begins at an entry of `document_starts`; the first entry is 0. Made for
    `datasets.Dataset.map(batched=True, remove_columns=...)`; the plan is global over the texts of one call.

    - `overflow`: what does not fit continues in another piece (else it is cut off and lost).
    - `packed`: several documents share a block, by `packing_strategy` "greedy", "best_fit" or "first_fit".
    - `stride`: tokens that a later piece repeats from the piece before.
    - `min_len`, `max_len`: documents with fewer or more text tokens are left out; so are blocks with fewer
      than `min_len` tokens.
    - `add_bos`, `add_eos`: around every document, where the tokenizer has such a token. Texts that already
      spell their BOS want `add_bos=False`.
    - `truncate_at`: a regular expression; a text ends at its first match.
    - `shuffle_output`: blocks in the order of `RandomState(seed).permutation(len(blocks))`.
    """
    packing = PackOptions(
        max_length=max_length, overflow=overflow, packed=packed, packing_strategy=packing_strategy, stride=stride,
        shuffle_output=shuffle_output, seed=seed, min_len=min_len, max_len=max_len, add_bos=add_bos, add_eos=add_eos,
        truncate_at=truncate_at,
    )  # fmt: skip
    blocks = tokenize_blocks(features, tokenizer, feature, packing)
    return {"input_ids": blocks.input_ids, "document_starts": blocks.document_starts}


def tokenize_blocks(
    features: Mapping[str, Sequence[str]], tokenizer: Any, feature: str, packing: PackOptions
) -> Blocks:
    """Return the same as `block_tokenize_fn`, with a report of what was cut and left out."""
    if packing.packing_strategy not in STRATEGIES:
        raise UnknownNameError("packing strategy", packing.packing_strategy, [s.value for s in STRATEGIES])
    bos = special_id(tokenizer, "bos") if packing.add_bos else None
    eos = special_id(tokenizer, "eos") if packing.add_eos else None
    splitting = _Splitting(packing.max_length, int(bos is not None), packing.stride, packing.overflow)
    _check_lengths(splitting)

    texts = _texts(features, feature, packing.truncate_at)
    ids, offsets = _encode(tokenizer, texts)
    text_lengths = np.diff(offsets)
    short = text_lengths < packing.min_len
    long = text_lengths > (np.inf if packing.max_len is None else packing.max_len)
    ids, offsets = _wrapped(ids, offsets, ~short & ~long, bos=bos, eos=eos)
    pieces, block_offsets = _laid_out(offsets, splitting, packing)
    blocks, starts = _assemble(ids, pieces, block_offsets, bos)
    sizes = np.array([len(block) for block in blocks], dtype=np.int64)
    kept = np.flatnonzero(sizes >= packing.min_len)
    if packing.shuffle_output:
        kept = kept[np.random.RandomState(packing.seed).permutation(len(kept))]
    beyond = np.maximum(np.diff(offsets) - packing.max_length, 0) * (not packing.overflow)
    report = BlockReport(
        documents=len(texts),
        tokens=int(text_lengths.sum()),
        truncated=sum(len(a) != len(b) for a, b in zip(features[feature], texts, strict=True)),
        too_short=int(short.sum()),
        too_short_tokens=int(text_lengths[short].sum()),
        too_long=int(long.sum()),
        too_long_tokens=int(text_lengths[long].sum()),
        cut=int(np.count_nonzero(beyond)),
        cut_tokens=int(beyond.sum()),
        blocks=len(kept),
        blocks_too_short=len(blocks) - len(kept),
        blocks_too_short_tokens=int(sizes[sizes < packing.min_len].sum()),
    )
    return Blocks(input_ids=[blocks[i] for i in kept], document_starts=[starts[i] for i in kept], report=report)


def _laid_out(offsets: Ints, splitting: _Splitting, packing: PackOptions) -> tuple[_Pieces, Ints]:
    """Pieces in the order of the blocks, and the offsets of the blocks among them."""
    lengths, fills_up = np.diff(offsets), packing.packed and packing.packing_strategy == Strategy.GREEDY
    fills_up = fills_up and packing.overflow
    room = _rooms(lengths, splitting) if fills_up else np.full(len(lengths), splitting.max_length)
    pieces = _split(offsets, splitting, room)
    if fills_up:
        opens = pieces.later.copy()
        opens[~pieces.later] = room == splitting.max_length
        return pieces, np.append(np.flatnonzero(opens), len(opens))
    if not packing.packed:
        return pieces, np.arange(len(pieces.lengths) + 1)
    planned = plan(pieces.lengths, splitting.max_length, packing.packing_strategy)
    order = planned.order
    return _Pieces(pieces.first[order], pieces.lengths[order], pieces.later[order]), planned.bin_offsets


def _check_lengths(splitting: _Splitting) -> None:
    max_length, stride = splitting.max_length, splitting.stride
    if max_length < 1:
        raise ConfigError(f"max_length is {max_length}; a block holds at least one token")
    if not 0 <= stride < splitting.holds:
        raise ConfigError(
            f"stride is {stride}; it must be at least 0, and below the {splitting.holds} document tokens that "
            f"a block of max_length {max_length} holds{' after its BOS' if splitting.bos else ''}"
        )


def _texts(features: Mapping[str, Sequence[str]], feature: str, truncate_at: str | re.Pattern[str] | None) -> list[str]:
    if feature not in features:
        raise UnknownNameError("feature", feature, sorted(map(str, features)))
    column = features[feature]
    if isinstance(column, str):
        raise DataError(f"feature {feature!r} must be a list of texts, not one text: use batched=True in map")
    texts = list(column)
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"feature {feature!r}, row {row}: a text is wanted, not {type(text).__name__} {text!r:.40}")
    if truncate_at is None:
        return texts
    try:
        pattern = re.compile(truncate_at)
    except re.error as error:
        raise ConfigError(f"truncate_at {truncate_at!r} is not a regular expression: {error}") from None
    return [text[: match.start()] if (match := pattern.search(text)) else text for text in texts]


def _encode(tokenizer: Any, texts: list[str]) -> tuple[Ints, Ints]:
    """Flat ids and offsets of finished documents: control tokens are recognised, nothing is added."""
    if not texts:
        return np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    if hasattr(tokenizer, "encode_documents"):
        ids, offsets = tokenizer.encode_documents(texts)
        return ids.astype(np.int64), offsets
    if not callable(tokenizer):
        refuse_altering(tokenizer)
        raise TokenizerError(
            f"a {type(tokenizer).__name__} cannot encode a list of texts by a call: give a transformers tokenizer, or "
            "chatmill.load_tokenizer(tokenizer)"
        )
    rows = [np.asarray(row, dtype=np.int64) for row in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    if len(rows) != len(texts) or any(row.ndim != 1 for row in rows):
        raise DataError(f"the tokenizer made {len(rows)} rows of {len(texts)} texts: it must encode lists of texts")
    return np.concatenate(rows), offsets_of(np.array([len(row) for row in rows]))


def _wrapped(
    ids: Ints, offsets: Ints, keep: NDArray[np.bool_], *, bos: int | None, eos: int | None
) -> tuple[Ints, Ints]:
    """Put BOS before and EOS after every document that is kept; documents without any token are gone."""
    before, after = int(bos is not None), int(eos is not None)
    lengths = np.diff(offsets)
    keep &= lengths + before + after > 0
    begins, lengths = offsets[:-1][keep], lengths[keep]
    wrapped_offsets = offsets_of(lengths + before + after)
    wrapped = np.empty(int(wrapped_offsets[-1]), dtype=np.int64)
    wrapped[ranges(wrapped_offsets[:-1] + before, lengths)] = ids[ranges(begins, lengths)]
    if bos is not None:
        wrapped[wrapped_offsets[:-1]] = bos
    if eos is not None:
        wrapped[wrapped_offsets[1:] - 1] = eos
    return wrapped, wrapped_offsets


def _split(offsets: Ints, splitting: _Splitting, room: Ints) -> _Pieces:
    """Pieces of all documents, in order; the first of each holds `room` tokens.

    Later piece k = 1, 2, ... begins at `begin + (k - 1) * advance`, where `begin` is `stride` tokens before
    the end of the first piece, but not before the text: a piece's BOS is not followed by the document's own.
    """
    lengths = np.diff(offsets)
    begin = np.maximum(room - splitting.stride, splitting.bos)
    beyond = np.maximum(lengths - begin - splitting.holds, 0)
    goes_on = (lengths > room) & splitting.overflow
    counts = np.where(goes_on, 2 + -(-beyond // splitting.advance), 1)

    document = np.repeat(np.arange(len(lengths)), counts)
    number = ranges(np.zeros(len(counts), dtype=np.int64), counts)
    later = number > 0
    start = np.where(later, begin[document] + (number - 1) * splitting.advance, 0)
    end = np.minimum(lengths[document], np.where(later, start + splitting.holds, room[document]))
    own_bos = later * splitting.bos
    return _Pieces(first=offsets[:-1][document] + start - own_bos, lengths=end - start + own_bos, later=later)


def _rooms(lengths: Ints, splitting: _Splitting) -> Ints:
    """Return the room that each document finds when it comes to the open block (a full block means a new one).

    Each answer depends on the one before, so this is a loop over documents, of a few integer operations each.
    """
    max_length, bos, stride = splitting.max_length, splitting.bos, splitting.stride
    holds, advance = splitting.holds, splitting.advance
    rooms = np.empty(len(lengths), dtype=np.int64)
    room = max_length
    for i, length in enumerate(lengths.tolist()):
        rooms[i] = room
        if length <= room:
            room -= length
        else:
            start = max(room - stride, bos)
            start += max(0, -(-(length - start - holds) // advance)) * advance
            room = holds - (length - start)
        room = room or max_length
    return rooms


def _assemble(
    ids: Ints, pieces: _Pieces, block_offsets: Ints, bos: int | None
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of each block and the starts of the pieces in it, as lists."""
    flat = ids[ranges(pieces.first, pieces.lengths)]
    offsets = offsets_of(pieces.lengths)
    if bos is not None:
        flat[offsets[:-1][pieces.later]] = bos
    borders = offsets[block_offsets]
    starts = (offsets[:-1] - np.repeat(borders[:-1], np.diff(block_offsets))).tolist()
    tokens = flat.tolist()
    in_blocks = [tokens[a:b] for a, b in pairwise(borders.tolist())]
    return in_blocks, [starts[a:b] for a, b in pairwise(block_offsets.tolist())]
