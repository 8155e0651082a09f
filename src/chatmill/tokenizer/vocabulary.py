"""The Chatmill tokenizer: one text engine, a table of token bytes, and a map of control tokens."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.distinct import distinct
from chatmill.core.native.points import token_points
from chatmill.core.texts import Texts
from chatmill.core.tokens import offsets_of, ranges
from chatmill.errors import TokenizerError
from chatmill.tokenizer.backends import Backend, HuggingFaceBackend
from chatmill.tokenizer.control import control_pattern, lookup
from chatmill.tokenizer.prefix import Prefix
from chatmill.tokenizer.protocol import Encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedIds:
    """The ids of the tokens that begin, end and pad; None where a tokenizer has none."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None


class VocabularyTokenizer:
    """A tokenizer of the `chatmill.tokenizer.protocol.Tokenizer` kind over any text engine."""

    def __init__(
        self,
        *,
        name: str,
        backend: Backend,
        token_bytes: Mapping[int, bytes],
        control_ids: Mapping[str, int],
        named: NamedIds,
        rules_fingerprint: Callable[[], str],
        normalizer: HuggingFaceBackend | None = None,
        bytes_add_up: bool = True,
        unknown_id: int | None = None,
        document_backend: Backend | None = None,
        ordinary: Collection[str] = (),
    ) -> None:
        """Assemble the parts; `load_tokenizer` is the way in.

        `bytes_add_up`: the bytes of a text's tokens, joined, are the normalised text; if not, `normalizer` must be
        given and finds where tokens are. `unknown_id` may come out of text although it is listed as special.
        `document_backend` reads finished documents where control tokens match in ways of their own (stripping white
        space, say); without one they match as they are spelled. `ordinary` names the control tokens that text may
        spell, since the vocabulary lists them without calling them special.
        """
        self.name = name
        self.backend = backend
        self.control_ids = dict(sorted(control_ids.items(), key=lambda item: (item[1], item[0])))
        self.ordinary = frozenset(ordinary)
        """Added tokens that text may spell."""
        self.named_tokens: Mapping[str, str] = {}
        """`bos_token` and the like, where the tokenizer's files name them."""
        self.stripping: Mapping[str, tuple[bool, bool]] = {}
        """Added tokens that take white space before or behind them away."""
        self.single_words: frozenset[str] = frozenset()
        """Added tokens that are found only where no letter or digit is beside them."""
        self.bos_id, self.eos_id, self.pad_id = named.bos, named.eos, named.pad
        self.text_vocab_size = max(token_bytes, default=-1) + 1
        self.vocab_size = max(self.text_vocab_size, max(self.control_ids.values(), default=-1) + 1)
        self._bytes = token_bytes
        self._rules_fingerprint = rules_fingerprint
        self._reference = normalizer
        self.bytes_add_up = bytes_add_up
        self._unknown_id = unknown_id
        self._document_backend = document_backend
        self.normal_form: str | None = "" if normalizer is None else None
        """The Unicode form that the normalizer makes; "" for no normalizer, None for any other."""
        self.keeps_ascii: bool | None = None
        """Whether the normalizer leaves ASCII text alone; None where that is found out when it is needed."""
        self.origin: tuple[Callable[..., VocabularyTokenizer], tuple[Any, ...]] | None = None
        """Function and arguments that load this tokenizer again, before control tokens were added."""
        self.row_origin: tuple[Callable[..., VocabularyTokenizer], tuple[Any, ...]] | None = None
        """The same for the tokenizer of rows, where text gets a prefix."""
        self.prefix: Prefix | None = None
        """What rows write in front of text, since the engine does not."""
        self._added: tuple[str, ...] = ()

    @property
    def text_fingerprint(self) -> str:
        """sha256 over the text vocabulary and its rules alone."""
        return self._rules_fingerprint()

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the text vocabulary and its rules, the control map and the named ids."""
        parts = [self._rules_fingerprint(), self.control_ids, [self.bos_id, self.eos_id, self.pad_id]]
        canonical = json.dumps([*parts, sorted(self.ordinary)] if self.ordinary else parts)
        return hashlib.sha256(canonical.encode()).hexdigest()

    @cached_property
    def _byte_lengths(self) -> NDArray[np.int32]:
        lengths = np.zeros(self.vocab_size, dtype=np.int32)
        lengths[np.fromiter(self._bytes.keys(), dtype=np.int64, count=len(self._bytes))] = [
            len(b) for b in self._bytes.values()
        ]
        return lengths

    @cached_property
    def _forbidden(self) -> NDArray[np.bool_] | None:
        """True for control ids among the ids that the text engine knows; None when there are none."""
        allowed = {self._unknown_id, *(self.control_ids[name] for name in self.ordinary)}
        inside = [i for i in self.control_ids.values() if i < self.text_vocab_size and i not in allowed]
        if not inside:
            return None
        table = np.zeros(self.text_vocab_size, dtype=np.bool_)
        table[inside] = True
        return table

    @cached_property
    def _first_forbidden(self) -> int:
        """The lowest control id among those that the text engine knows."""
        assert self._forbidden is not None
        return int(np.argmax(self._forbidden))

    @cached_property
    def _control_names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for name, token_id in self.control_ids.items():
            names.setdefault(token_id, name)
        return names

    @property
    def special_tokens(self) -> list[str]:
        """Names of the control tokens that no text can spell."""
        return [name for name in self.control_ids if name not in self.ordinary]

    def control(self, name: str) -> int:
        """The id of a control token."""
        return lookup(self.control_ids, name, self.name)

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Encode many texts in one call; control tokens are not recognised."""
        try:
            ids, offsets = self.backend.encode_batch(texts)
        except (UnicodeError, TypeError):  # the engines refuse text without a UTF-8 form in their own ways
            raise TokenizerError(_lone_surrogate(texts)) from None
        if self._forbidden is not None:
            high = np.flatnonzero(ids >= self._first_forbidden)
            if self._forbidden[ids[high]].any():
                self._refuse_control(texts, ids, offsets)
        return ids, offsets

    def _refuse_control(self, texts: Sequence[str], ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> None:
        assert self._forbidden is not None
        at = int(np.flatnonzero(self._forbidden[ids])[0])
        which = int(np.searchsorted(offsets, at, side="right")) - 1
        raise TokenizerError(
            f"tokenizer {self.name!r} gives the control token {self._control_names[int(ids[at])]!r} for plain text: "
            f"text {which}, {texts[which][:60]!r}. Such a vocabulary cannot tell text from control."
        )

    def encode_documents(self, texts: Sequence[str]) -> Encoded:
        """Encode finished documents: control tokens spelled in the text become their ids."""
        pattern = self._document_pattern
        if pattern is None:
            return self._encode_between(texts)
        pieces: list[str] = []
        piece_document: list[int] = []
        controls: list[int] = []
        for index, text in enumerate(texts):
            for i, piece in enumerate(pattern.split(text)):
                pieces.append("" if i % 2 else piece)
                controls.append(self.control_ids[piece] if i % 2 else -1)
                piece_document.append(index)
        ids, offsets = self._encode_between(pieces)
        is_control = np.array(controls, dtype=np.int32)
        lengths = np.where(is_control >= 0, 1, np.diff(offsets))
        starts = offsets_of(lengths)
        out = np.empty(int(starts[-1]), dtype=np.int32)
        at = starts[:-1][is_control >= 0]
        text_mask = np.ones(len(out), dtype=np.bool_)
        text_mask[at] = False
        out[text_mask] = ids
        out[at] = is_control[is_control >= 0]
        counts = np.bincount(np.array(piece_document, dtype=np.int64), weights=lengths, minlength=len(texts))
        return out, offsets_of(counts.astype(np.int64))

    def _encode_between(self, texts: Sequence[str]) -> Encoded:
        """Encode what is between the control tokens that `_document_pattern` finds."""
        if self._document_backend is None:
            return self.encode_batch(texts)
        try:
            return self._document_backend.encode_batch(texts)
        except (UnicodeError, TypeError):
            raise TokenizerError(_lone_surrogate(texts)) from None

    @cached_property
    def _document_pattern(self) -> re.Pattern[str] | None:
        """Matches the control tokens of documents; with an engine for documents, those that it does not know."""
        return control_pattern(self.control_ids if self._document_backend is None else self._added)

    def encode(self, text: str) -> list[int]:
        """Encode one text; control tokens are not recognised."""
        return self.encode_batch([text])[0].tolist()  # type: ignore[no-any-return]

    def split_points(
        self, encoded: Encoded, which: NDArray[np.int64], prefixes: Sequence[str], texts: Sequence[str]
    ) -> NDArray[np.int64]:
        """For each pair: how many tokens of `texts[which[i]]` start inside its beginning `prefixes[i]`."""
        if not self.bytes_add_up:
            assert self._reference is not None
            return self._reference.tokens_before([texts[i] for i in which], [len(prefix) for prefix in prefixes])
        known = {prefix: self._normalised_size(prefix) for prefix in set(prefixes)}
        sizes = np.array([known[prefix] for prefix in prefixes], dtype=np.int64)
        ids, offsets = encoded
        return token_points(ids, self._byte_lengths, offsets, which, sizes) - offsets[which]

    def byte_points(
        self, encoded: Encoded, which: NDArray[np.int64], prefix_bytes: NDArray[np.int64], texts: Texts
    ) -> NDArray[np.int64]:
        """For each pair: the first token of `texts[which[i]]`, counted among all, that starts at or behind a byte."""
        ids, offsets = encoded
        if not self.bytes_add_up:
            return offsets[which] + self.split_points(encoded, which, _prefixes(texts, which, prefix_bytes), texts)
        points = token_points(ids, self._byte_lengths, offsets, which, prefix_bytes)
        moved = self._moved_by_normalizer(texts, which, prefix_bytes)
        if self.normal_form and len(moved):
            tails = texts.lengths[which[moved]] - prefix_bytes[moved]
            behind = Texts(texts.data, texts.starts[which[moved]] + prefix_bytes[moved], tails)
            plain = ~behind.not_ascii()  # no normal form changes ASCII text, or joins it to what is before it
            at_end = moved[plain]
            points[at_end] = self._points_before_end(encoded, which[at_end], tails[plain])
            moved = moved[~plain]
            moved = moved[_not_normal(texts, which[moved], self.normal_form)]
        if len(moved):
            prefixes = _prefixes(texts, which[moved], prefix_bytes[moved])
            points[moved] = offsets[which[moved]] + self.split_points(encoded, which[moved], prefixes, texts)
        return points

    def _moved_by_normalizer(
        self, texts: Texts, which: NDArray[np.int64], prefix_bytes: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The pairs whose byte may be another one after the normalizer."""
        if self.normal_form == "":
            return np.empty(0, dtype=np.int64)
        doubtful = np.flatnonzero(texts.not_ascii()[which]) if self._keeps_ascii else np.arange(len(which))
        if self.normal_form is None or not self._keeps_ascii or not len(doubtful):
            return doubtful
        begins, prefixes = texts.starts[which[doubtful]], prefix_bytes[doubtful]
        moved = Texts(texts.data, begins, prefixes).not_ascii()
        inside = np.flatnonzero(~moved & (prefixes < texts.lengths[which[doubtful]]))
        borders = (begins + prefixes)[inside]
        beside = texts.data[borders]  # the first byte behind ASCII text: of what joins to it?
        joins = ~_NEVER_JOINS[beside]
        inside, borders, before = inside[joins], borders[joins], np.minimum(prefixes[inside[joins]], 1)
        characters = Texts(texts.data, borders - before, before + _CHARACTER_BYTES[beside[joins]])
        numbers, firsts = distinct(texts.data, characters.starts, characters.lengths)
        kept = [_keeps_border(self.normal_form, characters[first]) for first in firsts.tolist()]
        moved[inside] = ~np.array(kept, dtype=np.bool_)[numbers]
        return doubtful[moved]

    def _points_before_end(
        self, encoded: Encoded, which: NDArray[np.int64], tails: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """For each pair: the first token of a text that begins inside its last bytes; the text's end without one."""
        ids, offsets = encoded
        different, number = np.unique(which, return_inverse=True)
        counts = offsets[different + 1] - offsets[different]
        passed = offsets_of(self._byte_lengths[ids[ranges(offsets[different], counts)]])
        ends = offsets_of(counts)
        sizes = (passed[ends[1:]] - passed[ends[:-1]])[number]
        return token_points(ids, self._byte_lengths, offsets, which, np.maximum(sizes - tails, 0))

    def _normalised_size(self, text: str) -> int:
        """Bytes of a normalised text."""
        if self._keeps_ascii and text.isascii():
            return len(text)
        return len(self.normalize(text).encode())

    @cached_property
    def _keeps_ascii(self) -> bool:
        """Whether the normalizer leaves ASCII text alone, as the Unicode normal forms do."""
        if self.keeps_ascii is not None:
            return self.keeps_ascii
        ascii_text = "".join(map(chr, range(128)))
        return all(self.normalize(text) == text for text in ("a", " a ", ascii_text, ascii_text[::-1]))

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Text of the ids; control tokens are spelled out, broken UTF-8 becomes U+FFFD."""
        numbers = [int(i) for i in ids]
        if self.bytes_add_up:
            return b"".join(map(self.token_bytes, numbers)).decode("utf-8", errors="replace")
        assert self._reference is not None
        out: list[str] = []
        run: list[int] = []
        for number in [*numbers, -1]:
            name = self._control_names.get(number)
            if name is None and number >= 0:
                run.append(number)
                continue
            if run:
                out.append(self._reference.decode(run))
                run = []
            out.append(name or "")
        return "".join(out)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one id stands for; the UTF-8 of its name for a control token."""
        name = self._control_names.get(token_id)
        return self.text_bytes(token_id) if name is None else name.encode()

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes of an id that the text engine gave."""
        try:
            return self._bytes[token_id]
        except KeyError:
            raise TokenizerError(
                f"id {token_id} is not in the vocabulary of {self.name!r} ({self.vocab_size} ids)"
            ) from None

    def normalize(self, text: str) -> str:
        """What the declared normalizer makes of a text."""
        return text if self._reference is None else self._reference.normalize(text)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as the way it was loaded: the engines themselves cannot be."""
        if self.origin is None:
            raise TypeError(f"tokenizer {self.name!r} was put together by hand and cannot be pickled")
        function, arguments = self.origin
        return _reload, (function, arguments, self._added)

    def use_rules_of(self, rules_fingerprint: Callable[[], str]) -> None:
        """Have the fingerprint of another tokenizer, whose vocabulary this one reads in its own way."""
        self._rules_fingerprint = rules_fingerprint

    def for_rows(self) -> VocabularyTokenizer:
        """The tokenizer that encodes rows in pieces: itself, but for vocabularies that put a space before text."""
        if self.row_origin is None:
            return self
        function, arguments = self.row_origin
        made = function(*arguments).with_added(self._added)
        made.named_tokens = self.named_tokens
        return made

    def with_added(self, names: Sequence[str]) -> Self:
        """A tokenizer with these control tokens too; missing ones go above the vocabulary, in the order given."""
        added = object.__new__(type(self))  # a copy would load everything anew: it goes by way of `__reduce__`
        added.__dict__ = {k: v for k, v in self.__dict__.items() if k not in _CACHED}
        added.control_ids = dict(self.control_ids)
        for name in dict.fromkeys(names):
            if not name:
                raise TokenizerError("a control token must not be empty")
            if name not in added.control_ids:
                added.control_ids[name] = added.vocab_size
                added.vocab_size += 1
                added._added += (name,)
        return added


_CACHED = {
    "fingerprint",
    "_byte_lengths",
    "_forbidden",
    "_first_forbidden",
    "_control_names",
    "_document_pattern",
    "_keeps_ascii",
}


def _reload(
    function: Callable[..., VocabularyTokenizer], arguments: tuple[Any, ...], added: tuple[str, ...]
) -> VocabularyTokenizer:
    tokenizer = function(*arguments)
    return tokenizer.with_added(added) if added else tokenizer


def _prefixes(texts: Texts, which: NDArray[np.int64], prefix_bytes: NDArray[np.int64]) -> list[str]:
    """The beginnings of texts, cut at bytes."""
    begins = texts.starts[which]
    return Texts(texts.data, begins, prefix_bytes)[:]


def _lone_surrogate(texts: Sequence[str]) -> str:
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            return f"text {index} is a {type(text).__name__}, not a string"
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return f"text {index} has a lone surrogate at character {error.start}: it has no UTF-8 form"
    return "the texts cannot be encoded"


_NEVER_JOINS = np.zeros(256, dtype=np.bool_)
"""First bytes of characters that no normal form joins to what is before them."""
for _first, _last in ((0x00, 0x7F), (0xC3, 0xC3), (0xE4, 0xE9), (0xEB, 0xEC)):  # ASCII, Latin, Chinese, Hangul
    _NEVER_JOINS[_first : _last + 1] = True


_CHARACTER_BYTES = np.ones(256, dtype=np.int64)
"""Bytes of a character, by its first byte."""
for _first, _count in ((0xC0, 2), (0xE0, 3), (0xF0, 4)):
    _CHARACTER_BYTES[_first:] = _count


@lru_cache(maxsize=4096)
def _keeps_border(form: str, around: str) -> bool:
    """Whether a normal form joins nothing to ASCII text; `around` is its last character, if any, and the next one."""
    is_normal = unicodedata.is_normalized(form, around)  # type: ignore[arg-type]
    return is_normal and not unicodedata.combining(around[-1])


def _not_normal(texts: Texts, places: NDArray[np.int64], form: str) -> NDArray[np.int64]:
    """Which of these texts a normal form changes, as numbers in the list of places."""
    changed = {
        place: not unicodedata.is_normalized(form, texts[place])  # type: ignore[arg-type]
        for place in np.unique(places).tolist()
    }
    return np.flatnonzero([changed[place] for place in places.tolist()])
