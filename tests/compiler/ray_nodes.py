"""Builds on a Ray cluster of several nodes, in a process of their own: Ray ends the process that loses its cluster.

python -m tests.compiler.ray_nodes RECIPE OUT
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from chatmill.compiler.chunk_job import ChunkJob, compile_chunk
from chatmill.compiler.engines.ray_engine import RayExecutor
from chatmill.compiler.run import BuildProgress, run_build


def slow_chunk(job: ChunkJob) -> dict[str, Any]:
    """A chunk that takes long enough for its node to be lost in the middle; notes where it ran."""
    time.sleep(0.3)
    receipt = compile_chunk(job)
    Path(job.place.directory, "..", f"ran_{job.number}_{ray.get_runtime_context().get_node_id()}").touch()
    return receipt


class Slowly(RayExecutor):
    def map(self, job: Any, specs: Any) -> Any:
        return super().map(slow_chunk if job is compile_chunk else job, specs)


def lose_a_node(cluster: Cluster, recipe: dict[str, Any], out: Path) -> None:
    """Kill one of two nodes after three chunks."""
    nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
    cluster.wait_for_nodes()
    killed = []

    def kill_a_node(state: BuildProgress) -> None:
        if state.chunks_done == 3 and not killed:
            cluster.remove_node(nodes[0], allow_graceful=False)
            killed.append(nodes[0])

    run_build(recipe, out, executor=Slowly(cluster.address), on_progress=kill_a_node)
    assert killed


def main() -> None:
    recipe, out = sys.argv[1:]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        lose_a_node(cluster, json.loads(Path(recipe).read_text()), Path(out))
    finally:
        sys.stdout.flush()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
