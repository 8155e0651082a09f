"""Pack plans: what a build writes next to its episodes, for every strategy and overflow, and what a reader refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.run import run_build
from chatmill.errors import DataError, FormatError
from chatmill.pack.plan import Plan, Strategy, plan
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import OPEN_GATES, chats, plain_recipe, write_jsonl
from tests.load.sets import state_rows
from tests.pages import run_python

LENGTH = 500
SPLIT: dict[str, Any] = {"split": {"val_fraction": 0.3}, "shard_bytes": 3000}


@pytest.fixture(scope="module")
def source(fast_module: Path) -> Path:
    return write_jsonl(fast_module / "chats.jsonl", chats(60, 3))


@pytest.fixture(scope="module")
def packed(fast_module: Path, source: Path) -> Path:
    return build(source, fast_module / "packed", pack={"length": LENGTH, "strategy": "greedy"}, **SPLIT)


def build(source: Path, out: Path, **changes: Any) -> Path:
    recipe = plain_recipe(source, gates=OPEN_GATES)
    run_build({**recipe, "packing": {"overflow": "windows"}, "pack": {"length": LENGTH}, **changes}, out, workers=0)
    return out


def opened(folder: Path, split: str = "train") -> Plan:
    found = EpisodeDataset(folder, split).plan
    assert found is not None
    return found


def test_what_the_manifests_say_of_the_rows_and_that_all_else_is_as_without_a_plan(
    packed: Path, source: Path, fast: Path
) -> None:
    manifest = json.loads((packed / "manifest.json").read_bytes())
    assert len(EpisodeDataset(packed).shards) > 2
    for split in ("train", "val"):
        lengths = EpisodeDataset(packed, split).lengths
        made, found = plan(lengths, LENGTH, Strategy.GREEDY), opened(packed, split)
        assert (found.order.tolist(), found.bin_offsets.tolist()) == (made.order.tolist(), made.bin_offsets.tolist())
        about = json.loads((packed / split / "episodes.json").read_bytes())
        assert about["rows"] == {"length": LENGTH, "strategy": "greedy", "count": made.bins}
        held = manifest["splits"][split]
        assert held["rows"] == made.bins < len(lengths)
        assert held["fill"] == made.fill > 0.6
        assert held["padding"] == made.bins * LENGTH - made.tokens
        assert held["lower_bound"] == made.lower_bound
    assert manifest["ledger"]["padding"] == sum(held["padding"] for held in manifest["splits"].values()) > 0
    plain = build(source, fast / "out", pack=None, packing={"max_length": LENGTH, "overflow": "windows"}, **SPLIT)
    files, others = (json.loads((folder / "manifest.json").read_bytes())["files"] for folder in (plain, packed))
    assert {name for name in files if files[name] != others[name]} == {"train/episodes.json", "val/episodes.json"}
    assert files.keys() == others.keys()
    assert EpisodeDataset(plain).plan is None


def test_conversations_longer_than_a_row(source: Path, fast: Path) -> None:
    """`overflow` has cut, windowed or dropped them before rows are planned, so every episode fits a row."""
    short = 90
    with pytest.raises(DataError, match=r"more than max_length|longer than"):
        build(source, fast / "error", pack={"length": short}, packing={"overflow": "error"})
    for overflow in ("cut", "windows", "drop", "drop_oldest_turns"):
        folder = build(source, fast / overflow, pack={"length": short}, packing={"overflow": overflow})
        lengths, found = EpisodeDataset(folder).lengths, opened(folder)
        assert lengths.max() <= short
        assert found.bin_lengths(lengths).max() <= short
        assert sorted(found.order.tolist()) == list(range(len(lengths)))
    cut = {"max_length": short, "overflow": "cut"}
    long_rows = build(source, fast / "rows", pack={"length": 4 * short}, packing=cut)
    lengths = EpisodeDataset(long_rows).lengths
    assert lengths.tolist() == EpisodeDataset(fast / "cut").lengths.tolist()
    assert short < opened(long_rows).bin_lengths(lengths).max() <= 4 * short


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"count": 7}, r"states 7 packed rows of 500 tokens by greedy, and the planner makes \d+"),
        ({"length": 30}, r"rows of 30 tokens cannot be planned again: document \d+ has length"),
        ({"strategy": "worst"}, "cannot be planned again: unknown packing strategy 'worst'"),
    ],
)
def test_rows_that_cannot_be_made_again(packed: Path, fast: Path, changes: dict[str, Any], words: str) -> None:
    path = shutil.copytree(packed / "train", fast / "train") / "episodes.json"
    about = json.loads(path.read_bytes())
    path.write_text(json.dumps(about | {"rows": about["rows"] | changes}))
    with pytest.raises(FormatError, match=words):
        opened(fast)


def test_the_reader_of_the_page_reads_the_rows(fast: Path) -> None:
    names = run_python("formats/dataset.md", blocks=1)
    with EpisodeWriter(fast, "train") as writer:
        for ids in ([1, 2, 3], [4, 5], [6, 7, 8, 9]):
            writer.append(ids)
    state_rows(fast / "train", 6)
    rows = [[array.tolist() for array in row] for row in names["read_rows"](fast)]
    assert rows == [[[2, 1], [0, 4], [6, 7, 8, 9, 4, 5]], [[0], [0], [1, 2, 3]]]
