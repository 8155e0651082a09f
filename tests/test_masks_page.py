"""The pages on masks and templates show code that runs, and what it prints."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from tests.pages import DOCS, ROOT, fences


def shown(page: Path) -> list[tuple[str, str | None]]:
    """Each Python block of a page with the output block after it, if there is one."""
    found: list[tuple[str, str | None]] = []
    for fence in fences(page):
        if fence.language == "python":
            found.append((fence.body, None))
        elif fence.language == "text" and found and found[-1][1] is None:
            found[-1] = (found[-1][0], fence.body)
    return found


def outputs(page: Path) -> list[str]:
    """What the blocks print, run one after the other in one program."""
    names: dict[str, Any] = {}
    printed = []
    for code, _ in shown(page):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, page.name, "exec"), names)
        printed.append(out.getvalue())
    return printed


def test_the_page_on_masks_prints_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = DOCS / "masks.md"
    expected = [output for _, output in shown(page)]
    assert sum(output is not None for output in expected) >= 8
    for printed, output in zip(outputs(page), expected, strict=True):
        assert printed == (output or "")


def test_every_reason_of_the_code_is_on_the_page() -> None:
    from chatmill.render.jinja.rules import Answer
    from chatmill.render.jinja.turn_sequences import refusal

    text = (DOCS / "masks.md").read_text()
    for reason in ("prompt_not_in_history", "no_prompt", "not_shown", "no_stop", "template_refused", "origin_lost"):
        assert f"**`{reason}`**" in text
        if reason != "origin_lost":  # the template's refusal, not an answer's
            assert refusal(Answer(0, reason, "here")).code == reason
