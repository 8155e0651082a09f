"""Pages are true: their commands and code run from top to bottom in a folder, and print what the pages show."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chats import chat_record
from tests.data.tokenizer_files import HERE as TOKENIZERS
from tests.images.model_folders import picture, write_model
from tests.pages import ROOT, run_page

EXAMPLE = ROOT / "examples" / "data" / "conversations.jsonl"


def _nothing(folder: Path) -> None: ...


def _three_chats(folder: Path) -> None:
    (folder / "Qwen3-8B").symlink_to(TOKENIZERS / "tiny_torchtitan")
    (folder / "chats.jsonl").write_text("".join(EXAMPLE.read_text().splitlines(keepends=True)[:3]))


def _chats(folder: Path) -> None:
    (folder / "chats.jsonl").write_bytes(EXAMPLE.read_bytes())


def _pictures(folder: Path) -> None:
    write_model(folder / "vlm", "qwen3_vl")
    (folder / "ring.png").write_bytes(picture(64, 64))
    (folder / "wide.png").write_bytes(picture(64, 200))


def _talks(folder: Path) -> None:
    (folder / "talks.jsonl").write_text(json.dumps({"prompt": "q", "completion": "ab"}) + "\n")


def _talk(folder: Path) -> None:
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    (folder / "talks.jsonl").write_text(json.dumps({"conversations": turns}) + "\n")


def _sum(folder: Path) -> None:
    (folder / "talks.jsonl").write_text(json.dumps(chat_record(("user", "2 + 2?"), ("assistant", "4"))) + "\n")


def _synth_rows(folder: Path) -> None:
    row = {"synth_id": "a", "query": "q", "reasoning": "r", "response": "a"}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")


def _my_set(folder: Path) -> None:
    run_page("systems/episode-loader.md", folder)


@dataclass(frozen=True, slots=True)
class Page:
    """How many blocks a page runs and at least how many lines it shows, what else it prints, what holds at its end."""

    blocks: int
    shown: int = 0
    says: tuple[str, ...] = ()
    holds: str = "True"
    given: Callable[[Path], None] = _nothing


SAID_BY_PYTHON = (
    *("Dataset: 3 records read, 3 built, 0 left out", "records[2], field messages[0].role: ", "2 unknown_role"),
    *("['input_ids', 'labels']", "\nConversation('", "\nRendered(3 conversations"),
)
PAGES = {
    "tutorial.md": Page(11, 20),
    "architecture.md": Page(6, 7),
    "sampled.md": Page(10, 8),
    "pairs.md": Page(2, 4),
    "teachers.md": Page(3, 4),
    "pictures.md": Page(2, 1, ("[image 200x64,",), given=_pictures),
    "training.md": Page(4, 0, ("finished ", "step_00000005\n"), "result.step > 2", _chats),
    "python.md": Page(5, 0, SAID_BY_PYTHON, given=_three_chats),
    "systems/episode-loader.md": Page(6, 0, ("['input_ids', 'labels', 'seq_lengths']",)),
    "formats/episodes.md": Page(2, 0, ("[ 3 11 12 13 14]\n",), given=_my_set),
    "policies.md": Page(2, 0, (), "weights.sum() == 3 and policy.scope.value == 'last_turn'", _talks),
    "records.md": Page(3, 0, (), "[len(talk.messages) for talk in conversations] == [2]", _talk),
    "packing.md": Page(2, 0, ("1 1 0.8\n", "[0, 2, 1]\n", "[0 0] [0 1] 19\n")),
    "systems/token-native-sft.md": Page(2, 0, (), "first.tolist() == ids and loss_mask.sum() == 2", _sum),
    "systems/post-training-stream.md": Page(2, 0, ("(3, 16) 6\nStreamReport(records=2, blocks=3,",)),
    "commands/transcripts.md": Page(1),
    "commands/synth-harmony.md": Page(1, 0, (), "result.rows == 1", _synth_rows),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs(name: str, tmp_path: Path) -> None:
    page = PAGES[name]
    page.given(tmp_path)
    ran = run_page(name, tmp_path)
    assert ran.blocks == page.blocks
    assert ran.shown >= page.shown
    for words in page.says:
        assert words in ran.said
    assert eval(page.holds, ran.names), page.holds


def test_the_page_on_masks_prints_what_it_shows() -> None:
    assert run_page("masks.md", ROOT).shown >= 8
