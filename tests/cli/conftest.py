"""The command line in this process: quicker than a new one, and as true as far as words go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.run import Call, Done, here
from tests.look.sets import tokenizer_once


@pytest.fixture(scope="package", autouse=True)
def _vocabularies_are_loaded_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in ("look.decoder", "look.template_look", "compiler.first_recipe"):
            patch.setattr(f"chatmill.{module}.load_tokenizer", tokenizer_once)
        yield


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Runs `chatmill ...` in an empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: Any, columns: int = 100) -> Done:
        done = here(*map(str, arguments), columns=columns)
        assert done.returncode == 70 or "Traceback" not in done.stderr
        return Done(done.returncode, done.stdout, done.stderr)

    return run
