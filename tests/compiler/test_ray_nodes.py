"""Builds on a Ray cluster of several nodes: one of them is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chatmill.compiler.run import run_build
from tests.compiler.builds import chats, digest, leftovers, plain_recipe, write_jsonl
from tests.ray_cluster import PATIENT, WORKERS_WHEN_NEEDED

pytest.importorskip("ray")


@pytest.mark.slow
def test_a_node_killed_in_the_middle_of_a_build(fast: Path) -> None:
    """The head runs no tasks: all of them run on nodes that are added."""
    path = write_jsonl(fast / "chats.jsonl", chats(150, 5))
    recipe = plain_recipe(path, split={"val_fraction": 0.1}, shard_bytes=path.stat().st_size // 14)
    run_build(recipe, fast / "whole", workers=0)
    (fast / "recipe.json").write_text(json.dumps(recipe))
    done = subprocess.run(
        [sys.executable, "-m", "tests.compiler.ray_nodes", str(fast / "recipe.json"), str(fast / "out")],
        env={**os.environ, **WORKERS_WHEN_NEEDED, **PATIENT, "RAY_AUTH_MODE": "disabled"},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    where = {path.name.split("_")[2] for path in fast.glob("ran_*")}
    assert len(where) == 2, "both nodes had chunks"
    assert digest(fast / "out") == digest(fast / "whole")
    assert leftovers(fast / "out") == []
