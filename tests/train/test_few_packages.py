"""Loaders, losses, isolation check and episode reader need numpy, msgspec and torch alone, the stream no episodes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import chatmill
from chatmill.load.token_stream import make_loader
from tests.load.sets import write_set
from tests.train.tiny import small_items

PACKAGES = {"numpy", "msgspec", "torch"}
OF_TORCH = {"torchgen", "functorch", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe",
            "filelock", "fsspec"}  # fmt: skip
OF_TORCH_ON_GPUS = ("nvidia", "triton", "cuda")
SCRIPT = """
import sys
sys.path[:] = [path for path in sys.path if "site-packages" not in path] + sys.argv[1:3]
import importlib.util, json, pkgutil
EPISODES = {"chatmill.load.episodes", "chatmill.load.episode_rows", "chatmill.store.episodes",
            "chatmill.store.episode_shard", "chatmill.store.episode_writer"}

class Block:
    def find_spec(self, name, path=None, target=None):
        if name in EPISODES:
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Block())
from chatmill.load.config import load_training_config
from chatmill.load.token_stream import make_loader
stream = make_loader({"batch_size": 4, "block_size": 7, "use_loss_mask": True}, sys.argv[3])
batches = [[t.tolist() for t in stream.get_batch()] for _ in range(5)]
EPISODES.clear()
open("c.xml", "w").write("<training><batch_size>3</batch_size><block_size>6</block_size></training>")
assert load_training_config("c.xml").batch_size == 3
import chatmill.core, chatmill.load

rooms = (chatmill.core, chatmill.load)
modules = [module.name for room in rooms for module in pkgutil.iter_modules(room.__path__, room.__name__ + ".")]
for name in modules:
    importlib.import_module(name)
others = ("pyarrow", "rich", "yaml", "transformers", "typer", "gigatoken", "xxhash")
absent = [name for name in others if importlib.util.find_spec(name) is None]
import chatmill.store.episodes
import chatmill.train.isolation
from chatmill.train.losses import token_losses, weighted_loss
import torch

config = {"batch_size": 4, "block_size": 16, "dataset_mode": "sft_episode", "pad_token_id": 96, "use_loss_mask": True}
x, y, mask, _ = make_loader(config, sys.argv[3], pack=True).get_batch()
loss = weighted_loss(token_losses(torch.zeros(*y.shape, 97), y), mask)
found = {"absent": len(absent), "imported": len(modules), "batches": batches, "loss": loss.values()["loss"]}
print(json.dumps(found))
"""


def test_batches_and_losses_need_few_packages(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(torch.__file__).parents[1].iterdir():
        top = path.name.removesuffix(".py").removesuffix(".libs")
        if top in PACKAGES | OF_TORCH or path.name.startswith(OF_TORCH_ON_GPUS):
            (packages / path.name).symlink_to(path)
    write_set(tmp_path / "set", small_items(20), small_items(8, seed=1))
    command = [sys.executable, "-I", "-S", "-c", SCRIPT, packages, Path(chatmill.__file__).parents[1], tmp_path / "set"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(done.stdout)
    assert got["absent"] == 7
    assert got["imported"] > 20
    assert got["loss"] == pytest.approx(math.log(97))
    made = make_loader({"batch_size": 4, "block_size": 7, "use_loss_mask": True}, tmp_path / "set")
    assert [[t.tolist() for t in made.get_batch()] for _ in range(5)] == got["batches"], "with episodes as without"
