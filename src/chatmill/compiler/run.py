"""The driver of a build: recipe to chunks, chunks to shards by an executor, shards to a dataset, the manifest last."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from chatmill.compiler.chunk_job import compile_chunk, load_pipeline, pipeline_of, recipe_json
from chatmill.compiler.chunk_runs import BuildProgress as BuildProgress
from chatmill.compiler.chunk_runs import OnProgress, run_chunks, whole_receipts
from chatmill.compiler.engines.executor import Executor, kept
from chatmill.compiler.engines.local import LocalExecutor
from chatmill.compiler.finish import PlannedBuild, check_gates, take_back
from chatmill.compiler.manifest import build_fingerprint
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.publish import storing, sweep_orphans
from chatmill.compiler.recipe import Recipe, recipe_of, recorded_recipe
from chatmill.compiler.remote import build_elsewhere
from chatmill.compiler.shards import DiskSync
from chatmill.compiler.sources import plan_sources
from chatmill.compiler.work import (
    UNFINISHED,
    begin_work,
    claim_work,
    clean_up,
    folder_lock,
    refuse_other,
    unfinished_state,
    what_it_holds,
)
from chatmill.core.ledger import Ledger
from chatmill.errors import ConfigError, NoReferenceError
from chatmill.read.places import Elsewhere, is_elsewhere
from chatmill.render.trust import TemplateTrust, allowed_template
from chatmill.store.receipts import MANIFEST, read_manifest
from chatmill.tokenizer.backends import Engine


class Outcome(StrEnum):
    """How a build ended."""

    BUILT = "built"
    ALREADY_BUILT = "already_built"
    """The same build is there, finished; nothing was done."""
    SHARD_DONE = "shard_done"
    """This process's share of the chunks is done; `merge_build` makes the dataset when all are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """What a build gives back."""

    outcome: Outcome
    directory: Path | Elsewhere
    manifest: dict[str, Any]
    """Empty after a share of a build."""
    seconds: float


def run_build(
    recipe: Recipe | dict[str, Any] | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    workers: int | None = None,
    executor: Executor | None = None,
    resume: bool = False,
    shard: tuple[int, int] | None = None,
    shard_bytes: int | None = None,
    on_progress: OnProgress | None = None,
    base: Path | None = None,
    on_start: Callable[[], None] | None = None,
) -> BuildResult:
    """Build the dataset that a recipe describes into the folder `out`.

    The bytes depend on the input and the recipe alone: not on workers, executor or interruptions. `resume` continues a
    build that was stopped; the same build, finished, is left alone; another one there is refused. `shard=(i, n)` does
    every n-th chunk from the i-th on and stops; `merge_build` puts the shards of all shares together. `shard_bytes`
    replaces that of the recipe. Relative names of input files start from `base` (default: the current folder). `out`
    may be the URL of a folder that `fsspec` can write, such as `s3://bucket/built`: the dataset is built on this
    machine and copied there, the manifest last. `on_start` is called once, when recipe and inputs are known to be good
    and work begins.
    """
    if is_elsewhere(os.fspath(out)):
        if shard is not None:
            raise ConfigError(f"the shares of a build (--shard) work in one folder that all see, not in {out}")
        build = partial(
            run_build,
            recipe,
            workers=workers,
            executor=executor,
            resume=resume,
            shard_bytes=shard_bytes,
            on_progress=on_progress,
            base=base,
            on_start=on_start,
        )
        return replace(build_elsewhere(os.fspath(out), build), directory=Elsewhere(os.fspath(out)))
    started = time.monotonic()
    checked = recipe_of(recipe)
    if shard_bytes is not None:
        checked = recipe_of({**checked.as_json(), "shard_bytes": shard_bytes})
    directory = Path(out)
    own = _own_executor(workers, checked, directory)
    with kept(executor) if executor is not None else own as chosen:
        pipeline = driver_pipeline(checked)  # an unknown name is reported before anything is made
        with storing(directory, "create the folder"):
            directory.mkdir(parents=True, exist_ok=True)
        with folder_lock(directory, shared=shard is not None):
            what_it_holds(directory)  # not ours to write into: refused
            planned = _planned(checked, pipeline, directory, chosen, base)
            outcome, manifest = _run(planned, chosen, shard, resume, on_progress, on_start)
    return BuildResult(outcome=outcome, directory=directory, manifest=manifest, seconds=time.monotonic() - started)


@contextmanager
def _own_executor(workers: int | None, recipe: Recipe, directory: Path) -> Iterator[LocalExecutor]:
    """The local executor; what its workers need is loaded while this process is busy."""
    executor = LocalExecutor(workers, keep=True)
    try:
        if not os.path.exists(directory / MANIFEST):  # else there is, most likely, nothing to do
            executor.prepare(load_pipeline, recipe_json(recipe))
        yield executor
    finally:
        executor.close()


