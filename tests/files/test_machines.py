"""Builds by machines that share nothing but a bucket: tasks, a cluster of Ray, kills, and two builders at once.

A machine is a process with a home, a cache and a working folder of its own, for which the folders of the others are not
there (`fence/sitecustomize.py`). A driver on Ray is a process of its own, too:
python -m tests.files.test_machines RECIPE URL NODES
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.run import run_build
from chatmill.files import stores
from chatmill.prove.verify import verify
from tests.compiler.builds import mixed_recipe, write_inputs
from tests.files.small_store import small_store
from tests.files.stores_for_tests import put_folder, s3_server
from tests.files.test_builds import assert_same, objects
from tests.ray_cluster import PATIENT, WORKERS_WHEN_NEEDED

ROOT = Path(__file__).parents[2]
FENCE = Path(__file__).parent / "fence"
pytestmark = pytest.mark.slow


class Machines:
    """A folder with the homes of machines, and the recipe that all of them have."""

    def __init__(self, home: Path, bucket: str, size: int = 40) -> None:
        self.home, self.bucket = home, bucket
        write_inputs(home / "in", size)
        put_folder(home / "in", f"{bucket}/in")
        text = json.dumps(mixed_recipe(Path("/IN"))).replace("/IN/", f"{bucket}/in/")
        self.recipe: dict[str, Any] = json.loads(text)
        run_build(self.recipe, home / "local", workers=0)

    def environment(self, name: str, others: list[str]) -> dict[str, str]:
        """Make the folders of a machine; give its environment."""
        own = self.home / name
        (own / "work").mkdir(parents=True, exist_ok=True)
        (own / "work" / "recipe.yaml").write_text(json.dumps(self.recipe))
        fenced = [self.home / "in", self.home / "local", *(self.home / other for other in others if other != name)]
        return {
            **os.environ,
            "HOME": str(own),
            "CHATMILL_CACHE": str(own / "cache"),
            "TEST_FENCE": ":".join(map(str, fenced)),
            "PYTHONPATH": f"{FENCE}:{os.environ.get('PYTHONPATH', '')}:{ROOT}",
        }

    def start(self, name: str, others: list[str], *arguments: str) -> subprocess.Popen[str]:
        """Start a build on a machine."""
        environment = self.environment(name, others)
        command = [sys.executable, "-m", "chatmill", "build", "recipe.yaml", "-q", "--workers", "0", *arguments]
        return subprocess.Popen(
            command,
            cwd=self.home / name / "work",
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setenv("CHATMILL_CACHE", str(tmp_path / "cache"))
    with s3_server() as bucket:
        yield Machines(tmp_path, bucket)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out + err
    return out + err


def test_eight_tasks_on_eight_machines(machines: Machines) -> None:
    names = [f"machine{number}" for number in range(9)]
    url = f"{machines.bucket}/built"
    for pair in ((0, 1), (2, 3), (4, 5), (6, 7)):
        for process in [machines.start(names[n], names, "--out", url, "--shard", f"{n}/8") for n in pair]:
            finish(process)
    finish(machines.start(names[8], names, "--out", url, "--resume"))
    assert_same(url, machines.home / "local")
    assert list((machines.home / "machine0" / "cache" / "builds").iterdir()) == []


def test_of_two_builders_one_wins_and_the_other_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATMILL_CACHE", str(tmp_path / "cache"))
    with small_store(delay=0.1) as bucket:
        machines = Machines(tmp_path, bucket)
        url = f"{bucket}/built"
        first = machines.start("a", ["b"], "--out", url)
        until = time.monotonic() + 120
        while not any("locks" in name for name in stores.list_objects(url)):
            assert time.monotonic() < until
            time.sleep(0.05)
        first.send_signal(signal.SIGSTOP)  # so that it is at work as long as the second one takes
        try:
            second = machines.start("b", ["a"], "--out", url)
            _, err = second.communicate(timeout=600)
        finally:
            first.send_signal(signal.SIGCONT)
        assert second.returncode == 2, err
        assert "another build" in err
        assert "Traceback" not in err
        finish(first)
        assert_same(url, machines.home / "local")


def test_a_builder_that_is_told_to_end_gives_its_lock_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the scheduler of a cluster does it, with SIGTERM: another machine continues with --resume alone."""
    monkeypatch.setenv("CHATMILL_CACHE", str(tmp_path / "cache"))
    with small_store(delay=0.1) as bucket:
        machines = Machines(tmp_path, bucket)
        url = f"{bucket}/built"
        process = machines.start("a", ["b"], "--out", url)
        until = time.monotonic() + 120
        while not any("receipts" in name for name in stores.list_objects(url)):
            assert time.monotonic() < until
            time.sleep(0.05)
        process.terminate()
        _, err = process.communicate(timeout=120)
        assert process.returncode == 143, err
        assert "the same command with --resume continues" in err
        out = finish(machines.start("b", ["a"], "--out", url, "--resume"))
        assert "chunks were there already, from an earlier run" in out
        assert_same(url, machines.home / "local")


