"""Commands and scripts in processes that are forked from one which has imported everything: a start costs milliseconds.

All processes of a test run share that one: where pytest starts several, their environment says where it listens.
A fork is a process of its own: its signals, exit status, memory and open files are as always, and what it imports is
there already. Tests of a start itself (what is imported, what is missing, hash seeds) start `sys.executable` instead.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests import faults

ROOT = Path(__file__).parents[1]
ADDRESS = "CHATMILL_TEST_FORKS"
"""Where `SHIM` and other processes of pytest find the server."""
IMPORTED = (
    *("torch._dynamo", "typer._adapters", "numpy.ma", "rich.table", "yaml", "xxhash", "resource", "PIL.Image"),
    *("pyarrow.parquet", "pandas", "awkward", "datasets", "gigatoken", "tokenizers", "openai_harmony", "tiktoken"),
    *("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"),
    *("chatmill.load", "chatmill.train.trainer", "chatmill.compiler.run", "chatmill.compiler.first_recipe"),
    *("chatmill.prove.verify", "chatmill.prove.compare.diff", "chatmill.export.export", "chatmill.distill.check"),
    *("chatmill.look.stats", "chatmill.look.dataset", "chatmill.look.template_look", "chatmill.look.viewer.overview"),
)
"""Next to the modules of the commands, which import less than they use; the first are what libraries import late."""
SHIM = f"""#!{sys.executable} -ISE
import array, json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(os.environ["{ADDRESS}"])
order = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
server.sendmsg([b"%12d" % len(order)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
server.sendall(order)
answers = server.makefile()
process = int(answers.readline())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda got, frame: os.kill(process, got))
status = int(answers.readline())
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if status != -signal.SIGKILL else None
    os.kill(os.getpid(), -status)
sys.exit(status)
"""
"""Hands its arguments and open files to the server, and ends as the fork did."""
CHATMILL = '#!/bin/sh\nexec {shim} chatmill "$@"\n'
PYTHON = """#!/bin/sh
case "$1" in
  [!-]*|-|-c) exec {shim} "$@" ;;
  *) exec {python} "$@" ;;
esac
"""
"""Both for shells. Scripts and `-c` are forks; everything else that an interpreter may be asked for is one."""


@cache
def address() -> Path:
    """Where the server listens: it is started if there is none yet, and ends when its input does."""
    if ADDRESS in os.environ:
        return Path(os.environ[ADDRESS])
    folder = Path(tempfile.mkdtemp(prefix="forks"))  # short: sockets with long paths cannot be made
    names = {"shim": str(folder / "shim"), "python": shlex.quote(sys.executable)}
    for name, script in (("shim", SHIM), ("chatmill", CHATMILL.format(**names)), ("python", PYTHON.format(**names))):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forked", str(folder / "socket")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "JE_ARROW_MALLOC_CONF": "background_thread:false"},  # a thread of Arrow's
    )
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.communicate)
    assert server.stdout is not None
    assert server.stdout.readline() == b"listening\n", "the process that forks did not start"
    return folder / "socket"


def share_forks() -> None:
    """Have the processes that are started from here on use one server."""
    os.environ[ADDRESS] = str(address())


def for_shells(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which `chatmill` is a fork, and so is `python` with a script."""
    path = f"{address().parent}{os.pathsep}{environment['PATH']}"
    return {**environment, "PATH": path, ADDRESS: str(address())}


class Forked(subprocess.Popen[str]):
    """`chatmill ...` or `script.py ...` in a fork; SIGINT and SIGTERM are handed on to it."""

    def __init__(self, *command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        super().__init__(
            [address().with_name("shim"), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**(os.environ if env is None else env), ADDRESS: str(address())},
        )


def run_forked(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run and wait; nothing is raised for a failing exit status."""
    process = Forked(*command, **options)
    out, errors = process.communicate()
    return subprocess.CompletedProcess(list(map(str, command)), process.returncode, out, errors)


def work_here(put: Callable[[Any, str, Any], None]) -> None:
    """Start workers only if a number is given: each takes a second of processor time, and most inputs are tiny."""
    from chatmill.compiler.engines import local

    put(local, "available_cores", lambda: 0)


# -- in the process that forks -----------------------------------------------------------------------------------------


def serve(address: str) -> None:
    """Fork for everybody who connects, until the input ends."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    os.write(1, b"listening\n")
    if sys.stdin in select.select([listening, sys.stdin], [], [])[0]:
        return  # nobody came
    load()
    running: dict[int, tuple[int, socket.socket]] = {}  # by a descriptor that becomes readable when the process ends
    while sys.stdin not in (ready := select.select([listening, sys.stdin, *running], [], [])[0]):
        for source in ready:
            if not isinstance(source, int):
                connection, _ = listening.accept()
                child = fork_for(connection, [listening.fileno(), *running, *(c.fileno() for _, c in running.values())])
                running[os.pidfd_open(child)] = child, connection
                continue
            child, connection = running.pop(source)
            os.close(source)
            say(connection, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            connection.close()


def load() -> None:
    """Import everything, and make what most commands make first."""
    import chatmill.cli
    from chatmill.render.registry import bind, find_template
    from chatmill.tokenizer.byte_level import byte_tokenizer
    from chatmill.tokenizer.load import load_tokenizer
    from tests.engines_once import share_engines

    bind("chatml", byte_tokenizer(find_template("chatml").control_tokens))  # compiled once: most commands take it
    commands = [f"chatmill.cli.{module.name}" for module in pkgutil.iter_modules(chatmill.cli.__path__)]
    for name in (*IMPORTED, *commands):
        importlib.import_module(name)
    work_here(setattr)
    share_engines(setattr)
    load_tokenizer("o200k")
    assert len(os.listdir("/proc/self/task")) == 1, "a fork copies one thread"
    for cleanup in weakref.finalize._registry:  # type: ignore[attr-defined]  # torch has thousands, which take long
        cleanup.atexit = False
    gc.collect()
    gc.freeze()


def fork_for(connection: socket.socket, others: list[int]) -> int:
    """Start what is asked for, and say its process; `others` are descriptors that are none of its business."""
    head, files, _, _ = socket.recv_fds(connection, 12, 3)
    order = b""
    while len(order) < int(head):
        order += connection.recv(int(head) - len(order))
    child = os.fork()
    if child == 0:
        for file in (connection.fileno(), *others):
            os.close(file)
        become(files, *json.loads(order))
    for file in files:
        os.close(file)
    say(connection, child)
    return child


def say(connection: socket.socket, number: int) -> None:
    """Send a number to somebody who may be gone."""
    with contextlib.suppress(ConnectionError):
        connection.sendall(b"%d\n" % number)


def become(files: list[int], command: list[str], folder: str, environment: dict[str, str]) -> None:
    """The command, as an interpreter that has just been started runs it; never returns."""
    status: Any = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        faults.install()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = command
        try:
            start(command[0])
            status = 0
        except SystemExit as ended:
            status = ended.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
        status = status if isinstance(status, int) else int(status is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # what an interpreter does at its end
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status & 0xFF)


def start(program: str) -> None:
    sys.modules["__main__"] = script = types.ModuleType("__main__")
    if program in ("-", "-c"):
        code = sys.stdin.read() if program == "-" else sys.argv.pop(1)
        sys.path[0] = ""
        exec(compile(code, "<string>", "exec"), vars(script))
    elif program == "chatmill":
        from chatmill.cli import main

        sys.path[0] = str(Path(sys.executable).parent)
        main()
    else:
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1])
