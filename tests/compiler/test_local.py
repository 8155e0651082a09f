"""The local engine with real processes: results, killed workers, errors, and no process left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chatmill.compiler.engines import local
from chatmill.compiler.engines.jobs import JobError, JobKilledWorkers, RemoteTraceback, WorkerStartError
from chatmill.compiler.engines.local import LocalExecutor, available_cores
from chatmill.errors import ChatmillError, ConfigError, DataError, RecordError, UnknownNameError
from tests.compiler import executor_jobs as jobs
from tests.compiler.executor_jobs import Chunk


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def child_pids() -> set[int]:
    listed = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in listed if alive(int(pid))}


def pipes() -> set[tuple[str, str]]:
    """The open descriptors of the kinds that the engine makes: pipes, sockets and handles of processes."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder itself, which was open while it was listed
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return {(number, what) for number, what in found if what.startswith(("pipe:", "socket:", "anon_inode:[pidfd]"))}


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    before, descriptors = child_pids(), pipes()
    yield
    assert child_pids() <= before
    assert pipes() <= descriptors, "a descriptor was left open"


@pytest.fixture(scope="module", autouse=True)
def _nothing_of_others() -> None:
    gc.collect()  # what other modules left must not be closed while these tests count


def run(workers: int, job: Callable[[Any], Any], specs: list[Any]) -> dict[int, Any]:
    found = list(LocalExecutor(workers).map(job, specs))
    assert len(dict(found)) == len(found), "a job was reported twice"
    return dict(found)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_every_job_is_reported_once_with_its_result(workers: int) -> None:
    found = run(workers, jobs.square, list(range(20)))
    assert {index: result["square"] for index, result in found.items()} == {n: n * n for n in range(20)}
    pids = {result["pid"] for result in found.values()}
    assert (pids == {os.getpid()}) == (workers == 0)
    assert len(pids) <= max(workers, 1)


def test_work_is_shared_and_workers_keep_what_they_have_loaded(tmp_path: Path) -> None:
    found = run(2, jobs.square_in_company, [(number, str(tmp_path)) for number in range(12)])
    per_worker: Counter[int] = Counter(result["pid"] for result in found.values())
    assert len(per_worker) == 2
    most = {pid: max(r["calls"] for r in found.values() if r["pid"] == pid) for pid in per_worker}
    assert most == dict(per_worker), "the list in the module did not live as long as its worker"


def test_no_more_workers_than_jobs_and_none_without_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(run(8, jobs.count_siblings, [5, 6]).values()) <= 2
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **options: pytest.fail("a process was started"))
    assert run(8, jobs.square, []) == {}


def test_workers_are_as_many_as_the_cores_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(6 if process == 0 else 64), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for quota, cores in (("max 100000", 6), ("250000 100000", 2), ("50000 100000", 1), ("900000 100000", 6)):
        monkeypatch.setattr(local, "Path", lambda name, quota=quota: SimpleNamespace(read_text=lambda: quota))
        assert available_cores() == cores
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS, which has no quotas either
    monkeypatch.setattr(local, "Path", lambda name: Path("/nowhere"))
    assert available_cores() == 64


@pytest.mark.parametrize(("workers", "load"), [(1, None), (2, None), (2, jobs.square), (2, jobs.fail)])
def test_a_killed_worker_is_replaced_and_its_job_done_again(tmp_path: Path, workers: int, load: Any) -> None:
    """What was loaded, and whether that failed, changes nothing."""
    with LocalExecutor(workers) as engine:
        if load is not None:
            engine.prepare(load, 1 if load is jobs.square else "data")
        found = dict(engine.map(jobs.kill_once_if_odd, [Chunk(number=n, folder=str(tmp_path)) for n in range(6)]))
    assert {i: r["number"] for i, r in found.items()} == {n: n for n in range(6)}
    for n in range(6):
        tries = (tmp_path / f"tries_{n}").read_text().split()
        assert len(tries) == 1 + n % 2
        assert len(set(tries)) == len(tries), "the second try ran in the worker that was killed"


