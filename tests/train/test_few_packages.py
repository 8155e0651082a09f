"""core, load, train and the episode reader run with numpy, torch and safetensors: in a Python with nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

import chatmill
from tests.load.sets import write_set
from tests.train.test_trainer import small_items

PACKAGES = ("numpy", "torch", "torchgen", "functorch", "safetensors")
NEEDED_BY_TORCH = ("typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec")
NEEDED_BY_TORCH_ON_GPUS = ("nvidia", "triton", "cuda")
SCRIPT = """
import sys
sys.path[:] = [path for path in sys.path if "site-packages" not in path] + sys.argv[1:3]
import importlib, json, pkgutil
import chatmill.core, chatmill.load, chatmill.train

absent = []
for name in ("msgspec", "pyarrow", "rich", "yaml", "transformers", "typer", "gigatoken", "xxhash"):
    try:
        importlib.import_module(name)
    except ImportError:
        absent.append(name)
imported = []
for room in (chatmill.core, chatmill.load, chatmill.train):
    for module in pkgutil.iter_modules(room.__path__, room.__name__ + "."):
        if not module.name.endswith("_triton"):  # kernels of a GPU
            importlib.import_module(module.name)
            imported.append(module.name)
import chatmill.store.episodes
from chatmill.load.make import make_loader
from chatmill.train.generate import generate
from chatmill.train.gpt import GPT, GPTConfig
from chatmill.train.open_model import open_model

data, out = sys.argv[3:]
config = {"batch_size": 4, "block_size": 16, "dataset_mode": "sft_episode", "pad_token_id": 96, "use_loss_mask": True}
model = GPT(GPTConfig(vocab_size=97, layers=1, hidden=16, heads=2))
first = model.fit(make_loader(config, data, pack=True), steps=3, log_every=1, out=out, progress=True)
more = open_model(out).fit(make_loader(config, data, pack=True), steps=5, log_every=1, out=out)
said = {"absent": absent, "imported": imported, "steps": [first.step, more.step], "said": len(generate(model, [1]).ids)}
print(json.dumps(said))
"""


def test_training_needs_numpy_torch_and_safetensors_alone(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    wanted = PACKAGES + NEEDED_BY_TORCH
    for path in Path(torch.__file__).parents[1].iterdir():
        top = path.name.removesuffix(".py").removesuffix(".libs")
        if top in wanted or path.name.startswith(NEEDED_BY_TORCH_ON_GPUS):
            (packages / path.name).symlink_to(path)
    assert {"numpy", "torch"} <= {path.name for path in packages.iterdir()}
    write_set(tmp_path / "set", small_items(20), small_items(8, seed=1))
    source = Path(chatmill.__file__).parents[1]
    arguments = map(str, (packages, source, tmp_path / "set", tmp_path / "run"))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", SCRIPT, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(done.stdout)
    assert len(got["absent"]) == 8
    assert len(got["imported"]) > 30
    assert "chatmill.train.trainer" in got["imported"]
    assert (got["steps"], got["said"]) == ([3, 5], 256)
    assert (tmp_path / "run" / "log.jsonl").read_text().count('"grad_norm"') == 5
