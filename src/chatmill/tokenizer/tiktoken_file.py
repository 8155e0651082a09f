"""Loads .tiktoken rank files and the o200k Harmony vocabulary."""

from __future__ import annotations

import binascii
import hashlib
import importlib.util
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from chatmill.core.harmony_ids import BOS, CALL, CHANNEL, END, EOD, RETURN, START, VOCAB_SIZE
from chatmill.errors import NoReferenceError, TokenizerError, UnknownNameError
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
PATTERNS: Mapping[str, str | None] = {
    "gpt2": r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
    "cl100k": r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"""
    r"""| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s""",
    "o200k": "|".join(
        (
            rf"""[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?""",
            rf"""[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?""",
            r"""\p{N}{1,3}""",
            r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
            r"""\s*[\r\n]+""",
            r"""\s+(?!\S)""",
            r"""\s+""",
        )
    ),
    "qwen2": None,
    "qwen35": None,
    "olmo3": None,
    "deepseek_v3": None,
    "nemotron": None,
    "kimi": None,
}
"""Names of split patterns; with the expression itself where `tiktoken` can serve as the reference."""

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
    """All control tokens of o200k Harmony, the reserved ones included."""
    taken = set(HARMONY_NAMES.values()) - {200018}
    reserved = {f"<|reserved_{i}|>": i for i in range(200000, VOCAB_SIZE) if i not in taken}
    return dict(sorted({**HARMONY_NAMES, **reserved}.items(), key=lambda item: (item[1], item[0])))


def load_o200k(path: str | os.PathLike[str] | None = None, engine: Engine = Engine.FAST) -> Tokenizer:
    """The o200k Harmony tokenizer: 201088 ids, eos `<|endoftext|>` (199999), no bos, no pad."""
    return load_tiktoken(
        find_o200k(path),
        pattern="o200k",
        name="o200k",
        control_ids=harmony_control_ids(),
        eos_id=EOD,
        engine=engine,
    )


def load_tiktoken(
    path: str | os.PathLike[str],
    pattern: str | None,
    name: str | None = None,
    control_ids: Mapping[str, int] | None = None,
    eos_id: int | None = None,
    engine: Engine = Engine.FAST,
) -> Tokenizer:
    """A tokenizer from a .tiktoken rank file; the file does not hold its split pattern, so it must be named."""
    path = Path(path)
    if pattern is None or pattern not in PATTERNS:
        raise UnknownNameError(
            "split pattern",
            pattern,
            list(PATTERNS),
            "A .tiktoken file does not hold its own: name it with pattern=...",
        )
    raw = path.read_bytes()
    ranks = _ranks(raw, path)
    backend = _reference(ranks, pattern) if engine is Engine.REFERENCE else _fast(path, ranks, pattern, engine)
    if backend is None:
        raise NoReferenceError(
            f"{path}: no reference engine encodes the pattern {pattern!r} here (tiktoken must be installed, and knows "
            f"{', '.join(name for name, known in PATTERNS.items() if known)}); load it with engine='fast'"
        )
    rules = hashlib.sha256(hashlib.sha256(raw).digest() + pattern.encode()).hexdigest()
    return Tokenizer(
        name=name or path.stem,
        backend=backend,
        text_tokens={rank: token for token, rank in ranks.items()},
        control_ids=control_ids or {},
        eos_id=eos_id,
        rules_fingerprint=lambda: rules,
        origin=partial(load_tiktoken, path, pattern, name, control_ids, eos_id, engine),
    )


def _fast(path: Path, ranks: dict[bytes, int], pattern: str, engine: Engine) -> Backend:
    """gigatoken, compared with the reference on the probe where there is one, unless the caller does that."""
    try:
        backend = GigatokenBackend.from_tiktoken(str(path), pattern)
    except FastEngineMissing as missing:
        if engine is Engine.UNCHECKED:  # the caller has a fallback of its own
            raise
        return _instead(path, ranks, pattern, missing)
    except ENGINE_FAILURES as error:
        raise TokenizerError(f"{path} cannot be loaded: {error}") from None
    reference = None if engine is Engine.UNCHECKED else _reference(ranks, pattern)
    difference = disagreement(backend, reference) if reference else None
    if difference:
        raise TokenizerError(f"{path}: {difference}. Is {pattern!r} the right pattern?")
    return backend


def _instead(path: Path, ranks: dict[bytes, int], pattern: str, missing: FastEngineMissing) -> Backend:
    """The reference in the place of a fast engine that cannot be imported."""
    reference = _reference(ranks, pattern)
    if reference is None:
        cause = missing.__cause__
        raise TokenizerError(
            f"{path}: gigatoken cannot be imported ({type(cause).__name__}: {cause}), and there is no reference engine "
            f"for the pattern {pattern!r} here. Install gigatoken again (pip install --force-reinstall gigatoken), or "
            "tiktoken (pip install 'chatmill[harmony]'), which encodes "
            + ", ".join(name for name, known in PATTERNS.items() if known)
        )
    warn_of_fallback(str(missing))
    return reference


def _reference(ranks: dict[bytes, int], pattern: str) -> Backend | None:
    """tiktoken, where it is installed and the pattern has an expression for it."""
    expression = PATTERNS[pattern]
    if expression is None or not importlib.util.find_spec("tiktoken"):
        return None
    return TiktokenBackend(ranks, expression)


def _ranks(raw: bytes, path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        if line:
            try:
                token, rank = line.split()
                ranks[binascii.a2b_base64(token, strict_mode=True)] = int(rank)
            except (ValueError, binascii.Error) as error:
                raise TokenizerError(f"{path}:{number}: not a line of a .tiktoken file ({error})") from None
    return ranks
