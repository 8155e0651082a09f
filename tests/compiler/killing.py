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
from pathlib import Path
from typing import Any

from chatmill.compiler.run import run_build
from tests.compiler.builds import digest, leftovers
from tests.distill import inputs
from tests.distill.inputs import in_chunks_of
from tests.faults import active

NAMES = ("rename", "remove", "mkdir", "rmdir", "truncate", "utime", "link", "symlink", "fsync")
CHANGES = {f"os.{name}" for name in NAMES}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def in_child(work: Callable[[], None]) -> int:
    """Run something in a forked process; its exit status as `waitpid` gives it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


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


def builder(order: dict[str, Any], out: Path, *, resume: bool = False, workers: int = 0) -> Callable[[], None]:
    def work() -> None:
        if "distil" in order:
            # the audit changes no byte, and takes a third of the time
            options: dict[str, Any] = {"valid_fraction": 0.3, "on_error": "quarantine", "audit": 0}
            in_chunks_of(10, order["distil"], out, workers=workers, resume=resume, **options)
        else:
            run_build(order["recipe"], out, workers=workers, resume=resume)

    return work


def after_kill(order: dict[str, Any], out: Path, status: int, expected: dict[str, str]) -> dict[str, Any]:
    """Resume a build that ended with a status, and report what came out."""
    report: dict[str, Any] = {"killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL}
    report["manifest_before"] = (out / "manifest.json").exists()
    report["resumed"] = in_child(builder(order, out, resume=True)) == 0
    report["equal"] = report["resumed"] and digest(out) == expected
    left = inputs.leftovers if "distil" in order else leftovers
    report["leftovers"] = left(out) if report["resumed"] else []
    shutil.rmtree(out)
    return report


def kill_everywhere(order: dict[str, Any], home: Path, expected: dict[str, str]) -> None:
    note, out, left = home / "note", home / "out", home / "left"

    def killed_first() -> None:
        with active(order["first"]):
            builder(order, left)()

    if "first" in order:
        assert in_child(killed_first) == signal.SIGKILL, "the build was not killed"

    def counted(at: int, note: Path | None) -> Callable[[], None]:
        def work() -> None:
            watch_files(out, at, note)
            builder(order, out, resume=left.exists())()

        if left.exists():
            shutil.copytree(left, out)
        return work

    assert in_child(counted(0, note)) == 0, "the build that counts its operations failed"
    shutil.rmtree(out)
    operations = [json.loads(line) for line in note.read_text().splitlines()]
    renames = [at for at, operation in enumerate(operations, 1) if operation[0] in ("os.rename", "os.fsync")]
    if order["kill"] == "kinds":
        renames = sorted({kind_of(operations[at - 1]): at for at in reversed(renames)}.values())
    # A kill before the operation that follows a rename is a kill after it; the last operation is never a rename.
    around = sorted({*renames, *(at + 1 for at in renames)})
    for at in around if order["kill"] != "everywhere" else range(1, len(operations) + 1):
        status = in_child(counted(at, None))
        report = {"at": at, "operation": operations[at - 1], **after_kill(order, out, status, expected)}
        print(json.dumps({**report, "operations": len(operations), "renames": len(renames)}), flush=True)


def kind_of(operation: list[str]) -> tuple[str, str]:
    """What is renamed to what, whatever its number and its temporary name; all files that are synced are one kind."""
    what, *paths = operation
    if what == "os.fsync" and Path(paths[-1]).suffix:
        return what, "file"
    return what, re.sub(r"\d+", "0", re.sub(r"\.tmp-\d+-[0-9a-f]+", "tmp", Path(paths[-1]).name))


def workers_of(driver: int) -> list[int]:
    """All processes below one: its children, and those that were forked from them."""
    try:
        children = [int(pid) for pid in Path(f"/proc/{driver}/task/{driver}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [pid for child in children for pid in (child, *workers_of(child))]


def send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def ended(child: int, until: float) -> int | None:
    """The status of a child that ends before a time; None: it is still running."""
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.002)
    return None


def kill_at_random(order: dict[str, Any], home: Path, expected: dict[str, str]) -> None:
    """Every build goes on where the one before it was stopped; one that ends is compared, and the next begins anew."""
    out = home / "out"
    started = time.monotonic()
    assert in_child(builder(order, out, workers=2)) == 0
    usual = time.monotonic() - started
    for seed in [*order["seeds"], None]:  # the last one is left alone
        rng = random.Random(seed)
        child = os.fork()
        if child == 0:
            os._exit(in_child(builder(order, out, resume=True, workers=2)) != 0)
        report: dict[str, Any] = {"seed": seed, "hit": False}
        # The process that builds is a child of the child, so that the one which waits is never hit.
        status = None if seed is None else ended(child, time.monotonic() + rng.random() * usual)
        drivers = workers_of(child)[:1]
        if status is None and drivers and seed is not None:
            victims = workers_of(drivers[0]) if rng.random() < 0.5 else drivers
            victim = rng.choice(victims or drivers)
            what = rng.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
            report |= {"signal": what.name, "driver": victim == drivers[0], "hit": send(victim, what)}
            if what == signal.SIGSTOP:
                status = ended(child, time.monotonic() + rng.random() * usual / 4)
                send(victim, rng.choice([signal.SIGCONT, signal.SIGKILL]))
        if status is None:
            status = os.waitpid(child, 0)[1]
        report["finished"] = status == 0
        if status == 0:
            report |= {"equal": digest(out) == expected, "leftovers": leftovers(out)}
            shutil.rmtree(out)
        print(json.dumps(report), flush=True)


def reports_of(order: dict[str, Any]) -> list[dict[str, Any]]:
    """What this module prints of an order, one report for each kill."""
    command, home = [sys.executable, "-m", "tests.compiler.killing"], Path(__file__).parents[2]
    done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, check=False, cwd=home)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["killed"], f"the build was not killed: {report}"
        assert report["resumed"], f"the build could not be resumed: {report}"
        assert report["equal"], f"other bytes than those of an undisturbed build: {report}"
        assert not report["leftovers"], report


def main() -> None:
    order = json.load(sys.stdin)
    home = Path(order["home"])
    builder(order, home / "whole")()  # here, so that children find made what a first build makes
    gc.collect()
    gc.freeze()  # a collection in a child would copy all that it shares
    expected = digest(home / "whole")
    assert expected
    if "seeds" in order:
        kill_at_random(order, home, expected)
    else:
        kill_everywhere(order, home, expected)


if __name__ == "__main__":
    main()
