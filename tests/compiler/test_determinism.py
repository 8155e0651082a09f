"""The bytes of a build depend on input and recipe alone: not on workers, chunk size, engine, shares or environment."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatmill.compiler.run import Outcome, merge_build, run_build
from chatmill.errors import ConfigError
from tests.cli.run import chatmill
from tests.compiler.builds import (
    chat,
    digest,
    files_of,
    leftovers,
    mixed_recipe,
    plain_recipe,
    write_inputs,
    write_jsonl,
)
from tests.conftest import CONVERSATION_FILES

FORMATS = ["episodes"]
SMALL = 1500
"""Chunk bytes that cut the mixed input into more than 12 chunks."""


class Reference:
    """The mixed input, and what one process makes of it in one go."""

    def __init__(self, home: Path) -> None:
        self.inputs = write_inputs(home / "in")
        self.expected: dict[str, dict[str, Any]] = {}
        for name in FORMATS:
            run_build(self.recipe(name), home / name, workers=0)
            self.expected[name] = files_of(home / name)

    def recipe(self, name: str) -> dict[str, Any]:
        return mixed_recipe(self.inputs)

    def check(self, out: Path, name: str = "episodes") -> None:
        assert files_of(out) == self.expected[name]
        assert leftovers(out) == []


@pytest.fixture(scope="module")
def reference(fast_module: Path) -> Reference:
    return Reference(fast_module)


def test_the_reference_is_worth_comparing(reference: Reference) -> None:
    for name, files in reference.expected.items():
        assert sum("shard_00001" in file for file in files) >= 2, f"{name}: both splits have several shards"
        assert "rejected.jsonl" in files
        assert {file.split("/")[0] for file in files} == {"train", "val", "rejected.jsonl"}
    masks = [record["bytes"] for file, record in reference.expected["episodes"].items() if file.endswith("mask.bin")]
    tokens = [
        record["bytes"] // 4 for file, record in reference.expected["episodes"].items() if file.endswith("tokens.bin")
    ]
    assert any(m == t for m, t in zip(masks, tokens, strict=True)), "some shards have masks of bytes"
    assert any(m == 4 * t for m, t in zip(masks, tokens, strict=True)), "some have fractions"


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_any_number_of_workers(reference: Reference, fast: Path, workers: int) -> None:
    states: list[Any] = []
    run_build(reference.recipe("episodes"), fast / "out", workers=workers, chunk_bytes=SMALL, on_progress=states.append)
    assert states[-1].chunks >= 12
    reference.check(fast / "out")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("chunk_bytes", [300, SMALL, 20_000, 100_000, 32 << 20])
def test_any_chunk_size(reference: Reference, fast: Path, name: str, chunk_bytes: int) -> None:
    run_build(reference.recipe(name), fast / "out", workers=0, chunk_bytes=chunk_bytes)
    reference.check(fast / "out", name)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_on_ray(reference: Reference, fast: Path) -> None:
    pytest.importorskip("ray")
    from chatmill.compiler.engines.ray_engine import RayExecutor

    run_build(reference.recipe("episodes"), fast / "out", executor=RayExecutor(workers=2), chunk_bytes=SMALL)
    reference.check(fast / "out")


@pytest.mark.parametrize("name", FORMATS)
def test_shares_one_after_the_other_in_any_order(reference: Reference, fast: Path, name: str) -> None:
    for share in (2, 0, 1):
        result = run_build(reference.recipe(name), fast / "out", workers=0, shard=(share, 3), chunk_bytes=SMALL)
        assert result.outcome is Outcome.SHARD_DONE
        assert not (fast / "out" / "manifest.json").exists()
        if share != 1:
            with pytest.raises(ConfigError, match=r"chunks are not built yet; first: chunk \d+ \("):
                merge_build(fast / "out")
    assert merge_build(fast / "out").outcome is Outcome.BUILT
    reference.check(fast / "out", name)
    assert merge_build(fast / "out").outcome is Outcome.ALREADY_BUILT
    reference.check(fast / "out", name)


def test_shares_that_run_at_the_same_time(reference: Reference, fast: Path) -> None:
    """They spool the same packed file and write beside each other; none may sweep what another is writing."""
    (fast / "recipe.yaml").write_text(json.dumps(reference.recipe("episodes")))
    code = (
        "import sys; from chatmill.compiler.run import run_build; "
        f"run_build({str(fast / 'recipe.yaml')!r}, {str(fast / 'out')!r}, workers=0, shard=(int(sys.argv[1]), 4), "
        f"chunk_bytes={SMALL})"
    )
    shares = [subprocess.Popen([sys.executable, "-c", code, str(i)], stderr=subprocess.PIPE) for i in range(4)]
    for share in shares:
        _, stderr = share.communicate(timeout=120)
        assert share.returncode == 0, stderr.decode()
    merge_build(fast / "out")
    reference.check(fast / "out")


def test_shares_with_different_chunks_are_refused(reference: Reference, fast: Path) -> None:
    run_build(reference.recipe("episodes"), fast / "a", workers=0, shard=(0, 2), chunk_bytes=SMALL)
    run_build(reference.recipe("episodes"), fast / "b", workers=0, shard=(1, 2), chunk_bytes=2 * SMALL)
    (fast / "a" / ".build" / "state.json").write_bytes((fast / "b" / ".build" / "state.json").read_bytes())
    with pytest.raises(ValueError, match="the same --chunk-bytes"):
        merge_build(fast / "a")


@pytest.mark.parametrize("seed", ["1", "2"])
def test_another_hash_seed_and_another_locale(reference: Reference, fast: Path, seed: str) -> None:
    (fast / "recipe.yaml").write_text(json.dumps(reference.recipe("episodes")))
    done = chatmill(
        "build", fast / "recipe.yaml", "-o", fast / "out", "-w", "0", "--chunk-bytes", "4000",
        env={"PYTHONHASHSEED": seed, "LC_ALL": "C", "PYTHONUTF8": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reference.check(fast / "out")


def test_files_of_another_name_are_another_build(fast: Path) -> None:
    """A record without an id is known by its place, so the place is a part of the output."""
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    first = run_build(plain_recipe(write_jsonl(fast / "chats.jsonl", [record])), fast / "one", workers=0)
    (fast / "sub").mkdir()
    moved = write_jsonl(fast / "sub" / "chats.jsonl", [record])
    second = run_build(plain_recipe(moved), fast / "two", workers=0)
    assert first.manifest["files"] != second.manifest["files"]
    assert first.manifest["fingerprint"] != second.manifest["fingerprint"]
    with pytest.raises(ConfigError, match="holds another dataset"):
        run_build(plain_recipe(moved), fast / "one", workers=0)
    assert digest(fast / "one"), "it is still there"
    assert leftovers(fast / "one") == []


LINES = st.sampled_from(["record", "record", "record", "blank", "spaces", "broken", "no id"])


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    lines=st.lists(LINES, min_size=1, max_size=30),
    line_end=st.sampled_from(["\n", "\r\n"]),
    chunk_bytes=st.integers(1, 3000),
    weight=st.sampled_from([1.0, 0.5, 2.3]),
    max_records=st.none() | st.integers(1, 30),
    name=st.sampled_from(FORMATS),
)
def test_any_lines_cut_anywhere(
    lines: list[str], line_end: str, chunk_bytes: int, weight: float, max_records: int | None, name: str, fast: Path
) -> None:
    rng = random.Random(len(lines))
    texts = []
    for number, kind in enumerate([*lines, "record"]):
        record = json.dumps(chat(rng, None if kind == "no id" else f"r{number}"))
        texts.append({"blank": "", "spaces": "  ", "broken": "{"}.get(kind, record))
    home = fast / f"{len(list(fast.iterdir()))}"
    home.mkdir()
    path = home / "lines.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line_end.join(texts).encode())
    recipe = plain_recipe(
        path,
        sources=[{"path": str(path), "weight": weight, "max_records": max_records, "shape": "openai"}],
        format=name,
        packing={"max_length": 300, "overflow": "windows"},
        split={"val_fraction": 0.5},
        on_error="quarantine",
    )
    found = []
    for number, size in enumerate((chunk_bytes, 32 << 20)):
        try:
            found.append(run_build(recipe, home / str(number), workers=0, chunk_bytes=size).manifest)
        except ValueError as error:  # nothing is left to build
            found.append({"files": str(error), "ledger": {}})
    assert found[0]["files"] == found[1]["files"]
    assert found[0]["ledger"] == found[1]["ledger"]


def test_real_conversations_and_a_real_tokenizer(fast: Path) -> None:
    chosen = [path for path in CONVERSATION_FILES if path.name.split(".")[0] in ("tau_airline", "swe_agent", "mgsm")]
    assert len(chosen) == 3
    recipe = {
        "sources": [{"path": str(path), "max_records": 120} for path in chosen],
        "tokenizer": "o200k",
        "template": "harmony",
        "packing": {"max_length": 4096, "overflow": "windows"},
        "split": {"val_fraction": 0.1},
        "shard_tokens": 100_000,
        "gates": {"records_without_trained_tokens": None},
    }
    files = [
        run_build(recipe, fast / str(size), workers=0, chunk_bytes=size).manifest["files"]
        for size in (32 << 20, 60_000)
    ]
    assert len(files[0]) > 10
    assert files[0] == files[1]
