"""The driver of a build: recipe to chunks, chunks to shards by an executor, shards to a dataset, the manifest last."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from chatmill.compiler.chunk_job import ChunkJob, compile_chunk, load_pipeline, pipeline_of, recipe_json
from chatmill.compiler.chunk_shards import RECEIPTS, Receipt, whole_receipts
from chatmill.compiler.engines.jobs import Executor
from chatmill.compiler.engines.local import LocalExecutor
from chatmill.compiler.finish import PlannedBuild
from chatmill.compiler.gates import check_gates
from chatmill.compiler.manifest import build_fingerprint
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.progress import BuildProgress as BuildProgress
from chatmill.compiler.progress import OnProgress
from chatmill.compiler.recipe import OnError, Recipe, recipe_of
from chatmill.compiler.reuse import EarlierBuild
from chatmill.compiler.sources import find_nothing, input_bytes, plan_sources
from chatmill.compiler.work import (
    UNFINISHED,
    begin_work,
    clean_up,
    failure_noted,
    folder_lock,
    forget_failed,
    refuse_other,
    what_it_holds,
    work_folder,
)
from chatmill.core.ledger import Ledger, stored_records_read
from chatmill.core.publish import storing, sweep_orphans
from chatmill.errors import ConfigError, NoReferenceError, short_errors
from chatmill.files.builds import BuildDriver, driving
from chatmill.files.remote import address, local_path
from chatmill.store.episode_layout import INDEX, MANIFEST, SPLITS
from chatmill.store.receipts import read_manifest
from chatmill.tokenizer.backends import Engine

SMALL = 1 << 20
"""Bytes of input up to which this process does all work, with the reference engine.

That engine needs about 1.1 s for a megabyte of text, and the start of the fast one, and of workers, takes longer.
"""
SYNC_THREADS = 4
"""That wait for the disk while the workers continue."""


class Outcome(StrEnum):
    """How a build ended."""

    BUILT = "built"
    ALREADY_BUILT = "already_built"
    """The same build is there, finished; nothing was done."""
    SHARD_DONE = "shard_done"
    """This process's share of the chunks is done; a build with `resume` makes the dataset when all are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """What a build gives back."""

    outcome: Outcome
    directory: Path | str
    """A folder, or a URL."""
    manifest: dict[str, Any]
    """Empty after a share of a build."""
    seconds: float
    chunks: int = 0
    """Chunks of this build, or of this share of it; 0 where nothing was done."""
    present: int = 0
    """Those of them that an earlier run had done."""
    reused: int = 0
    """Those of them that were taken from an earlier dataset."""


