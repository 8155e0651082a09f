"""Local workers that one process prepares: started ahead, kept between runs, replaced, and ended in time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from chatmill.compiler.engines.executor import (
    EventKind,
    ExecutorEvent,
)
from chatmill.compiler.engines.local import LocalExecutor
from tests.compiler import executor_jobs as jobs
from tests.compiler.local_processes import _no_process_left, _nothing_of_others, alive, child_pids, pipes  # noqa: F401 - for every test here
from tests.compiler.reported import Seen


def noted(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def test_prepared_workers_share_what_one_process_has_loaded(tmp_path: Path) -> None:
    engine = LocalExecutor(2)
    engine.prepare(jobs.note_pid, tmp_path / "prepared")
    done: dict[int, dict[str, int]] = {}
    specs = [(number, str(tmp_path / "company")) for number in range(6)]
    (tmp_path / "company").mkdir()
    engine.run(jobs.square_in_company, specs, done.__setitem__)
    (foreman,) = noted(tmp_path / "prepared")
    pids = {receipt["pid"] for receipt in done.values()}
    assert len(pids) == 2
    assert int(foreman) not in pids
    assert not any(alive(pid) for pid in (*pids, int(foreman)))


def test_the_libraries_of_a_build_leave_a_process_that_can_be_forked(tmp_path: Path) -> None:
    """No thread of theirs is in the way (the memory of pyarrow has one on x86-64): they are loaded once for all."""
    engine = LocalExecutor(2)
    engine.prepare(jobs.load_libraries, tmp_path / "prepared")
    engine.run(jobs.square, list(range(4)), lambda index, receipt: None)
    assert len(noted(tmp_path / "prepared")) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_killed_foreman_is_replaced(tmp_path: Path, when: str) -> None:
    """Its workers end with it; another one loads again and does the jobs that are left."""
    engine, seen, before = LocalExecutor(2), Seen(), child_pids()
    engine.prepare(jobs.note_pid, tmp_path / "prepared")
    (foreman,) = child_pids() - before
    if when == "before":
        os.kill(foreman, signal.SIGKILL)

    def hear(event: ExecutorEvent) -> None:
        seen.events.append(event)
        if when == "after" and event.kind is EventKind.JOB_STARTED and alive(foreman):
            os.kill(foreman, signal.SIGKILL)

    engine.run(jobs.square, list(range(8)), seen.done, hear)
    assert {index: receipt["square"] for index, receipt in seen.receipts.items()} == {n: n * n for n in range(8)}
    assert set(noted(tmp_path / "prepared")) - {str(foreman)}, "nothing was loaded again"
    assert foreman in {event.pid for event in seen.events if event.kind is EventKind.WORKER_DIED}


def test_a_process_with_threads_is_not_forked(tmp_path: Path) -> None:
    """Its workers are fresh interpreters: each does the first job once, and then the jobs of the run."""
    engine = LocalExecutor(2)
    done: dict[int, dict[str, int]] = {}
    engine.prepare(jobs.start_thread, tmp_path / "prepared")
    engine.run(jobs.square, list(range(6)), done.__setitem__)
    assert len(done) == 6
    prepared = noted(tmp_path / "prepared")
    assert {str(receipt["pid"]) for receipt in done.values()} <= set(prepared)
    assert len(set(prepared)) == len(prepared) <= 3


def test_workers_are_kept_between_runs_until_they_are_not_needed(tmp_path: Path) -> None:
    engine = LocalExecutor(2, keep=True)
    before = child_pids()
    found: list[set[int]] = []
    try:
        for number in range(3):
            done: dict[int, int] = {}
            engine.run(jobs.note_pid, [tmp_path / f"run{number}"] * 4, done.__setitem__)
            assert len(done) == 4
            found.append(set(done.values()))
        assert len(set.union(*found)) <= 2
        with pytest.raises(ValueError):
            engine.run(jobs.fail, ["data"], lambda index, receipt: None)
        assert child_pids() == before, "an error ends them"
        engine.run(jobs.note_pid, [tmp_path / "again"] * 4, lambda index, receipt: None)
    finally:
        engine.close()
    assert child_pids() == before


def test_prepared_workers_that_are_not_needed_end() -> None:
    engine = LocalExecutor(2)
    before = child_pids()
    engine.prepare(jobs.fail, "data")
    assert len(child_pids()) == len(before) + 1, "the process from which they would have been forked"
    engine.close()
    engine.close()
    assert child_pids() == before


def test_nobody_waits_for_workers_that_prepare_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatmill.compiler.engines.local.GOODBYE_SECONDS", 900.0)
    engine = LocalExecutor(1)
    before = child_pids()
    started = time.monotonic()
    engine.prepare(time.sleep, 900)
    engine.run(jobs.square, [], lambda index, receipt: None)
    assert time.monotonic() - started < 800
    assert child_pids() == before


def test_a_preparation_that_fails_changes_nothing(tmp_path: Path) -> None:
    engine = LocalExecutor(1)
    engine.prepare(jobs.fail, "data")
    done: dict[int, int] = {}
    engine.run(jobs.note_pid, [tmp_path / "jobs"] * 2, done.__setitem__)
    assert len(done) == 2


def test_workers_that_are_not_needed_any_more_run_their_exit_handlers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    LocalExecutor(1).run(jobs.note_at_exit, [tmp_path / "one", tmp_path / "two"], lambda index, receipt: None)
    assert [(tmp_path / name).read_text() for name in ("one", "two")] == ["ended\n"] * 2
    assert capfd.readouterr().err == "not flushed" * 2
