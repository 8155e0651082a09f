"""Builds on a Ray cluster of several nodes, in a process of their own: Ray ends the process that loses its cluster.

python -m tests.compiler.ray_nodes lose_a_node RECIPE OUT
python -m tests.compiler.ray_nodes hide_the_folder RECIPE OUT
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from chatmill.compiler.chunk_job import ChunkJob, compile_chunk
from chatmill.compiler.engines.ray_engine import RayExecutor
from chatmill.compiler.run import BuildProgress, run_build
from chatmill.errors import ConfigError
from tests.ray_cluster import wait_until_started


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


def hide_the_folder(cluster: Cluster, recipe: dict[str, Any], out: Path) -> None:
    """Build on a node with mounts of its own: its workers find an empty folder where the driver has the dataset."""
    with hidden_node(cluster.address, out.parent):
        try:
            run_build(recipe, out, executor=RayExecutor(cluster.address))
        except ConfigError as error:
            print(error)


@contextlib.contextmanager
def hidden_node(address: str, folder: Path) -> Iterator[None]:
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", "--num-cpus=1", "--block"]
    hide = f'mount -t tmpfs none {folder} && exec "$@"'
    log = folder.with_name("log")
    with log.open("w") as file:
        node = subprocess.Popen(
            ["unshare", "-m", "bash", "-c", hide, "hidden", *start],
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        wait_until_started(node, log)
        yield
    finally:
        node.terminate()
        try:
            node.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()


def main() -> None:
    name, recipe, out = sys.argv[1:]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        globals()[name](cluster, json.loads(Path(recipe).read_text()), Path(out))
    finally:
        sys.stdout.flush()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
