"""The local engine with real processes: results, killed workers, errors, and no process left behind."""

from __future__ import annotations

import errno
import functools
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.engines.executor import (
    EventKind,
    ExecutorEvent,
    JobError,
    JobKilledWorkers,
    RemoteTraceback,
    WorkerStartError,
    describe_exit,
    label_of,
)
from chatmill.compiler.engines.local import LocalExecutor, available_cores
from chatmill.errors import ChatmillError, ConfigError, DataError, RecordError, UnknownNameError
from tests.compiler import executor_jobs as jobs
from tests.compiler.executor_jobs import Chunk
from tests.compiler.local_processes import _no_process_left, _nothing_of_others, alive, child_pids, pipes  # noqa: F401 - for every test here
from tests.compiler.reported import Seen

ROOT = Path(__file__).parents[2]


def run(workers: int, job: Callable[[Any], Any], specs: list[Any]) -> Seen:
    seen = Seen()
    LocalExecutor(workers).run(job, specs, seen.done, seen.events.append)
    return seen


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_every_job_is_reported_once_with_its_receipt(workers: int) -> None:
    seen = run(workers, jobs.square, list(range(20)))
    assert {index: receipt["square"] for index, receipt in seen.receipts.items()} == {n: n * n for n in range(20)}
    assert seen.kinds()[EventKind.JOB_STARTED] == 20
    pids = {receipt["pid"] for receipt in seen.receipts.values()}
    assert (pids == {os.getpid()}) == (workers == 0)
    assert seen.kinds()[EventKind.WORKER_STARTED] <= workers


def test_work_is_shared_and_workers_keep_what_they_have_loaded(tmp_path: Path) -> None:
    seen = run(2, jobs.square_in_company, [(number, str(tmp_path)) for number in range(12)])
    per_worker: Counter[int] = Counter(receipt["pid"] for receipt in seen.receipts.values())
    assert len(per_worker) == 2
    most = {pid: max(r["calls"] for r in seen.receipts.values() if r["pid"] == pid) for pid in per_worker}
    assert most == dict(per_worker), "the list in the module did not live as long as its worker"


def test_no_more_workers_than_jobs_and_none_without_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = run(8, jobs.count_siblings, [5, 6])
    assert list(seen.receipts.values()) == [2, 2]
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **options: pytest.fail("a process was started"))
    assert run(8, jobs.square, []).events == []


@pytest.mark.parametrize(("workers", "prepared"), [(1, False), (2, False), (2, True)])
def test_a_killed_worker_is_replaced_and_its_job_done_again(tmp_path: Path, workers: int, prepared: bool) -> None:
    chunks = [Chunk(number=n, folder=str(tmp_path)) for n in range(6)]
    seen, engine = Seen(), LocalExecutor(workers)
    if prepared:
        engine.prepare(jobs.square, 1)
    engine.run(jobs.kill_once_if_odd, chunks, seen.done, seen.events.append)
    assert {i: r["number"] for i, r in seen.receipts.items()} == {n: n for n in range(6)}
    for n in range(6):
        tries = (tmp_path / f"tries_{n}").read_text().split()
        assert len(tries) == 1 + n % 2
        assert len(set(tries)) == len(tries), "the second try ran in the worker that was killed"
    died = [event for event in seen.events if event.kind is EventKind.WORKER_DIED]
    assert sorted(event.index for event in died) == [1, 3, 5]
    assert all("SIGKILL" in event.detail for event in died)
    retried = [event for event in seen.events if event.kind is EventKind.JOB_RETRIED]
    assert [(e.index, e.attempt) for e in retried] == [(e.index, 2) for e in died]
    assert retried[0].label == f"chunk {retried[0].index} of sample.jsonl"


@pytest.mark.parametrize("killer", [signal.SIGKILL, signal.SIGSEGV])
def test_a_job_that_always_kills_is_named(tmp_path: Path, killer: int) -> None:
    chunks = [Chunk(number=n, folder=str(tmp_path), signal=killer) for n in range(8)]
    with pytest.raises(
        JobKilledWorkers, match=r"chunk 3 of sample.jsonl: this job killed its worker 3 times"
    ) as caught:
        run(2, jobs.kill_always_if_three, chunks)
    assert signal.Signals(killer).name in str(caught.value)
    assert "smaller chunks" in str(caught.value)
    assert isinstance(caught.value, ChatmillError | RuntimeError)
    assert len((tmp_path / "tries_3").read_text().split()) == 3
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.causes == caught.value.causes


def test_a_worker_that_exits_by_itself_counts_as_killed() -> None:
    with pytest.raises(JobKilledWorkers, match="exit status 7"):
        run(1, jobs.exit_quietly, [Chunk(number=0)])


