"""A build on a Ray cluster of several nodes: one of them is lost.

The cluster is that of a process of its own, as Ray ends the process that loses it:
python -m tests.compiler.test_ray_nodes RECIPE OUT
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.chunk_job import ChunkJob, compile_chunk
from chatmill.compiler.engines.ray_engine import RayExecutor
from chatmill.compiler.run import BuildProgress, run_build
from tests.compiler.builds import chats, digest, leftovers, plain_recipe, write_jsonl
from tests.ray_cluster import PATIENT, WORKERS_WHEN_NEEDED

ray = pytest.importorskip("ray")


def slow_chunk(job: ChunkJob) -> dict[str, Any]:
    """A chunk that takes long enough for its node to be lost in the middle; notes where it ran."""
    time.sleep(0.3)
    receipt = compile_chunk(job)
    Path(job.place.directory, "..", f"ran_{job.number}_{ray.get_runtime_context().get_node_id()}").touch()
    return receipt


@pytest.mark.slow
def test_a_node_killed_in_the_middle_of_a_build(fast: Path) -> None:
    """The head runs no tasks: all of them run on nodes that are added."""
    path = write_jsonl(fast / "chats.jsonl", chats(150, 5))
    recipe = plain_recipe(path, split={"val_fraction": 0.1}, shard_bytes=path.stat().st_size // 14)
    run_build(recipe, fast / "whole", workers=0)
    (fast / "recipe.json").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "tests.compiler.test_ray_nodes", str(fast / "recipe.json"), str(fast / "out")]
    environment = {**os.environ, **WORKERS_WHEN_NEEDED, **PATIENT, "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    where = {path.name.split("_")[2] for path in fast.glob("ran_*")}
    assert len(where) == 2, "both nodes had chunks"
    assert digest(fast / "out") == digest(fast / "whole")
    assert leftovers(fast / "out") == []


def main() -> None:
    """Build, and kill one of two nodes after three chunks."""
    from ray.cluster_utils import Cluster

    recipe, out = sys.argv[1:]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
    cluster.wait_for_nodes()
    killed = []

    def kill_a_node(state: BuildProgress) -> None:
        if state.chunks_done == 3 and not killed:
            cluster.remove_node(nodes[0], allow_graceful=False)
            killed.append(nodes[0])

    executor, given = RayExecutor(cluster.address), json.loads(Path(recipe).read_text())
    try:
        run_build(given, out, executor=executor, on_progress=kill_a_node, job=slow_chunk)
        assert killed
    finally:
        sys.stdout.flush()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