@pytest.mark.parametrize("killer", [signal.SIGKILL, signal.SIGSEGV])
def test_a_job_that_always_kills_is_named(tmp_path: Path, killer: int) -> None:
    chunks = [Chunk(number=n, folder=str(tmp_path), signal=killer) for n in range(8)]
    words = r"chunk 3 of sample.jsonl: this job killed its worker 3 times"
    with pytest.raises(JobKilledWorkers, match=words) as caught:
        run(2, jobs.kill_always_if_three, chunks)
    assert signal.Signals(killer).name in str(caught.value)
    assert "smaller chunks" in str(caught.value)
    assert isinstance(caught.value, ChatmillError)
    assert len((tmp_path / "tries_3").read_text().split()) == 3
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(JobKilledWorkers, match="exit status 7"):
        run(1, jobs.exit_quietly, [Chunk(number=0)])


def test_the_last_try_of_a_job_runs_alone(tmp_path: Path) -> None:
    found = run(3, jobs.overlap_on_last_try, [Chunk(number=n, folder=str(tmp_path)) for n in range(24)])
    times = [(r["begin"], r["end"]) for r in found.values()]
    begin, end = found[7]["begin"], found[7]["end"]
    assert len(times) == 24
    assert sum(b < end and begin < e for b, e in times) == 1, "another job ran at the same time"
    others = [span for span in times if span != (begin, end)]
    assert any(b < other[1] and other[0] < e and (b, e) != other for b, e in others for other in others)
    assert any(b > end for b, _ in others), "the run goes on after it"


def test_an_idle_worker_killed_from_outside_is_replaced(tmp_path: Path) -> None:
    with LocalExecutor(1) as engine:
        ((_, first),) = engine.map(jobs.square, [1])
        os.kill(first["pid"], signal.SIGKILL)
        jobs.wait_for(lambda: not alive(first["pid"]))
        ((_, second),) = engine.map(jobs.square, [2])
    assert second["square"] == 4
    assert second["pid"] != first["pid"]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "expected", "text"),
    [
        ("data", DataError, "bad value 5"),
        ("record", RecordError, "a.jsonl:3, record 'r1', field messages: no messages"),
        ("unknown", UnknownNameError, "Did you mean 'chatml'?"),
        ("odd", jobs.OddError, "1 and two"),
        ("file", FileNotFoundError, "/no/such/file"),
    ],
)
def test_an_error_of_a_job_arrives_as_it_was(workers: int, kind: str, expected: type[Exception], text: str) -> None:
    with pytest.raises(expected) as caught:
        run(workers, jobs.fail, [kind])
    assert type(caught.value) is expected
    assert text in str(caught.value)
    assert f"in the job: '{kind}'" in caught.value.__notes__
    if workers:
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        assert "executor_jobs.py" in str(caught.value.__cause__)
    about = {"record": ("code", "empty"), "odd": ("second", "two"), "file": ("errno", 2)}
    if kind in about:
        name, value = about[kind]
        assert getattr(caught.value, name) == value


def test_an_error_that_cannot_travel_arrives_in_words_and_any_error_ends_the_run_at_once() -> None:
    with pytest.raises(JobError, match=r"'stubborn': the job failed: .*StubbornError: holds a lock"):
        run(1, jobs.fail, ["stubborn"])
    with pytest.raises(JobError, match="SystemExit: 4"):
        run(1, jobs.fail, ["exit"])
    with pytest.raises((pickle.PicklingError, AttributeError, JobError), match=r"lambda|pickle"):
        run(1, jobs.unpicklable_receipt, [4])
    begin = time.monotonic()
    with pytest.raises(DataError, match="number 2 is bad"):
        run(3, jobs.fail_on_two, list(range(50)))
    assert time.monotonic() - begin < 800, "the sleeping jobs were waited for"


def test_a_caller_that_stops_ends_the_run(tmp_path: Path) -> None:
    """The fixture of this module sees whether anything is left."""
    results = LocalExecutor(2).map(jobs.square_when_told, [(1, tmp_path), *((n, tmp_path / "never") for n in range(9))])
    next(results)
    results.close()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="workers is -1"):
        LocalExecutor(-1)


