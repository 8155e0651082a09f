"""Shards of a distillation set: token files with the two sidecars next to them, opened together or refused.

A shard is `PREFIX_tokens`, `PREFIX_lossmask` and `PREFIX_span`, each a `.bin` with an `.idx`. On disk the two sidecars
are *label-aligned*: the value at position `t` is that of token `t + 1`, and the last value of a document is 0. A mask
of 1 means "train on that token"; a span is 1 (analysis), 2 (final) or 0 (neither, or not trained).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from chatmill.core.harmony_ids import CHANNEL_NAMES, EOD, START, VOCAB_SIZE, spans_of_ids
from chatmill.core.json_files import read_object
from chatmill.core.shift import shift_left_ragged
from chatmill.core.tokens import first_difference
from chatmill.errors import ConfigError, FormatError
from chatmill.store.episode_layout import MANIFEST
from chatmill.store.mapped import MappedFiles, StoredValues, probe, stated_digest
from chatmill.store.megatron import MegatronIndex, idx_path
from chatmill.store.receipts import EXPORT_MANIFEST, KD_SCHEMA, manifest_kind

TOKENS, LOSSMASK, SPAN = "tokens", "lossmask", "span"
COLUMNS = (TOKENS, LOSSMASK, SPAN)
"""What the three datasets of a shard are called: `PREFIX_tokens` and so on."""
SPAN_NAMES = ("context", "analysis", "final")
"""What the span ids 0, 1 and 2 mean."""
SAMPLED = 64
"""Documents of a shard whose values are compared when it is opened, besides the first."""
_SIDECAR_NAME = re.compile(r"[a-z][a-z0-9_]*")


def token_prefix(prefix: str | os.PathLike[str]) -> str:
    """Return the prefix of a shard's token files, checked for its name, which is where the sidecars are found."""
    text = os.fspath(prefix)
    if not text.endswith(f"_{TOKENS}"):
        hint = f"; did you mean {text}_{TOKENS}?" if idx_path(f"{text}_{TOKENS}").exists() else ""
        raise ConfigError(
            f"{text}: the prefix of a distillation shard ends in _{TOKENS}, so that _{LOSSMASK} and _{SPAN} are found "
            f"beside it{hint}"
        )
    return text


def sidecar_prefix(prefix: str | os.PathLike[str], column: str) -> str:
    """Return the prefix of a sidecar, from that of the token files."""
    return f"{token_prefix(prefix).removesuffix(TOKENS)}{column}"


def check_sidecar_name(name: str) -> None:
    """Refuse a sidecar of a user's own whose name is not plain, or is one of ours."""
    if not _SIDECAR_NAME.fullmatch(name) or name in COLUMNS:
        raise ConfigError(
            f"{name!r} is no name for a sidecar: lower-case letters, digits and _, and none of {', '.join(COLUMNS)}"
        )


class Problem(NamedTuple):
    """A rule that documents break, and the first place where they do."""

    message: str
    document: int
    token: int
    positions: int
    """Positions at which it is broken."""


