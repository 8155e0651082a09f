"""Stores for tests: moto's server of S3 on loopback, with a bucket, and folders put into it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import fsspec
import s3fs
from moto.server import ThreadedMotoServer

KEY, SECRET = "AKIAEXAMPLEKEY", "a-secret-that-is-never-printed"


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Start a server of S3 with a bucket `team`; give the URL of the bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        variables = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        with mock.patch.dict(os.environ, variables):
            s3fs.S3FileSystem.clear_instance_cache()
            fsspec.filesystem("s3").mkdir("team")
            yield "s3://team"
            s3fs.S3FileSystem.clear_instance_cache()
    finally:
        server.stop()


def put_folder(folder: Path, url: str) -> None:
    """Copy a folder to a URL."""
    store, root = fsspec.core.url_to_fs(url)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.pipe_file(f"{root}/{path.relative_to(folder).as_posix()}", path.read_bytes())
