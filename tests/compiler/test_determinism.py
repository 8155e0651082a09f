"""The bytes of a build depend on input and recipe alone: not on workers, engine, shares, environment or what is reused.

No chunk is compiled with a fast engine that nobody has checked, and what an earlier dataset has is linked.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatmill.compiler import chunk_job, run, scan_jobs, spools
from chatmill.compiler.chunk_job import ChunkJob, checked_pipeline, compile_chunk, pipeline_of
from chatmill.compiler.engines.local import LocalExecutor
from chatmill.compiler.recipe import recipe_of
from chatmill.compiler.run import BuildResult, Outcome, run_build
from chatmill.errors import ConfigError, FormatError
from chatmill.prove.verify import verify
from chatmill.store.episodes import EpisodeDataset
from chatmill.tokenizer import tiktoken_file
from chatmill.tokenizer.backends import Engine, GigatokenBackend
from tests.cli.run import chatmill
from tests.compiler import builds
from tests.compiler.builds import chats, digest, leftovers, mixed_recipe, plain_recipe, write_inputs, write_jsonl
from tests.damage import flip
from tests.data.tokenizer_files import unpacked
from tests.forked import Forked

SMALL = 1500
"""Bytes of a shard that cut the mixed input into more than 12."""


class Reference:
    """The mixed input, and what one process makes of it in one go."""

    def __init__(self, home: Path) -> None:
        self.recipe = mixed_recipe(write_inputs(home / "in"), shard_bytes=SMALL)
        self.built = home / "built"
        run_build(self.recipe, self.built, workers=0)
        self.expected: dict[str, Any] = builds.files_of(self.built)
        assert {file.split("/")[0] for file in self.expected} == {"train", "val", "rejected.jsonl", "chunks.jsonl"}
        assert "val/shard_00001/mask.bin" in self.expected
        (home / "recipe.yaml").write_text(json.dumps(self.recipe))

    def check(self, out: Path) -> None:
        assert builds.files_of(out) == self.expected
        assert leftovers(out) == []


@pytest.fixture(scope="module")
def reference(fast_module: Path) -> Reference:
    return Reference(fast_module)


def test_any_number_of_workers(reference: Reference, fast: Path) -> None:
    states: list[Any] = []
    run_build(reference.recipe, fast / "out", workers=3, on_progress=states.append)
    assert states[-1].chunks >= 12
    reference.check(fast / "out")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_on_ray(reference: Reference, fast: Path, ray_address: str) -> None:
    from chatmill.compiler.engines.ray_engine import RayExecutor

    run_build(reference.recipe, fast / "out", executor=RayExecutor(ray_address))
    reference.check(fast / "out")


def compile_elsewhere(job: ChunkJob) -> dict[str, Any]:
    """As a worker that does not see the output folder, which is on another machine."""
    place = dataclasses.replace(job.place, directory=Path(f"{job.place.directory}-of-another-machine"))
    return compile_chunk(dataclasses.replace(job, place=place))


def test_workers_that_do_not_reach_the_output_folder(reference: Reference, fast: Path) -> None:
    words = r"a worker on \S+ cannot reach \S+/out-of-another-machine/\.build.* file system that all"
    with pytest.raises(ConfigError, match=words):
        run_build(reference.recipe, fast / "out", workers=0, job=compile_elsewhere)
    assert not (fast / "out-of-another-machine").exists()


def test_shares_that_run_at_the_same_time(reference: Reference, fast: Path) -> None:
    """They spool the same packed file and write beside each other; none may sweep what another is writing."""
    recipe = reference.built.parent / "recipe.yaml"
    (fast / "share.py").write_text(
        "import sys; from chatmill.compiler.run import run_build; "
        f"run_build({str(recipe)!r}, {str(fast / 'out')!r}, workers=0, shard=(int(sys.argv[1]), 3))"
    )
    for share in [Forked(fast / "share.py", str(number)) for number in range(3)]:
        _, stderr = share.communicate()
        assert share.returncode == 0, stderr
    run_build(reference.recipe, fast / "out", workers=0, resume=True)
    reference.check(fast / "out")


def test_another_hash_seed_and_another_locale(reference: Reference, fast: Path) -> None:
    environment = {"PYTHONHASHSEED": "1", "LC_ALL": "C", "PYTHONUTF8": "0"}
    recipe = reference.built.parent / "recipe.yaml"
    done = chatmill("build", recipe, "-o", fast / "out", "-w", "0", env=environment)
    assert done.returncode == 0, done.stderr
    reference.check(fast / "out")


def contents(out: Path) -> list[Any]:
    """Everything that is stored of every episode, in order, the rejected records and the ledger."""
    found: list[Any] = []
    for split in ("train", "val"):
        for one in EpisodeDataset(out, split) if (out / split).exists() else ():
            assert one.weights is not None
            assert one.kinds is not None
            columns = [one.ids.tolist(), one.weights.tolist(), one.kinds.tolist()]
            found.append([split, *columns, one.source, one.turns, one.trained, one.record_id])
    rejected, manifest = out / "rejected.jsonl", json.loads((out / "manifest.json").read_bytes())
    return [found, rejected.exists() and rejected.read_bytes(), manifest["ledger"], manifest["splits"]]


@pytest.mark.parametrize("shard_bytes", [300, 32 << 20])
def test_shards_of_any_size_hold_the_same_episodes(reference: Reference, fast: Path, shard_bytes: int) -> None:
    run_build({**reference.recipe, "shard_bytes": shard_bytes}, fast / "out", workers=0)
    assert contents(fast / "out") == contents(reference.built)


LINES = st.sampled_from(["record", "record", "record", "blank", "spaces", "broken", "no id"])
LIMITS = st.fixed_dictionaries(
    {"weight": st.sampled_from([1.0, 0.5, 2.3]), "max_records": st.none() | st.integers(1, 30)}
)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(st.lists(LINES, min_size=1, max_size=30), st.sampled_from(["\n", "\r\n"]), st.integers(1, 3000), LIMITS)
def test_any_lines_cut_anywhere(fast: Path, lines: Any, line_end: str, shard_bytes: int, limits: Any) -> None:
    rng = random.Random(len(lines))
    texts = []
    for number, kind in enumerate([*lines, "record"]):
        record = json.dumps(builds.random_chat(rng, None if kind == "no id" else f"r{number}"))
        texts.append({"blank": "", "spaces": "  ", "broken": "{"}.get(kind, record))
    home = fast / f"{len(list(fast.iterdir()))}"
    home.mkdir()
    path = home / "lines.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line_end.join(texts).encode())
    recipe = plain_recipe(
        path,
        sources=[{"path": str(path), "shape": "openai", **limits}],
        packing={"max_length": 300, "overflow": "windows"},
        split={"val_fraction": 0.5},
        on_error="quarantine",
    )
    found = []
    for number, size in enumerate((shard_bytes, 32 << 20)):
        try:
            run_build({**recipe, "shard_bytes": size}, home / str(number), workers=0)
            found.append(contents(home / str(number)))
        except ValueError as error:  # nothing is left to build
            found.append([str(error)])
    assert found[0] == found[1]


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


# Engines: the driver asks the reference, each worker compares.

WRONG = """
from chatmill.tokenizer.backends import GigatokenBackend

