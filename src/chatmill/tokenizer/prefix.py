"""The space that sentencepiece-style vocabularies put in front of a text, as a rule for documents of pieces.

A document is encoded in pieces, cut where a model starts to write. An engine that prefixes every text would put a space
in front of each piece, also where the document goes on in the middle of a word's context. So documents are encoded by
an engine without the rule, and the prefix is written where the whole document would have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

SPACE_MARK = "\u2581"


class Prefix(NamedTuple):
    """Where a vocabulary puts what in front of text."""

    text: str
    everywhere: bool
    """Whether text after every added token gets it, or only text at the very beginning."""
    unless: tuple[str, ...]
    """Text that begins with one of these gets none."""


def split_prefix(normalizer: Any, pre_tokenizer: Any) -> tuple[Prefix, Any, Any] | None:
    """Split the prefix rule off a vocabulary's rules: the rule and both without it; None if there is none."""
    steps = rule_steps(normalizer, "normalizers")
    for number, step in enumerate(steps):
        if step.get("type") == "Prepend":
            left = _joined([*steps[:number], *steps[number + 1 :]], "normalizers")
            return Prefix(step["prepend"], True, ()), left, pre_tokenizer
    first, *others = rule_steps(pre_tokenizer, "pretokenizers") or [{}]
    parts = _of_pre_tokenizer(first)
    return None if parts is None else (parts[0], normalizer, _joined([parts[1], *others], "pretokenizers"))


def _of_pre_tokenizer(step: Mapping[str, Any]) -> tuple[Prefix, dict[str, Any]] | None:
    if step.get("type") == "ByteLevel" and step.get("add_prefix_space"):
        return Prefix(" ", True, (" ",)), {**step, "add_prefix_space": False}
    if step.get("type") != "Metaspace":
        return None
    scheme = step.get("prepend_scheme") or ("always" if step.get("add_prefix_space") else "never")
    if scheme == "never":
        return None
    mark = step.get("replacement", SPACE_MARK)
    without = {key: value for key, value in step.items() if key != "add_prefix_space"}
    return Prefix(" ", scheme == "always", (" ", mark)), {**without, "prepend_scheme": "never"}


def rule_steps(part: Any, key: str) -> list[dict[str, Any]]:
    """Return the rules of a normalizer or pre-tokenizer: those of a sequence, or the one; none where it is null."""
    if part is None:
        return []
    return list(part.get(key, [])) if part.get("type") == "Sequence" else [part]


def _joined(steps: list[dict[str, Any]], key: str) -> Any:
    if len(steps) < 2:
        return steps[0] if steps else None
    return {"type": "Sequence", key: steps}
