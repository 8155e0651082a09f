"""A script that forks two ranks of a program: given its path, the modules to import before it, and its arguments."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from pathlib import Path


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    program, preload, arguments = sys.argv[1], sys.argv[2].split(), sys.argv[3:]
    for name in preload:
        importlib.import_module(name)
    code = compile(Path(program).read_text(), program, "exec")
    children = set()
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                sys.argv = [program, str(rank), *arguments]
                os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
                exec(code, {"__name__": "__main__", "__file__": program})
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


if __name__ == "__main__":
    main()