@pytest.mark.filterwarnings("ignore:.*without a receipt")
@pytest.mark.parametrize("seed", range(4))
def test_builds_that_are_killed_go_on_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Ten kills at random moments in each of four runs; every machine is a new one."""
    monkeypatch.setenv("CHATMILL_CACHE", str(tmp_path / "cache"))
    generator = random.Random(seed)
    with small_store(delay=0.02) as bucket:
        machines = Machines(tmp_path, bucket, 120)
        kills = 0
        build = 0
        while kills < 10:
            build += 1
            url = f"{bucket}/built{build}"
            attempt = 0
            while True:
                attempt += 1
                name = f"machine{build}-{attempt}"
                process = machines.start(name, [], "--out", url, "--take-over")
                try:
                    process.communicate(timeout=generator.uniform(0.8, 4.0) if kills < 10 else 600)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                    process.communicate()
                    kills += 1
                    continue
                finish(process)
                break
            assert_same(url, machines.home / "local")
        assert kills >= 10


def test_a_cluster_of_three_nodes_that_share_no_folder(machines: Machines) -> None:
    names = ["head", "one", "two", "three"]
    url = f"{machines.bucket}/built"
    environment = machines.environment("head", names)
    (machines.home / "recipe.json").write_text(json.dumps(machines.recipe))
    environments = {name: machines.environment(name, names) for name in names[1:]}
    own = ("HOME", "CHATMILL_CACHE", "TEST_FENCE", "PYTHONPATH")
    nodes = {name: {key: values[key] for key in own} for name, values in environments.items()}
    (machines.home / "head" / "nodes.json").write_text(json.dumps(nodes))
    command = [sys.executable, "-m", "tests.files.test_machines"]
    command += [str(machines.home / "recipe.json"), url, str(machines.home / "head" / "nodes.json")]
    done = subprocess.run(
        command,
        cwd=machines.home,  # nodes begin where their cluster was started
        env={**environment, **WORKERS_WHEN_NEEDED, **PATIENT, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["lost"]
    assert len(said["ran"]) == 3, "jobs ran on all nodes"
    assert_same(url, machines.home / "local")
    assert not [name for name in objects(url) if "spool" in name]
    assert not verify(url, deep=True, workers=0).differences


def ray_driver(recipe: str, url: str, nodes: str) -> None:
    """Build on a cluster, one node of which is lost when three chunks are done."""
    import ray
    from ray.cluster_utils import Cluster

    from chatmill.compiler import group_borders, scan_jobs
    from chatmill.compiler.engines.ray_engine import RayExecutor

    scan_jobs.PART_BYTES = 5000
    scan_jobs.FILE_COST = group_borders.PIECE_COST = 1
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    environments = json.loads(Path(nodes).read_text())
    added = {name: cluster.add_node(num_cpus=1, env_vars=own) for name, own in environments.items()}
    cluster.wait_for_nodes()
    ran: set[str] = set()
    lost: list[str] = []

    class Watched(RayExecutor):
        """Notes on which machine each job ran, and loses the first node after some chunks."""

        def map(self, job: Any, specs: Any) -> Iterator[tuple[int, Any]]:
            for done, (index, (home, result)) in enumerate(super().map(_NotesHome(job), specs), 1):
                ran.add(home)
                yield index, result
                if job.__name__ == "compile_chunk" and done == 3 and not lost:
                    cluster.remove_node(added["one"], allow_graceful=False)
                    lost.append("one")

    with ExitStack() as stack:
        stack.callback(cluster.shutdown)
        stack.callback(ray.shutdown)
        run_build(json.loads(Path(recipe).read_text()), url, executor=Watched(cluster.address))
        print(json.dumps({"ran": sorted(ran), "lost": lost}), flush=True)


class _NotesHome:
    """A job that says the home of the machine it ran on; slow enough to be lost in the middle."""

    def __init__(self, job: Any) -> None:
        self.job = job

    def __call__(self, spec: Any) -> tuple[str, Any]:
        time.sleep(0.3)
        return os.environ["HOME"], self.job(spec)


def test_the_fence_hides_the_folders_of_other_machines(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")
    code = f"""
import os, pathlib
path = pathlib.Path({str(tmp_path / "other" / "file")!r})
for call in (path.read_text, path.stat, lambda: os.listdir(path.parent), lambda: (path.parent / "new").write_text("")):
    try:
        call()
    except FileNotFoundError:
        continue
    raise SystemExit("reached")
assert not path.exists() and not os.path.isdir(path.parent)
"""
    environment = {**os.environ, "TEST_FENCE": str(tmp_path / "other"), "PYTHONPATH": str(FENCE)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


if __name__ == "__main__":
    ray_driver(*sys.argv[1:])
