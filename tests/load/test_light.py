"""The loaders and the isolation check need numpy, msgspec and torch alone: everything else is blocked here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.load.sets import items, write_set

SCRIPT = """
import sys, json
HEAVY = {"pyarrow", "rich", "yaml", "typer", "datasets", "transformers",
         "tokenizers", "gigatoken", "torchdata", "zstandard", "awkward"}

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HEAVY:
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Block())
from chatmill.load.config import load_training_config
from chatmill.load.token_stream import make_loader
import chatmill.train.isolation
shapes = []
for mode in ("token_stream", "sft_episode"):
    config = load_training_config(batch_size=2, block_size=6, dataset_mode=mode, pad_token_id=1, use_loss_mask=True)
    shapes.append([list(t.shape) for t in make_loader(config, sys.argv[1]).get_batch()])
shapes.append(len(make_loader(config, sys.argv[1], pack=True).get_batch()))
path = sys.argv[1] + "/c.xml"
open(path, "w").write("<training><batch_size>3</batch_size><block_size>6</block_size></training>")
shapes.append(load_training_config(path).batch_size)
print(json.dumps(shapes))
"""


def test_numpy_msgspec_and_torch_are_enough(tmp_path: Path) -> None:
    write_set(tmp_path, items(12), items(4))
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    got = json.loads(done.stdout)
    assert got[:2] == [[[2, 6]] * 3] * 2
    assert got[2] == 4
    assert got[3] == 3
