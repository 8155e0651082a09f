"""The driver of a build: recipe to chunks, chunks to shards on an engine, shards to a dataset, the manifest last."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from chatmill.compiler.chunk_job import (
    STATE,
    ChunkJob,
    compile_chunk,
    load_pipeline,
    pipeline_of,
)
from chatmill.compiler.engines.executor import Executor, ExecutorEvent
from chatmill.compiler.engines.late import LateJobs
from chatmill.compiler.engines.local import LocalExecutor, available_cores
from chatmill.compiler.faults import fault_point
from chatmill.compiler.finish import Finish, check_gates, take_back
from chatmill.compiler.ledger import Ledger, records_read
from chatmill.compiler.lock import folder_lock
from chatmill.compiler.manifest import build_fingerprint
from chatmill.compiler.paths import resolve_paths
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.publish import (
    TEMPORARY,
    canonical_json,
    storing,
    sweep_orphans,
    write_atomic,
)
from chatmill.compiler.recipe import Recipe, recipe_of, recorded_recipe
from chatmill.compiler.shards import DiskSync, whole_receipt
from chatmill.compiler.sources import SourcePlan, plan_sources
from chatmill.compiler.work import claim_work, remove_work, work_folder
from chatmill.errors import ChatmillError, ConfigError, NoReferenceError
from chatmill.render.trust import TemplateTrust, allowed_template
from chatmill.store.documents import WORK
from chatmill.store.receipts import MANIFEST, read_manifest
from chatmill.tokenizer.backends import Engine


class Outcome(StrEnum):
    """How a build ended."""

    BUILT = "built"
    ALREADY_BUILT = "already_built"
    """The same build stands there, finished; nothing was done."""
    SHARD_DONE = "shard_done"
    """This process's share of the chunks is done; `merge_build` makes the dataset when all are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """What a build gives back."""

    outcome: Outcome
    directory: Path
    manifest: dict[str, Any]
    """Empty after a share of a build."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildProgress:
    """What a display may show; given to `on_progress` after every chunk, and when one is late."""

    stage: str
    chunks_done: int
    chunks: int
    bytes_done: int
    bytes: int
    tokens: int
    """Tokens written by the chunks of this run."""
    records: int
    retries: int
    late: tuple[str, ...] = ()
    """Chunks whose workers have not answered for long, with the process ids."""


OnProgress = Callable[[BuildProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Callbacks of somebody who watches a build."""

    on_progress: OnProgress | None
    on_start: Callable[[], None] | None


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
    on_start: Callable[[], None] | None = None,
) -> BuildResult:
    """Build the dataset that a recipe describes into the folder `out`.

    The bytes depend on the input and the recipe alone: not on workers, engine or interruptions. `resume` goes on with a
    build that was stopped; the same build, finished, is left alone; another one there is refused. `shard=(i, n)` does
    every n-th chunk from the i-th on and stops; `merge_build` puts the shards of all shares together. `shard_bytes`
    replaces that of the recipe. `on_start` is called once, when recipe and inputs are known to be good and work begins.
    """
    started = time.monotonic()
    checked = recipe_of(recipe)
    if shard_bytes is not None:
        checked = recipe_of({**checked.as_json(), "shard_bytes": shard_bytes})
    directory = Path(out)
    own = _own_engine(workers, checked, directory)
    with nullcontext(executor) if executor is not None else own as engine:
        pipeline = _driver_pipeline(checked)  # a name that is not known is told before anything is made
        with storing(directory, "create the folder"):
            directory.mkdir(parents=True, exist_ok=True)
        with folder_lock(directory, shared=shard is not None):
            _refuse_foreign(directory)
            watch = Watch(on_progress=on_progress, on_start=on_start)
            outcome, manifest = _build(checked, pipeline, directory, engine, resume, shard, watch)
    return BuildResult(outcome=outcome, directory=directory, manifest=manifest, seconds=time.monotonic() - started)


@contextmanager
def _own_engine(workers: int | None, recipe: Recipe, directory: Path) -> Iterator[LocalExecutor]:
    """The local engine; what its workers need is loaded while this process is busy."""
    engine = LocalExecutor(workers, keep=True)
    try:
        if not os.path.exists(directory / MANIFEST):  # else there is, most likely, nothing to do
            engine.prepare(load_pipeline, _recipe_text(recipe), most=_chunks_about(recipe))
        yield engine
    finally:
        engine.close()