def driver_pipeline(recipe: Recipe) -> Pipeline:
    """A recipe as this process needs it: with the tokenizer's reference engine, whose answers workers check theirs by.

    Where there is no reference, with the fast engine, as they have it.
    """
    text = recipe_json(recipe)
    try:
        return pipeline_of(text, Engine.REFERENCE)
    except NoReferenceError:
        return pipeline_of(text)


def _planned(
    recipe: Recipe, pipeline: Pipeline, directory: Path, executor: Executor | None = None, base: Path | None = None
) -> PlannedBuild:
    """A build in a folder that is held by this process, with its input read once."""
    planned = plan_sources(recipe, claim_work(directory) / "spool", executor, base)
    fingerprint = build_fingerprint(recipe, planned.files, pipeline.fingerprints)
    return PlannedBuild(directory, recipe, pipeline, planned, fingerprint)


def _run(
    build: PlannedBuild,
    executor: Executor,
    share: tuple[int, int] | None,
    resume: bool,
    on_progress: OnProgress | None,
    on_start: Callable[[], None] | None,
) -> tuple[Outcome, dict[str, Any]]:
    """The build itself, or a share of it."""
    directory, recipe = build.directory, build.recipe
    finished = _claim(directory, build.fingerprint, resume=resume or share is not None)
    if finished is not None:
        return _already_built(directory, recipe, finished), finished
    if share is None:  # other shares may be writing here now; what one of them left goes with the whole work folder
        sweep_orphans(directory)
    begin_work(build.work, {"fingerprint": build.fingerprint, "recipe": recipe.as_json()})
    jobs = build.jobs()
    if on_start is not None:
        on_start()
    with DiskSync() as disk:
        if share is not None:
            run_chunks(compile_chunk, jobs[share[0] :: share[1]], executor, on_progress, on_whole=disk.add)
            disk.wait()
            return Outcome.SHARD_DONE, {}
        with storing(directory, "write the dataset in"):
            take_back(directory)
        receipts = run_chunks(compile_chunk, jobs, executor, on_progress, on_whole=disk.add)
        build.planned.check_unchanged()
        return Outcome.BUILT, build.publish(jobs, receipts, executor, disk)


def merge_build(
    out: str | os.PathLike[str],
    *,
    template: str | os.PathLike[str] | None = None,
    trust_template: str | None = None,
) -> BuildResult:
    """Make the dataset of the shards that the shares of a build (`shard=(i, n)`) have made, once all are there.

    A Python template that the shares were made with is run only when `template` names the file again or
    `trust_template` is its sha256.
    """
    started = time.monotonic()
    directory = Path(out)
    if not directory.is_dir():
        raise ConfigError(f"there is no folder {directory}: run the shares of a build first (--shard i/N)")
    with folder_lock(directory, shared=False):
        outcome, manifest = _merge(directory, TemplateTrust(template=template, sha256=trust_template))
    return BuildResult(outcome=outcome, directory=directory, manifest=manifest, seconds=time.monotonic() - started)


def _merge(directory: Path, trust: TemplateTrust) -> tuple[Outcome, dict[str, Any]]:
    finished = read_manifest(directory)
    if finished is not None:
        return _already_built(directory, recorded_recipe(finished), finished), finished
    state = unfinished_state(directory)
    if state is None:
        raise ConfigError(f"{directory} holds no build to merge: run its shares first (--shard i/N)")
    recipe = recipe_of(state["recipe"])
    named = allowed_template(recipe.template, trust, str(directory))
    build = _planned(recipe, driver_pipeline(structs.replace(recipe, template=named)), directory)
    if build.fingerprint != state["fingerprint"]:
        raise ConfigError(f"{directory}: the input or the package has changed since the shares were built")
    jobs = build.jobs()
    with DiskSync() as disk:
        with storing(directory, "write the dataset in"):
            take_back(directory)
            receipts = whole_receipts(jobs)
            missing = [job for job in jobs if job.number not in receipts]
            if missing:
                raise ConfigError(
                    f"{directory}: {len(missing)} of {len(jobs)} chunks are not built yet; first: {missing[0].label}"
                )
            sweep_orphans(directory)
        for job in jobs:
            disk.add(job.folder, receipts[job.number])
        return Outcome.BUILT, build.publish(jobs, receipts, LocalExecutor(0), disk)


def _already_built(directory: Path, recipe: Recipe, manifest: dict[str, Any]) -> Outcome:
    """The outcome of a build that is there already; its gates may have changed."""
    clean_up(directory)
    check_gates(recipe, Ledger.from_json(manifest["ledger"]), "The dataset is there already and was not touched.")
    return Outcome.ALREADY_BUILT


def _claim(directory: Path, fingerprint: str, *, resume: bool) -> dict[str, Any] | None:
    """Whether this folder may be built into; the manifest, when the same build is finished there."""
    manifest = read_manifest(directory)
    if refuse_other(directory, fingerprint, manifest) and manifest is None and not resume:
        raise ConfigError(f"{directory} holds {UNFINISHED} of this recipe: continue with --resume (resume=True)")
    return manifest
