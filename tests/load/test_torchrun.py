"""Two real processes under torchrun: disjoint, complete coverage, and a resume with one process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from chatmill.errors import ConfigError
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.placement import rank_and_world
from tests.forked import for_shells, run_forked
from tests.load.sets import PAD, items, write_set

CONFIG = {
    "batch_size": 3, "block_size": 6, "dataset_mode": "sft_episode", "pad_token_id": PAD, "epoch_drop_last": False,
}  # fmt: skip

SCRIPT = """
import json, sys
import torch
import torch.distributed as dist
from chatmill.load.episodes import GPTEpisodeDataLoader

dist.init_process_group("gloo")
config, directory, out = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
made = GPTEpisodeDataLoader(config, None, directory)
assert (made.rank, made.world_size) == (dist.get_rank(), dist.get_world_size()) == (dist.get_rank(), 2)
rows, state = [], None
for step in range(made.steps_per_epoch()):
    x, y = made.get_batch()
    gathered = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(gathered, x)
    rows.append([g[:, 0].tolist() for g in gathered])
    if step == 1:
        state = made.state_dict()
if dist.get_rank() == 0:
    json.dump({"rows": rows, "state": state}, open(out, "w"))
dist.barrier()
dist.destroy_process_group()
"""


def test_two_processes_share_an_epoch(tmp_path: Path) -> None:
    train = items(25)
    write_set(tmp_path / "set", train)
    script, out, torchrun = tmp_path / "run.py", tmp_path / "out.json", tmp_path / "torchrun.py"
    script.write_text(SCRIPT)
    torchrun.write_text("from torch.distributed.run import main; main()")
    options = ["--standalone", "--nproc_per_node=2", "--log-dir", str(tmp_path / "logs"), "--no-python"]
    command = ["python", str(script), json.dumps(CONFIG), str(tmp_path / "set"), str(out)]
    environment = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE"}} | {"OMP_NUM_THREADS": "1"}
    done = run_forked(torchrun, *options, *command, env=for_shells(environment))
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    taken = [[v for step in result["rows"] for v in step[rank] if v != PAD] for rank in range(2)]
    assert not set(taken[0]) & set(taken[1])
    assert sorted(taken[0] + taken[1]) == [item.ids[0] for item in train]
    assert min(map(len, taken)) > 9

    alone = GPTEpisodeDataLoader(CONFIG, None, tmp_path / "set")
    alone.load_state_dict(result["state"])
    rest = [alone.get_batch()[0][:, 0].tolist() for _ in range(5)]
    seen = [v for step in result["rows"][:2] for part in step for v in part]
    assert sorted(seen + [v for part in rest for v in part if v != PAD]) == [item.ids[0] for item in train]


def test_rank_and_world_come_from_the_arguments_else_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert rank_and_world() == (0, 1)
    assert rank_and_world(2, 4) == (2, 4)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert rank_and_world() == (1, 3)
    assert rank_and_world(0) == (0, 3)
    with pytest.raises(ConfigError, match="rank 3 of world_size 3"):
        rank_and_world(3)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        rank_and_world()
