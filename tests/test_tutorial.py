"""The tutorial is true: its commands run in order in an empty folder, and print what the page shows."""

from __future__ import annotations

from pathlib import Path

from tests.pages import DOCS, Fence, fences, run_bash

PAGE = DOCS / "tutorial.md"
STEPS = [fence for fence in fences(PAGE) if fence.language in ("bash", "text")]


def shown_lines(fence: Fence) -> list[str]:
    """Lines of an output block; what stands before `...` counts where a line has it."""
    lines = [" ".join(line.partition("...")[0].split()) for line in fence.body.splitlines()]
    return [line for line in lines if line]


def test_a_fresh_reader_reaches_the_end(tmp_path: Path) -> None:
    said, checked, commands = "", 0, 0
    for fence in STEPS:
        if fence.language == "bash":
            done = run_bash(fence.body, tmp_path)
            assert done.returncode == 0, f"{fence.body}\n{done.stdout}\n{done.stderr}"
            said = "\n".join(" ".join(line.split()) for line in (done.stdout + done.stderr).splitlines())
            commands += fence.body.count("chatmill ")
            continue
        for line in shown_lines(fence):
            assert line in said, f"the page shows {line!r}; printed was:\n{said}"
            checked += 1
    assert commands >= 12
    assert checked >= 20
    assert {"chats.jsonl", "recipe.yaml", "built", "last", "runs"} <= {path.name for path in tmp_path.iterdir()}