@dataclass(frozen=True, kw_only=True)
class KDShard:
    """One shard, opened and found aligned: counts, lengths, document borders, and the values of some documents."""

    prefix: str
    """That of the token files, with `_tokens`."""
    tokens: MegatronIndex
    sidecars: Mapping[str, MegatronIndex]
    """`lossmask`, `span`, and the sidecars of a user's own that were asked for."""
    files: MappedFiles = field(default_factory=MappedFiles)
    few_tokens: bool = False
    """Another reader fetches the tokens: here few of them are asked of the store."""

    @classmethod
    def open(
        cls,
        prefix: str | os.PathLike[str],
        sidecars: Sequence[str] = (),
        *,
        is_own: bool = False,
        few_tokens: bool = False,
    ) -> KDShard:
        """Open all six files, and those of further sidecars; what does not fit together is a `FormatError`.

        Args:
            prefix: That of the token files.
            sidecars: Further sidecars.
            is_own: This very run wrote the files, and nothing but their sizes is checked.
            few_tokens: The tokens are in a store, and another reader fetches them.
        """
        name = token_prefix(prefix)
        for sidecar in sidecars:
            check_sidecar_name(sidecar)
        beside = (LOSSMASK, SPAN, *sidecars)
        shard = cls(
            prefix=name,
            tokens=MegatronIndex.open(name, is_own=is_own),
            sidecars={column: MegatronIndex.open(sidecar_prefix(name, column), is_own=is_own) for column in beside},
            few_tokens=few_tokens,
        )
        if is_own:
            return shard
        shard._check_tokens()
        for column, index in shard.sidecars.items():
            if column in COLUMNS and index.dtype != np.uint8:
                raise FormatError(f"{index.bin}: holds {index.dtype.name} values; a sidecar holds uint8")
            _check_beside(shard.tokens, index)
        shard._check_sampled()
        return shard

    @property
    def name(self) -> str:
        """`shard_00`."""
        return Path(self.prefix).name.removesuffix(f"_{TOKENS}")

    def __len__(self) -> int:
        """Documents."""
        return self.tokens.documents

    def values(self, column: str) -> NDArray[Any]:
        """Return all values of the tokens or of a sidecar, flat, mapped from their file."""
        index = self.tokens if column == TOKENS else self.sidecars[column]
        if column == TOKENS and self.few_tokens:
            return cast(NDArray[Any], StoredValues(index.bin, index.dtype, index.values))
        return self.files.get(index.bin, index.dtype, index.values)

    def spans(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Start and length of some documents, in tokens: two rows."""
        return np.stack([self.tokens.starts(rows), self.tokens.lengths[rows]])

    def place(self, number: int) -> slice:
        """Return where a document lies in the flat values."""
        first = int(self.tokens.pointers[number]) // self.tokens.dtype.itemsize
        return slice(first, first + int(self.tokens.lengths[number]))

    def document(self, number: int) -> tuple[NDArray[Any], NDArray[np.uint8], NDArray[np.uint8]]:
        """Ids, mask and span of a document as they are on disk: mask and span are label-aligned. Views."""
        place = self.place(number)
        return self.values(TOKENS)[place], self.values(LOSSMASK)[place], self.values(SPAN)[place]

    def fingerprint(self) -> str:
        """A hash over all lengths and samples of all values, with their sizes: another build gives another one.

        Of a remote dataset whose tokens another reader fetches: over the digests of all files.
        """
        digest = hashlib.sha256(self.tokens.dtype.name.encode())
        if self.few_tokens:
            for index in (self.tokens, *self.sidecars.values()):
                digest.update(f"{stated_digest(index.idx)} {stated_digest(index.bin)}\0".encode())
            return digest.hexdigest()
        digest.update(np.ascontiguousarray(self.tokens.lengths).data)
        for column in (TOKENS, *self.sidecars):
            probe(digest, self.values(column))
        return digest.hexdigest()

    def problems(self, first: int, last: int, *, strict: bool = False) -> Iterator[Problem]:
        """The rules that documents `first` to `last - 1` break; `strict`: also that they begin as Harmony does."""
        place = slice(self.place(first).start, self.place(last - 1).stop)
        ends = np.cumsum(self.tokens.lengths[first:last], dtype=np.int64) - 1
        for message, wrong in self._broken_rules(place, ends, strict).items():
            if wrong.any():
                at = int(np.flatnonzero(wrong)[0])
                document = int(np.searchsorted(ends, at))
                begin = int(ends[document - 1]) + 1 if document else 0
                yield Problem(message, first + document, at - begin, int(np.count_nonzero(wrong)))

    def _broken_rules(self, place: slice, ends: NDArray[np.int64], strict: bool) -> dict[str, NDArray[np.bool_]]:
        """For whole documents, whose last tokens are at `ends`, the positions at which each rule is broken.

        Sidecars that are off by one have the right lengths; only the ids show it, which are known of Harmony
        conversations alone.
        """
        ids, mask, span = (self.values(column)[place] for column in COLUMNS)
        is_end = np.zeros(len(ids), dtype=np.bool_)
        is_end[ends] = True
        broken = {
            f"the last value of {name} is not 0 (no token follows it: was it written token-aligned?)": (
                is_end & (self.values(name)[place] != 0)
            )
            for name in self.sidecars
        }
        broken["lossmask is not 1 exactly where the span is 1 or 2"] = mask != (span > 0)
        broken["a span other than 0, 1 and 2"] = span > max(CHANNEL_NAMES)
        eod, is_harmony = self._known_of_ids
        if eod is not None:  # documents of other templates may use the EOD between messages
            wrong = (ids == eod) != is_end if is_harmony else (ids != eod) & is_end
            broken["EOD inside of a document, or none at its end"] = wrong
        if is_harmony:  # unless strict, only what begins as Harmony does is held to its rules
            offsets = np.append(0, ends + 1)
            begins = ids[offsets[:-1]] == START
            expected = shift_left_ragged(spans_of_ids(ids, offsets), offsets)
            broken["a span is not that of the message by its role and channel"] = np.repeat(
                begins, np.diff(offsets)
            ) & (span != expected)
            if strict:
                broken["an id outside of the vocabulary"] = (ids < 0) | (ids >= VOCAB_SIZE)
                broken["a document does not begin with <|start|>"] = np.zeros(len(ids), dtype=np.bool_)
                broken["a document does not begin with <|start|>"][offsets[:-1]] = ~begins
        return broken

    @cached_property
    def _known_of_ids(self) -> tuple[int | None, bool]:
        """The last token of all documents, if the manifest of the root says so; and whether `synth-kd` wrote it."""
        root = Path(self.prefix).parent.parent
        is_kd = manifest_kind(root) == KD_SCHEMA
        path = root / (MANIFEST if is_kd else EXPORT_MANIFEST)
        said = read_object(path).get("tokenizer" if is_kd else "options") if path.is_file() else None
        eod = said.get("eod_id") if isinstance(said, dict) else None
        return (EOD if is_kd and eod is None else eod), is_kd

    def _check_sampled(self) -> None:
        """On the first document and a sample of the others: no rule is broken."""
        for number in sorted(set(np.linspace(0, len(self) - 1, min(SAMPLED, len(self))).astype(np.int64).tolist())):
            for problem in self.problems(number, number + 1):
                ids, mask, span = (int(column[problem.token]) for column in self.document(number))
                raise FormatError(
                    f"{self.tokens.bin}: {problem.message}: document {number} has the mask {mask} and the span {span} "
                    f"at position {problem.token} ({problem.positions:,} of its {self.tokens.lengths[number]:,} "
                    f"positions are wrong), where the token is {ids}; tokens or sidecars are shifted, swapped, or "
                    "belong to another build"
                )

    def _check_tokens(self) -> None:
        """There are documents, of one sequence each, in an integer dtype."""
        index = self.tokens
        if not len(index.lengths):
            raise FormatError(f"{index.idx}: holds no document; leave this shard out")
        if index.dtype.kind not in "iu":
            raise FormatError(f"{index.bin}: holds {index.dtype.name} values; token ids are integers")
        if index.documents != len(index.lengths):
            raise FormatError(
                f"{index.idx}: {index.documents:,} documents of {len(index.lengths):,} sequences; in a distillation "
                "shard every document is one sequence"
            )
        empty = int(np.argmin(index.lengths))
        if not index.lengths[empty]:
            raise FormatError(f"{index.idx}: document {empty} is empty")


def _check_beside(tokens: MegatronIndex, sidecar: MegatronIndex) -> None:
    """Check that a sidecar has the sequences, lengths and document borders of the tokens."""
    for plural, noun, values, expected in (
        ("sequences", "length", sidecar.lengths, tokens.lengths),
        ("documents", "border", sidecar.document_indices[1:], tokens.document_indices[1:]),
    ):
        if len(values) != len(expected):
            raise FormatError(
                f"{sidecar.idx}: {len(values):,} {plural}, but {tokens.idx.name} next to it has {len(expected):,}"
            )
        at = first_difference(values, expected)
        if at is not None:
            raise FormatError(
                f"{sidecar.idx}: document {at} has the {noun} {int(values[at]):,}, but in {tokens.idx.name} next to it "
                f"{int(expected[at]):,}: the sidecar belongs to another build or shard"
            )
