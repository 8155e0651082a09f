"""Two ranks of a training program as forks of one process, so that torch is imported once and not twice."""

from __future__ import annotations

import os
from pathlib import Path

from torch.distributed import TCPStore

from tests.forked import run_forked

ROOT = Path(__file__).parents[2]


def run_two_ranks(program: Path, *arguments: str | Path, preload: tuple[str, ...] = ()) -> None:
    """Run a program with its rank as the first argument; `preload` names what both are to find imported.

    The environment is that of torchrun, which keeps the store in a process of its own, too: no port is guessed.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    torchrun |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1"}
    modules = " ".join(("torch.distributed", "torch.nn.parallel", *preload))
    launcher = Path(__file__).with_name("fork_ranks.py")
    done = run_forked(launcher, program, modules, *arguments, cwd=ROOT, env={**os.environ, **torchrun})
    assert done.returncode == 0, done.stderr[-3000:]
