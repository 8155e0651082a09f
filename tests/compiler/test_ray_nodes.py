"""Builds on a Ray cluster of several nodes: one that is lost, and one that does not see the folder of the driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.chunk_job import ChunkJob, compile_chunk
from chatmill.compiler.engines.ray_engine import RayExecutor
from chatmill.compiler.run import BuildProgress, run_build
from chatmill.errors import ConfigError
from tests.compiler.builds import chats, digest, leftovers, plain_recipe, write_jsonl

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def recipe(fast_module: Path) -> dict[str, Any]:
    path = write_jsonl(fast_module / "chats.jsonl", chats(150, 5))
    recipe = plain_recipe(path, split={"val_fraction": 0.1}, shard_bytes=path.stat().st_size // 14)
    run_build(recipe, fast_module / "whole", workers=0)
    return recipe


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head that runs no tasks, so that all of them run on nodes that a test adds."""
    from ray.cluster_utils import Cluster

    ray.shutdown()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_prestart_worker_first_driver", "0")
    monkeypatch.setenv("RAY_enable_worker_prestart", "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def slow_chunk(job: ChunkJob) -> dict[str, Any]:
    """A chunk that takes long enough for its node to be lost in the middle; notes where it ran."""
    time.sleep(0.3)
    receipt = compile_chunk(job)
    Path(job.place.directory, "..", f"ran_{job.number}_{ray.get_runtime_context().get_node_id()}").touch()
    return receipt


class Slowly(RayExecutor):
    def map(self, job: Any, specs: Any) -> Any:
        return super().map(slow_chunk if job is compile_chunk else job, specs)


def test_a_node_killed_in_the_middle_of_a_build(
    cluster: Any, recipe: dict[str, Any], fast: Path, fast_module: Path
) -> None:
    nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
    cluster.wait_for_nodes()
    killed = []

    def kill_a_node(state: BuildProgress) -> None:
        if state.chunks_done == 3 and not killed:
            cluster.remove_node(nodes[0], allow_graceful=False)
            killed.append(nodes[0])

    run_build(recipe, fast / "out", executor=Slowly(cluster.address), on_progress=kill_a_node)
    assert killed
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
def test_a_node_that_does_not_see_the_folder_of_the_driver(cluster: Any, recipe: dict[str, Any], fast: Path) -> None:
    """The node has mounts of its own: its workers find an empty folder where the driver has the dataset."""
    (fast / "shared").mkdir()
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={cluster.address}", "--num-cpus=1"]
    hide = f'mount -t tmpfs none {fast / "shared"} && exec "$@"'
    with (fast / "log").open("w") as log:
        node = subprocess.Popen(
            ["unshare", "-m", "bash", "-c", hide, "hidden", *start, "--block"],
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        until = time.monotonic() + 120
        while "Ray runtime started" not in (fast / "log").read_text():
            assert node.poll() is None, (fast / "log").read_text()
            assert time.monotonic() < until, (fast / "log").read_text()
            time.sleep(0.1)
        with pytest.raises(
            ConfigError, match=r"a worker on \S+ cannot reach \S+/shared/out/\.build.* file system that all"
        ):
            run_build(recipe, fast / "shared" / "out", executor=RayExecutor(cluster.address))
        assert not (fast / "shared" / "out" / "manifest.json").exists()
    finally:
        node.terminate()
        try:
            node.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()
