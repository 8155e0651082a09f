"""Loads the o200k Harmony vocabulary from its .tiktoken rank file."""

from __future__ import annotations

import binascii
import hashlib
import importlib.util
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from chatmill.core.harmony_ids import BOS, CALL, CHANNEL, END, EOD, RETURN, START, VOCAB_SIZE
from chatmill.errors import NoReferenceError, TokenizerError
from chatmill.tokenizer.assets import find_o200k
from chatmill.tokenizer.backends import (
    ENGINE_FAILURES,
    Backend,
    Engine,
    FastEngineMissing,
    GigatokenBackend,
    TiktokenBackend,
    warn_of_fallback,
)
from chatmill.tokenizer.probe import disagreement
from chatmill.tokenizer.tokenizer import Tokenizer

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PATTERN = "|".join(
    (
        rf"""[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?""",
        rf"""[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    )
)
"""How o200k splits text, for the reference."""

HARMONY_NAMES: Mapping[str, int] = {
    "<|startoftext|>": BOS,
    "<|endoftext|>": EOD,
    "<|return|>": RETURN,
    "<|constrain|>": 200003,
    "<|channel|>": CHANNEL,
    "<|start|>": START,
    "<|end|>": END,
    "<|message|>": 200008,
    "<|call|>": CALL,
    "<|endofprompt|>": 200018,
}


def harmony_control_ids() -> dict[str, int]:
    """List all control tokens of o200k Harmony, the reserved ones included."""
    named = set(HARMONY_NAMES.values()) - {200018}
    reserved = {f"<|reserved_{i}|>": i for i in range(200000, VOCAB_SIZE) if i not in named}
    return dict(sorted({**HARMONY_NAMES, **reserved}.items(), key=lambda item: (item[1], item[0])))


def load_o200k(path: str | os.PathLike[str] | None = None, engine: Engine = Engine.FAST) -> Tokenizer:
    """Load the o200k Harmony tokenizer: 201088 ids, eos `<|endoftext|>` (199999), no bos, no pad."""
    file = find_o200k(path)
    raw = file.read_bytes()
    ranks = _ranks(raw)
    rules = hashlib.sha256(hashlib.sha256(raw).digest() + b"o200k").hexdigest()
    return Tokenizer(
        name="o200k",
        backend=_backend(file, ranks, engine),
        text_tokens={rank: token for token, rank in ranks.items()},
        control_ids=harmony_control_ids(),
        eos_id=EOD,
        rules_fingerprint=lambda: rules,
        origin=partial(load_o200k, file, engine),
    )


def _backend(path: Path, ranks: dict[bytes, int], engine: Engine) -> Backend:
    """The engine asked for; gigatoken is compared with the reference, if there is one, unless the caller does that."""
    reference = None if engine is Engine.UNCHECKED else _reference(ranks)
    if engine is Engine.REFERENCE:
        if reference is None:
            raise NoReferenceError(
                f"{path}: tiktoken, the reference engine, is not installed; load it with engine='fast'"
            )
        return reference
    try:
        backend = GigatokenBackend.from_o200k(str(path))
    except FastEngineMissing as missing:
        if engine is Engine.UNCHECKED:  # the caller has a fallback of its own
            raise
        if reference is None:
            cause = missing.__cause__
            raise TokenizerError(
                f"{path}: gigatoken cannot be imported ({type(cause).__name__}: {cause}). Install it again (pip "
                "install --force-reinstall gigatoken), or tiktoken (pip install 'chatmill[harmony]')"
            ) from None
        warn_of_fallback(str(missing))
        return reference
    except ENGINE_FAILURES as error:
        raise TokenizerError(f"{path} cannot be loaded: {error}") from None
    if reference and (difference := disagreement(backend, reference)):
        raise TokenizerError(f"{path}: {difference}")
    return backend


def _reference(ranks: dict[bytes, int]) -> Backend | None:
    """tiktoken, where it is installed."""
    return TiktokenBackend(ranks, PATTERN) if importlib.util.find_spec("tiktoken") else None


def _ranks(raw: bytes) -> dict[bytes, int]:
    """Return the rank of each token in a file whose hash is known."""
    return {binascii.a2b_base64(token): int(rank) for token, rank in map(bytes.split, raw.splitlines())}
