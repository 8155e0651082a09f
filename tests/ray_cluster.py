"""One Ray cluster for all tests of a process that need one."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

WORKERS_WHEN_NEEDED = {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
"""Else a cluster starts one for each core whenever a driver joins, and each takes a second of processor time."""
PATIENT = {"RAY_health_check_timeout_ms": "120000", "RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
"""Else a busy machine loses nodes that are only slow, and Ray ends the driver of a lost node."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_started(node: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until `ray start` says in its log that the node is up."""
    until = time.monotonic() + 300
    while "Ray runtime started" not in log.read_text():
        assert node.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A cluster of one node that somebody else started, as a process that is stopped by its id; it starts slowly."""
    ray = pytest.importorskip("ray")
    folder = tempfile.mkdtemp(prefix="ray")  # short: sockets with long paths cannot be made
    port, log = free_port(), Path(folder, "start.log")
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}", "--block"]
    command += ["--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}"]
    with pytest.MonkeyPatch.context() as patch, log.open("w") as file:
        for name, value in (PATIENT | {"RAY_AUTH_MODE": "disabled"}).items():
            patch.setenv(name, value)
        environment = {**os.environ, **WORKERS_WHEN_NEEDED}
        head = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            wait_until_started(head, log)
            yield f"127.0.0.1:{port}"
        finally:
            ray.shutdown()
            head.terminate()
            head.wait(timeout=300)
            shutil.rmtree(folder, ignore_errors=True)
