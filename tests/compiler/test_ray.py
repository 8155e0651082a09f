"""The Ray engine on a real local Ray: results, killed workers, errors; and a build on a cluster that loses a node.

That cluster is of a process of its own, as Ray ends the process that loses it:
python -m tests.compiler.test_ray RECIPE OUT
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.chunk_job import ChunkJob, compile_chunk
from chatmill.compiler.engines.jobs import JobKilledWorkers, RemoteTraceback, WorkerStartError
from chatmill.compiler.engines.ray_engine import RayExecutor
from chatmill.compiler.run import BuildProgress, run_build
from chatmill.errors import ConfigError, DataError, MissingExtraError, UnknownNameError
from tests.compiler import executor_jobs as jobs
from tests.compiler.builds import chats, digest, leftovers, plain_recipe, write_jsonl
from tests.compiler.executor_jobs import Chunk
from tests.ray_cluster import PATIENT, WORKERS_WHEN_NEEDED, free_port

ray = pytest.importorskip("ray")


@pytest.fixture
def cluster(ray_address: str) -> None:
    """A connection that was there before the executor, which must leave it alone; kept for the next test."""
    if not ray.is_initialized():
        ray.init(address=ray_address, log_to_driver=False, logging_level=logging.ERROR)


@pytest.fixture
def apart() -> None:
    """No connection to any Ray."""
    ray.shutdown()


def run(job: Callable[[Any], Any], specs: list[Any], **options: Any) -> dict[int, Any]:
    found = list(RayExecutor(**options).map(job, specs))
    assert len(dict(found)) == len(found), "a job was reported twice"
    return dict(found)


@pytest.mark.usefixtures("cluster")
def test_every_job_is_reported_once_and_workers_are_used_again() -> None:
    found = run(jobs.square, list(range(12)))
    assert {index: result["square"] for index, result in found.items()} == {n: n * n for n in range(12)}
    assert os.getpid() not in {result["pid"] for result in found.values()}
    assert max(result["calls"] for result in found.values()) > 1
    assert ray.is_initialized(), "a connection that is not ours was ended"


@pytest.mark.usefixtures("cluster")
def test_a_job_that_always_kills_is_named(tmp_path: Path) -> None:
    chunks = [Chunk(number=n, folder=str(tmp_path)) for n in range(3, 5)]
    with pytest.raises(JobKilledWorkers, match=r"chunk 3 of sample.jsonl: this job killed its worker 3 times"):
        run(jobs.kill_always_if_three, chunks)
    assert len((tmp_path / "tries_3").read_text().split()) == 3


@pytest.mark.usefixtures("cluster")
def test_an_error_of_a_job_arrives_as_it_was_and_ends_the_run() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'chatml'") as caught:
        run(jobs.fail, ["unknown"])
    assert type(caught.value) is UnknownNameError
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "in the job: 'unknown'" in caught.value.__notes__
    begin = time.monotonic()
    with pytest.raises(DataError, match="number 2 is bad"):
        run(jobs.fail_on_two, [0, 2, 1])
    assert time.monotonic() - begin < 800, "the sleeping job was waited for"
    assert run(jobs.square, [7])[0]["square"] == 49, "the sleeping job still holds a CPU"


@pytest.mark.usefixtures("cluster")
def test_another_version_on_the_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatmill.__version__", "99.0")
    with pytest.raises(ConfigError, match=r"but the driver has 99.0; install the same version"):
        run(jobs.square, [1])


@pytest.mark.usefixtures("apart")
def test_a_cluster_is_joined_and_left_and_killed_workers_are_survived(
    ray_address: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    found = run(jobs.kill_once_if_odd, [Chunk(number=n, folder=str(tmp_path)) for n in range(4)], address=ray_address)
    assert {i: r["number"] for i, r in found.items()} == {n: n for n in range(4)}
    assert [len((tmp_path / f"tries_{n}").read_text().split()) for n in range(4)] == [1, 2, 1, 2]
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) == handler
    assert capfd.readouterr().out == "", "Ray speaks where a receipt may be printed"


@pytest.mark.usefixtures("apart")
def test_a_cluster_is_found_as_ray_users_expect(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    places = [ray.get_runtime_context().gcs_address for _ in RayExecutor().map(jobs.square, [1])]
    assert [place.rpartition(":")[2] for place in places] == [ray_address.rpartition(":")[2]]
    assert not ray.is_initialized()


DRIVER = """
import sys
from chatmill.compiler.engines.ray_engine import RayExecutor
from tests.compiler.executor_jobs import Chunk, sleep_after_note
list(RayExecutor(sys.argv[1]).map(sleep_after_note, [Chunk(number=0, folder=sys.argv[2])]))
"""


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_no_job_outlives_its_driver(ray_address: str, tmp_path: Path, end: int) -> None:
    command = [sys.executable, "-c", DRIVER, ray_address, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as driver:
        try:
            jobs.wait_for(lambda: bool(list(tmp_path.iterdir())))
            (note,) = tmp_path.iterdir()
            worker = Path("/proc", note.name.removeprefix("pid_"))
            assert worker.exists()
            driver.send_signal(end)
            _, complaint = driver.communicate(timeout=300)
            jobs.wait_for(lambda: not worker.exists())
        finally:
            driver.kill()
    assert driver.returncode == -end, complaint


@pytest.mark.usefixtures("apart")
def test_a_ray_of_our_own_is_started_and_ended(capfd: pytest.CaptureFixture[str]) -> None:
    def parent(result: dict[str, int]) -> int:
        return int(Path(f"/proc/{result['pid']}/stat").read_text().rpartition(")")[2].split()[1])

    with RayExecutor(workers=1) as engine:
        assert not ray.is_initialized(), "it is started for the first run, if there is one"
        parents = [parent(result) for specs in ([1, 2, 3], [4]) for _, result in engine.map(jobs.square, specs)]
    assert len(parents) == 4
    assert len(set(parents)) == 1, "one raylet for all runs"
    assert not ray.is_initialized()
    assert not any(Path(f"/proc/{pid}").exists() for pid in parents), "its raylet is still there"
    assert capfd.readouterr().out == ""


@pytest.mark.usefixtures("apart")
def test_a_cluster_that_is_not_there() -> None:
    with pytest.raises(WorkerStartError, match=r"cannot connect to the Ray cluster at 127.0.0.1:\d+: .*refused"):
        run(jobs.square, [1], address=f"127.0.0.1:{free_port()}")
    assert not ray.is_initialized()


def test_options_and_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="workers is 0"):
        RayExecutor(workers=0)
    monkeypatch.setitem(sys.modules, "ray", None)
    words = r"the Ray engine needs the package 'ray': pip install 'chatmill\[ray\]'"
    with pytest.raises(MissingExtraError, match=words):
        run(jobs.square, [1])


# A cluster of several nodes.


def slow_chunk(job: ChunkJob) -> dict[str, Any]:
    """A chunk that takes long enough for its node to be lost in the middle; notes where it ran."""
    time.sleep(0.3)
    receipt = compile_chunk(job)
    Path(job.place.directory, "..", f"ran_{job.number}_{ray.get_runtime_context().get_node_id()}").touch()
    return receipt


class Slowly(RayExecutor):
    def map(self, job: Any, specs: Any) -> Any:
        return super().map(slow_chunk if job is compile_chunk else job, specs)


@pytest.mark.slow
def test_a_node_killed_in_the_middle_of_a_build(fast: Path) -> None:
    """The head runs no tasks: all of them run on nodes that are added."""
    path = write_jsonl(fast / "chats.jsonl", chats(150, 5))
    recipe = plain_recipe(path, split={"val_fraction": 0.1}, shard_bytes=path.stat().st_size // 14)
    run_build(recipe, fast / "whole", workers=0)
    (fast / "recipe.json").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "tests.compiler.test_ray", str(fast / "recipe.json"), str(fast / "out")]
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

    try:
        run_build(json.loads(Path(recipe).read_text()), out, executor=Slowly(cluster.address), on_progress=kill_a_node)
        assert killed
    finally:
        sys.stdout.flush()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
