"""The bytes of a build depend on input and recipe alone: not on workers, engine, shares or environment."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatmill.compiler.engines.local import LocalExecutor
from chatmill.compiler.run import run_build
from chatmill.errors import ConfigError
from chatmill.store.episodes import EpisodeDataset
from tests.cli.run import chatmill
from tests.compiler.builds import (
    chats,
    files_of,
    leftovers,
    mixed_recipe,
    plain_recipe,
    random_chat,
    write_inputs,
    write_jsonl,
)
from tests.forked import Forked

SMALL = 1500
"""Bytes of a shard that cut the mixed input into more than 12."""


class Reference:
    """The mixed input, and what one process makes of it in one go."""

    def __init__(self, home: Path) -> None:
        self.recipe = mixed_recipe(write_inputs(home / "in"), shard_bytes=SMALL)
        self.built = home / "built"
        run_build(self.recipe, self.built, workers=0)
        self.expected: dict[str, Any] = files_of(self.built)
        assert {file.split("/")[0] for file in self.expected} == {"train", "val", "rejected.jsonl", "chunks.jsonl"}
        assert "val/shard_00001/mask.bin" in self.expected

    def check(self, out: Path) -> None:
        assert files_of(out) == self.expected
        assert leftovers(out) == []


@pytest.fixture(scope="module")
def reference(fast_module: Path) -> Reference:
    return Reference(fast_module)


def test_any_number_of_workers(reference: Reference, fast: Path) -> None:
    states: list[Any] = []
    run_build(reference.recipe, fast / "out", workers=3, on_progress=states.append)
    assert states[-1].chunks >= 12
    reference.check(fast / "out")


def episodes(out: Path) -> list[Any]:
    """Everything that is stored of every episode, in order."""
    found = []
    for split in ("train", "val"):
        for one in EpisodeDataset(out, split):
            assert one.weights is not None
            assert one.kinds is not None
            columns = [one.ids.tolist(), one.weights.tolist(), one.kinds.tolist()]
            found.append([split, *columns, one.source, one.turns, one.trained, one.record_id])
    return found


@pytest.mark.parametrize("shard_bytes", [300, 32 << 20])
def test_shards_of_any_size_hold_the_same_episodes(reference: Reference, fast: Path, shard_bytes: int) -> None:
    found = run_build({**reference.recipe, "shard_bytes": shard_bytes}, fast / "out", workers=0).manifest
    assert episodes(fast / "out") == episodes(reference.built)
    expected = json.loads((reference.built / "manifest.json").read_bytes())
    assert found["ledger"] == expected["ledger"]
    assert found["splits"] == expected["splits"]
    assert found["files"]["rejected.jsonl"] == expected["files"]["rejected.jsonl"]


def test_what_fits_one_shard_is_flat(fast: Path) -> None:
    """The layout of spec 4, which the five lines of its readers open."""
    path = write_jsonl(fast / "chats.jsonl", chats(30))
    run_build(plain_recipe(path, split={"val_fraction": 0.2}), fast / "out", workers=0)
    for split in ("train", "val"):
        folder = fast / "out" / split
        assert not [entry for entry in folder.iterdir() if entry.is_dir()]
        tokens = np.fromfile(folder / "tokens.bin", "<u4")
        index = np.fromfile(folder / "episodes.idx", "<u8").reshape(-1, 2)
        assert len(np.fromfile(folder / "mask.bin", "u1")) in (len(tokens), 4 * len(tokens))
        dataset = EpisodeDataset(fast / "out", split)
        assert len(index) == len(dataset) > 1
        for (start, length), episode in zip(index.tolist(), dataset, strict=True):
            assert tokens[start : start + length].tolist() == episode.ids.tolist()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_on_ray(reference: Reference, fast: Path, ray_address: str) -> None:
    from chatmill.compiler.engines.ray_engine import RayExecutor

    run_build(reference.recipe, fast / "out", executor=RayExecutor(ray_address))
    reference.check(fast / "out")


class Elsewhere(LocalExecutor):
    """An engine whose workers do not see the output folder, as those of another machine may not."""

    def map(self, job: Any, specs: Any) -> Any:
        return super().map(job, [dataclasses.replace(spec, place=elsewhere(spec.place)) for spec in specs])


def elsewhere(place: Any) -> Any:
    return dataclasses.replace(place, directory=Path(f"{place.directory}-of-another-machine"))


def test_workers_that_do_not_reach_the_output_folder(reference: Reference, fast: Path) -> None:
    words = r"a worker on \S+ cannot reach \S+/out-of-another-machine/\.build.* file system that all"
    with pytest.raises(ConfigError, match=words):
        run_build(reference.recipe, fast / "out", executor=Elsewhere(0))
    assert not (fast / "out-of-another-machine").exists()


def test_shares_that_run_at_the_same_time(reference: Reference, fast: Path) -> None:
    """They spool the same packed file and write beside each other; none may sweep what another is writing."""
    (fast / "recipe.yaml").write_text(json.dumps(reference.recipe))
    (fast / "share.py").write_text(
        "import sys; from chatmill.compiler.run import run_build; "
        f"run_build({str(fast / 'recipe.yaml')!r}, {str(fast / 'out')!r}, workers=0, shard=(int(sys.argv[1]), 3))"
    )
    for share in [Forked(fast / "share.py", str(number)) for number in range(3)]:
        _, stderr = share.communicate()
        assert share.returncode == 0, stderr
    run_build(reference.recipe, fast / "out", workers=0, resume=True)
    reference.check(fast / "out")


def test_another_hash_seed_and_another_locale(reference: Reference, fast: Path) -> None:
    (fast / "recipe.yaml").write_text(json.dumps(reference.recipe))
    done = chatmill(
        "build", fast / "recipe.yaml", "-o", fast / "out", "-w", "0",
        env={"PYTHONHASHSEED": "1", "LC_ALL": "C", "PYTHONUTF8": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reference.check(fast / "out")


LINES = st.sampled_from(["record", "record", "record", "blank", "spaces", "broken", "no id"])


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    lines=st.lists(LINES, min_size=1, max_size=30),
    line_end=st.sampled_from(["\n", "\r\n"]),
    shard_bytes=st.integers(1, 3000),
    weight=st.sampled_from([1.0, 0.5, 2.3]),
    max_records=st.none() | st.integers(1, 30),
)
def test_any_lines_cut_anywhere(
    lines: list[str], line_end: str, shard_bytes: int, weight: float, max_records: int | None, fast: Path
) -> None:
    rng = random.Random(len(lines))
    texts = []
    for number, kind in enumerate([*lines, "record"]):
        record = json.dumps(random_chat(rng, None if kind == "no id" else f"r{number}"))
        texts.append({"blank": "", "spaces": "  ", "broken": "{"}.get(kind, record))
    home = fast / f"{len(list(fast.iterdir()))}"
    home.mkdir()
    path = home / "lines.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line_end.join(texts).encode())
    recipe = plain_recipe(
        path,
        sources=[{"path": str(path), "weight": weight, "max_records": max_records, "shape": "openai"}],
        packing={"max_length": 300, "overflow": "windows"},
        split={"val_fraction": 0.5},
        on_error="quarantine",
    )
    found = []
    for number, size in enumerate((shard_bytes, 32 << 20)):
        try:
            ledger = run_build({**recipe, "shard_bytes": size}, home / str(number), workers=0).manifest["ledger"]
            found.append([ledger, *episodes_there(home / str(number))])
        except ValueError as error:  # nothing is left to build
            found.append([str(error)])
    assert found[0] == found[1]


def episodes_there(out: Path) -> list[Any]:
    """Ids and record ids of the splits that there are, and the rejected records."""
    there = [split for split in ("train", "val") if (out / split).exists()]
    stored = [[split, one.ids.tolist(), one.record_id] for split in there for one in EpisodeDataset(out, split)]
    rejected = out / "rejected.jsonl"
    return [stored, rejected.read_text() if rejected.exists() else ""]
