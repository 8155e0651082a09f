"""Stores for tests: moto's server of S3 on loopback, in a process of its own, and folders put into it.

As a program, it is that server: python -m tests.files.stores_for_tests
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import fsspec

KEY, SECRET = "AKIAEXAMPLEKEY", "a-secret-that-is-never-printed"
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def server_process(*arguments: str) -> Iterator[str]:
    """Run a module as a server that prints its port; give its address."""
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


@contextlib.contextmanager
def s3_settings(endpoint: str) -> Iterator[None]:
    """Let this process, and those that it starts, find a server of S3."""
    import s3fs

    variables = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with mock.patch.dict(os.environ, variables):
        s3fs.S3FileSystem.clear_instance_cache()
        try:
            yield
        finally:
            s3fs.S3FileSystem.clear_instance_cache()


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Start a server of S3 with a bucket `team`; give the URL of the bucket."""
    with server_process("tests.files.stores_for_tests") as endpoint, s3_settings(endpoint):
        fsspec.filesystem("s3").mkdir("team")
        yield "s3://team"


def put_folder(folder: Path, url: str) -> None:
    """Copy a folder to a URL."""
    store, root = fsspec.core.url_to_fs(url)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.pipe_file(f"{root}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def main() -> None:
    """Serve S3 until this process is killed."""
    import logging
    import threading

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
