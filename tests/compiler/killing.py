"""Builds that end by SIGKILL, in forked processes of one interpreter that has loaded everything before.

Run as `python -m tests.compiler.killing` with a JSON object on the standard input; prints one JSON line for each kill:
the child was killed before its n-th operation on a file (a sync, or as the interpreter's audit events count them:
creating, opening for writing, cutting, renaming, removing), then the build was resumed in another child.
`kill` says which: `everywhere`, `renames` (before and after each of these, and each sync), or `kinds` (one of each).
With `first`, a fault (`tests/faults.py`), it is the resuming of a build that was killed there that is killed, and
resumed once more.
With `distil`, the build is `build_synth_kd` of this folder.
With `seeds`, the driver or a process that it has started gets one signal for each, at a moment that the seed gives.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from chatmill.compiler.run import run_build
from tests.compiler.builds import digest, leftovers
from tests.distill import inputs
from tests.faults import active

NAMES = ("rename", "remove", "mkdir", "rmdir", "truncate", "utime", "link", "symlink", "fsync")
CHANGES = {f"os.{name}" for name in NAMES}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
Report = dict[str, Any]


def in_child(work: Callable[..., None], *arguments: Any) -> int:
    """Run something in a forked process; its exit status as `waitpid` gives it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work(*arguments)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def build(order: Report, out: Path, resume: bool = False, workers: int = 0) -> None:
    if "distil" in order:
        # the audit changes no byte, and takes a third of the time
        options: dict[str, Any] = {"valid_fraction": 0.3, "on_error": "quarantine", "audit": 0}
        inputs.in_chunks_of(10, order["distil"], out, workers=workers, resume=resume, **options)
    else:
        run_build(order["recipe"], out, workers=workers, resume=resume)


def watch_files(inside: Path, at: int, note: Path | None) -> None:
    """From here on: SIGKILL before the `at`-th change of a file in a folder (0: never); `note` lists them all."""
    seen, is_noting, sync = 0, False, os.fsync

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen, is_noting
        if is_noting or (event not in CHANGES and event != "open"):
            return
        path = arguments[0]
        if event == "open" and not (isinstance(path, str) and isinstance(arguments[2], int) and arguments[2] & WRITING):
            return
        # Removing a tree names files relative to an open folder.
        if not (os.fspath(path).startswith(str(inside)) or "/" not in os.fspath(path)):
            return
        seen += 1
        if note is not None:
            is_noting = True
            with note.open("a") as file:
                file.write(json.dumps([event, os.fspath(path), *map(str, arguments[1:2])]) + "\n")
            is_noting = False
        if seen == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def noted_sync(descriptor: int) -> None:
        hook("os.fsync", (os.readlink(f"/proc/self/fd/{descriptor}"),))
        sync(descriptor)

    os.fsync = noted_sync
    sys.addaudithook(hook)


def kill_everywhere(order: Report, home: Path, expected: dict[str, str]) -> None:
    note, out, left = home / "note", home / "out", home / "left"
    if "first" in order:

        def killed_first() -> None:
            with active(order["first"]):
                build(order, left)

        assert in_child(killed_first) == signal.SIGKILL, "the build was not killed"

    def watched(at: int, note: Path | None) -> int:
        def work() -> None:
            watch_files(out, at, note)
            build(order, out, resume=left.exists())

        if left.exists():
            shutil.copytree(left, out)
        return in_child(work)

    assert watched(0, note) == 0, "the build that counts its operations failed"
    shutil.rmtree(out)
    operations = [json.loads(line) for line in note.read_text().splitlines()]
    renames = [at for at, operation in enumerate(operations, 1) if operation[0] in ("os.rename", "os.fsync")]
    if order["kill"] == "kinds":
        renames = sorted({kind_of(operations[at - 1]): at for at in reversed(renames)}.values())
    # A kill before the operation that follows a rename is a kill after it; the last operation is never a rename.
    around = sorted({*renames, *(at + 1 for at in renames)})
    for at in around if order["kill"] != "everywhere" else range(1, len(operations) + 1):
        report: Report = {"operation": operations[at - 1], "operations": len(operations)}
        report["killed"] = watched(at, None) == signal.SIGKILL
        report["manifest_before"] = (out / "manifest.json").exists()
        report["resumed"] = in_child(build, order, out, True) == 0
        report["equal"] = report["resumed"] and digest(out) == expected
        report["leftovers"] = (inputs.leftovers if "distil" in order else leftovers)(out) if report["resumed"] else []
        shutil.rmtree(out)
        print(json.dumps(report), flush=True)


