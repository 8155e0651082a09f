"""Two ranks of a training program as forks of one process, so that torch is imported once and not twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FORK = """
import importlib, os, signal, sys, traceback
program, preload, arguments = sys.argv[1], sys.argv[2].split(), sys.argv[3:]
for name in preload:
    importlib.import_module(name)
code = compile(open(program).read(), program, "exec")
children = set()
for rank in (0, 1):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            sys.argv = [program, str(rank), *arguments]
            exec(code, {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    children.add(child)
failed = False
while children:
    child, status = os.wait()
    children.discard(child)
    if status and not failed:
        failed = True
        for other in children:  # it would wait for the one that is gone
            os.kill(other, signal.SIGKILL)
sys.exit(failed)
"""


def run_two_ranks(program: Path, *arguments: str | Path, preload: tuple[str, ...] = ()) -> None:
    """Run a program with its rank as the first argument; `preload` names what both are to find imported."""
    modules = " ".join(("torch", "torch.distributed", "torch.nn.parallel", *preload))
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(program), modules, *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
