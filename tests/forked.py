"""Commands and scripts in processes that are forked from one which has imported everything: a start costs milliseconds.

All processes of a test run share that one: where pytest starts several, their environment says where it listens.
A fork is a process of its own: its signals, exit status, memory and open files are as always, and what it imports is
there already. Tests of a start itself (what is imported, what is missing, hash seeds) start `sys.executable` instead.
"""

from __future__ import annotations

import array
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
SHIM = f"""
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
"""A `chatmill` or `python` for shells: hands its arguments and open files to the server, and ends as the fork did."""
PYTHON = """#!/bin/sh
case "$1" in
  [!-]*|-|-c) exec {shim} "$@" ;;
  *) exec {python} "$@" ;;
esac
"""
"""Scripts and `-c` are forks; everything else that an interpreter may be asked for is one."""


class Server:
    """The process that forks, for as long as this one lives."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="forks"))  # short: sockets with long paths cannot be made
        self.address = self.folder / "socket"
        (self.folder / "shim.py").write_text(SHIM)
        shim = shlex.join([sys.executable, "-ISE", str(self.folder / "shim.py")])
        (self.folder / "chatmill").write_text(f'#!/bin/sh\nexec {shim} chatmill "$@"\n')
        (self.folder / "python").write_text(PYTHON.format(shim=shim, python=shlex.quote(sys.executable)))
        for name in ("chatmill", "python"):
            (self.folder / name).chmod(0o755)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(self.address)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "JE_ARROW_MALLOC_CONF": "background_thread:false"},  # a thread of Arrow's
        )
        atexit.register(self.close)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"listening\n", "the process that forks did not start"

    def close(self) -> None:
        """It ends when its input does."""
        self.process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)


@cache
def address() -> Path:
    """Of the server, which is started if there is none yet."""
    return Path(os.environ[ADDRESS]) if ADDRESS in os.environ else Server().address


def share_forks() -> None:
    """Have the processes that are started from here on use one server."""
    os.environ[ADDRESS] = str(address())


def for_shells(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which `chatmill` is a fork, and so is `python` with a script."""
    path = f"{address().parent}{os.pathsep}{environment['PATH']}"
    return {**environment, "PATH": path, ADDRESS: str(address())}


class Forked:
    """`chatmill ...` or `script.py ...` in a fork, with its output in files."""

    def __init__(
        self, *command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, **_: Any
    ) -> None:
        self.command = [str(word) for word in command]
        self.said, self.errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.returncode: int | None = None
        order = json.dumps([self.command, str(cwd or Path.cwd()), dict(os.environ if env is None else env)]).encode()
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(str(address()))
        with open(os.devnull) as nothing:
            files = array.array("i", [nothing.fileno(), self.said.fileno(), self.errors.fileno()])
            self.connection.sendmsg([b"%12d" % len(order)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
            self.connection.sendall(order)
            self.answers = self.connection.makefile()
            answer = self.answers.readline()
            assert answer, "the process that forks has ended"
            self.pid = int(answer)

    def poll(self) -> int | None:
        """The exit status, if it has ended."""
        if self.ends_within(0):
            self.wait()
        return self.returncode

    def ends_within(self, seconds: float) -> bool:
        """Whether it has ended, or does so in that time."""
        return self.returncode is not None or bool(select.select([self.connection], [], [], seconds)[0])

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self.answers.readline())
            self.answers.close()
            self.connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        assert self.poll() is None
        os.kill(self.pid, number)

    def heard(self) -> str:
        """What it has printed so far."""
        return os.pread(self.said.fileno(), 1 << 20, 0).decode()

    def communicate(self) -> tuple[str, str]:
        """What it wrote, when it has ended."""
        self.wait()
        texts = []
        for file in (self.said, self.errors):
            if not file.closed:
                file.seek(0)
                texts.append(file.read().decode())
                file.close()
        return texts[0], texts[1]


def run_forked(
    *command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run and wait; nothing is raised for a failing exit status."""
    process = Forked(*command, cwd=cwd, env=env)
    out, errors = process.communicate()
    return subprocess.CompletedProcess(process.command, process.wait(), out, errors)


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
    if program in ("-", "-c"):
        code = sys.stdin.read() if program == "-" else sys.argv.pop(1)
        sys.path[0] = ""
        sys.modules["__main__"] = script = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(script))
        return
    if program != "chatmill":
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")
        return
    from chatmill.cli import main

    sys.path[0] = str(Path(sys.executable).parent)
    sys.modules["__main__"] = types.ModuleType("__main__")
    main()


if __name__ == "__main__":
    serve(sys.argv[1])
