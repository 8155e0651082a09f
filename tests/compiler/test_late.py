"""Workers that are stopped or hang: the chunk and the process are named, and nothing is ended by itself."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.engines.executor import EventKind, ExecutorEvent
from chatmill.compiler.engines.late import LateJobs, Patience, process_state
from chatmill.compiler.engines.local import LocalExecutor
from chatmill.compiler.engines.ray_engine import RayExecutor, _Tasks
from chatmill.compiler.progress import shown_progress
from chatmill.compiler.run import BuildProgress, run_build
from tests.compiler import executor_jobs as jobs
from tests.compiler.builds import chats, digest, plain_recipe, write_jsonl
from tests.compiler.executor_jobs import Chunk

TEMPLATE = """
import os, signal
from pathlib import Path

from chatmill.render.templates.token_native import TokenNative

note = Path(__file__).with_suffix(".stop")
if note.exists() and os.getpid() != int(note.read_text()):  # not in the driver
    note.unlink()
    os.kill(os.getpid(), signal.SIGSTOP)


class Own(TokenNative):
    pass
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stopped_worker_is_named_and_goes_on_when_it_is_let(tmp_path: Path, workers: int) -> None:
    receipts: dict[int, Any] = {}
    events: list[ExecutorEvent] = []

    def on_event(event: ExecutorEvent) -> None:
        events.append(event)
        if event.kind is EventKind.JOB_LATE and "is stopped" in event.detail:
            assert event.pid is not None
            os.kill(event.pid, signal.SIGCONT)

    specs = [Chunk(number=number, folder=str(tmp_path)) for number in range(2)]
    LocalExecutor(workers, late_seconds=0.1).run(jobs.stop_once, specs, receipts.__setitem__, on_event)
    assert sorted(receipts) == [0, 1]
    stopped = [event for event in events if event.kind is EventKind.JOB_LATE and "is stopped" in event.detail]
    assert {event.index for event in stopped} == {0, 1}
    for event in stopped:
        assert event.index is not None
        assert event.label == f"chunk {event.index} of sample.jsonl"
        assert event.pid == int((tmp_path / f"stopped_{event.index}").read_text()) == receipts[event.index]["pid"]
        assert re.search(rf"^for \d+ s; .*kill -CONT {event.pid}", event.detail)
    assert not [event for event in events if event.kind in (EventKind.WORKER_DIED, EventKind.JOB_RETRIED)]


def test_a_stopped_foreman_is_named(tmp_path: Path) -> None:
    """The process between driver and workers hands out nothing while it is stopped."""
    receipts: dict[int, Any] = {}
    late: list[ExecutorEvent] = []

    def on_event(event: ExecutorEvent) -> None:
        if event.kind is EventKind.JOB_STARTED and not late:
            os.kill(parent_of(event.pid or 0), signal.SIGSTOP)
            (tmp_path / "go").touch()
        if event.kind is EventKind.JOB_LATE and "is stopped" in event.detail:
            late.append(event)
            os.kill(event.pid or 0, signal.SIGCONT)

    specs = [(number, tmp_path / "go") for number in range(2)]
    LocalExecutor(1, late_seconds=0.1).run(jobs.square_when_told, specs, receipts.__setitem__, on_event)
    assert sorted(receipts) == [0, 1]
    assert (late[0].index, late[0].label) == (None, "the process that hands out the jobs")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_quick_jobs_and_idle_workers_are_never_late() -> None:
    events: list[ExecutorEvent] = []
    LocalExecutor(2, late_seconds=3600).run(jobs.square, list(range(20)), lambda index, receipt: None, events.append)
    assert events
    assert not [event for event in events if event.kind is EventKind.JOB_LATE]


