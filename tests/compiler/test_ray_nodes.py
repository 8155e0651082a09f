"""Builds on a Ray cluster of several nodes: one that is lost, and one that does not see the folder of the driver."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.run import run_build
from tests.compiler.builds import chats, digest, leftovers, plain_recipe, write_jsonl
from tests.ray_cluster import PATIENT, WORKERS_WHEN_NEEDED

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def recipe(fast_module: Path) -> dict[str, Any]:
    path = write_jsonl(fast_module / "chats.jsonl", chats(150, 5))
    recipe = plain_recipe(path, split={"val_fraction": 0.1}, shard_bytes=path.stat().st_size // 14)
    run_build(recipe, fast_module / "whole", workers=0)
    return recipe


def on_a_cluster(name: str, recipe: dict[str, Any], out: Path) -> str:
    """What a function of `ray_nodes` printed, with a head that runs no tasks: all of them run on nodes it adds."""
    file = out.parent / "recipe.json"
    file.write_text(json.dumps(recipe))
    done = subprocess.run(
        [sys.executable, "-m", "tests.compiler.ray_nodes", name, str(file), str(out)],
        env={**os.environ, **WORKERS_WHEN_NEEDED, **PATIENT, "RAY_AUTH_MODE": "disabled"},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_node_killed_in_the_middle_of_a_build(recipe: dict[str, Any], fast: Path, fast_module: Path) -> None:
    on_a_cluster("lose_a_node", recipe, fast / "out")
    where = {path.name.split("_")[2] for path in fast.glob("ran_*")}
    assert len(where) == 2, "both nodes had chunks"
    assert digest(fast / "out") == digest(fast_module / "whole")
    assert leftovers(fast / "out") == []


def can_hide_folders() -> bool:
    return (
        sys.platform == "linux"
        and subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
    )


@pytest.mark.skipif(not can_hide_folders(), reason="no mount namespaces here")
def test_a_node_that_does_not_see_the_folder_of_the_driver(recipe: dict[str, Any], fast: Path) -> None:
    (fast / "shared").mkdir()
    printed = on_a_cluster("hide_the_folder", recipe, fast / "shared" / "out")
    assert re.search(r"a worker on \S+ cannot reach \S+/shared/out/\.build.* file system that all", printed), printed
    assert not (fast / "shared" / "out" / "manifest.json").exists()