original = GigatokenBackend.encode_batch


def wrong(self, texts):
    ids, offsets = original(self, texts)
    return ids[::-1].copy(), offsets


GigatokenBackend.encode_batch = wrong
"""
MISSING = "from chatmill.tokenizer.backends import GigatokenBackend; GigatokenBackend.from_json = None"
"""What every Python runs when it starts, once its folder is in PYTHONPATH."""


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has loaded nothing yet."""
    monkeypatch.setattr(chunk_job, "LOADED", {})


class Good(NamedTuple):
    """A recipe, and what workers with a good engine make of it."""

    recipe: dict[str, Any]
    files: dict[str, str]
    kept: dict[Any, Any]
    """What the driver has loaded: it has the good engine, and only workers have a bad one."""


@pytest.fixture(scope="module")
def good(fast_module: Path) -> Good:
    """Built by workers; the driver needs no fast engine."""
    path, kept = write_jsonl(fast_module / "chats.jsonl", chats(60)), dict[Any, Any]()
    recipe = plain_recipe(path, tokenizer=str(unpacked("gpt2")), template="token_native", shard_bytes=4000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_job, "LOADED", kept)
        patch.setattr(GigatokenBackend, "from_json", lambda text: pytest.fail("the driver loads gigatoken"))
        run_build(recipe, fast_module / "good", workers=1)
    return Good(recipe, digest(fast_module / "good"), kept)