@short_errors
def run_build(
    recipe: Recipe | dict[str, Any] | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    workers: int | None = None,
    executor: Executor | None = None,
    resume: bool = False,
    shard: tuple[int, int] | None = None,
    on_progress: OnProgress | None = None,
    base: Path | None = None,
    on_start: Callable[[], None] | None = None,
    reuse: str | os.PathLike[str] | None = None,
    rehash: bool = False,
    take_over: bool = False,
    job: Callable[[ChunkJob], Receipt] = compile_chunk,
) -> BuildResult:
    """Build the dataset that a recipe describes into the folder `out`.

    The bytes depend on the input and the recipe alone: not on workers, executor or interruptions. `resume` continues a
    build that was stopped; the same build, finished, is left alone; another one there is refused. `shard=(i, n)` does
    every n-th chunk from the i-th on and stops; with `resume` and without `shard`, a build takes the shards of all
    shares. Relative names of input files start from `base` (default: the current folder). `on_start` is called once,
    when recipe and inputs are known to be good and work begins.

    `reuse` names the folder of an earlier dataset: chunks that it has are linked from there, and not made; the result
    has the same bytes as a full build. Files with the size and time of change that they had then are not read again,
    unless `rehash` says so. `job` does the work of a chunk: `compile_chunk`, or what calls it and does more.

    `out` may be a URL; `take_over` then says that the build whose lock is there is dead, and continues it.
    """
    started = time.monotonic()
    resume = resume or take_over
    checked = recipe_of(recipe)
    earlier = None if reuse is None else EarlierBuild(reuse)
    is_small = executor is None and workers is None and (input_bytes(checked, base) or SMALL + 1) <= SMALL
    with ExitStack() as stack:
        directory, driver = _opened(out, checked, shard, take_over, stack)
        chosen = stack.enter_context(executor or _own_executor(0 if is_small else workers, checked, directory))
        engine = Engine.FAST if executor is None and workers == 0 else Engine.REFERENCE
        pipeline = driver_pipeline(checked, engine, for_chunks=is_small)  # refuses unknown names before any write
        with storing(directory, "create the folder"):
            directory.mkdir(parents=True, exist_ok=True)
        with folder_lock(directory, shared=shard is not None):
            if driver is not None:
                driver.pull()
            what_it_holds(directory)  # refuses folders that are not ours
            planned = plan_sources(
                checked,
                work_folder(directory) / "spool",
                base,
                lookup=find_nothing if earlier is None or rehash else earlier.known,
                executor=chosen,
                share="" if driver is None or isinstance(chosen, LocalExecutor) else driver.spool_url(),
            )
            fingerprint = build_fingerprint(checked, planned.files, pipeline.fingerprints, planned.agents)
            build = PlannedBuild(
                directory, checked, pipeline, planned, fingerprint, None if driver is None else driver.build
            )
            outcome, manifest, counts = _run(build, chosen, job, shard, resume, on_progress, on_start, earlier, driver)
    seconds = time.monotonic() - started
    final = directory if driver is None else driver.build.url
    return BuildResult(outcome=outcome, directory=final, manifest=manifest, seconds=seconds, **counts)


def _opened(
    out: str | os.PathLike[str], recipe: Recipe, share: tuple[int, int] | None, take_over: bool, stack: ExitStack
) -> tuple[Path, BuildDriver | None]:
    """Return the folder of a build; for a URL that of its driver, which the stack takes away, and the driver."""
    url = address(out)
    if url is None:
        return local_path(out), None
    options = recipe.as_json()["store"]
    single_writer = options.pop("single_writer")
    task = "" if share is None else f"{share[0]}/{share[1]}"
    driver = stack.enter_context(driving(url, options, task=task, take_over=take_over, single_writer=single_writer))
    return driver.folder, driver


def _own_executor(workers: int | None, recipe: Recipe, directory: Path) -> LocalExecutor:
    """Return the local executor; what its workers need is loaded while this process is busy."""
    executor = LocalExecutor(workers)
    if not os.path.exists(directory / MANIFEST):  # else there is, most likely, nothing to do
        executor.prepare(load_pipeline, recipe_json(recipe))
    return executor


def driver_pipeline(recipe: Recipe, engine: Engine = Engine.REFERENCE, *, for_chunks: bool = False) -> Pipeline:
    """A recipe as this process needs it: with the tokenizer's reference engine, whose answers workers check theirs by.

    If there is no reference, with the fast engine, as they have it. `for_chunks`: this process compiles with it too.
    """
    text = recipe_json(recipe)
    try:
        return pipeline_of(text, engine, for_chunks=for_chunks)
    except NoReferenceError:
        return pipeline_of(text)


