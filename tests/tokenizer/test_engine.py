"""The reference engine: the same tokenizer without gigatoken."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.core.conversation import Conversation
from chatmill.errors import TokenizerError, UnknownNameError
from chatmill.tokenizer import tiktoken_file
from chatmill.tokenizer.backends import Engine
from chatmill.tokenizer.load import load_tokenizer
from tests.data.tokenizer_files import unpacked


@pytest.mark.parametrize(("name", "engine"), [("o200k", "tiktoken"), ("gpt2", "tokenizers")])
def test_both_engines_are_one_tokenizer(
    name: str, engine: str, o200k: Any, gpt2: Any, real_conversations: Callable[[int], list[Conversation]]
) -> None:
    fast = {"o200k": o200k, "gpt2": gpt2}[name]
    reference: Any = load_tokenizer(name if name == "o200k" else unpacked(name), engine="reference")
    assert (fast.backend.name, reference.backend.name) == ("gigatoken", engine)
    assert reference.fingerprint == fast.fingerprint
    assert (reference.vocab_size, reference.control_ids) == (fast.vocab_size, fast.control_ids)
    texts = [message.content for one in real_conversations(3) for message in one.messages]
    assert len(texts) > 150
    ids, offsets = fast.encode_batch(texts)
    slow_ids, slow_offsets = reference.encode_batch(texts)
    assert np.array_equal(ids, slow_ids)
    assert np.array_equal(offsets, slow_offsets)
    assert reference.decode(slow_ids) == fast.decode(ids)
    assert pickle.loads(pickle.dumps(reference)).backend.name == engine


def test_what_has_no_reference_engine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match="fast, unchecked, reference"):
        load_tokenizer("bytes", engine="slow")
    monkeypatch.setattr(tiktoken_file, "_reference", lambda ranks: None)
    with pytest.raises(TokenizerError, match="tiktoken, the reference engine, is not installed"):
        load_tokenizer("o200k", engine=Engine.REFERENCE)


ONE = Path(__file__).parents[2] / ".tokenizers-1"
"""Where `make setup` puts `tokenizers` 1.0, whose classes are others."""
WITH_ONE = """
import sys
import tokenizers
from chatmill.errors import TokenizerError
from chatmill.tokenizer.load import load_tokenizer
from chatmill.tokenizer.probe import PROBE, disagreement

assert tokenizers.__version__.startswith("1.")
known, other = sys.argv[1:]
fast, reference = load_tokenizer(known), load_tokenizer(known, engine="reference")
assert (fast.backend.name, reference.backend.name) == ("gigatoken", "tokenizers")
assert disagreement(fast.backend, reference.backend) is None
assert fast.bytes_add_up and reference.bytes_add_up and fast.fingerprint == reference.fingerprint
assert all(reference.decode(reference.encode(text)) == reference.normalize(text) for text in PROBE)
try:
    load_tokenizer(other)
except TokenizerError as error:
    print(error)
"""


@pytest.mark.skipif(not ONE.is_dir(), reason="tokenizers 1.0 is not in .tokenizers-1 (make setup)")
def test_tokenizers_one_reads_vocabularies_whose_bytes_add_up_and_refuses_others(tmp_path: Path) -> None:
    data = json.loads((unpacked("gpt2") / "tokenizer.json").read_text())
    lower = tmp_path / "tokenizer.json"
    lower.write_text(json.dumps({**data, "normalizer": {"type": "Lowercase"}}))
    command = [sys.executable, "-c", WITH_ONE, str(unpacked("gpt2")), str(lower)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ONE)}
    )
    assert done.returncode == 0, done.stderr
    assert "a normalizer of its own (Lowercase): pip install 'tokenizers<1'" in done.stdout
