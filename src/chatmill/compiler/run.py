"""The driver of a build: recipe to chunks, chunks to parts on an engine, parts to a dataset, and the manifest last."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from chatmill.compiler.chunk_job import RECEIPT, REJECTED, SPLITS, ChunkJob, compile_chunk, load_pipeline, pipeline_of
from chatmill.compiler.engines.executor import Executor, ExecutorEvent
from chatmill.compiler.engines.late import LateJobs
from chatmill.compiler.engines.local import LocalExecutor
from chatmill.compiler.faults import fault_point
from chatmill.compiler.gates import GateError, gates_of
from chatmill.compiler.inputs import CHUNK_BYTES
from chatmill.compiler.join import Join
from chatmill.compiler.ledger import Ledger, records_read
from chatmill.compiler.lock import folder_lock
from chatmill.compiler.manifest import build_fingerprint, make_manifest
from chatmill.compiler.pack_plan import pack_split
from chatmill.compiler.paths import resolve_paths
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.publish import (
    TEMPORARY,
    canonical_json,
    remove_at_once,
    sha256_file,
    storing,
    sweep_orphans,
    write_atomic,
)
from chatmill.compiler.recipe import Recipe, recipe_of
from chatmill.compiler.sources import SourcePlan, plan_sources
from chatmill.compiler.work import claim_work, move_path, remove_work, work_folder
from chatmill.errors import ChatmillError, ConfigError, DataError, FormatError, NoReferenceError
from chatmill.render.trust import TemplateTrust, allowed_template
from chatmill.store.documents import WORK
from chatmill.store.durable import remove_path, sync_folder
from chatmill.store.receipts import MANIFEST, read_manifest, receipt_bytes
from chatmill.tokenizer.backends import Engine

STATE = "state.json"
JOINED = "joined"


class Outcome(StrEnum):
    """How a build ended."""

    BUILT = "built"
    ALREADY_BUILT = "already_built"
    """The same build stands there, finished; nothing was done."""
    SHARD_DONE = "shard_done"
    """This process's share of the chunks is done; `merge_build` joins them when all are."""


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


def run_build(
    recipe: Recipe | dict[str, Any] | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    workers: int | None = None,
    executor: Executor | None = None,
    resume: bool = False,
    shard: tuple[int, int] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    on_progress: OnProgress | None = None,
) -> BuildResult:
    """Build the dataset that a recipe describes into the folder `out`.

    The bytes depend on the input and the recipe alone: not on workers, engine, chunk size or interruptions. `resume`
    goes on with a build that was stopped; the same build, finished, is left alone; another one there is refused.
    `shard=(i, n)` does every n-th chunk from the i-th on and stops; `merge_build` joins the chunks of all shares.
    """
    started = time.monotonic()
    checked = recipe_of(recipe)
    directory = Path(out)
    own = _own_engine(workers, checked, directory, chunk_bytes)
    with nullcontext(executor) if executor is not None else own as engine:
        pipeline = _driver_pipeline(checked)  # a name that is not known is told before anything is made
        with storing(directory, "create the folder"):
            directory.mkdir(parents=True, exist_ok=True)
        with folder_lock(directory, shared=shard is not None):
            _refuse_foreign(directory)
            outcome, manifest = _build(checked, pipeline, directory, engine, resume, shard, chunk_bytes, on_progress)
    return BuildResult(outcome=outcome, directory=directory, manifest=manifest, seconds=time.monotonic() - started)


@contextmanager
def _own_engine(workers: int | None, recipe: Recipe, directory: Path, chunk_bytes: int) -> Iterator[LocalExecutor]:
    """The local engine; its workers, as many as will be needed, load the fast engine while this process is busy."""
    engine = LocalExecutor(workers)
    try:
        if not os.path.exists(directory / MANIFEST):  # else there is, most likely, nothing to do
            engine.prepare(load_pipeline, _recipe_text(recipe), most=_chunks_about(recipe, chunk_bytes))
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


