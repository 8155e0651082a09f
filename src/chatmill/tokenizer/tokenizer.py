"""The Chatmill tokenizer: one text engine, a table of token bytes, and a map of control tokens."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.gather import token_points
from chatmill.core.texts import Texts
from chatmill.core.tokens import offsets_of
from chatmill.errors import TokenizerError
from chatmill.tokenizer.backends import Backend, Encoded, HuggingFaceBackend
from chatmill.tokenizer.prefix import Prefix

Ints = NDArray[np.int64]
SURELY_NFC = np.array(
    [
        (0x0000, 0x02FF),  # Latin
        (0x03A3, 0x0482),  # Greek, Cyrillic
        (0x048A, 0x052F),
        (0x1E00, 0x1EFF),  # Latin with marks
        (0x2002, 0x2064),  # quotes, dashes, spaces
        (0x212C, 0x218B),
        (0x2190, 0x2328),  # arrows, mathematics
        (0x232B, 0x2426),
        (0x2460, 0x2ADB),
        (0x3001, 0x3029),  # Chinese, Japanese and Korean
        (0x3041, 0x3096),
        (0x309B, 0x30FF),
        (0x3131, 0x318E),
        (0x3220, 0xA48C),
        (0xAC00, 0xD7A3),
        (0xFE00, 0xFE0F),  # forms of emoji
        (0xFF01, 0xFFBE),
        (0x1F300, 0x1F6D7),
        (0x1F900, 0x1FA53),
    ],
    dtype=np.int64,
)
"""Ranges of characters that are no marks and that NFC neither changes nor joins: a text of them alone is in NFC."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Tokenizer:
    """Text to ids by any engine. Text is text: only `encode_documents` ever gives a control id.

    `load_tokenizer` is the way in.
    """

    name: str
    backend: Backend
    text_tokens: Mapping[int, bytes]
    """The bytes of every id that the engine gives."""
    control_ids: Mapping[str, int]
    """Control token -> id, in the order of ids: all added tokens, flagged special or not."""
    rules_fingerprint: Callable[[], str]
    """Computes the sha256 over the text vocabulary and its rules."""
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    reference: HuggingFaceBackend | None = None
    """Has the normalizer, and finds where tokens are if their bytes do not add up."""
    bytes_add_up: bool = True
    """Whether the bytes of a text's tokens, joined, are the normalised text."""
    normal_form: str | None = ""
    """The Unicode form that the normalizer makes; "" for no normalizer, None for any other."""
    unknown_id: int | None = None
    """May come out of text although it is listed as special."""
    ordinary: frozenset[str] = frozenset()
    """Control tokens that text may spell, since the vocabulary lists them without calling them special."""
    document_backend: Backend | None = None
    """Reads finished documents where control tokens match in ways of their own (stripping white space, say)."""
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    """`bos_token` and the like, where the tokenizer's files name them."""
    stripping: Mapping[str, tuple[bool, bool]] = field(default_factory=dict)
    """Added tokens that take white space before or after them away."""
    single_words: frozenset[str] = frozenset()
    """Added tokens that are found only where no letter or digit is next to them."""
    engine_prefixes: bool = False
    """Whether the engine puts a prefix in front of every text: see `for_documents`."""
    prefix: Prefix | None = None
    """What documents write in front of text, since the engine does not."""
    origin: partial[Tokenizer] | None = None
    """Loads this tokenizer again, before control tokens were added."""
    added: tuple[str, ...] = ()
    """Control tokens that were added above the vocabulary."""

    @cached_property
    def vocab_size(self) -> int:
        """One above the largest id, control tokens included."""
        return max(self._text_vocab_size, max(self.control_ids.values(), default=-1) + 1)

    @cached_property
    def _text_vocab_size(self) -> int:
        return max(self.text_tokens, default=-1) + 1

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the text vocabulary and its rules, the control map with how its tokens match, and named ids."""
        parts = [self.rules_fingerprint(), self.control_ids, [self.bos_id, self.eos_id, self.pad_id]]
        matching = [sorted(self.ordinary), sorted(self.stripping.items()), sorted(self.single_words)]
        canonical = json.dumps([*parts, matching] if any(matching) else parts)
        return hashlib.sha256(canonical.encode()).hexdigest()

    @cached_property
    def _byte_lengths(self) -> NDArray[np.int32]:
        lengths = np.zeros(self.vocab_size, dtype=np.int32)
        ids = np.fromiter(self.text_tokens.keys(), dtype=np.int64, count=len(self.text_tokens))
        lengths[ids] = np.fromiter(map(len, self.text_tokens.values()), dtype=np.int32, count=len(ids))
        return lengths

    @cached_property
    def _forbidden(self) -> NDArray[np.bool_] | None:
        """True for control ids among the ids that the text engine knows; None when there are none."""
        allowed = {self.unknown_id, *(self.control_ids[name] for name in self.ordinary)}
        inside = [i for i in self.control_ids.values() if i < self._text_vocab_size and i not in allowed]
        if not inside:
            return None
        table = np.zeros(self._text_vocab_size, dtype=np.bool_)
        table[inside] = True
        return table

    @cached_property
    def _lowest_forbidden(self) -> int:
        """The lowest of these control ids, or one beyond all ids."""
        return self._text_vocab_size if self._forbidden is None else int(np.argmax(self._forbidden))

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
        """Look up the id of a control token; the error lists those there are."""
        token = self.control_ids.get(name)
        if token is None:
            listed = ", ".join(list(self.control_ids)[:12]) + (", ..." if len(self.control_ids) > 12 else "")
            raise TokenizerError(
                f"tokenizer {self.name!r} has no control token {name!r}. It has: {listed or 'none'}. Add it with "
                "with_control_tokens(tokenizer, [...]), or load with load_tokenizer(..., control_tokens=[...])."
            )
        return token

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Encode many texts in one call; control tokens are not recognised."""
        try:
            ids, offsets = self.backend.encode_batch(texts)
        except (UnicodeError, TypeError):  # the engines refuse text without a UTF-8 form in their own ways
            raise TokenizerError(_lone_surrogate(texts)) from None
        if self._forbidden is None or ids.max(initial=0) < self._lowest_forbidden:
            return ids, offsets
        # Control tokens mostly have the highest ids, and few other tokens have ids as high.
        doubtful = np.flatnonzero(ids >= self._lowest_forbidden)
        is_control = self._forbidden[ids[doubtful]]
        if is_control.any():
            at = int(doubtful[np.argmax(is_control)])
            which = int(np.searchsorted(offsets, at, side="right")) - 1
            name = self._control_names[int(ids[at])]
            raise TokenizerError(
                f"tokenizer {self.name!r} gives the control token {name!r} for plain text: text {which}, "
                f"{texts[which][:60]!r}. Such a vocabulary cannot tell text from control."
            )
        return ids, offsets

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
        if self.document_backend is None:
            return self.encode_batch(texts)
        try:
            return self.document_backend.encode_batch(texts)
        except (UnicodeError, TypeError):
            raise TokenizerError(_lone_surrogate(texts)) from None

    @cached_property
    def _document_pattern(self) -> re.Pattern[str] | None:
        """Matches the control tokens of documents, the longest first; with an engine for documents, those that it does
        not know.
        """
        names = self.control_ids if self.document_backend is None else self.added
        ordered = sorted(names, key=lambda name: (-len(name), name))
        return re.compile("(" + "|".join(map(re.escape, ordered)) + ")") if ordered else None

    def encode(self, text: str) -> list[int]:
        """Encode one text; control tokens are not recognised."""
        return self.encode_batch([text])[0].tolist()  # type: ignore[no-any-return]

    def byte_points(
        self,
        encoded: Encoded,
        which: Ints,
        prefix_bytes: Ints,
        texts: Texts,
        not_ascii: NDArray[np.bool_] | None = None,
    ) -> Ints:
        """Find, for each pair, the first token of `texts[which[i]]`, counted among all, that starts at or after a byte.

        `not_ascii` is `texts.not_ascii()`, if it is known.
        """
        ids, offsets = encoded
        if not self.bytes_add_up:
            assert self.reference is not None
            cuts = list(map(len, _prefixes(texts, which, prefix_bytes)))
            return offsets[which] + self.reference.tokens_before([texts[i] for i in which], cuts)
        sizes = self._normal_sizes(texts, which, prefix_bytes, not_ascii)
        return token_points(ids, self._byte_lengths, offsets, which, sizes)

    def inside_tokens(
        self, encoded: Encoded, which: Ints, prefix_bytes: Ints, points: Ints, texts: Texts
    ) -> NDArray[np.bool_]:
        """Return whether the byte of each pair lies inside a token that began before it.

        `points` are those of `byte_points`. Bytes are those at which a character begins, or the end of a text.
        """
        ids, offsets = encoded
        if not self.bytes_add_up:
            assert self.reference is not None
            prefixes, wholes = _prefixes(texts, which, prefix_bytes), [texts[i] for i in which]
            following = self.reference.tokens_before(wholes, [len(prefix) + 1 for prefix in prefixes])
            is_end = np.array([len(a) == len(b) for a, b in zip(prefixes, wholes, strict=True)], dtype=np.bool_)
            is_start: NDArray[np.bool_] = is_end | (points == offsets[which]) | (offsets[which] + following > points)
            return ~is_start
        before = offsets_of(self._byte_lengths[ids])
        starts = before[points] - before[offsets[which]]
        is_inside: NDArray[np.bool_] = (points > offsets[which]) & (
            starts > self._normal_sizes(texts, which, prefix_bytes, None)
        )
        return is_inside

    def _normal_sizes(self, texts: Texts, which: Ints, prefix_bytes: Ints, not_ascii: NDArray[np.bool_] | None) -> Ints:
        """Return the bytes of beginnings of texts after the normalizer."""
        moved = self._moved_by_normalizer(texts, which, prefix_bytes, not_ascii)
        prefixes, sizes = _prefixes(texts, which[moved], prefix_bytes[moved]), prefix_bytes.copy()
        size_of = {prefix: len(self.normalize(prefix).encode()) for prefix in set(prefixes)}
        sizes[moved] = [size_of[prefix] for prefix in prefixes]
        return sizes

    def _moved_by_normalizer(
        self, texts: Texts, which: Ints, prefix_bytes: Ints, not_ascii: NDArray[np.bool_] | None
    ) -> Ints:
        """Find the pairs of a text and a beginning of it which the normalizer may change."""
        if self.normal_form == "":
            return np.empty(0, dtype=np.int64)
        if self.normal_form is None:
            return np.arange(len(which))
        changed = (texts.not_ascii() if not_ascii is None else not_ascii).copy()
        moved = np.flatnonzero(changed[which])
        pairs = texts.take(which[moved])  # normal forms keep ASCII that is not next to other text
        next_to = np.minimum(prefix_bytes[moved] + 1, pairs.lengths)
        moved = moved[Texts(pairs.data, pairs.starts, next_to).not_ascii()]
        form = self.normal_form
        is_asked = np.zeros(len(texts), dtype=np.bool_)
        is_asked[which[moved]] = True
        asked = np.flatnonzero(is_asked)
        if form == "NFC":  # most texts are in it by their characters alone
            is_doubtful = texts.take(asked).has_other_characters(SURELY_NFC)
            changed[asked] = False
            asked = asked[is_doubtful]
        # every part of a normal text is normal
        changed[asked] = [not unicodedata.is_normalized(form, raw.decode()) for raw in texts.raw(asked)]  # type: ignore[arg-type]
        return moved[changed[which[moved]]]

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Text of the ids; control tokens are spelled out, broken UTF-8 becomes U+FFFD."""
        numbers = [int(i) for i in ids]
        if self.bytes_add_up:
            return b"".join(map(self.token_bytes, numbers)).decode("utf-8", errors="replace")
        assert self.reference is not None
        names, out = self._control_names, list[str]()
        for is_control, group in groupby(numbers, names.__contains__):
            run = list(group)
            out += map(names.__getitem__, run) if is_control else [self.reference.decode(run)]
        return "".join(out)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of an id; for a control token the UTF-8 of its name."""
        name = self._control_names.get(token_id)
        return self.text_bytes(token_id) if name is None else name.encode()

    def text_bytes(self, token_id: int) -> bytes:
        """Return the bytes of an id that the text engine gave."""
        try:
            return self.text_tokens[token_id]
        except KeyError:
            raise TokenizerError(
                f"id {token_id} is not in the vocabulary of {self.name!r} ({self.vocab_size} ids)"
            ) from None

    def normalize(self, text: str) -> str:
        """Apply the declared normalizer to a text."""
        return text if self.reference is None else self.reference.normalize(text)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as the way it was loaded: the engines themselves cannot be."""
        if self.origin is None:
            raise TypeError(f"tokenizer {self.name!r} was put together by hand and cannot be pickled")
        return _reload, (self.origin, self.added)

    def for_documents(self) -> Tokenizer:
        """Return the tokenizer for documents in pieces: itself, unless the vocabulary puts a space before text."""
        if not self.engine_prefixes:
            return self
        assert self.origin is not None
        return _reload(partial(self.origin, for_documents=True), self.added)

    def with_added(self, names: Sequence[str]) -> Self:
        """Add missing control tokens above the vocabulary, in the order given."""
        if not all(names):
            raise TokenizerError("a control token must not be empty")
        missing = [name for name in dict.fromkeys(names) if name not in self.control_ids]
        ids = {name: self.vocab_size + number for number, name in enumerate(missing)}
        return replace(self, control_ids={**self.control_ids, **ids}, added=(*self.added, *missing))


def _reload(origin: partial[Tokenizer], added: tuple[str, ...]) -> Tokenizer:
    tokenizer = origin()
    return tokenizer.with_added(added) if added else tokenizer


def _prefixes(texts: Texts, which: Ints, prefix_bytes: Ints) -> list[str]:
    """Cut texts at bytes and return their beginnings."""
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
