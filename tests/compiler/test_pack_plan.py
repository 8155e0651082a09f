"""Pack plans: what a build writes beside its episodes, for every strategy and overflow, and what a reader refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.compiler.pack_plan import write_pack_plan
from chatmill.compiler.run import run_build
from chatmill.errors import DataError, FormatError
from chatmill.pack.plan import Strategy, plan
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.pack_plan import PackPlan, read_pack_plan
from tests.compiler.builds import OPEN_GATES, chats, plain_recipe, write_jsonl
from tests.hashes import file_entry
from tests.pages import DOCS, run_python

LENGTH = 500


@pytest.fixture(scope="module")
def source(fast_module: Path) -> Path:
    return write_jsonl(fast_module / "chats.jsonl", chats(60, 3))


@pytest.fixture(scope="module")
def packed(fast_module: Path, source: Path) -> Path:
    return build(source, fast_module / "packed", split={"val_fraction": 0.3}, shard_bytes=3000)


def build(source: Path, out: Path, **changes: Any) -> Path:
    recipe = plain_recipe(source, gates=OPEN_GATES)
    run_build({**recipe, "packing": {"overflow": "windows"}, "pack": {"length": LENGTH}, **changes}, out, workers=0)
    return out


def opened(folder: Path, split: str = "train", **options: Any) -> PackPlan:
    dataset = EpisodeDataset(folder, split)
    found = read_pack_plan(dataset.folder, dataset.lengths, **options)
    assert found is not None
    return found


def test_the_files_of_a_plan(packed: Path) -> None:
    """Written as the page of the format says, and hashed in the manifest."""
    manifest = json.loads((packed / "manifest.json").read_bytes())
    assert len(EpisodeDataset(packed).shards) > 2
    for split in ("train", "val"):
        lengths = EpisodeDataset(packed, split).lengths
        made = plan(lengths, LENGTH)
        order = np.fromfile(packed / split / "pack" / "order.u64", dtype="<u8")
        rows = np.fromfile(packed / split / "pack" / "rows.u64", dtype="<u8")
        assert order.tolist() == made.order.tolist()
        assert rows.tolist() == made.bin_offsets.tolist()
        about = json.loads((packed / split / "pack" / "plan.json").read_bytes())
        files = {name: packed / split / "pack" / name for name in ("order.u64", "rows.u64")}
        assert about == {
            "format": "chatmill-pack",
            "version": 1,
            "length": LENGTH,
            "strategy": "best_fit",
            "episodes": len(lengths),
            "rows": made.bins,
            "tokens": int(lengths.sum()),
            "lower_bound": made.lower_bound,
            "files": {name: file_entry(path.read_bytes()) for name, path in files.items()},
        }
        for name in (*files, "plan.json"):
            path = packed / split / "pack" / name
            assert manifest["files"][f"{split}/pack/{name}"] == file_entry(path.read_bytes())
        held = manifest["splits"][split]
        assert held["rows"] == made.bins < len(lengths)
        assert held["fill"] == made.fill > 0.8
        assert held["padding"] == made.bins * LENGTH - made.tokens
    assert manifest["ledger"]["padding"] == sum(held["padding"] for held in manifest["splits"].values()) > 0


@pytest.mark.parametrize("strategy", list(Strategy))
def test_every_strategy_gives_the_rows_of_the_planner(source: Path, fast: Path, strategy: Strategy) -> None:
    found = opened(build(source, fast / "out", pack={"length": LENGTH, "strategy": str(strategy)}))
    lengths = EpisodeDataset(fast / "out").lengths
    made = plan(lengths, LENGTH, strategy)
    assert found.strategy == strategy
    assert [found.row(row).tolist() for row in range(len(found))] == [
        made.bin(row).tolist() for row in range(made.bins)
    ]
    assert found.row_tokens.tolist() == made.bin_lengths(lengths).tolist()
    assert (found.tokens, found.padding) == (made.tokens, made.bins * LENGTH - made.tokens)


def test_the_same_episodes_with_and_without_a_plan(source: Path, packed: Path, fast: Path) -> None:
    plain = build(source, fast / "out", pack=None, packing={"max_length": LENGTH, "overflow": "windows"},
                  split={"val_fraction": 0.3}, shard_bytes=3000)  # fmt: skip
    files = [json.loads((folder / "manifest.json").read_bytes())["files"] for folder in (plain, packed)]
    assert not any("/pack/" in name for name in files[0])
    assert files[0] == {name: record for name, record in files[1].items() if "/pack/" not in name}
    dataset = EpisodeDataset(plain)
    assert read_pack_plan(dataset.folder, dataset.lengths) is None


def test_conversations_longer_than_a_row(source: Path, fast: Path) -> None:
    """`overflow` has cut, windowed or dropped them before rows are planned, so every episode fits a row."""
    short = 90
    with pytest.raises(DataError, match=r"more than max_length|longer than"):
        build(source, fast / "error", pack={"length": short}, packing={"overflow": "error"})
    for overflow in ("cut", "windows", "drop", "drop_oldest_turns"):
        folder = build(source, fast / overflow, pack={"length": short}, packing={"overflow": overflow})
        lengths = EpisodeDataset(folder).lengths
        found = opened(folder)
        assert lengths.max() <= short
        assert found.row_tokens.max() <= short
        assert sorted(found.order.tolist()) == list(range(len(lengths)))
    long_rows = build(
        source, fast / "rows", pack={"length": 4 * short}, packing={"max_length": short, "overflow": "cut"}
    )
    assert EpisodeDataset(long_rows).lengths.tolist() == EpisodeDataset(fast / "cut").lengths.tolist()
    assert short < opened(long_rows).row_tokens.max() <= 4 * short


@settings(max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.sampled_from(list(Strategy)))
def test_a_plan_reads_back(
    tmp_path_factory: pytest.TempPathFactory, given_lengths: list[int], strategy: Strategy
) -> None:
    folder, lengths = tmp_path_factory.mktemp("plan"), np.array(given_lengths)
    said = write_pack_plan(folder, lengths, 30, strategy)
    assert write_pack_plan(folder, lengths, 30, strategy) == said, "an old plan is replaced"
    found = read_pack_plan(folder, lengths)
    assert found is not None
    assert sorted(found.order.tolist()) == list(range(len(lengths)))
    assert found.row_tokens.tolist() == [int(lengths[found.row(row)].sum()) for row in range(len(found))]
    assert (len(found), found.padding, found.lower_bound) == (said["rows"], said["padding"], said["lower_bound"])
    assert found.lower_bound <= len(found)


def _order(change: Callable[[Any], None]) -> Callable[[Path], None]:
    return lambda folder: _changed(folder / "order.u64", change)


def _rows(change: Callable[[Any], None]) -> Callable[[Path], None]:
    return lambda folder: _changed(folder / "rows.u64", change)


def _about(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / "plan.json").read_bytes())
        (folder / "plan.json").write_text(json.dumps(content | changes))

    return edit


def _changed(path: Path, change: Callable[[Any], None]) -> None:
    values = np.fromfile(path, dtype="<u8")
    change(values)
    values.tofile(path)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "twice": (_order(lambda v: v.__setitem__(5, v[2])), r"order\.u64: number 5 \(byte 40\) .* already in place 2"),
    "outside": (_order(lambda v: v.__setitem__(3, len(v))), r"order\.u64: number 3 .* episodes, counted from 0"),
    "huge": (_order(lambda v: v.__setitem__(3, 2**63)), r"order\.u64: number 3 .* that large"),
    "first": (_rows(lambda v: v.__setitem__(0, 1)), r"rows\.u64: number 0 .* begins at 0"),
    "empty": (_rows(lambda v: v.__setitem__(2, v[1])), r"rows\.u64: number 2 .* borders grow"),
    "last": (_rows(lambda v: v.__setitem__(-1, v[-1] + 1)), r"rows\.u64: number \d+ .* the last row ends"),
    "too_full": (_about(length=300), r"row 0 has \d+ tokens, and a row holds 300"),
    "cut": (lambda folder: (folder / "order.u64").write_bytes(b"12345678"), r"order\.u64: 8 bytes, .* was cut"),
    "gone": (lambda folder: (folder / "rows.u64").unlink(), r"rows\.u64"),
    "unfinished": (lambda folder: (folder / "plan.json").unlink(), r"plan\.json, which is written last, is missing"),
    "no_json": (lambda folder: (folder / "plan.json").write_text("{"), r"plan\.json cannot be read"),
    "no_object": (lambda folder: (folder / "plan.json").write_text("[]"), r"an object is needed"),
    "version": (_about(version=2), r"version 2; this package reads 'chatmill-pack' version 1"),
    "episodes": (_about(episodes=7), r"a plan over 7 episodes, and the split has \d+: it belongs to another dataset"),
    "length": (_about(length=-1), r"length is -1"),
    "files": (_about(files={}), r"lacks files\.order\.u64"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_wrong_with_a_plan_is_named(packed: Path, fast: Path, name: str) -> None:
    folder = shutil.copytree(packed / "train", fast / "train")
    damage, words = DAMAGE[name]
    damage(folder / "pack")
    with pytest.raises(FormatError, match=words):
        opened(fast)


def test_the_reader_of_the_page_reads_the_rows(source: Path, fast: Path) -> None:
    names = run_python("formats/dataset.md", blocks=1)
    with EpisodeWriter(fast, "train") as writer:
        for ids in ([1, 2, 3], [4, 5], [6, 7, 8, 9]):
            writer.append(ids)
    write_pack_plan(fast / "train", EpisodeDataset(fast).lengths, 6)
    rows = [[array.tolist() for array in row] for row in names["read_rows"](fast / "train")]
    assert rows == [[[2, 1], [0, 4], [6, 7, 8, 9, 4, 5]], [[0], [0], [1, 2, 3]]]
    for name in ("order.u64", "rows.u64"):
        lines = (DOCS / "formats" / "dataset.md").read_text().splitlines()
        shown = next(line for line in lines if line.startswith(name))
        assert (fast / "train" / "pack" / name).read_bytes() == bytes.fromhex(shown.removeprefix(name))
