"""A server on loopback that speaks S3, and the environment in which any process finds it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import fsspec
import pytest
from moto.server import ThreadedMotoServer


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Runs a server with the empty bucket `mill`; gives the variables that lead to it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        found = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "mill",
            "AWS_SECRET_ACCESS_KEY": "mill",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in found.items():
                patch.setenv(name, value)
            fsspec.filesystem("s3", skip_instance_cache=True).mkdir("mill")
            yield found
    finally:
        server.stop()