def kind_of(operation: list[str]) -> tuple[str, str]:
    """What is renamed to what, whatever its number and its temporary name; all files that are synced are one kind."""
    what, *paths = operation
    if what == "os.fsync" and Path(paths[-1]).suffix:
        return what, "file"
    return what, re.sub(r"\d+", "0", re.sub(r"\.tmp-\d+-[0-9a-f]+", "tmp", Path(paths[-1]).name))


def processes_below(process: int) -> list[int]:
    """The children of a process, and those that were forked from them."""
    try:
        children = [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [pid for child in children for pid in (child, *processes_below(child))]


def ended(child: int, seconds: float, is_enough: Callable[[], bool] = lambda: False) -> int | None:
    """The status of a child that ends in time, and before it is enough; None: it is still running."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not is_enough():
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.002)
    return None


def kill_at_random(order: Report, home: Path, expected: dict[str, str]) -> None:
    """Every build goes on where the one before it was stopped; one that ends is compared, and the next begins anew."""
    out, started = home / "out", time.monotonic()
    resume = partial(in_child, build, order, out, True, 2)
    assert resume() == 0
    usual = time.monotonic() - started
    for seed in [*order["seeds"], None]:  # the last one is left alone
        rng = random.Random(seed)
        child = os.fork()
        if child == 0:
            os._exit(resume() != 0)
        report: Report = {"hit": False, "is_worker": rng.random() < 0.5}
        # The process that builds is a child of the child, so that the one which waits is never hit.
        status = None
        if seed is not None and report["is_worker"]:
            status = ended(child, 9 * usual, lambda child=child: len(processes_below(child)) > 2)  # type: ignore[misc]
        if seed is not None and status is None:
            status = ended(child, rng.random() * usual / (20 if report["is_worker"] else 1))
        running = processes_below(child)  # the driver, the helper that starts its workers, and these
        victims = running[2:] if report["is_worker"] else running[:2]
        if status is None and victims and seed is not None:
            victim = rng.choice(victims)
            what = rng.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
            report["signal"] = what.name
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, what)
                report["hit"] = True
                if what == signal.SIGSTOP:
                    status = ended(child, rng.random() * usual / 4)
                    os.kill(victim, rng.choice([signal.SIGCONT, signal.SIGKILL]))
        if status is None:
            status = os.waitpid(child, 0)[1]
        report["finished"] = status == 0
        if status == 0:
            report |= {"equal": digest(out) == expected, "leftovers": leftovers(out)}
            shutil.rmtree(out)
        print(json.dumps(report), flush=True)


def reports_of(order: Report) -> list[Report]:
    """What this module prints of an order, one report for each kill."""
    command, home = [sys.executable, "-m", "tests.compiler.killing"], Path(__file__).parents[2]
    done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, check=False, cwd=home)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(reports: list[Report]) -> None:
    """Killed, resumed, with the bytes of an undisturbed build and nothing else."""
    for report in reports:
        assert [report[name] for name in ("killed", "resumed", "equal", "leftovers")] == [True, True, True, []], report


def main() -> None:
    order = json.load(sys.stdin)
    home = Path(order["home"])
    build(order, home / "whole")  # here, so that children find made what a first build makes
    gc.collect()
    gc.freeze()  # a collection in a child would copy all that it shares
    expected = digest(home / "whole")
    assert expected
    (kill_at_random if "seeds" in order else kill_everywhere)(order, home, expected)


if __name__ == "__main__":
    main()