def _chunks_about(recipe: Recipe, chunk_bytes: int) -> int:
    """Chunks of the input, as far as the sizes of the files tell; 0 where they cannot be found, which is told later."""
    try:
        files = [path for source in recipe.sources for path in resolve_paths(source.patterns)]
        return sum(-(-path.stat().st_size // max(chunk_bytes, 1)) for path in files)
    except (ChatmillError, OSError):
        return 0


def _build(
    recipe: Recipe,
    pipeline: Pipeline,
    directory: Path,
    engine: Executor,
    resume: bool,
    shard: tuple[int, int] | None,
    chunk_bytes: int,
    on_progress: OnProgress | None,
) -> tuple[Outcome, dict[str, Any]]:
    """The build itself, in a folder that is held by this process."""
    work = claim_work(directory)
    chunk_bytes = _chunk_bytes(work, chunk_bytes)
    planned = plan_sources(recipe, work / "spool", engine, chunk_bytes=chunk_bytes)
    fingerprint = build_fingerprint(recipe, planned.files, pipeline.fingerprints)
    finished = _claim(directory, fingerprint, resume=resume or shard is not None)
    if finished is not None:
        return _already_built(directory, recipe, finished), finished
    if shard is None:  # other shares may be writing here now; what one of them left goes with the whole work folder
        sweep_orphans(directory)
    state = {"fingerprint": fingerprint, "recipe": recipe.as_json(), "chunk_bytes": chunk_bytes}
    with storing(work, "create the folder"):
        work.mkdir(exist_ok=True)
    write_atomic(work / STATE, canonical_json(state), step="state")
    jobs = _jobs(recipe, pipeline, planned, work)
    if shard is not None:
        _run_jobs(jobs[shard[0] :: shard[1]], engine, on_progress)
        return Outcome.SHARD_DONE, {}
    with _open_join(directory, recipe, jobs) as join:
        _run_jobs(jobs, engine, on_progress, join)
        planned.check_unchanged()
        return Outcome.BUILT, _finish(directory, recipe, pipeline, planned, fingerprint, join)


def _open_join(directory: Path, recipe: Recipe, jobs: Sequence[ChunkJob]) -> Join:
    """The join of the work folder, with what an earlier one, killed before its manifest, had moved out of there."""
    with storing(directory, "write the dataset in"):
        _take_back(directory)
        join = Join(recipe, work_folder(directory) / JOINED)
        try:
            for job, receipt in zip(jobs, join.receipts(), strict=False):
                _check_chunk(job, receipt)
        except BaseException:
            join.close()
            raise
    return join


def _take_back(directory: Path) -> None:
    """Move what has no manifest back to where it was joined."""
    joined = work_folder(directory) / JOINED
    for name in (*SPLITS, REJECTED):
        if (directory / name).is_symlink():
            raise ConfigError(f"{directory / name} is a link, and no build made it: remove it")
        if (directory / name).exists():
            joined.mkdir(exist_ok=True)
            remove_path(joined / name)
            move_path(directory / name, joined / name)


def merge_build(
    out: str | os.PathLike[str],
    *,
    template: str | os.PathLike[str] | None = None,
    trust_template: str | None = None,
) -> BuildResult:
    """Join the chunks that the shares of a build (`shard=(i, n)`) have made, once all are there.

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
        return _already_built(directory, recipe_of(finished["recipe"]), finished), finished
    work = claim_work(directory)
    try:
        state = json.loads((work / STATE).read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{directory} holds no build to merge: run its shares first (--shard i/N)") from None
    recipe = recipe_of(state["recipe"])
    planned = plan_sources(recipe, work / "spool", chunk_bytes=state["chunk_bytes"])
    named = allowed_template(recipe.template, trust, str(directory))
    pipeline = _driver_pipeline(recipe.model_copy(update={"template": named}))
    fingerprint = build_fingerprint(recipe, planned.files, pipeline.fingerprints)
    if fingerprint != state["fingerprint"]:
        raise ConfigError(f"{directory}: the input or the package has changed since the shares were built")
    jobs = _jobs(recipe, pipeline, planned, work)
    with _open_join(directory, recipe, jobs) as join, storing(directory, "write the dataset in"):
        left = _not_joined(jobs, join)
        missing = [job for job in left if not _is_whole(job)]
        if missing:
            raise ConfigError(
                f"{directory}: {len(missing)} of {len(jobs)} chunks are not built yet; first: {missing[0].label}"
            )
        sweep_orphans(directory)
        for job in left:
            join.add(job.number, job.folder, _receipt(job))
        return Outcome.BUILT, _finish(directory, recipe, pipeline, planned, fingerprint, join)


def _not_joined(jobs: Sequence[ChunkJob], join: Join | None) -> Sequence[ChunkJob]:
    """The jobs whose parts are to be joined; one that was joined may have been killed before its part was removed."""
    joined = join.joined if join is not None else 0
    for job in jobs[:joined]:
        if job.folder.exists():
            remove_at_once(job.folder)
    return jobs[joined:]


def _already_built(directory: Path, recipe: Recipe, manifest: dict[str, Any]) -> Outcome:
    """What to say of a build that stands there finished: its gates may be others than before."""
    _remove_work(directory)
    _check_gates(recipe, Ledger.from_json(manifest["ledger"]), "The dataset is there already and was not touched.")
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


def _chunk_bytes(work: Path, wanted: int) -> int:
    """The chunk size of the unfinished build that is there, since its parts were cut by it; else the wanted one."""
    try:
        return int(json.loads((work / STATE).read_bytes())["chunk_bytes"])
    except FileNotFoundError:
        return wanted


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


def _jobs(recipe: Recipe, pipeline: Pipeline, planned: SourcePlan, work: Path) -> list[ChunkJob]:
    text = _recipe_text(recipe)
    return [
        ChunkJob(
            number=number,
            chunk=work_item.chunk,
            weight=work_item.weight,
            max_records=work_item.max_records,
            recipe=text,
            parts=str((work / "parts").absolute()),
            answers=pipeline.answers,
        )
        for number, work_item in enumerate(planned.work)
    ]


def _run_jobs(
    jobs: Sequence[ChunkJob], executor: Executor, on_progress: OnProgress | None, join: Join | None = None
) -> None:
    """Run the chunks that have no part yet; all parts are handed to the join, if there is one, as they get ready."""
    left = _not_joined(jobs, join)
    todo = [job for job in left if not _is_whole(job)]
    unmade = {job.number for job in todo}
    total_bytes = sum(job.chunk.bytes for job in jobs)
    done = len(jobs) - len(todo)
    counts = {"bytes": total_bytes - sum(j.chunk.bytes for j in todo), "tokens": 0, "records": 0}
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

    def hand_over(job: ChunkJob, receipt: dict[str, Any]) -> None:
        if join is not None:
            with storing(job.folder.parent.parent, "write the dataset in"):
                join.add(job.number, job.folder, receipt)

    def on_done(index: int, receipt: dict[str, Any]) -> None:
        nonlocal done
        hand_over(todo[index], receipt)
        done += 1
        late.forget(index)
        counts["bytes"] += todo[index].chunk.bytes
        counts["tokens"] += sum(split["tokens"] for split in receipt["splits"].values())
        counts["records"] += records_read(receipt["ledger"])
        tell()

    def on_event(event: ExecutorEvent) -> None:
        nonlocal retries
        retries += event.kind == "job_retried"
        late.hear(event)

    tell()
    for job in left:
        if job.number not in unmade:
            hand_over(job, _receipt(job))
    executor.run(compile_chunk, todo, on_done, on_event)


def _is_whole(job: ChunkJob) -> bool:
    """Whether the part of a chunk is published and its files are those of the receipt."""
    if not job.folder.exists():
        return False
    try:
        receipt = json.loads((job.folder / RECEIPT).read_bytes())
    except (OSError, ValueError):  # the machine went down before it was on the disk
        receipt = None
    if receipt is not None:
        _check_chunk(job, receipt)
    if receipt is None or not all(_is_file(job.folder / name, record) for name, record in receipt["files"].items()):
        remove_path(job.folder)
        return False
    return True


def _is_file(path: Path, record: dict[str, Any]) -> bool:
    """Whether a file is there with the bytes of its record."""
    return path.is_file() and path.stat().st_size == record["bytes"] and sha256_file(path) == record["sha256"]


def _receipt(job: ChunkJob) -> dict[str, Any]:
    """The receipt of a part that is there."""
    try:
        receipt: dict[str, Any] = json.loads((job.folder / RECEIPT).read_bytes())
    except (OSError, ValueError) as error:
        raise FormatError(f"{job.folder / RECEIPT} cannot be read: {error}; delete {job.folder} and resume") from None
    _check_chunk(job, receipt)
    return receipt


def _check_chunk(job: ChunkJob, receipt: dict[str, Any]) -> None:
    """Raise when the part of a receipt was made of another chunk than that of the job."""
    if receipt["chunk"] != job.identity:
        raise FormatError(
            f"{job.folder} was made of {receipt['chunk']}, but in this build it is {job.identity}: shares of one build "
            f"need the same --chunk-bytes. Delete {job.folder.parent.parent} and build again"
        )


def _finish(
    directory: Path,
    recipe: Recipe,
    pipeline: Pipeline,
    planned: SourcePlan,
    fingerprint: str,
    join: Join,
) -> dict[str, Any]:
    """Check ledger and gates, end the join, move everything to its place, and write the manifest."""
    ledger = join.ledger
    for source, count in planned.capped.items():
        ledger.notes[source, "records_beyond_max_records"] += count
    _check_gates(
        recipe, ledger, "Change the gate or the recipe; with a changed gate alone, --resume goes on from here."
    )
    tokenizer = pipeline.template.tokenizer
    pad_id = next(i for i in (tokenizer.pad_id, tokenizer.eos_id, 0) if i is not None)
    with storing(directory, "write the dataset in"):
        splits = join.finish()
        if not splits:
            raise DataError("no record of the input could be built: there is no dataset to write (see the ledger)")
        if recipe.pack is not None:
            for name, held in splits.items():
                held |= pack_split(work_folder(directory) / JOINED / name, recipe.pack)
        ledger.padding += sum(split.get("padding", 0) for split in splits.values())
        stored = sum(split["tokens"] + split.get("padding", 0) for split in splits.values())
        problems = ledger.imbalance(stored)
        if problems:
            raise FormatError("the ledger does not balance: " + "; ".join(problems))
        fault_point("before_publish")
        try:
            _move(directory, splits)
            manifest = make_manifest(directory, recipe, planned, pipeline, fingerprint, splits, ledger, pad_id)
            fault_point("before_manifest")
            write_atomic(directory / MANIFEST, receipt_bytes(manifest), step="manifest_file")
        except BaseException:
            if not (directory / MANIFEST).exists():
                _take_back(directory)
            raise
        fault_point("after_manifest")
        remove_work(directory)
    return manifest


def _check_gates(recipe: Recipe, ledger: Ledger, hint: str) -> None:
    failed = [gate for gate in gates_of(recipe.gates, ledger) if not gate.passed]
    if failed:
        raise GateError(failed, hint)


def _move(directory: Path, splits: dict[str, Any]) -> None:
    joined = work_folder(directory) / JOINED
    for split in splits:
        fault_point("before_split_move")
        move_path(joined / split, directory / split)
        fault_point("after_split_move")
    if (joined / REJECTED).exists():
        fault_point("before_rejected_rename")
        move_path(joined / REJECTED, directory / REJECTED)
        fault_point("after_rejected_rename")
    sync_folder(directory)
