"""A missing compiled part is reported once per build, with the way to get it; one that is switched off is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatmill.cli.options import report_missing_library
from tests.chats import chat_record
from tests.cli.run import here
from tests.compiler.builds import write_jsonl

BUILD = ("build", "chats.jsonl", "-t", "bytes", "-T", "chatml", "--add-control-tokens", "-w", "0", "-o")


@pytest.fixture
def _missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CHATMILL_NATIVE", raising=False)
    monkeypatch.setattr("chatmill.core.native.library.PATH", tmp_path / "none.so")


@pytest.mark.usefixtures("_missing")
def test_it_is_reported_once_per_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "chats.jsonl", [chat_record(("user", "Hi"), ("assistant", "Hello"))])
    done = here(*BUILD, "built", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr.count("compiled part") == 1
    assert "install a wheel for this platform; or install a C compiler" in " ".join(done.stderr.split())
    assert "compiled part" not in done.stdout
    monkeypatch.setenv("CHATMILL_NATIVE", "0")
    assert "compiled part" not in here(*BUILD, "again", cwd=tmp_path).stderr


@pytest.mark.usefixtures("_missing")
def test_the_version_says_so() -> None:
    assert here("--version").stdout.endswith(" (without its compiled part: builds are slower)\n")


def test_nothing_is_reported_where_it_is_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHATMILL_NATIVE", "1")
        patch.setattr("chatmill.core.native.library.load_library", lambda path: object())
        report_missing_library()
    assert capsys.readouterr().err == ""