def test_progress_and_log_of_a_build_name_chunk_and_worker(fast: Path, caplog: pytest.LogCaptureFixture) -> None:
    (fast / "own.py").write_text(TEMPLATE)
    recipe = plain_recipe(write_jsonl(fast / "chats.jsonl", chats(30)), template=str(fast / "own.py"))
    run_build(recipe, fast / "good", workers=0)
    states: list[BuildProgress] = []

    def on_progress(state: BuildProgress) -> None:
        states.append(state)
        for text in state.late:
            if stopped := re.search(r"kill -CONT (\d+)", text):
                os.kill(int(stopped[1]), signal.SIGCONT)

    (fast / "own.stop").write_text(str(os.getpid()))
    executor = LocalExecutor(1, late_seconds=0.1)
    with caplog.at_level(logging.WARNING, logger="chatmill.build"):
        run_build(recipe, fast / "late", executor=executor, on_progress=on_progress)
    assert not (fast / "own.stop").exists(), "the worker was stopped"
    named = [text for state in states for text in state.late if "is stopped" in text]
    assert named
    assert re.match(r"chunk 0 \(.*/chats\.jsonl, .* 1 on\) \(worker \d+, for \d+ s; ", named[0])
    assert f"Waiting for {named[0]}" in caplog.messages
    assert states[-1].late == ()
    assert digest(fast / "late") == digest(fast / "good")


def test_a_job_is_reported_again_after_twice_the_time() -> None:
    patience = Patience(10.0)
    reports = [second for second in range(1, 101) if patience.wait(1.0, 1.0)]
    assert reports == [10, 20, 40, 80]


def test_time_in_which_the_driver_was_stopped_itself_does_not_count() -> None:
    patience = Patience(10.0)
    assert not patience.wait(3600.0, 1.0)
    assert patience.waited == 1.0


def test_late_jobs_are_shown_until_they_are_done_or_begun_again() -> None:
    calls: list[tuple[str, ...]] = []
    late = LateJobs(lambda: calls.append(late.texts))
    for index in (4, 5, None):
        late.hear(ExecutorEvent(kind=EventKind.JOB_LATE, pid=7, index=index, label=f"job {index}", detail="for 2 s"))
    assert calls[-1] == ("job 4 (worker 7, for 2 s)", "job 5 (worker 7, for 2 s)", "job None (worker 7, for 2 s)")
    late.forget(4)
    assert calls[-1] == ("job 5 (worker 7, for 2 s)",), "nor is a worker getting ready when jobs move"
    late.hear(ExecutorEvent(kind=EventKind.JOB_RETRIED, index=5))
    assert calls[-1] == ()
    before = len(calls)
    late.forget(9)
    assert len(calls) == before


class SilentRay:
    """Stands for Ray: no task ever ends."""

    def remote(self, function: Any) -> Any:
        return self

    def options(self, **options: Any) -> Any:
        return self

    def wait(self, references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        time.sleep(timeout)
        return [], references


def test_on_ray_the_oldest_task_is_named() -> None:
    events: list[ExecutorEvent] = []
    specs = [Chunk(number=number) for number in range(3)]
    options = RayExecutor(late_seconds=0.01)
    tasks = _Tasks(SilentRay(), jobs.square, specs, lambda index, receipt: None, events.append, options)
    tasks._flying = {"second": 1, "third": 2}
    while not events:
        assert tasks._wait() == []
    assert (events[0].kind, events[0].index, events[0].pid) == (EventKind.JOB_LATE, 1, None)
    assert events[0].label == "chunk 1 of sample.jsonl"
    assert "ray list tasks" in events[0].detail


def test_the_state_of_a_process_in_words() -> None:
    assert "running" in process_state(os.getpid())
    assert process_state(2**22 + 1) == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_line_names_a_late_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TERM", "xterm")
    state = BuildProgress(
        stage="compile", chunks_done=1, chunks=2, bytes_done=1, bytes=2, tokens=3, records=4, retries=0,
        late=("chunk 1 of [red]a.jsonl (worker 4711, for 120 s)",),
    )  # fmt: skip
    with shown_progress() as on_progress:
        assert on_progress is not None
        on_progress(state)
    assert "waiting for chunk 1 of [red]a.jsonl (worker 4711, for 120 s)" in re.sub(
        r"\x1b\[[0-9;?]*\w", "", terminal.getvalue()
    )