def test_the_last_try_of_a_job_runs_alone(tmp_path: Path) -> None:
    seen = run(3, jobs.overlap_on_last_try, [Chunk(number=n, folder=str(tmp_path)) for n in range(24)])
    times = [(r["begin"], r["end"]) for r in seen.receipts.values()]
    begin, end = seen.receipts[7]["begin"], seen.receipts[7]["end"]
    assert len(times) == 24
    assert sum(b < end and begin < e for b, e in times) == 1, "another job ran at the same time"
    others = [span for span in times if span != (begin, end)]
    assert any(
        b < other_e and other_b < e and (b, e) != (other_b, other_e) for b, e in others for other_b, other_e in others
    )
    assert any(b > end for b, _ in others), "the run goes on after it"


def test_an_idle_or_unlucky_worker_killed_from_outside_is_replaced(tmp_path: Path) -> None:
    seen = Seen()
    killed: list[int] = []

    def kill_the_first(event: ExecutorEvent) -> None:
        seen.events.append(event)
        if event.kind is EventKind.WORKER_STARTED and not killed:
            killed.append(event.pid or 0)
            os.kill(event.pid or 0, signal.SIGKILL)
        if event.kind is EventKind.WORKER_DIED:
            (tmp_path / "go").touch()

    specs = [(number, tmp_path / "go") for number in range(8)]
    LocalExecutor(2).run(jobs.square_when_told, specs, seen.done, kill_the_first)
    assert len(seen.receipts) == 8
    assert killed
    assert killed[0] not in {receipt["pid"] for receipt in seen.receipts.values()}
    assert [e.pid for e in seen.events if e.kind is EventKind.WORKER_DIED] == killed


def test_an_interrupt_is_for_the_driver_alone() -> None:
    seen = Seen()

    def interrupt(event: ExecutorEvent) -> None:
        seen.events.append(event)
        if event.kind is EventKind.JOB_STARTED:
            os.kill(event.pid or 0, signal.SIGINT)

    LocalExecutor(1).run(jobs.slow_square, [1, 2, 3], seen.done, interrupt)
    assert len(seen.receipts) == seen.kinds()[EventKind.JOB_STARTED] == 3


