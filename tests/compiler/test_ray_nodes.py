"""A build on a Ray cluster of several nodes: one of them is lost, and the driver reads no input.

The cluster is that of a process of its own, as Ray ends the process that loses it:
python -m tests.compiler.test_ray_nodes RECIPE OUT JOB
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler import group_borders, scan_jobs
from chatmill.compiler.engines.ray_engine import RayExecutor
from chatmill.compiler.run import run_build
from tests.compiler.builds import chats, digest, leftovers, mixed_recipe, write_inputs, write_jsonl
from tests.ray_cluster import PATIENT, WORKERS_WHEN_NEEDED

ray = pytest.importorskip("ray")

JOBS = ("scan_parts", "summarize_groups", "compile_chunk")
"""What a build lets its executor do."""
WATCHED = ("/in/", "/.build/spool/")
"""Folders that the driver must open nothing in."""


def recipe_over(folder: Path) -> dict[str, Any]:
    """Every kind of input, one file of many parts, and one source with groups."""
    write_inputs(folder / "in", 60)
    large = write_jsonl(folder / "in" / "large.jsonl", chats(150, 5))
    recipe = mixed_recipe(folder / "in")
    grouped = {"path": str(large), "name": "large", "pick": {"group": "id"}}
    return {**recipe, "sources": [*recipe["sources"], grouped], "shard_bytes": large.stat().st_size // 14}


def slowly(job: Callable[[Any], Any], out: str, spec: Any) -> Any:
    """A job that takes long enough for its node to be lost in the middle; notes where it ran."""
    time.sleep(0.3)
    result = job(spec)
    node = ray.get_runtime_context().get_node_id()
    Path(out, "..", f"ran_{job.__name__}_{node}_{time.monotonic_ns()}").touch()
    return result


class LosesANode(RayExecutor):
    """A cluster that loses a node when three jobs of one kind are done."""

    def __init__(self, cluster: Any, node: Any, job: str, out: str) -> None:
        super().__init__(cluster.address)
        self.cluster, self.node, self.job, self.out, self.is_lost = cluster, node, job, out, False

    def map(self, job: Any, specs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        results = super().map(partial(slowly, job, self.out), specs)
        for done, (index, result) in enumerate(results, 1):
            yield index, result
            if job.__name__ == self.job and done == 3 and not self.is_lost:
                self.cluster.remove_node(self.node, allow_graceful=False)
                self.is_lost = True


@pytest.mark.slow
@pytest.mark.parametrize("job", ["scan_parts", "compile_chunk"])
def test_a_node_killed_in_the_middle_of_a_build_whose_driver_reads_no_input(fast: Path, job: str) -> None:
    """The head runs no tasks: all of them run on nodes that are added."""
    recipe = recipe_over(fast)
    run_build(recipe, fast / "whole", workers=0)
    (fast / "recipe.json").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "tests.compiler.test_ray_nodes", str(fast / "recipe.json"), str(fast / "out"), job]
    environment = {**os.environ, **WORKERS_WHEN_NEEDED, **PATIENT, "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"lost": True, "opened": []}
    ran = [path.name.removeprefix("ran_").rsplit("_", 2) for path in fast.glob("ran_*")]
    assert {name for name, _, _ in ran} == set(JOBS)
    assert len({node for name, node, _ in ran if name == job}) == 2, "both nodes had such jobs"
    assert digest(fast / "out") == digest(fast / "whole")
    assert leftovers(fast / "out") == []


def noted(note: Callable[[object], None], opens: Callable[..., Any], path: Any, *given: Any, **more: Any) -> Any:
    """Open a file of a library whose own code opens it, and note that."""
    note(path)
    return opens(path, *given, **more)


def opened_files() -> list[str]:
    """From now on: the inputs and spools that this process opens."""
    import pyarrow
    import pyarrow.parquet

    found: list[str] = []

    def note(name: object) -> None:
        if any(part in str(name) for part in WATCHED):
            found.append(str(name))

    sys.addaudithook(lambda event, about: note(about[0]) if event == "open" else None)
    for module, name in ((pyarrow.parquet, "ParquetFile"), (pyarrow, "memory_map"), (pyarrow, "OSFile")):
        setattr(module, name, partial(noted, note, getattr(module, name)))
    return found


def main() -> None:
    """Build, and lose one of two nodes after three jobs of a kind; say what the driver opened."""
    from ray.cluster_utils import Cluster

    recipe, out, job = sys.argv[1:]
    scan_jobs.PART_BYTES = 5000
    scan_jobs.FILE_COST = group_borders.PIECE_COST = 1
    group_borders.JOB_BYTES = 5000
    opened = opened_files()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
    cluster.wait_for_nodes()
    executor = LosesANode(cluster, nodes[0], job, out)
    try:
        run_build(json.loads(Path(recipe).read_text()), out, executor=executor)
        print(json.dumps({"lost": executor.is_lost, "opened": opened}))
    finally:
        sys.stdout.flush()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
