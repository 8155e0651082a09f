"""The text of stored ids: the tokenizer that a manifest names, and decoding that never fails."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.native.gather import gathered
from chatmill.core.tokens import offsets_of
from chatmill.errors import ChatmillError, TokenizerError
from chatmill.store.named_paths import find_named
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from chatmill.tokenizer.tokenizer import Tokenizer

Ints = NDArray[np.int64]


class Decoder:
    """A tokenizer for showing: ids that it does not know are shown as numbers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.control_ids: frozenset[int] = frozenset(tokenizer.control_ids.values())
        self._controls = np.array(sorted(self.control_ids), dtype=np.int64)

    def text(self, ids: NDArray[np.integer]) -> str:
        """Decode ids; control tokens are spelled out, broken UTF-8 is U+FFFD, unknown ids are `[id 123]`."""
        try:
            return self.tokenizer.decode(ids)
        except TokenizerError:
            known = ((token_id, self.known_bytes(token_id)) for token_id in ids.tolist())
            raw = (f"[id {token_id}]".encode() if raw is None else raw for token_id, raw in known)
            return b"".join(raw).decode("utf-8", errors="replace")

    def known_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of an id; None for an id outside the vocabulary."""
        try:
            return self.tokenizer.token_bytes(token_id)
        except TokenizerError:
            return None

    @cached_property
    def _table(self) -> tuple[NDArray[np.bool_], Ints, Ints, NDArray[np.uint8]]:
        """Whether each id is known, length and start of its bytes, and the bytes; last comes what is not known."""
        table = [*map(self.known_bytes, range(self.tokenizer.vocab_size)), None]
        lengths = np.array([len(raw or b"") for raw in table], dtype=np.int64)
        data = np.frombuffer(b"".join(raw or b"" for raw in table), dtype=np.uint8)
        return np.array([raw is not None for raw in table], dtype=np.bool_), lengths, offsets_of(lengths)[:-1], data

    def has(self, ids: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Mark the ids that the vocabulary has."""
        known: NDArray[np.bool_] = self._table[0][np.minimum(ids, self.tokenizer.vocab_size)]
        return known

    def joined_bytes(self, ids: NDArray[np.integer]) -> tuple[bytes, Ints]:
        """Join the bytes of all ids, none for ids outside the vocabulary; also the offsets of each id's bytes."""
        _, lengths, starts, data = self._table
        places = np.minimum(ids, self.tokenizer.vocab_size)
        joined = gathered([data], np.zeros(len(places), dtype=np.uint8), starts[places], lengths[places])
        return joined.tobytes(), offsets_of(lengths[places])

    def is_control(self, ids: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return which ids are control tokens."""
        return np.isin(ids, self._controls)

    def parts(self, ids: NDArray[np.integer]) -> list[tuple[bool, str]]:
        """(is a control token, text) parts of a run; text is decoded in stretches, so no character is torn apart."""
        if not len(ids):
            return []
        control = self.is_control(ids)
        borders = np.flatnonzero(control[1:] | control[:-1]) + 1
        firsts = control[np.append(0, borders)].tolist()
        return [(first, self.text(stretch)) for first, stretch in zip(firsts, np.split(ids, borders), strict=True)]


class TextPiece(NamedTuple):
    """One token as it is shown, or several that hold parts of one character."""

    text: str
    ids: tuple[int, ...]
    flag: str = ""
    """`control`, `raw` (bytes that are no UTF-8), `unknown` (not in the vocabulary) or `id` (there is no tokenizer)."""
    raw: str = ""
    """The bytes of each token in hexadecimal, where they are not simply the UTF-8 of the text."""


def pieces_of(ids: NDArray[np.integer], decoder: Decoder | None) -> list[TextPiece]:
    """Decode tokens one by one."""
    if decoder is None:
        return [TextPiece(str(i), (i,), "id") for i in ids.tolist()]
    return list(_pieces(ids.tolist(), decoder))


def _pieces(numbers: list[int], decoder: Decoder) -> Iterator[TextPiece]:
    pending: list[tuple[int, bytes]] = []  # tokens whose bytes end in the middle of a character
    for number in numbers:
        raw = decoder.known_bytes(number)
        if raw is None or number in decoder.control_ids:
            yield from starmap(_single, pending)
            pending = []
            if raw is None:
                yield TextPiece(str(number), (number,), "unknown")
            else:
                yield TextPiece(raw.decode("utf-8", errors="replace"), (number,), "control")
            continue
        pending.append((number, raw))
        joined = b"".join(part for _, part in pending)
        try:
            text, used = codecs.utf_8_decode(joined, "strict", False)
        except UnicodeDecodeError:  # no bytes that follow can complete it
            yield from starmap(_single, pending)
            pending = []
            continue
        if used == len(joined):
            each = " | ".join(part.hex(" ") for _, part in pending) if len(pending) > 1 else ""
            yield TextPiece(text, tuple(number for number, _ in pending), "", each)
            pending = []
    yield from starmap(_single, pending)


def _single(number: int, raw: bytes) -> TextPiece:
    """Decode a token that shares no character with its neighbours; bytes that are not text are spelled out."""
    try:
        return TextPiece(raw.decode("utf-8"), (number,))
    except UnicodeDecodeError:
        return TextPiece(raw.decode("utf-8", errors="backslashreplace"), (number,), "raw", raw.hex(" "))


def text_of(ids: NDArray[np.integer], decoder: Decoder | None) -> str:
    """Decode ids; without a tokenizer return the ids themselves."""
    return " ".join(map(str, ids.tolist())) if decoder is None else decoder.text(ids)


def decoder_for(about: Mapping[str, Any], override: Any = None, home: Path | None = None) -> tuple[Decoder | None, str]:
    """Make the decoder of a dataset, and say why there is none or why it may be wrong; see `manifest_tokenizer`."""
    tokenizer, problem = manifest_tokenizer(about, override, home)
    return (None, f"{problem}: --tokenizer gives the text") if tokenizer is None else (Decoder(tokenizer), problem)


def manifest_tokenizer(
    about: Mapping[str, Any], override: Any = None, home: Path | None = None
) -> tuple[Tokenizer | None, str]:
    """Load the tokenizer that a manifest names, and say why there is none, or why it may be the wrong one.

    Control tokens that the build added are added.

    Args:
        about: The manifest.
        override: Anything `load_tokenizer` takes; it wins over the one that is named, and must load.
        home: Folder of the dataset. A relative path is looked up from there, too.
    """
    named = about["tokenizer"] if isinstance(about.get("tokenizer"), dict) else {}
    if override is None and not named:
        return None, "no manifest names the tokenizer"
    name = named.get("given_as") if override is None else override
    expected = named.get("fingerprint")
    places = find_named(name, home) if override is None and isinstance(name, str) else [name]
    first: Tokenizer | None = None
    problem = ""
    for place in places:
        try:
            tokenizer = load_tokenizer(place)
            tokenizer = with_control_tokens(tokenizer, named.get("control_tokens") or ())
        except (ChatmillError, OSError) as error:
            if override is not None:
                raise
            problem = problem or f"the tokenizer {name!r} of the manifest does not load ({error})"
            continue
        if not expected or tokenizer.fingerprint == expected:
            return tokenizer, ""
        first = first or tokenizer
    if first is None:
        return None, problem
    return first, (
        f"the tokenizer {first.name!r} is not the one of the build (fingerprint {first.fingerprint[:12]}, the "
        f"manifest says {str(expected)[:12]}): the text may be wrong"
    )