def _driver_pipeline(recipe: Recipe) -> Pipeline:
    """A recipe as this process needs it: with the tokenizer's reference engine, whose answers workers check theirs by.

    Where there is no reference, with the fast engine, as they have it.
    """
    text = _recipe_text(recipe)
    try:
        return pipeline_of(text, Engine.REFERENCE)
    except NoReferenceError:
        return pipeline_of(text)


def _chunks_about(recipe: Recipe) -> int:
    """Chunks of the input, as far as the sizes of the files tell; 0 where they cannot be found: reported later."""
    try:
        files = [path for source in recipe.sources for path in resolve_paths(source.patterns)]
        return -(-sum(path.stat().st_size for path in files) // recipe.shard_bytes)
    except (ChatmillError, OSError):
        return 0


def _build(
    recipe: Recipe,
    pipeline: Pipeline,
    directory: Path,
    engine: Executor,
    resume: bool,
    shard: tuple[int, int] | None,
    watch: Watch,
) -> tuple[Outcome, dict[str, Any]]:
    """The build itself, in a folder that is held by this process."""
    work = claim_work(directory)
    planned = plan_sources(recipe, work / "spool", engine)
    fingerprint = build_fingerprint(recipe, planned.files, pipeline.fingerprints)
    finished = _claim(directory, fingerprint, resume=resume or shard is not None)
    if finished is not None:
        return _already_built(directory, recipe, finished), finished
    if shard is None:  # other shares may be writing here now; what one of them left goes with the whole work folder
        sweep_orphans(directory)
    with storing(work, "create the folder"):
        work.mkdir(exist_ok=True)
    write_atomic(work / STATE, canonical_json({"fingerprint": fingerprint, "recipe": recipe.as_json()}), step="state")
    jobs = _jobs(recipe, pipeline, planned, work, fingerprint)
    if watch.on_start is not None:
        watch.on_start()
    with DiskSync() as disk:
        if shard is not None:
            _run_jobs(jobs[shard[0] :: shard[1]], engine, watch.on_progress, disk)
            disk.wait()
            return Outcome.SHARD_DONE, {}
        with storing(directory, "write the dataset in"):
            take_back(directory)
        receipts = _run_jobs(jobs, engine, watch.on_progress, disk)
        planned.check_unchanged()
        build = Finish(directory, recipe, pipeline, planned, fingerprint)
        return Outcome.BUILT, build.publish(jobs, receipts, engine, disk)


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
    work = claim_work(directory)
    try:
        state = json.loads((work / STATE).read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{directory} holds no build to merge: run its shares first (--shard i/N)") from None
    recipe = recipe_of(state["recipe"])
    planned = plan_sources(recipe, work / "spool")
    named = allowed_template(recipe.template, trust, str(directory))
    pipeline = _driver_pipeline(recipe.model_copy(update={"template": named}))
    fingerprint = build_fingerprint(recipe, planned.files, pipeline.fingerprints)
    if fingerprint != state["fingerprint"]:
        raise ConfigError(f"{directory}: the input or the package has changed since the shares were built")
    jobs = _jobs(recipe, pipeline, planned, work, fingerprint)
    with DiskSync() as disk:
        with storing(directory, "write the dataset in"):
            take_back(directory)
            receipts = _whole_receipts(jobs)
            missing = [job for job in jobs if job.number not in receipts]
            if missing:
                raise ConfigError(
                    f"{directory}: {len(missing)} of {len(jobs)} chunks are not built yet; first: {missing[0].label}"
                )
            sweep_orphans(directory)
        for job in jobs:
            disk.add(job.folder, receipts[job.number])
        build = Finish(directory, recipe, pipeline, planned, fingerprint)
        return Outcome.BUILT, build.publish(jobs, receipts, LocalExecutor(0), disk)


def _already_built(directory: Path, recipe: Recipe, manifest: dict[str, Any]) -> Outcome:
    """What to say of a build that stands there finished: its gates may be others than before."""
    _remove_work(directory)
    check_gates(recipe, Ledger.from_json(manifest["ledger"]), "The dataset is there already and was not touched.")
    return Outcome.ALREADY_BUILT


def _remove_work(directory: Path) -> None:
    """Remove what is no part of a finished dataset: left by a kill at the very end, or by looking at packed input."""
    remove_work(directory)
    sweep_orphans(directory)


def _refuse_foreign(directory: Path) -> None:
    """A folder that holds something, but neither a dataset nor an unfinished build, is not ours to write into."""
    with storing(directory, "read the folder"):
        names = [path.name for path in directory.iterdir()]
    others = [name for name in names if name != WORK and not TEMPORARY.fullmatch(name)]
    if others and MANIFEST not in others and not (work_folder(directory) / STATE).exists():
        raise ConfigError(
            f"{directory} is not empty ({', '.join(sorted(others)[:5])}) and holds no build; choose an empty folder"
        )


def _recipe_text(recipe: Recipe) -> str:
    return canonical_json(recipe.as_json()).decode()


def _claim(directory: Path, fingerprint: str, *, resume: bool) -> dict[str, Any] | None:
    """Whether this folder may be built into; the manifest, when the same build is finished there."""
    manifest = read_manifest(directory)
    if manifest is not None:
        if manifest["fingerprint"] != fingerprint:
            _remove_work(directory)
            raise ConfigError(
                f"{directory} holds another dataset (fingerprint {manifest['fingerprint'][:12]}, this build is "
                f"{fingerprint[:12]}): another recipe, input, tokenizer or package version. Choose another folder."
            )
        return manifest
    state = work_folder(directory) / STATE
    if state.exists():
        found = json.loads(state.read_bytes())["fingerprint"]
        if found != fingerprint:
            raise ConfigError(
                f"{directory} holds an unfinished build of something else (fingerprint {found[:12]}, this build is "
                f"{fingerprint[:12]}). Choose another folder, or delete {state.parent}."
            )
        if not resume:
            raise ConfigError(
                f"{directory} holds an unfinished build of this recipe: go on with --resume (resume=True)"
            )
    return None


def _jobs(recipe: Recipe, pipeline: Pipeline, planned: SourcePlan, work: Path, fingerprint: str) -> list[ChunkJob]:
    text, home = _recipe_text(recipe), str(work.absolute())
    return [
        ChunkJob(
            number=number, pieces=pieces, recipe=text, work=home, fingerprint=fingerprint, answers=pipeline.answers
        )
        for number, pieces in enumerate(planned.chunks)
    ]


def _run_jobs(
    jobs: Sequence[ChunkJob], executor: Executor, on_progress: OnProgress | None, disk: DiskSync
) -> dict[int, dict[str, Any]]:
    """Make the shards that are not there yet; the receipts of all, by the numbers of their chunks."""
    receipts = _whole_receipts(jobs)
    todo = [job for job in jobs if job.number not in receipts]
    total_bytes = sum(job.bytes for job in jobs)
    done = len(jobs) - len(todo)
    counts = {"bytes": total_bytes - sum(job.bytes for job in todo), "tokens": 0, "records": 0}
    retries = 0

    def tell() -> None:
        if on_progress is not None:
            on_progress(
                BuildProgress(
                    stage="compile",
                    chunks_done=done,
                    chunks=len(jobs),
                    bytes_done=counts["bytes"],
                    bytes=total_bytes,
                    tokens=counts["tokens"],
                    records=counts["records"],
                    retries=retries,
                    late=late.texts,
                )
            )

    late = LateJobs(tell)

    def on_done(index: int, receipt: dict[str, Any]) -> None:
        nonlocal done
        job = todo[index]
        receipts[job.number] = receipt
        disk.add(job.folder, receipt)
        fault_point("after_chunk")
        done += 1
        late.forget(index)
        counts["bytes"] += job.bytes
        counts["tokens"] += sum(split["tokens"] for split in receipt["splits"].values())
        counts["records"] += records_read(receipt["ledger"])
        tell()

    def on_event(event: ExecutorEvent) -> None:
        nonlocal retries
        retries += event.kind == "job_retried"
        late.hear(event)

    tell()
    for job in jobs:
        if job.number in receipts:
            disk.add(job.folder, receipts[job.number])
    executor.run(compile_chunk, todo, on_done, on_event)
    return receipts


def _whole_receipts(jobs: Sequence[ChunkJob]) -> dict[int, dict[str, Any]]:
    """The receipts of the shards that are there and whole; those that a crash has damaged are removed."""
    made = set(os.listdir(jobs[0].folder.parent)) if jobs and jobs[0].folder.parent.is_dir() else set()
    there = [job for job in jobs if job.folder.name in made]
    with ThreadPoolExecutor(available_cores()) as threads:  # hashing needs no interpreter
        found = threads.map(whole_receipt, [job.folder for job in there])
        return {job.number: receipt for job, receipt in zip(there, found, strict=True) if receipt is not None}
