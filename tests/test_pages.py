"""Pages are true: their commands and code run from top to bottom in a folder, and print what the pages show."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.chats import chat_record
from tests.data.tokenizer_files import HERE as TOKENIZERS
from tests.forked import run_forked
from tests.images.model_folders import picture, write_model
from tests.pages import DOCS, ROOT, fences, run_bash, run_page

CHATS = (ROOT / "examples" / "data" / "conversations.jsonl").read_text()
EXAMPLES = {name: ROOT / name for name in ("examples", "tests")}
THREE_CHATS = {"Qwen3-8B": TOKENIZERS / "tiny_torchtitan", "chats.jsonl": "".join(CHATS.splitlines(keepends=True)[:3])}
PICTURES = {"ring.png": picture(64, 64), "wide.png": picture(64, 200)}
TALK = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
SUM = chat_record(("user", "2 + 2?"), ("assistant", "4"))
SYNTH = {"synth_id": "a", "query": "q", "reasoning": "r", "response": "a"}


@dataclass(frozen=True, slots=True)
class Page:
    """How many blocks a page runs and at least how many lines it shows, what else it prints, what holds at its end."""

    blocks: int
    shown: int = 0
    says: tuple[str, ...] = ()
    """In this order."""
    holds: str = "True"
    given: Mapping[str, Any] = field(default_factory=dict)
    """Files and links that are there before, by name; a dict is the record of a file."""
    after: str = ""
    """The page whose commands come first."""


SAID_BY_PYTHON = (
    *("Dataset: 3 records read, 3 built, 0 left out", "records[2], field messages[0].role: ", "2 unknown_role"),
    *("['input_ids', 'labels']", "\nConversation('", "\nRendered(3 conversations"),
)
ANSWERS = (
    *("status 3\n", "What is <|im_end|>?«<|im_end|>»", "status 3\n", "All records are equal.", "the same bytes\n"),
    *("already holds exactly this build", "status 1\n", "status 2\n", "{(64,)}"),
)
"""Silent, cut away, damaged and bad have a status of their own."""
BUILT: dict[str, Any] = {"given": {"chats.jsonl": CHATS}, "after": "recipes/index.md"}
PAGES = {
    "tutorial.md": Page(11, 20),
    "architecture.md": Page(6, 7),
    "masks.md": Page(12, 20, given=EXAMPLES),
    "api.md": Page(68),
    "faq.md": Page(15, 0, ANSWERS, **BUILT),
    "recipes/hf-trainer.md": Page(3, 0, ("\nloss ", "'position_ids', 'use_cache']\n"), **BUILT),
    "recipes/megatron.md": Page(3, 0, ("'loss_r': ",), **BUILT),
    "recipes/pytorch.md": Page(4, 0, ("loss ", "\nTrue 0.0\n"), **BUILT),
    "recipes/trl.md": Page(1, 0, ("\nloss ",), **BUILT),
    "sampled.md": Page(10, 8),
    "agents.md": Page(6, 21),
    "renderer.md": Page(4, 16),
    "pairs.md": Page(2, 4),
    "teachers.md": Page(3, 4),
    "pictures.md": Page(2, 1, ("[image 200x64,",), given=PICTURES),
    "training.md": Page(4, 0, ("finished ", "step_00000005\n"), "result.step > 2", {"chats.jsonl": CHATS}),
    "python.md": Page(5, 0, SAID_BY_PYTHON, given=THREE_CHATS),
    "systems/episode-loader.md": Page(6, 0, ("['input_ids', 'labels', 'seq_lengths']",)),
    "formats/episodes.md": Page(2, 0, ("[ 3 11 12 13 14]\n",), after="systems/episode-loader.md"),
    "policies.md": Page(
        2, 0, (), "weights.sum() == 3 and policy.scope.value == 'last_turn'",
        {"talks.jsonl": {"prompt": "q", "completion": "ab"}},
    ),
    "records.md": Page(3, 0, (), "[len(t.messages) for t in conversations] == [2]", {"talks.jsonl": TALK}),
    "packing.md": Page(2, 0, ("1 1 0.8\n", "[0, 2, 1]\n", "[0 0] [0 1] 19\n")),
    "systems/token-native-sft.md": Page(
        2, 0, (), "first.tolist() == ids and loss_mask.sum() == 2", {"talks.jsonl": SUM}
    ),
    "systems/post-training-stream.md": Page(2, 0, ("(3, 16) 6\nStreamReport(records=2, blocks=3,",)),
    "commands/transcripts.md": Page(1),
    "commands/synth-harmony.md": Page(1, 0, (), "result.rows == 1", {"rows.jsonl": SYNTH}),
}  # fmt: skip


def lay_out(given: Mapping[str, Any], folder: Path) -> None:
    for name, content in given.items():
        if isinstance(content, Path):
            (folder / name).symlink_to(content)
        else:
            text = json.dumps(content) + "\n" if isinstance(content, dict) else content
            (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def test_every_recipe_runs() -> None:
    found = {f"recipes/{path.name}" for path in DOCS.glob("recipes/*.md")} - {"recipes/index.md"}
    assert found == {name for name in PAGES if name.startswith("recipes/")}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs(name: str, tmp_path: Path) -> None:
    page = PAGES[name]
    if name == "pictures.md":
        write_model(tmp_path / "vlm", "qwen3_vl")
    lay_out(page.given, tmp_path)
    if page.after:
        run_page(page.after, tmp_path)
    ran = run_page(name, tmp_path)
    assert ran.blocks == page.blocks
    assert ran.shown >= page.shown
    at = 0
    for words in page.says:
        assert words in ran.said[at:]
        at = ran.said.index(words, at)
    assert eval(page.holds, ran.names), page.holds


NOT_RUN = re.compile(r"make (demo|test)\b|git clone\b|pip install\b")
"""The two commands of the README run this very test; an install needs a package index."""


def test_the_commands_of_the_readme_run(tmp_path: Path) -> None:
    """One after the other, in a folder that has the examples; the output goes there too."""
    lay_out(EXAMPLES, tmp_path)
    blocks = [fence.body for fence in fences(ROOT / "README.md") if not fence.language]
    lines = [line.partition("  #")[0].strip() for body in blocks for line in body.splitlines()]
    commands = [line for line in lines if re.match(r"(make|chatmill|python|git|pip)\b", line)]
    commands = [command for command in commands if not NOT_RUN.match(command)]
    assert {"inspect", "build", "verify", "diff", "export"} <= {shlex.split(command)[1] for command in commands}
    for command in commands:
        done = run_bash(command, tmp_path)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert done.stdout.strip(), command


def test_the_code_of_the_readme_runs(tmp_path: Path) -> None:
    (code,) = [fence.body for fence in fences(ROOT / "README.md") if fence.language == "python"]
    (tmp_path / "code.py").write_text(code)
    done = run_forked(tmp_path / "code.py", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    assert len(code.splitlines()) <= 11, "ten lines and a blank one"


RUN_ELSEWHERE = {"train_tiny.py": "tests/train", "screenshots.py": "tests/view", "grpo_tool.py": "tests/rollouts"}
"""Examples whose tests stand next to what they show, because they take a browser or a minute."""


@pytest.mark.parametrize("name", sorted({path.name for path in ROOT.glob("examples/*.py")} - set(RUN_ELSEWHERE)))
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    done = run_forked(ROOT / "examples" / name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert name != "demo.py" or "trained" in done.stdout
