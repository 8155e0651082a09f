"""Engines and tokenizers of large vocabularies, loaded once in a process for all tests: loading one takes a second.

What is made of the same bytes is shared, and nothing changes it. A test that replaces an engine loads its own, tests of
tokenizers make their objects anew and have the engines compared, and so do processes that are fresh interpreters.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from chatmill.tokenizer import backends, load, tiktoken_file
from chatmill.tokenizer.backends import FastEngineMissing, GigatokenBackend, HuggingFaceBackend, TiktokenBackend

LARGE = 1_000_000
"""Bytes of a vocabulary from which on its engine is kept."""
KEPT = 4
"""Of each kind; one takes up to a quarter of a gigabyte."""


def share_engines(put: Callable[[Any, str, Any], None]) -> None:
    """Share engines from now on; `put` replaces an attribute, as `setattr` does."""

    def of_gigatoken(raw: bytes) -> Hashable:
        backends._gigatoken()  # where that cannot be imported, no engine is there
        return large(raw)

    from_ranks = TiktokenBackend.__init__

    def encoding(ranks: dict[bytes, int], pattern: str) -> Any:
        made = SimpleNamespace()
        from_ranks(made, ranks, pattern)  # type: ignore[arg-type]
        return made._encoding

    encodings = kept(encoding, lambda ranks, pattern: (hash(tuple(ranks.items())), pattern))
    put(GigatokenBackend, "from_json", staticmethod(kept(GigatokenBackend.from_json, of_gigatoken)))
    put(
        HuggingFaceBackend,
        "from_json",
        staticmethod(kept(HuggingFaceBackend.from_json, lambda raw, file=None: large(raw))),
    )
    from_o200k = kept(GigatokenBackend.from_o200k, lambda path: of_gigatoken(Path(path).read_bytes()))
    put(GigatokenBackend, "from_o200k", staticmethod(from_o200k))
    put(TiktokenBackend, "__init__", lambda self, *given: setattr(self, "_encoding", encodings(*given)))
    put(tiktoken_file, "_ranks", kept(tiktoken_file._ranks, large))
    usual = _engines()

    def of_json(raw: bytes, name: str, config: Any = None, *options: Any, **more: bool) -> Hashable:
        sha = large(raw) if _engines() == usual else None
        return sha and (sha, name, json.dumps(config, sort_keys=True), options, str(more))

    put(load, "tokenizer_from_json", kept(vars(load)["tokenizer_from_json"], of_json))


def kept(make: Callable[..., Any], key_of: Callable[..., Hashable]) -> Callable[..., Any]:
    """A slow function whose results that were used last are kept by a key; None keeps nothing."""
    known: OrderedDict[Hashable, Any] = OrderedDict()

    def get(*given: Any, **more: Any) -> Any:
        key = key_of(*given, **more)
        if key is None:
            return make(*given, **more)
        if key not in known:
            known[key] = make(*given, **more)
        known.move_to_end(key)
        while len(known) > KEPT:
            known.popitem(last=False)
        return known[key]

    return get


def large(raw: bytes) -> Hashable:
    """The hash of a large vocabulary; None for a small one."""
    return None if len(raw) < LARGE else hashlib.sha256(raw).digest()


def _engines() -> tuple[Any, ...]:
    """What makes engines now; nothing if the fast one cannot be imported."""
    try:
        backends._gigatoken()
    except FastEngineMissing:
        return ()
    return GigatokenBackend.from_json, HuggingFaceBackend.from_json
