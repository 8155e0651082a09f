"""Two ranks of a training program as forks of one process, so that torch is imported once and not twice."""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.connection
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_two_ranks(program: Path, *arguments: str | Path, preload: tuple[str, ...] = ()) -> None:
    """Run a program with its rank as the first argument; `preload` names what both are to find imported.

    The environment is that of torchrun, which keeps the store in a process of its own, too: no port is guessed.
    """
    from torch.distributed import TCPStore

    from tests.forked import run_forked

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    torchrun |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1"}
    modules = " ".join(("torch.distributed", "torch.nn.parallel", *preload))
    done = run_forked(__file__, program, modules, *arguments, cwd=ROOT, env={**os.environ, **torchrun})
    assert done.returncode == 0, done.stderr[-3000:]


def _rank(number: int) -> None:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(number)
    program, _, *arguments = sys.argv[1:]
    sys.argv = [program, str(number), *arguments]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for name in sys.argv[2].split():
        importlib.import_module(name)
    ranks = [multiprocessing.get_context("fork").Process(target=_rank, args=(number,)) for number in (0, 1)]
    for rank in ranks:
        rank.start()
    while running := [rank.sentinel for rank in ranks if rank.is_alive()]:
        multiprocessing.connection.wait(running)
        for rank in ranks if any(rank.exitcode for rank in ranks) else ():  # it would wait for the one that is gone
            rank.kill()
    sys.exit(any(rank.exitcode for rank in ranks))