def test_a_dead_worker_is_noticed_though_its_child_holds_the_pipe(tmp_path: Path) -> None:
    with pytest.raises(JobKilledWorkers):
        run(1, jobs.leave_a_grandchild, [Chunk(number=0, folder=str(tmp_path))])
    grandchildren = [int(path.name.removeprefix("grandchild_")) for path in tmp_path.glob("grandchild_*")]
    assert len(grandchildren) == 3
    still_there = [alive(pid) for pid in grandchildren]
    for pid in grandchildren:
        os.kill(pid, signal.SIGKILL)
    assert all(still_there), "the pipe alone was watched"


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "expected", "text"),
    [
        ("data", DataError, "bad value 5"),
        ("record", RecordError, "a.jsonl:3, record 'r1', field messages: no messages"),
        ("unknown", UnknownNameError, "Did you mean 'chatml'?"),
        ("odd", jobs.OddError, "1 and two"),
        ("zero", ZeroDivisionError, "division"),
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
    if kind == "record":
        assert caught.value.code == "empty"  # type: ignore[attr-defined]
    if kind == "odd":
        assert caught.value.second == "two"  # type: ignore[attr-defined]
    if kind == "file":
        assert caught.value.errno == 2  # type: ignore[attr-defined]


def test_an_error_that_cannot_travel_arrives_in_words() -> None:
    with pytest.raises(JobError, match=r"'stubborn': the job failed: .*StubbornError: holds a file"):
        run(1, jobs.fail, ["stubborn"])
    with pytest.raises(JobError, match="SystemExit: 4"):
        run(1, jobs.call_exit, [4])
    with pytest.raises((pickle.PicklingError, AttributeError, JobError), match=r"lambda|pickle"):
        run(1, jobs.unpicklable_receipt, [4])


def test_an_error_ends_the_run_at_once() -> None:
    seen = Seen()
    begin = time.monotonic()
    with pytest.raises(DataError, match="number 2 is bad"):
        LocalExecutor(3).run(jobs.fail_on_two, list(range(50)), seen.done)
    assert time.monotonic() - begin < 800, "the sleeping jobs were waited for"
    assert len(seen.receipts) < 47


def test_an_error_in_a_callback_ends_the_run() -> None:
    def full(index: int, receipt: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        LocalExecutor(2).run(jobs.slow_square, list(range(50)), full)


def test_jobs_that_workers_cannot_import_are_refused() -> None:
    for job in (lambda spec: spec, functools.partial(lambda a, b: b, 1)):
        with pytest.raises(ConfigError, match="top level of a module"):
            run(1, job, [1])
    seen = run(1, functools.partial(jobs.note_then, kills=0), [])
    assert seen.receipts == {}
    with pytest.raises(ConfigError, match="workers is -1"):
        LocalExecutor(-1)


def test_workers_see_our_path_one_thread_and_a_quiet_output(capfd: pytest.CaptureFixture[str]) -> None:
    receipt = run(1, jobs.say_something, [1]).receipts[0]
    assert receipt["path"] == sys.path
    assert receipt["environment"] == {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "CHATMILL_WORKER": None,
    }
    assert receipt["child"] == "1\n"
    out, err = capfd.readouterr()
    assert (out, err) == ("", "a job speaks\n")


def test_workers_that_cannot_start_end_the_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("chatmill.compiler.engines.local.BOOT", "raise SystemExit('no chatmill here')")
    with pytest.raises(WorkerStartError, match="3 worker processes in a row died before they were ready"):
        run(2, jobs.square, [1, 2, 3])
    assert "no chatmill here" in capfd.readouterr().err
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(WorkerStartError, match="cannot be started"):
        run(2, jobs.square, [1, 2, 3])


def test_workers_that_die_while_they_load_end_the_run(tmp_path: Path) -> None:
    engine = LocalExecutor(2)
    engine.prepare(jobs.end_in_workers, tmp_path / "first")
    with pytest.raises(WorkerStartError, match=r"3 worker processes in a row.*ended by itself with exit status 3"):
        engine.run(jobs.square, [1, 2, 3], lambda index, receipt: None)


def test_a_foreman_that_always_dies_ends_the_run() -> None:
    seen = Seen()
    with pytest.raises(WorkerStartError, match=r"hands out the jobs died 3 times.*SIGKILL"):
        LocalExecutor(1).run(jobs.kill_the_parent, [1, 2], seen.done, seen.events.append)
    assert seen.kinds()[EventKind.WORKER_DIED] == 3


def test_too_few_descriptors_are_one_clear_error_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture above counts processes and descriptors."""

    def none_left(*given: object) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr("chatmill.compiler.engines.local.Pipe", none_left)
        with pytest.raises(WorkerStartError, match="raise the limit on processes or open files"):
            run(2, jobs.square, [1, 2, 3])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", none_left, raising=False)
        assert run(2, jobs.square, [1, 2, 3]).receipts[2]["square"] == 9, "the end of the pipe is enough"


DRIVER = """
    import sys
    from chatmill.compiler.engines.local import LocalExecutor
    from tests.compiler import executor_jobs
    specs = [executor_jobs.Chunk(number=n, folder=sys.argv[1]) for n in range(4)]
    # no `if __name__ == "__main__"`: the workers must not run this script again
    engine = LocalExecutor(2)
    if sys.argv[3] == "forked":
        engine.prepare(executor_jobs.square, 1)
    engine.run(getattr(executor_jobs, sys.argv[2]), specs, lambda *_: None)
"""


@pytest.mark.parametrize("job", ["sleep_after_note", "hold_the_interpreter_after_note"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("how", ["fresh", "forked"])
def test_no_worker_outlives_its_driver(tmp_path: Path, end: int, job: str, how: str) -> None:
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    notes = tmp_path / "notes"
    notes.mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
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


WATCHER = """
import sys, time
from chatmill.compiler.engines.foreman import _watch
_watch(int(sys.argv[1]))
print("watching", flush=True)
time.sleep(900)
"""


def test_a_worker_ends_by_its_pipe_where_the_system_does_not_help() -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-c", WATCHER, str(reading)]
    with subprocess.Popen(command, pass_fds=(reading,), stdout=subprocess.PIPE, text=True) as worker:
        os.close(reading)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "watching\n"
        assert worker.poll() is None
        os.close(writing)
        assert worker.wait(timeout=800) == 1


def test_a_driver_on_standard_input_works(tmp_path: Path) -> None:
    script = (
        "from chatmill.compiler.engines.local import LocalExecutor\n"
        "from tests.compiler.executor_jobs import square\n"
        "LocalExecutor(1).run(square, [3], lambda index, receipt: print(receipt['square']))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run(
        [sys.executable, "-"], input=script, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert (ran.stdout, ran.stderr) == ("9\n", "")


def test_words_for_jobs_and_exits() -> None:
    assert label_of({"label": "a"}) == "a"
    assert label_of(Chunk(number=4)) == "chunk 4 of sample.jsonl"
    assert label_of(functools.partial(int)) == "functools.partial(<class 'int'>)"
    assert len(label_of("x" * 500)) == 100
    assert describe_exit(-9).startswith("killed by signal 9 (SIGKILL")
    assert describe_exit(-250) == "killed by signal 250 (unknown signal)"
    assert describe_exit(1) == "ended by itself with exit status 1"
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
    assert LocalExecutor().workers == available_cores()