@pytest.mark.parametrize(("startup", "prepared"), [(WRONG, False), (MISSING, True)], ids=["wrong", "missing"])
def test_workers_with_a_bad_engine_build_the_same_bytes(
    good: Good, fast: Path, monkeypatch: pytest.MonkeyPatch, startup: str, prepared: bool
) -> None:
    monkeypatch.setattr(chunk_job, "LOADED", good.kept)
    if not prepared:
        monkeypatch.setattr(LocalExecutor, "prepare", lambda self, job, spec: None)
    (fast / "sitecustomize.py").write_text(startup)
    monkeypatch.setenv("PYTHONPATH", str(fast), prepend=os.pathsep)
    run_build(good.recipe, fast / "bad", workers=2)
    assert digest(fast / "bad") == good.files
    assert leftovers(fast / "bad") == []


@pytest.mark.usefixtures("forgotten")
def test_one_process_loads_each_engine_once(good: Good, fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = mock.Mock(side_effect=GigatokenBackend.from_json)
    monkeypatch.setattr(GigatokenBackend, "from_json", loaded)
    for name in ("here", "again"):
        run_build(good.recipe, fast / name, workers=0)
        assert digest(fast / name) == good.files
    assert loaded.call_count == 1


@pytest.mark.usefixtures("forgotten")
def test_a_small_input_is_built_here_by_the_reference(good: Good, fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GigatokenBackend, "from_json", None)
    monkeypatch.setattr(run, "LocalExecutor", lambda workers: LocalExecutor({0: 0}[workers]))
    run_build(good.recipe, fast / "small")
    assert digest(fast / "small") == good.files


@pytest.mark.usefixtures("forgotten")
def test_an_engine_is_used_after_it_gave_the_answers(good: Good) -> None:
    text = json.dumps(recipe_of(good.recipe).as_json())
    reference = pipeline_of(text, Engine.REFERENCE)
    answers, files = reference.answers, reference.files
    unchecked = pipeline_of(text, Engine.UNCHECKED)
    assert checked_pipeline(text, answers, files) is unchecked
    assert pipeline_of(text) is unchecked
    chunk_job.LOADED.clear()
    other = type(answers)(ids=answers.ids[::-1], normalized=answers.normalized)
    unchecked = pipeline_of(text, Engine.UNCHECKED)
    own = checked_pipeline(text, other, files)  # the answers are at fault here: the engine agrees with the reference
    assert own is not unchecked
    assert own.template.tokenizer.backend.name == "gigatoken"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("forgotten")
def test_without_a_reference_the_driver_has_the_fast_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(plain_recipe(Path("none.jsonl"), tokenizer="o200k"))
    for name in ("tiktoken", "gigatoken"):
        assert run.driver_pipeline(recipe).template.tokenizer.backend.name == name  # type: ignore[attr-defined]
        chunk_job.LOADED.clear()
        monkeypatch.setattr(tiktoken_file, "_reference", lambda ranks: None)


# What an earlier dataset has is linked, and the result has the bytes of a full build.


def reuse(recipe: Any, home: Path, name: str = "new", old: str = "old", **options: Any) -> BuildResult:
    """Build with and without an earlier dataset; both have the same bytes."""
    result = run_build(recipe, home / name, workers=0, reuse=home / old, **options)
    run_build(recipe, home / f"{name}_full", workers=0)
    assert digest(home / name) == digest(home / f"{name}_full")
    assert leftovers(home / name) == []
    return result


@pytest.fixture
def grown(fast: Path) -> dict[str, Any]:
    """A dataset in `old`, and a recipe over its input, to which records were appended since."""
    records: list[Any] = [*chats(120, 5), "{broken"]
    path = write_jsonl(fast / "chats.jsonl", records)
    recipe = plain_recipe(path, split={"val_fraction": 0.2}, on_error="quarantine", pack={"length": 4096})
    recipe |= {"shard_bytes": path.stat().st_size // 12, "packing": {"max_length": 4096, "overflow": "windows"}}
    run_build(recipe, fast / "old", workers=0)
    write_jsonl(path, [*records, *({**one, "id": f"new{n}"} for n, one in enumerate(chats(9, 6)))])
    return recipe


def test_appended_records_cost_the_last_chunks_and_a_changed_line_its_own(grown: dict[str, Any], fast: Path) -> None:
    result = reuse(grown, fast)
    assert result.outcome is Outcome.BUILT
    assert result.chunks - result.reused in (1, 2)
    assert result.reused >= 11
    assert os.stat(fast / "new/train/shard_00003/tokens.bin").st_nlink == 2, "linked, not copied"
    assert verify(fast / "new", deep=True).passed
    again = reuse(grown, fast, "third", "new")
    assert again.reused == again.chunks
    path = fast / "chats.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[40] = lines[40].replace("a", "b")
    path.write_text("".join(lines))
    changed = reuse(grown, fast, "changed", "new")
    assert changed.chunks - changed.reused == 1


def test_another_recipe_reuses_nothing_and_other_gates_and_plans_all(grown: dict[str, Any], fast: Path) -> None:
    assert reuse({**grown, "policy": "all"}, fast).reused == 0
    with pytest.raises(ValueError, match=r"chats\.jsonl:121"):
        run_build({**grown, "on_error": "fail"}, fast / "fails", workers=0, reuse=fast / "old")
    planned_anew = {**grown, "pack": {"length": 8192, "strategy": "greedy"}, "gates": {"records_left_out": 0.5}}
    assert reuse(planned_anew, fast, "planned").reused >= 11


def test_files_that_look_unchanged_are_not_read(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, read_part, spooled = list[str](), scan_jobs._read, spools._spooled

    def noted_part(part: Any, cutter: Any) -> bytes:
        read.append(Path(part.scan.path).name)
        return read_part(part, cutter)

    def noted_spool(scan: Any, *given: Any) -> Any:
        read.append(Path(scan.path).name)
        return spooled(scan, *given)

    monkeypatch.setattr(scan_jobs, "_read", noted_part)
    monkeypatch.setattr(spools, "_spooled", noted_spool)
    recipe = mixed_recipe(write_inputs(fast / "in", 40))
    run_build(recipe, fast / "old", workers=0)
    path, packed = fast / "in" / "plain.jsonl", {"list.json", "packed.jsonl.gz"}
    for name, wanted in (("new", packed), ("sure", {*packed, "plain.jsonl", "rows.parquet"}), ("touched", None)):
        read.clear()
        if name == "touched":  # another time: read, and found to be the same
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 1_000_000))
        result = run_build(recipe, fast / name, workers=0, reuse=fast / "old", rehash=name == "sure")
        assert result.reused == result.chunks
        assert digest(fast / name) == digest(fast / "old")
        assert set(read) == (wanted or {*packed, "plain.jsonl"}), "the lines of spools are counted"
    reuse({**recipe, "shard_bytes": 3000}, fast, "cut", "touched")  # what is known of its chunks is of no use here


def test_a_share_may_reuse_and_what_it_has_is_there_for_the_build_that_joins(grown: dict[str, Any], fast: Path) -> None:
    for share in range(2):
        result = run_build(grown, fast / "new", workers=0, shard=(share, 2), reuse=fast / "old")
        assert result.reused >= 5
    shutil.rmtree(fast / "old")
    run_build(grown, fast / "new", workers=0, resume=True)
    run_build(grown, fast / "full", workers=0)
    assert digest(fast / "new") == digest(fast / "full")


def test_what_cannot_be_linked_is_copied_or_made_or_one_clear_error(
    grown: dict[str, Any], fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_disk(*given: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", other_disk)
        assert reuse(grown, fast, "copied").reused >= 11
    assert os.stat(fast / "copied/train/shard_00003/tokens.bin").st_nlink == 1
    with pytest.raises(ConfigError, match=r"nowhere holds no finished build to reuse"):
        run_build(grown, fast / "new", workers=0, reuse=fast / "nowhere")
    (fast / "old/train/shard_00002/tokens.bin").unlink()
    assert reuse(grown, fast).reused == 11, "a shard that is not whole is made"
    for name in ("chunks.jsonl", "rejected.jsonl"):
        data = (fast / "old" / name).read_bytes()
        flip(fast / "old" / name, 30)
        with pytest.raises(FormatError, match=rf"{name} is missing or was changed: build without --reuse"):
            run_build(grown, fast / "other", workers=0, reuse=fast / "old")
        (fast / "old" / name).write_bytes(data)
