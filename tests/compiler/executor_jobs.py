"""Jobs that the tests of engines run in worker processes; workers import this module by name."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill.errors import ChatmillError, DataError, RecordError, UnknownNameError

CALLS: list[int] = []
"""Grows in a worker for as long as it lives, as a tokenizer cache would stay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A spec with a label."""

    number: int
    folder: Path
    kills: int = 0
    """How many of its workers it kills."""
    signal: int = signal.SIGKILL

    @property
    def label(self) -> str:
        return f"chunk {self.number} of sample.jsonl"


def wait_for(condition: Callable[[], bool]) -> None:
    """The limit is there to end a test that hangs, and is not reached on the slowest machine."""
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


def square(number: int) -> dict[str, int]:
    CALLS.append(number)
    return {"square": number * number, "pid": os.getpid(), "calls": len(CALLS)}


def square_in_company(spec: tuple[int, Path, int]) -> dict[str, int]:
    """Wait until so many workers have come here."""
    number, folder, workers = spec
    (folder / f"pid_{os.getpid()}").touch()
    wait_for(lambda: len(list(folder.iterdir())) >= workers)
    return square(number)


def count_siblings(number: int) -> int:
    """The processes that the parent of this one has started."""
    parent = os.getppid()
    return len(Path(f"/proc/{parent}/task/{parent}/children").read_text().split())


def note_pid(path: Path) -> int:
    """Write the process id down, one line a call."""
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")
    return os.getpid()


def note_and_kill(chunk: Chunk) -> dict[str, int]:
    """Note the try in a file, and kill the own process in the first tries."""
    tries = chunk.folder / f"tries_{chunk.number}"
    pid = note_pid(tries)
    if len(tries.read_text().splitlines()) <= chunk.kills:
        os.kill(pid, chunk.signal)
    return {"number": chunk.number, "pid": pid}


def overlap_and_kill(chunk: Chunk) -> dict[str, Any]:
    """Each job tells when it ran. The first two chunks wait for each other."""
    begin = time.monotonic()
    if chunk.number < 2:
        (chunk.folder / f"began_{chunk.number}").touch()
        wait_for(lambda: len(list(chunk.folder.glob("began_*"))) == 2)
    note_and_kill(chunk)
    time.sleep(0.02)
    return {"begin": begin, "end": time.monotonic()}


def kill_the_parent(number: int) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


class OddError(ChatmillError):
    """An error whose class cannot be unpickled in the ordinary way."""

    def __init__(self, first: int, *, second: str) -> None:
        self.first, self.second = first, second
        super().__init__(f"{first} and {second}")


class StubbornError(Exception):
    """An error that cannot travel at all, as it holds what cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        super().__init__("holds a lock")


def fail(kind: str) -> None:
    if kind == "file":
        Path("/no/such/file").read_text()
    raise {
        "data": DataError("bad value 5"),
        "record": RecordError("no messages", code="empty", path="messages", where="a.jsonl:3", record_id="r1"),
        "unknown": UnknownNameError("template", "chatlm", ["chatml", "llama3"]),
        "odd": OddError(1, second="two"),
        "stubborn": StubbornError(),
    }[kind]


def fail_on_two(number: int) -> int:
    if number == 2:
        raise DataError("number 2 is bad")
    time.sleep(900 if number < 2 else 0)
    return number


def sleep_after_note(chunk: Chunk) -> None:
    (chunk.folder / f"pid_{os.getpid()}").touch()
    time.sleep(600)


def hold_the_interpreter_after_note(chunk: Chunk) -> None:
    """No other thread of this process gets a turn: the pattern matcher needs ages and does not let go."""
    (chunk.folder / f"pid_{os.getpid()}").touch()
    re.match("(a+)+$", "a" * 60 + "b")


def say_something(number: int) -> dict[str, Any]:
    print("a job speaks")
    seen = subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True, check=True)
    return {"threads": os.environ.get("OMP_NUM_THREADS"), "path": sys.path, "child": seen.stdout}


def load_libraries(path: Path) -> None:
    """What a build loads besides Chatmill."""
    import awkward  # noqa: F401
    import gigatoken  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    note_pid(path)


def start_thread(path: Path) -> None:
    """Leave a thread after, as a library may."""
    note_pid(path)
    threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
