"""A tokenizer.json taken apart no further than is asked for: most of it is tables that the engines read themselves."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from chatmill.errors import TokenizerError

SPELLING_MODELS = frozenset({"Unigram", "WordPiece", "WordLevel"})
"""Models that would find a control token in text by its spelling, as one more word of the vocabulary."""
MAX_IDS = 1 << 26
"""No vocabulary comes near it; tables have a place for every id."""
FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")
"""Of an added token."""
_PARTS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NO_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_Id = Annotated[int, msgspec.Meta(ge=0, lt=MAX_IDS)]
_VOCAB = msgspec.json.Decoder(dict[str, _Id] | list[tuple[str, int | float]] | None)
_MERGES = msgspec.json.Decoder(list[tuple[str, str]])
_BYTE_PAIR_OPTIONS = frozenset(
    {
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "fuse_unk",
        "byte_fallback",
        "ignore_merges",
    }
)
_RULE_TEXTS = ("type", "prepend", "replacement", "prepend_scheme")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ESCAPE = re.compile(rb"\\.")
_NEEDED_ESCAPES = {b'\\"', b"\\\\"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BytePairModel:
    """A byte-pair model in the arguments of `tokenizers.models.BPE`."""

    vocab: dict[str, int]
    merges: list[tuple[str, str]]
    options: dict[str, Any]
    shell: bytes
    """The tokenizer.json without vocabulary, merges and added tokens."""
    added: list[dict[str, Any]]
    """The added tokens. Their ids follow from the vocabulary, so they are added after that."""


class TokenizerJson:
    """The parts of a tokenizer.json; vocabulary and merges are decoded when they are first needed."""

    def __init__(self, raw: bytes, name: str) -> None:
        """`raw` is the file; errors call it `name`."""
        self._name = name
        try:
            self._parts = _PARTS.decode(raw)
            self._model = _PARTS.decode(self._parts["model"])
        except (*_NO_JSON, KeyError) as error:
            raise TokenizerError(f"{name} is not a tokenizer.json: {error}") from None

        if not isinstance(self.model("type"), str | None):
            raise self._wrong("the type of its model", self.model("type"))

    def _wrong(self, what: str, value: Any) -> TokenizerError:
        return TokenizerError(f"{self._name} is not a tokenizer.json: {what} is {str(value)[:60]}")

    def check(self) -> None:
        """Refuse a vocabulary that is none before an engine reads it: gigatoken ends the process at a very large id."""
        if isinstance(self.vocab, list):
            tokens = self.spellings()[0]
            twice = next((token for token, count in Counter(tokens).items() if count > 1), None)
            if twice is not None:  # the ids of added tokens, which `tokenizers` counts, would be others
                raise self._wrong("a token that its vocabulary has twice", twice)

    def part(self, name: str) -> Any:
        """Decode a part of the file other than the model; None if it is missing."""
        return self._decoded(self._parts, name)

    def model(self, name: str) -> Any:
        """Decode an entry of the model; None if it is missing."""
        return self._decoded(self._model, name)

    def _decoded(self, parts: Mapping[str, msgspec.Raw], name: str, decoder: Any = msgspec.json) -> Any:
        try:
            return decoder.decode(parts[name]) if name in parts else None
        except _NO_JSON as error:  # a number out of range, say: `_PARTS` looks at none
            raise TokenizerError(f"{self._name} is not a tokenizer.json: its {name}: {error}") from None

    @cached_property
    def added_tokens(self) -> list[dict[str, Any]]:
        """The added tokens as they are written."""
        tokens = self.part("added_tokens") or []
        for token in tokens if isinstance(tokens, list) else [tokens]:
            if not (is_added_token(token) and type(token.get("id")) is int and 0 <= token["id"] < MAX_IDS):
                raise self._wrong("an added token", token)
        return tokens

    def rules(self, name: str) -> dict[str, Any] | None:
        """Decode the normalizer or the pre-tokenizer; each is an object, or a sequence of them."""
        rules = self.part(name)
        if rules is None:
            return None
        is_sequence = isinstance(rules, dict) and rules.get("type") == "Sequence"
        steps = rules.get(f"{name.replace('_', '')}s") if is_sequence else [rules]
        if not isinstance(steps, list) or not all(map(_is_rule, steps)):
            raise self._wrong(f"its {name}", rules)
        return rules  # type: ignore[no-any-return]

    @cached_property
    def vocab(self) -> dict[str, int] | list[tuple[str, int | float]]:
        """Token -> id, or (Unigram) pairs of token and score in the order of their ids."""
        return self._decoded(self._model, "vocab", _VOCAB) or {}

    @cached_property
    def unknown_id(self) -> int | None:
        """The id of the token for unknown text."""
        number, token = self.model("unk_id"), self.model("unk_token")
        if type(number) is int:
            return number
        return self.vocab.get(token) if isinstance(token, str) and isinstance(self.vocab, dict) else None

    def spellings(self) -> tuple[list[str], list[int]]:
        """List all tokens, and the id of each."""
        if isinstance(self.vocab, dict):
            return list(self.vocab), list(self.vocab.values())
        return [token for token, _ in self.vocab], list(range(len(self.vocab)))

    def changed(self, **parts: Any) -> bytes:
        """Replace parts of the file."""
        return msgspec.json.encode({**self._parts, **parts})

    def stripped(self, control_ids: set[int], ordinary: Container[str] = ()) -> bytes:
        """Write the file for a text engine: without post-processor, and no text spells a control token.

        Of the added tokens only the `ordinary` ones are left, which text may spell. The others keep their places, since
        `tokenizers` counts ids by them, under names that no text has.
        """
        without: dict[str, Any] = {"post_processor": None, "truncation": None, "padding": None}
        without["added_tokens"] = self._kept_tokens(ordinary)
        if self.model("type") in SPELLING_MODELS:
            spelled = {token_id for token_id in control_ids if token_id != self.unknown_id}
            without["model"] = {**self._model, "vocab": self._unspellable(spelled)}
        return msgspec.json.encode({**self._parts, **without})

    def byte_pair_model(self, stripped: bytes) -> BytePairModel | None:
        """Take apart the model of a stripped file, if it is a byte-pair model written as files of today are.

        `tokenizers` reads it from Python objects in two thirds of the time that it takes to parse the file.
        """
        options = {name: self.model(name) for name in self._model if name not in ("type", "vocab", "merges")}
        is_known = self.model("type") == "BPE" and options.keys() <= _BYTE_PAIR_OPTIONS
        if not is_known or options.get("continuing_subword_prefix") or options.get("end_of_word_suffix"):
            return None
        try:
            merges = _MERGES.decode(self._model["merges"])
        except (*_NO_JSON, KeyError):  # merges as texts, of older files
            return None

        if not isinstance(self.vocab, dict):
            return None
        empty = {"type": "BPE", **options, "vocab": {}, "merges": []}
        parts = _PARTS.decode(stripped)
        added = msgspec.json.decode(parts["added_tokens"])
        shell = msgspec.json.encode({**parts, "model": empty, "added_tokens": []})
        return BytePairModel(vocab=self.vocab, merges=merges, options=options, shell=shell, added=added)

    def _kept_tokens(self, ordinary: Container[str]) -> list[dict[str, Any]]:
        if not any(token["content"] in ordinary for token in self.added_tokens):
            return []
        names = self.vocab if isinstance(self.vocab, dict) else {token for token, _ in self.vocab}
        return [
            token if token["content"] in ordinary else {**token, "content": _unspellable_name(token["id"])}
            for token in self.added_tokens
            if token["content"] in ordinary or token["content"] not in names
        ]

    def _unspellable(self, control_ids: set[int]) -> dict[str, int] | list[tuple[str, int | float]]:
        """Rename these tokens of the vocabulary to noncharacters."""

        def name(token: str, token_id: int) -> str:
            return _unspellable_name(token_id) if token_id in control_ids else token

        if isinstance(self.vocab, dict):
            return {name(token, token_id): token_id for token, token_id in self.vocab.items()}
        return [(name(token, token_id), score) for token_id, (token, score) in enumerate(self.vocab)]

    def whole(self) -> bytes | None:
        """The file for an engine of finished documents, where added tokens match in ways of their own; else None."""
        flags = ("lstrip", "rstrip", "single_word")
        if not any(token.get(flag) for token in self.added_tokens for flag in flags):
            return None
        return self.changed(post_processor=None, truncation=None, padding=None)

    def fingerprint(self) -> str:
        """sha256 of vocabulary, merges and rules, whichever way and in whichever order the file writes them."""
        model = {name: self.model(name) for name in self._model if name not in ("vocab", "merges")}
        flags = {name: value for name, value in model.items() if value not in (None, False, "")}
        rules = [flags, self.part("normalizer"), self.part("pre_tokenizer")]
        digest = hashlib.sha256(msgspec.json.encode(rules, order="sorted"))
        for part in (*self._canonical_vocab(), self._canonical_merges()):
            digest.update(part)
        return digest.hexdigest()

    def _canonical_vocab(self) -> tuple[bytes, bytes]:
        """Write the tokens as JSON, in the order of their ids, and the ids; or (Unigram) the pairs and nothing."""
        vocab = self.vocab
        if not isinstance(vocab, dict):
            return msgspec.json.encode(vocab), b""
        tokens = list(vocab)
        ids = np.fromiter(vocab.values(), dtype="<i8", count=len(tokens))
        if not (np.diff(ids) > 0).all():  # sorting takes most of the time, and files mostly are sorted
            tokens.sort(key=lambda token: (vocab[token], token))
            ids.sort()
        return msgspec.json.encode(tokens), ids.tobytes()

    def _canonical_merges(self) -> bytes:
        """Write the merges as JSON pairs without white space and needless escapes."""
        raw = bytes(self._model.get("merges", b"null"))
        compact = msgspec.json.format(raw, indent=-1)
        if compact.startswith(b"[[") and set(_ESCAPE.findall(compact)) <= _NEEDED_ESCAPES:
            return compact  # encoding what it says would give the same, and takes half a second for a large vocabulary
        merges = msgspec.json.decode(raw) or []
        return msgspec.json.encode([merge.split(" ") if isinstance(merge, str) else merge for merge in merges])


def is_added_token(token: Any) -> bool:
    """Return whether this is an added token as tokenizer.json and tokenizer_config.json write one, its id aside."""
    if not isinstance(token, dict) or not all(isinstance(token.get(flag), bool | None) for flag in FLAGS):
        return False
    content = token.get("content")
    return isinstance(content, str) and content != ""


def _is_rule(step: Any) -> bool:
    """Return whether this is a normalizer or a pre-tokenizer: an object, in which what is read here is text."""
    if not isinstance(step, dict) or (step.get("type") == "Prepend" and "prepend" not in step):
        return False
    return all(isinstance(step.get(name), str | None) for name in _RULE_TEXTS)


def spelled_tokens(file: TokenizerJson, added: Mapping[str, int]) -> dict[int, bytes]:
    """Decode every id of a vocabulary to bytes, as its engine does; `added` tokens are spelled as they are."""
    tokens, ids = file.spellings()
    if "ByteLevel" in str(file.part("decoder")) or "ByteLevel" in str(file.part("pre_tokenizer")):
        spelled = dict(zip(ids, _byte_level_spellings(tokens), strict=True))
    else:
        spelled = dict(zip(ids, map(_plain_bytes, tokens), strict=True))
    spelled.update((token_id, name.encode()) for name, token_id in added.items())
    return spelled


def _unspellable_name(token_id: int) -> str:
    """Make a name of noncharacters."""
    return f"\U0010ffff{token_id}\U0010fffe"


def _plain_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte is not None:
        return bytes.fromhex(byte[1])
    return token.removeprefix("##").replace("\u2581", " ").encode()


def _byte_level_spellings(tokens: list[str]) -> list[bytes]:
    """Return the bytes of tokens; one with a character that is not a stand-in for a byte is itself."""
    lengths = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    codes = np.frombuffer("".join(tokens).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    values = _BYTES[np.minimum(codes, len(_BYTES) - 1)]
    data = values.astype(np.uint8).tobytes()
    spelled = [data[start:stop] for start, stop in itertools.pairwise(bounds.tolist())]
    others = np.searchsorted(bounds, np.flatnonzero(values < 0), side="right") - 1
    for index in set(others.tolist()):
        spelled[index] = tokens[index].encode()
    return spelled


def _stand_ins() -> NDArray[np.int16]:
    """Tabulate the byte of each printable stand-in: visible Latin-1 is itself, the others are from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    table = np.full(0x100 + len(hidden) + 1, -1, dtype=np.int16)  # the last entry is for all characters above
    table[visible] = visible
    table[0x100 : 0x100 + len(hidden)] = hidden
    return table


_BYTES = _stand_ins()
