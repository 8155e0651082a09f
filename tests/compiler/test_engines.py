"""The engines with real processes and a real Ray: results, killed workers, errors, and no process left behind."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
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
from chatmill.compiler.engines.ray_engine import RayExecutor
from chatmill.errors import ChatmillError, ConfigError, DataError, MissingExtraError, RecordError, UnknownNameError
from tests.compiler import executor_jobs as jobs
from tests.compiler.executor_jobs import Chunk
from tests.ray_cluster import free_port


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


@pytest.fixture(scope="module", autouse=True)
def _nothing_of_others() -> None:
    gc.collect()  # what other modules left must not be closed while these tests count


@pytest.fixture
def own() -> Iterator[type[LocalExecutor]]:
    """The local engine, which leaves no process and no descriptor."""
    before, descriptors = child_pids(), pipes()
    yield LocalExecutor
    assert child_pids() <= before
    assert pipes() <= descriptors, "a descriptor was left open"


@pytest.fixture
def cluster(ray_address: str) -> Any:
    """A connection that was there before the executor, which must leave it alone; kept for the next test."""
    ray = pytest.importorskip("ray")
    if not ray.is_initialized():
        ray.init(address=ray_address, log_to_driver=False, logging_level=logging.ERROR)
    return ray


@pytest.fixture
def apart() -> Any:
    """No connection to any Ray."""
    ray = pytest.importorskip("ray")
    ray.shutdown()
    return ray


@pytest.fixture(params=[0, 1, 3, "ray"])
def engine(request: pytest.FixtureRequest) -> Iterator[LocalExecutor | RayExecutor]:
    """With so many processes, or on a Ray that somebody else has started."""
    if request.param == "ray":
        ray = request.getfixturevalue("cluster")
        yield RayExecutor()
        assert ray.is_initialized(), "a connection that is not ours was ended"
    else:
        yield request.getfixturevalue("own")(request.param)


def run(engine: LocalExecutor | RayExecutor, job: Callable[[Any], Any], specs: list[Any]) -> dict[int, Any]:
    found = list(engine.map(job, specs))
    assert len(dict(found)) == len(found), "a job was reported twice"
    return dict(found)


def test_every_job_is_reported_once_with_its_result_and_workers_are_used_again(engine: Any) -> None:
    found = run(engine, jobs.square, list(range(20)))
    assert {index: result["square"] for index, result in found.items()} == {n: n * n for n in range(20)}
    pids = {result["pid"] for result in found.values()}
    assert (pids == {os.getpid()}) == (engine.workers == 0)
    assert engine.workers is None or len(pids) <= max(engine.workers, 1)
    assert max(result["calls"] for result in found.values()) > 1


@pytest.mark.parametrize(
    ("engine", "killer"), [(3, signal.SIGKILL), (3, signal.SIGSEGV), ("ray", signal.SIGKILL)], indirect=["engine"]
)
def test_a_job_that_always_kills_is_named(engine: Any, tmp_path: Path, killer: int) -> None:
    chunks = [Chunk(number=n, folder=tmp_path, kills=99 * (n == 3), signal=killer) for n in range(3, 8)]
    words = r"chunk 3 of sample.jsonl: this job killed its worker 3 times"
    with pytest.raises(JobKilledWorkers, match=words) as caught:
        run(engine, jobs.note_and_kill, chunks)
    assert isinstance(engine, RayExecutor) or signal.Signals(killer).name in str(caught.value)
    assert "smaller chunks" in str(caught.value)
    assert isinstance(caught.value, ChatmillError)
    assert len((tmp_path / "tries_3").read_text().split()) == 3
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


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
@pytest.mark.parametrize("engine", [0, 1, "ray"], indirect=True)
def test_an_error_of_a_job_arrives_as_it_was(engine: Any, kind: str, expected: type[Exception], text: str) -> None:
    with pytest.raises(expected) as caught:
        run(engine, jobs.fail, [kind])
    assert type(caught.value) is expected
    assert text in str(caught.value)
    assert f"in the job: '{kind}'" in caught.value.__notes__
    if engine.workers != 0:
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        assert "executor_jobs.py" in str(caught.value.__cause__)
    about = {"record": ("code", "empty"), "odd": ("second", "two"), "file": ("errno", 2)}
    if kind in about:
        name, value = about[kind]
        assert getattr(caught.value, name) == value


@pytest.mark.parametrize("engine", [3, "ray"], indirect=True)
def test_an_error_ends_the_run_at_once(engine: Any) -> None:
    begin = time.monotonic()
    with pytest.raises(DataError, match="number 2 is bad"):
        run(engine, jobs.fail_on_two, [0, 2, 1, *range(3, 30)])
    assert time.monotonic() - begin < 800, "the sleeping jobs were waited for"
    assert run(engine, jobs.square, [7])[0]["square"] == 49, "the sleeping jobs still hold CPUs"


# The local engine.


def test_work_is_shared_and_workers_keep_what_they_have_loaded(own: Any, tmp_path: Path) -> None:
    found = run(own(2), jobs.square_in_company, [(number, tmp_path, 2) for number in range(12)])
    per_worker: Counter[int] = Counter(result["pid"] for result in found.values())
    assert len(per_worker) == 2
    most = {pid: max(r["calls"] for r in found.values() if r["pid"] == pid) for pid in per_worker}
    assert most == dict(per_worker), "the list in the module did not live as long as its worker"


def test_no_more_workers_than_jobs_and_none_without_jobs(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(run(own(8), jobs.count_siblings, [5, 6]).values()) <= 2
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **options: pytest.fail("a process was started"))
    assert run(own(8), jobs.square, []) == {}
    with pytest.raises(ConfigError, match="workers is -1"):
        own(-1)


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
def test_a_killed_worker_is_replaced_and_its_job_done_again(own: Any, tmp_path: Path, workers: int, load: Any) -> None:
    """What was loaded, and whether that failed, changes nothing."""
    with own(workers) as engine:
        if load is not None:
            engine.prepare(load, 1 if load is jobs.square else "data")
        chunks = [Chunk(number=n, folder=tmp_path, kills=n % 2) for n in range(6)]
        found = run(engine, jobs.note_and_kill, chunks)
        assert {i: r["number"] for i, r in found.items()} == {n: n for n in range(6)}
        for n in range(6):
            tries = (tmp_path / f"tries_{n}").read_text().split()
            assert len(tries) == 1 + n % 2
            assert len(set(tries)) == len(tries), "the second try ran in the worker that was killed"
        for idle in {result["pid"] for result in found.values() if alive(result["pid"])}:
            os.kill(idle, signal.SIGKILL)
            jobs.wait_for(lambda idle=idle: not alive(idle))  # type: ignore[misc]
        assert run(engine, jobs.square, [2])[0]["square"] == 4


def test_the_last_try_of_a_job_runs_alone(own: Any, tmp_path: Path) -> None:
    chunks = [Chunk(number=n, folder=tmp_path, kills=2 * (n == 7)) for n in range(24)]
    found = run(own(3), jobs.overlap_and_kill, chunks)
    times = [(r["begin"], r["end"]) for r in found.values()]
    begin, end = found[7]["begin"], found[7]["end"]
    assert len(times) == 24
    assert sum(b < end and begin < e for b, e in times) == 1, "another job ran at the same time"
    others = [span for span in times if span != (begin, end)]
    assert any(b < other[1] and other[0] < e and (b, e) != other for b, e in others for other in others)
    assert any(b > end for b, _ in others), "the run goes on after it"


def test_what_cannot_travel_arrives_in_words(own: Any) -> None:
    with pytest.raises(JobError, match=r"'stubborn': the job failed: .*StubbornError: holds a lock"):
        run(own(1), jobs.fail, ["stubborn"])
    with pytest.raises(JobError, match="SystemExit: 4"):
        run(own(1), sys.exit, [4])
    with pytest.raises(TypeError, match=r"cannot pickle"):
        run(own(1), threading.Semaphore, [4])
    with pytest.raises(JobKilledWorkers, match="exit status 7"):
        run(own(1), os._exit, [7])


def test_a_caller_that_stops_ends_the_run(own: Any, tmp_path: Path) -> None:
    results = own(2).map(jobs.square_in_company, [(1, tmp_path, 1), *((n, tmp_path, 99) for n in range(9))])
    next(results)
    results.close()


def test_workers_see_our_path_one_thread_and_a_quiet_output(own: Any, capfd: pytest.CaptureFixture[str]) -> None:
    result = run(own(1), jobs.say_something, [1])[0]
    assert result["path"] == sys.path
    assert result["threads"] == os.environ.get("OMP_NUM_THREADS", "1")
    assert result["child"] == "1\n"
    assert capfd.readouterr() == ("", "a job speaks\n")


def test_workers_that_cannot_start_or_lose_their_helper_are_one_clear_error(
    own: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WorkerStartError, match=r"starts the workers killed by signal 9 \(SIGKILL"):
        run(own(1), jobs.kill_the_parent, [1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(local, "BOOT", "raise SystemExit('no chatmill here')")
        with pytest.raises(WorkerStartError, match=r"starts the workers ended by itself with exit status 1; .*resume"):
            run(own(2), jobs.square, [1, 2, 3])
        assert "no chatmill here" in capfd.readouterr().err
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(WorkerStartError, match=r"cannot be started.*raise the limit on processes or open files"):
        run(own(2), jobs.square, [1, 2, 3])


@pytest.mark.parametrize("load", [jobs.load_libraries, jobs.start_thread])
def test_what_is_loaded_is_loaded_once_and_kept_between_runs(
    own: Any, tmp_path: Path, load: Callable[[Path], None]
) -> None:
    """No thread of the libraries of a build is in the way of a fork (pyarrow has one on x86-64).

    A process that has threads is not forked.
    """
    before, found = child_pids(), list[set[int]]()
    with own(2) as engine:
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


def test_nobody_waits_for_a_helper_that_loads_for_nothing(own: Any) -> None:
    started = time.monotonic()
    with own(1) as engine:
        engine.prepare(time.sleep, 900)
    assert time.monotonic() - started < 800


DRIVER = """
import sys
from pathlib import Path
from chatmill.compiler.engines.local import LocalExecutor
from chatmill.compiler.engines.ray_engine import RayExecutor
from tests.compiler import executor_jobs
folder, job, how = sys.argv[1:]
specs = [executor_jobs.Chunk(number=n, folder=Path(folder)) for n in range(4)]
# no `if __name__ == "__main__"`: the workers must not run this script again
with RayExecutor(how) if ":" in how else LocalExecutor(2) as engine:
    if how == "spawned":
        engine.prepare(executor_jobs.start_thread, Path(folder + ".loaded"))
    list(engine.map(getattr(executor_jobs, job), specs))