def _run(
    build: PlannedBuild,
    executor: Executor,
    job: Callable[[ChunkJob], Receipt],
    share: tuple[int, int] | None,
    resume: bool,
    on_progress: OnProgress | None,
    on_start: Callable[[], None] | None,
    earlier: EarlierBuild | None,
    driver: BuildDriver | None,
) -> tuple[Outcome, dict[str, Any], dict[str, int]]:
    """Return the build itself, or a share of it."""
    directory, recipe, work = build.directory, build.recipe, work_folder(build.directory).absolute()
    if share is None and forget_failed(directory, SPLITS, RECEIPTS, build.fingerprint):
        warnings.warn(f"{directory} holds an unfinished build with other options: starting over", stacklevel=3)
        if driver is not None:
            driver.forget()
    finished = read_manifest(directory)
    has_begun = refuse_other(directory, build.fingerprint, finished)
    if finished is not None:
        _check_finished(directory, recipe, finished)
        return Outcome.ALREADY_BUILT, finished, {}
    if has_begun and not resume and share is None:
        raise ConfigError(f"{directory} holds {UNFINISHED} of this recipe: continue with --resume (resume=True)")
    if share is None:  # other shares may be writing here now; what one of them left goes with the whole work folder
        sweep_orphans(directory)
    begin_work(work, {"fingerprint": build.fingerprint})  # no more: the worker of every chunk reads it
    if driver is not None:
        driver.put_state()
    jobs = build.jobs()
    mine = jobs if share is None else jobs[share[0] :: share[1]]
    if on_start is not None:
        on_start()
    with nullcontext() if driver is None else driver.state_noted(), failure_noted(work):
        fails = recipe.on_error is OnError.FAIL
        receipts, counts = _make(mine, executor, job, on_progress, earlier, fails=fails)
        if share is not None:
            return Outcome.SHARD_DONE, {}, counts
        if driver is None:
            return Outcome.BUILT, build.publish(jobs, receipts), counts
        shards = [job.place.shard_name(split) for job in jobs for split in receipts[job.number]["splits"]]
        driver.gather(receipts, [f"{shard}/{INDEX}" for shard in shards])
        manifest = build.publish(jobs, receipts)
        driver.publish(manifest["files"])
        return Outcome.BUILT, manifest, counts


def _make(
    jobs: Sequence[ChunkJob],
    executor: Executor,
    make: Callable[[ChunkJob], Receipt],
    on_progress: OnProgress | None,
    earlier: EarlierBuild | None,
    *,
    fails: bool,
) -> tuple[dict[int, Receipt], dict[str, int]]:
    """Find, reuse or build all shards and wait until they are on disk; return receipts and counts of chunks.

    `fails`: an unusable record ends the build, so a chunk with one is built again.
    """
    receipts = whole_receipts((job.place, job.fingerprint) for job in jobs)
    if fails:  # on records that an earlier run has quarantined
        receipts = {number: receipt for number, receipt in receipts.items() if receipt["rejected"] is None}
    with ThreadPoolExecutor(SYNC_THREADS, thread_name_prefix="chatmill-to-disk") as disk:
        synced = [disk.submit(job.place.sync, receipts[job.number]) for job in jobs if job.number in receipts]
        present = len(receipts)
        if earlier is not None:
            for job in jobs:
                if job.number not in receipts and (linked := earlier.take(job.place, job.fingerprint, fails=fails)):
                    receipts[job.number] = linked
        reused = len(receipts) - present
        todo = [job for job in jobs if job.number not in receipts]
        total, left = (sum(job.bytes for job in group) for group in (jobs, todo))
        state = BuildProgress(
            stage="compile",
            chunks_done=len(receipts),
            chunks=len(jobs),
            bytes_done=total - left,
            bytes=total,
        )
        tell = on_progress or (lambda state: None)
        tell(state)
        for index, receipt in executor.map(make, todo):
            job = todo[index]
            receipts[job.number] = receipt
            synced.append(disk.submit(job.place.sync, receipt))
            state = replace(
                state,
                chunks_done=len(receipts),
                bytes_done=state.bytes_done + job.bytes,
                tokens=state.tokens + sum(split["tokens"] for split in receipt["splits"].values()),
                records=state.records + stored_records_read(receipt["ledger"]),
            )
            tell(state)
        for future in synced:
            future.result()
    return receipts, {"chunks": len(jobs), "present": present, "reused": reused}


def _check_finished(directory: Path, recipe: Recipe, manifest: dict[str, Any]) -> None:
    """Check a build that is there already: its gates, and what is done about bad records, may have changed."""
    clean_up(directory)
    ledger = Ledger.from_json(manifest["ledger"])
    aside = ledger.total_records("quarantined")
    if aside and recipe.on_error is OnError.FAIL:
        raise ConfigError(
            f"{directory} holds this build, finished with --on-error quarantine: {aside:,} records were put aside. Use "
            "the same option, or build into another folder to see the first of them fail"
        )
    check_gates(recipe.gates, ledger, "The dataset is there already and was not touched.")