def test_workers_see_our_path_one_thread_and_a_quiet_output(capfd: pytest.CaptureFixture[str]) -> None:
    result = run(1, jobs.say_something, [1])[0]
    assert result["path"] == sys.path
    assert result["threads"] == os.environ.get("OMP_NUM_THREADS", "1")
    assert result["child"] == "1\n"
    assert capfd.readouterr() == ("", "a job speaks\n")


def test_workers_that_cannot_start_or_lose_their_helper_are_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WorkerStartError, match=r"starts the workers killed by signal 9 \(SIGKILL"):
        run(1, jobs.kill_the_parent, [1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(local, "BOOT", "raise SystemExit('no chatmill here')")
        with pytest.raises(WorkerStartError, match=r"starts the workers ended by itself with exit status 1; .*resume"):
            run(2, jobs.square, [1, 2, 3])
        assert "no chatmill here" in capfd.readouterr().err
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(WorkerStartError, match=r"cannot be started.*raise the limit on processes or open files"):
        run(2, jobs.square, [1, 2, 3])


@pytest.mark.parametrize("load", [jobs.load_libraries, jobs.start_thread])
def test_what_is_loaded_is_loaded_once_and_kept_between_runs(tmp_path: Path, load: Callable[[Path], None]) -> None:
    """No thread of the libraries of a build is in the way of a fork (pyarrow has one on x86-64).

    A process that has threads is not forked.
    """
    before, found = child_pids(), list[set[int]]()
    with LocalExecutor(2) as engine:
        engine.prepare(load, tmp_path / "loaded")
        for number in range(3):
            found.append(set(dict(engine.map(jobs.note_pid, [tmp_path / f"run{number}"] * 4)).values()))
        assert len(set.union(*found)) <= 2
        (helper,) = (tmp_path / "loaded").read_text().split()
        assert int(helper) not in set.union(*found)
        with pytest.raises(DataError):
            list(engine.map(jobs.fail, ["data"]))
        assert child_pids() == before, "an error ends them"
        assert len(dict(engine.map(jobs.note_pid, [tmp_path / "again"] * 4))) == 4
    assert child_pids() == before


def test_nobody_waits_for_a_helper_that_loads_for_nothing() -> None:
    started = time.monotonic()
    with LocalExecutor(1) as engine:
        engine.prepare(time.sleep, 900)
    assert time.monotonic() - started < 800


DRIVER = """
import sys
from chatmill.compiler.engines.local import LocalExecutor
from tests.compiler import executor_jobs
specs = [executor_jobs.Chunk(number=n, folder=sys.argv[1]) for n in range(4)]
# no `if __name__ == "__main__"`: the workers must not run this script again
with LocalExecutor(2) as engine:
    if sys.argv[3] == "spawned":
        engine.prepare(executor_jobs.start_thread, executor_jobs.Path(sys.argv[1] + ".loaded"))
    list(engine.map(getattr(executor_jobs, sys.argv[2]), specs))
"""


@pytest.mark.parametrize(
    ("end", "job", "how"),
    [
        (signal.SIGKILL, "sleep_after_note", "spawned"),
        (signal.SIGKILL, "hold_the_interpreter_after_note", "forked"),
        (signal.SIGTERM, "sleep_after_note", "forked"),
        (signal.SIGINT, "hold_the_interpreter_after_note", "spawned"),
    ],
)
def test_no_worker_outlives_its_driver(tmp_path: Path, end: int, job: str, how: str) -> None:
    script, notes = tmp_path / "driver.py", tmp_path / "notes"
    script.write_text(DRIVER)
    notes.mkdir()
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(script), str(notes), job, how]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, start_new_session=True) as driver:
        try:
            jobs.wait_for(lambda: len(list(notes.iterdir())) == 2)
            pids = [int(note.name.removeprefix("pid_")) for note in notes.iterdir()]
            assert all(alive(pid) for pid in pids)
            if end == signal.SIGINT:
                os.killpg(driver.pid, end)  # as a terminal does it: to all of them
            else:
                driver.send_signal(end)
            _, complaint = driver.communicate(timeout=300)
            jobs.wait_for(lambda: not any(alive(pid) for pid in pids))
        finally:
            driver.kill()
    assert driver.returncode == -end
    assert complaint.count(b"Traceback") == (1 if end == signal.SIGINT else 0), "only the driver speaks"