"""


@pytest.mark.parametrize(
    ("end", "job", "how"),
    [
        (signal.SIGKILL, "sleep_after_note", "spawned"),
        (signal.SIGKILL, "hold_the_interpreter_after_note", "forked"),
        (signal.SIGTERM, "sleep_after_note", "forked"),
        (signal.SIGINT, "hold_the_interpreter_after_note", "spawned"),
        (signal.SIGKILL, "sleep_after_note", "ray"),
        (signal.SIGTERM, "sleep_after_note", "ray"),
    ],
)
def test_no_worker_outlives_its_driver(
    tmp_path: Path, request: pytest.FixtureRequest, end: int, job: str, how: str
) -> None:
    script, notes = tmp_path / "driver.py", tmp_path / "notes"
    script.write_text(DRIVER)
    notes.mkdir()
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    engine = request.getfixturevalue("ray_address") if how == "ray" else how
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(script), str(notes), job, engine]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, start_new_session=True) as driver:
        try:
            wanted = 1 if how == "ray" else 2  # a job that Ray could not cancel any more may hold the other core
            jobs.wait_for(lambda: len(list(notes.iterdir())) >= wanted)
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
    assert driver.returncode == -end, complaint
    assert complaint.count(b"Traceback") == (1 if end == signal.SIGINT else 0), "only the driver speaks"


# Ray.


def test_another_version_on_the_cluster_is_refused(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatmill.__version__", "99.0")
    with pytest.raises(ConfigError, match=r"but the driver has 99.0; install the same version"):
        run(RayExecutor(), jobs.square, [1])


def test_a_cluster_is_joined_and_left_and_killed_workers_are_survived(
    apart: Any, ray_address: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    chunks = [Chunk(number=n, folder=tmp_path, kills=n) for n in (0, 1)]
    found = run(RayExecutor(ray_address), jobs.note_and_kill, chunks)
    assert {i: r["number"] for i, r in found.items()} == {0: 0, 1: 1}
    assert [len((tmp_path / f"tries_{n}").read_text().split()) for n in range(2)] == [1, 2]
    assert not apart.is_initialized()
    assert signal.getsignal(signal.SIGTERM) == handler
    monkeypatch.setenv("RAY_ADDRESS", ray_address)  # as users of Ray name it
    places = [apart.get_runtime_context().gcs_address for _ in RayExecutor().map(jobs.square, [1])]
    assert [place.rpartition(":")[2] for place in places] == [ray_address.rpartition(":")[2]]
    assert not apart.is_initialized()
    assert capfd.readouterr().out == "", "Ray speaks where a receipt may be printed"


def test_a_ray_of_our_own_is_started_and_ended(apart: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def parent(result: dict[str, int]) -> int:
        return int(Path(f"/proc/{result['pid']}/stat").read_text().rpartition(")")[2].split()[1])

    with RayExecutor(workers=1) as engine:
        assert not apart.is_initialized(), "it is started for the first run, if there is one"
        parents = [parent(result) for specs in ([1, 2, 3], [4]) for _, result in engine.map(jobs.square, specs)]
    assert len(parents) == 4
    assert len(set(parents)) == 1, "one raylet for all runs"
    assert not apart.is_initialized()
    assert not any(Path(f"/proc/{pid}").exists() for pid in parents), "its raylet is still there"
    assert capfd.readouterr().out == ""


def test_a_ray_that_is_not_there(apart: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerStartError, match=r"cannot connect to the Ray cluster at 127.0.0.1:\d+: .*refused"):
        run(RayExecutor(f"127.0.0.1:{free_port()}"), jobs.square, [1])
    assert not apart.is_initialized()
    with pytest.raises(ConfigError, match="workers is 0"):
        RayExecutor(workers=0)
    monkeypatch.setitem(sys.modules, "ray", None)
    words = r"the Ray engine needs the package 'ray': pip install 'chatmill\[ray\]'"
    with pytest.raises(MissingExtraError, match=words):
        run(RayExecutor(), jobs.square, [1])
