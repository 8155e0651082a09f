"""Engines and tokenizers of large vocabularies, loaded once in a process for all tests: loading one takes a second.

What is made of the same bytes is shared, and nothing changes it. A test that replaces an engine loads its own, tests of
tokenizers make their objects anew and have the engines compared, and so do processes that are fresh interpreters.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from chatmill.tokenizer import backends, hf_json, load, tiktoken_file
from chatmill.tokenizer.backends import (
    Engine,
    FastEngineMissing,
    GigatokenBackend,
    HuggingFaceBackend,
    TiktokenBackend,
)

Made = TypeVar("Made")
LARGE = 1_000_000
"""Bytes of a vocabulary from which on its engine is kept."""
KEPT = 4
"""Of each kind; one takes up to a quarter of a gigabyte."""


class Kept:
    """The results of a slow function that were used last, by what it was given."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Made]) -> Made:
        if key not in self._known:
            self._known[key] = make()
        self._known.move_to_end(key)
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        found: Made = self._known[key]
        return found


def share_engines(put: Callable[[Any, str, Any], None]) -> None:
    """Share engines from now on; `put` replaces an attribute, as `setattr` does."""
    put(GigatokenBackend, "from_json", _by_text(GigatokenBackend))
    put(HuggingFaceBackend, "from_json", _by_text(HuggingFaceBackend))
    put(GigatokenBackend, "from_o200k", _by_file())
    put(TiktokenBackend, "__init__", _by_ranks())
    put(tiktoken_file, "_ranks", _ranks())
    put(load, "tokenizer_from_json", _tokenizers())


def _by_text(kind: Any) -> Any:
    load, kept = kind.from_json, Kept()

    def from_json(text: bytes) -> Any:
        if kind is GigatokenBackend:
            backends._gigatoken()  # where that cannot be imported, no engine is there
        if len(text) < LARGE:
            return load(text)
        return kept.get(hashlib.sha256(text).digest(), lambda: load(text))

    return staticmethod(from_json)


def _by_file() -> Any:
    load, kept = GigatokenBackend.from_o200k, Kept()

    def from_o200k(path: str) -> GigatokenBackend:
        backends._gigatoken()
        raw = Path(path).read_bytes()
        if len(raw) < LARGE:
            return load(path)
        return kept.get(hashlib.sha256(raw).digest(), lambda: load(path))

    return staticmethod(from_o200k)


def _by_ranks() -> Any:
    load, kept = TiktokenBackend.__init__, Kept()

    def init(self: TiktokenBackend, ranks: dict[bytes, int], pattern: str) -> None:
        def made() -> Any:
            load(self, ranks, pattern)
            return self._encoding

        key = (len(ranks), hash(tuple(ranks)), hash(tuple(ranks.values())), pattern)
        self._encoding = kept.get(key, made)

    return init


def _ranks() -> Any:
    read, kept = tiktoken_file._ranks, Kept()

    def ranks(raw: bytes, path: Path) -> dict[bytes, int]:
        if len(raw) < LARGE:
            return read(raw, path)
        return kept.get(hashlib.sha256(raw).digest(), lambda: read(raw, path))

    return ranks


def _tokenizers() -> Any:
    kept, engines = Kept(), _engines()

    def tokenizer_from_json(
        raw: bytes, name: str, config: Any = None, engine: Engine = Engine.FAST, strict_text: bool = False, **more: bool
    ) -> Any:
        made = partial(hf_json.tokenizer_from_json, raw, name, config, engine, strict_text, **more)
        if len(raw) < LARGE or _engines() != engines:
            return made()
        key = (hashlib.sha256(raw).digest(), name, json.dumps(config, sort_keys=True), engine, strict_text, str(more))
        return kept.get(key, made)

    return tokenizer_from_json


def _engines() -> tuple[Any, ...]:
    """What makes engines now; nothing if the fast one cannot be imported."""
    try:
        backends._gigatoken()
    except FastEngineMissing:
        return ()
    return GigatokenBackend.from_json, HuggingFaceBackend.from_json
