"""Loads a Hugging Face tokenizer.json: text rules to an engine, added tokens to the control map."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from chatmill.errors import TokenizerError
from chatmill.tokenizer.backends import ENGINE_FAILURES, Backend, Engine, GigatokenBackend, HuggingFaceBackend
from chatmill.tokenizer.probe import PROBE, first_difference
from chatmill.tokenizer.vocabulary import NamedIds, VocabularyTokenizer

UNICODE_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
"""Normalizers that leave ASCII text as it is."""
SPELLING_MODELS = frozenset({"Unigram", "WordPiece", "WordLevel"})
"""Models that would find a control token in text by its spelling, as one more word of the vocabulary."""


def tokenizer_from_json(
    raw: bytes,
    name: str,
    config: Mapping[str, Any] | None = None,
    named: NamedIds | None = None,
    engine: Engine = Engine.FAST,
) -> VocabularyTokenizer:
    """A tokenizer from the bytes of a tokenizer.json and, where there is one, the decoded tokenizer_config.json.

    `named` overrides what the config says about the bos, eos and pad tokens.
    """
    try:
        data = msgspec.json.decode(raw)
        model = data["model"]
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise TokenizerError(f"{name} is not a tokenizer.json: {error}") from None
    controls = _control_ids(data.get("added_tokens") or [], config or {}, name)
    unknown_id = _unknown_id(model)
    stripped = {**data, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    if model.get("type") in SPELLING_MODELS:
        stripped["model"] = _unspellable(model, set(controls.values()) - {unknown_id})
    reference, fast = _engines(msgspec.json.encode(stripped), name, engine)
    backend: Backend = fast or reference
    token_bytes = fast.vocabulary() if fast else _bytes_of_vocabulary(data)
    tokenizer = VocabularyTokenizer(
        name=name,
        backend=backend,
        token_bytes=token_bytes,
        control_ids=controls,
        named=named or _named_ids(config or {}, controls),
        rules_fingerprint=_later(raw) if engine is Engine.CHECKED else partial(str, _fingerprint(data)),
        normalizer=reference,
        unknown_id=unknown_id,
        document_backend=_document_backend(data, raw),
    )
    if engine is not Engine.CHECKED:
        tokenizer.bytes_add_up = _bytes_add_up(tokenizer)
    normalizer = data.get("normalizer")
    tokenizer.keeps_ascii = True if normalizer is None or normalizer.get("type") in UNICODE_FORMS else None
    tokenizer.origin = (tokenizer_from_json, (raw, name, config, named, engine))
    return tokenizer


def _unspellable(model: Mapping[str, Any], control_ids: set[int]) -> dict[str, Any]:
    """The model with its control tokens renamed to noncharacters, so that no text spells them."""

    def name(token: str, token_id: int) -> str:
        return f"\U0010ffff{token_id}\U0010fffe" if token_id in control_ids else token

    vocab = model["vocab"]
    if isinstance(vocab, dict):
        return {**model, "vocab": {name(token, token_id): token_id for token, token_id in vocab.items()}}
    return {**model, "vocab": [[name(entry[0], i), *entry[1:]] for i, entry in enumerate(vocab)]}


def _engines(stripped: bytes, name: str, engine: Engine) -> tuple[HuggingFaceBackend, GigatokenBackend | None]:
    """The reference engine and, where it is wanted, loads and agrees on the probe, the fast one."""
    if engine is Engine.CHECKED:
        return HuggingFaceBackend.deferred(stripped), GigatokenBackend.from_json(stripped)
    try:
        reference = HuggingFaceBackend.from_json(stripped)
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{name} cannot be loaded: {error}") from None
    if engine is Engine.REFERENCE:
        return reference, None
    try:
        fast = GigatokenBackend.from_json(stripped)
        agrees = first_difference(fast, reference) is None
    except ENGINE_FAILURES:
        return reference, None
    return reference, fast if agrees else None


def _control_ids(added: list[dict[str, Any]], config: Mapping[str, Any], name: str) -> dict[str, int]:
    """All added tokens of both files, flagged special or not."""
    controls = {str(token["content"]): int(token["id"]) for token in added}
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        content = str(token["content"])
        if controls.setdefault(content, int(token_id)) != int(token_id):
            raise TokenizerError(
                f"{name}: {content!r} is id {controls[content]} in tokenizer.json and id {token_id} in "
                "tokenizer_config.json"
            )
    return controls


def _named_ids(config: Mapping[str, Any], controls: Mapping[str, int]) -> NamedIds:
    def find(key: str) -> int | None:
        token = config.get(key)
        content = token.get("content") if isinstance(token, dict) else token
        return controls.get(content) if isinstance(content, str) else None

    return NamedIds(bos=find("bos_token"), eos=find("eos_token"), pad=find("pad_token"))


def _unknown_id(model: Mapping[str, Any]) -> int | None:
    if isinstance(model.get("unk_id"), int):
        return int(model["unk_id"])
    vocab, token = model.get("vocab"), model.get("unk_token")
    return int(vocab[token]) if isinstance(vocab, dict) and token in vocab else None


def _document_backend(data: Mapping[str, Any], raw: bytes) -> Backend | None:
    """The whole tokenizer, where its added tokens match in ways of their own."""
    flags = ("lstrip", "rstrip", "single_word")
    if not any(token.get(flag) for token in data.get("added_tokens") or [] for flag in flags):
        return None
    return HuggingFaceBackend.from_json(msgspec.json.encode({**data, "post_processor": None}))


def _later(raw: bytes) -> Callable[[], str]:
    """The fingerprint, made when it is asked for: workers never do."""
    return lambda: _fingerprint(msgspec.json.decode(raw))


def _fingerprint(data: Mapping[str, Any]) -> str:
    """sha256 of vocabulary, merges and rules, whichever way the file writes them."""
    model = dict(data["model"])
    vocab = model.pop("vocab", {})
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.pop("merges", None) or []]
    items = sorted(vocab.items()) if isinstance(vocab, dict) else vocab
    flags = {key: value for key, value in model.items() if value not in (None, False, "")}
    rules = [items, merges, flags, data.get("normalizer"), data.get("pre_tokenizer")]
    return hashlib.sha256(msgspec.json.encode(rules, order="sorted")).hexdigest()


def _bytes_add_up(tokenizer: VocabularyTokenizer) -> bool:
    """True when the bytes of the tokens, joined, are the normalised text on the whole probe."""
    ids, offsets = tokenizer.backend.encode_batch(PROBE)
    for i, text in enumerate(PROBE):
        row = ids[offsets[i] : offsets[i + 1]].tolist()
        if b"".join(map(tokenizer.text_bytes, row)) != tokenizer.normalize(text).encode():
            return False
    return True


def _bytes_of_vocabulary(data: Mapping[str, Any]) -> dict[int, bytes]:
    """Token bytes for a vocabulary that only the reference engine reads."""
    vocab = data["model"]["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else ((entry[0], i) for i, entry in enumerate(vocab))
    byte_level = "ByteLevel" in str(data.get("decoder")) or "ByteLevel" in str(data.get("pre_tokenizer"))
    spell = _byte_level_bytes if byte_level else _plain_bytes
    return {int(token_id): spell(str(token)) for token, token_id in pairs}


def _plain_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.removeprefix("##").replace("\u2581", " ").encode()


def _byte_level_bytes(token: str) -> bytes:
    table = _BYTE_OF_CHARACTER
    return bytes(table[c] for c in token) if all(c in table for c in token) else token.encode()


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level vocabularies: visible Latin-1 as itself, the rest from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(visible)]
    return {chr(b): b for b in visible} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


_BYTE_OF_CHARACTER = _byte_alphabet()
