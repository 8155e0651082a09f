"""Fixtures of the distillation build: a quick folder, the renderers, and the whole build of the real rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatmill.distill.chunk import renderer_of
from chatmill.distill.rows import BulkRows
from chatmill.systems.synth_kd import vocabulary_file
from tests.compiler.conftest import fast, fast_module

__all__ = ["fast", "fast_module"]


@pytest.fixture(scope="session")
def bulk() -> BulkRows:
    """The renderer that builds with 0 workers use, too: loaded once."""
    return renderer_of(str(vocabulary_file()[0].absolute()))


@pytest.fixture
def no_vocabulary_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment that names no vocabulary file, in a folder without one."""
    monkeypatch.delenv("O200K_HARMONY_VOCAB_PATH", raising=False)
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE", raising=False)
    monkeypatch.chdir(tmp_path)
