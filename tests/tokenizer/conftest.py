"""Tokenizers are what these tests are about, so they are not shared."""

from __future__ import annotations

import pytest

from chatmill.tokenizer import hf_json, load


@pytest.fixture(autouse=True)
def _made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "tokenizer_from_json", hf_json.tokenizer_from_json)
