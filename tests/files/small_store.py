"""A small server of S3's protocol, in a process of its own: with a delay, a rate, and faults that a seed decides.

Enough of the protocol for fsspec's file system: objects whole and in ranges, exclusive creation, listings. Faults come
in bursts: answers 500 and 503, bodies that are cut, connections that are closed before or after the work was done.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from xml.sax.saxutils import escape

from aiohttp import web

from tests.files.stores_for_tests import s3_settings, server_process

BLOCK = 256 << 10


class Store:
    """The objects, what was asked for, and the faults to come."""

    def __init__(self, delay: float, rate: float, seed: int | None, share: float) -> None:
        self.objects: dict[str, tuple[bytes, str, float]] = {}
        self.delay, self.rate = delay, rate
        self.random = random.Random(seed) if seed is not None else None
        self.share = share
        self.burst: list[str] = []
        self.faults: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.free_at = 0.0

    def fault(self) -> str:
        """Return the fault of the next request; empty for none."""
        if self.random is None:
            return ""
        if not self.burst and self.random.random() < self.share:
            kind = self.random.choice(["500", "503", "cut", "closed", "closed after", "slow"])
            self.burst = [kind] * self.random.randint(1, 3)
        return self.burst.pop() if self.burst else ""

    async def pace(self, size: int) -> None:
        """Wait until so many bytes fit into the rate."""
        if self.rate:
            self.free_at = max(self.free_at, time.monotonic()) + size / self.rate
            await asyncio.sleep(max(0.0, self.free_at - time.monotonic()))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/-/counts":
            return web.json_response({"requests": self.requests, "sent": self.sent, "faults": self.faults})
        body = await request.read()
        self.requests[request.method] += 1
        fault = self.fault()
        if fault:
            self.faults[fault] += 1
        await asyncio.sleep(self.delay * (4 if fault == "slow" else 1))
        if fault in ("500", "503"):
            return web.Response(status=int(fault), text=f"<Error><Code>{fault}</Code></Error>")
        if fault == "closed":
            return self.close(request)
        await self.pace(len(body))
        answer = self.answer(request, body)
        if fault == "closed after":
            return self.close(request)
        if request.method != "GET" or answer.status >= 300:
            return answer
        return await self.send(request, answer, cut=fault == "cut")

    def close(self, request: web.Request) -> web.Response:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async def send(self, request: web.Request, answer: web.Response, *, cut: bool) -> web.StreamResponse:
        body = bytes(answer.body or b"")  # type: ignore[arg-type]
        stream = web.StreamResponse(status=answer.status, headers=answer.headers)
        stream.content_length = len(body)
        await stream.prepare(request)
        end = len(body) // 2 if cut else len(body)
        for start in range(0, end, BLOCK):
            block = body[start : min(start + BLOCK, end)]
            await self.pace(len(block))
            await stream.write(block)
            self.sent[request.path] += len(block)
        if cut and len(body):
            return self.close(request)
        return stream

    def answer(self, request: web.Request, body: bytes) -> web.Response:
        name = request.path.lstrip("/")
        if "/" not in name.rstrip("/"):
            return self.listing(request) if request.method == "GET" else web.Response()
        if request.method == "PUT":
            if request.headers.get("If-None-Match") == "*" and name in self.objects:
                return web.Response(status=412, text="<Error><Code>PreconditionFailed</Code></Error>")
            if "aws-chunked" in request.headers.get("Content-Encoding", ""):
                body = unchunked(body)
            self.objects[name] = (body, hashlib.md5(body).hexdigest(), time.time())
            return web.Response(headers={"ETag": f'"{self.objects[name][1]}"'})
        if request.method == "DELETE":
            self.objects.pop(name, None)
            return web.Response(status=204)
        if name not in self.objects:
            return web.Response(status=404, text="<Error><Code>NoSuchKey</Code></Error>")
        data, tag, changed = self.objects[name]
        headers = {
            "ETag": f'"{tag}"',
            "Last-Modified": datetime.fromtimestamp(changed, UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"),
            "Accept-Ranges": "bytes",
        }
        if request.method == "HEAD":
            return web.Response(headers=headers | {"Content-Length": str(len(data))})
        if "Range" in request.headers:
            first, _, last = request.headers["Range"].removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{stop}/{len(data)}"
            return web.Response(status=206, body=data[start : stop + 1], headers=headers)
        return web.Response(body=data, headers=headers)

    def listing(self, request: web.Request) -> web.Response:
        bucket, prefix = request.path.strip("/"), request.query.get("prefix", "")
        delimiter = request.query.get("delimiter", "")
        items, folders = [], set()
        for name, (data, tag, changed) in sorted(self.objects.items()):
            key = name.removeprefix(f"{bucket}/")
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in key[len(prefix) :]:
                folders.add(prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter)
                continue
            moment = datetime.fromtimestamp(changed, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            items.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{moment}</LastModified>"
                f"<ETag>&quot;{tag}&quot;</ETag><Size>{len(data)}</Size></Contents>"
            )
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)
        )
        text = (
            f'<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(items)}</KeyCount>"
            f"<MaxKeys>100000</MaxKeys><IsTruncated>false</IsTruncated>{''.join(items)}{common}</ListBucketResult>"
        )
        return web.Response(text=text, content_type="application/xml")


def unchunked(body: bytes) -> bytes:
    """Return what a body of AWS's own chunks holds."""
    out, start = [], 0
    while True:
        end = body.index(b"\r\n", start)
        size = int(body[start:end].partition(b";")[0], 16)
        if not size:
            return b"".join(out)
        out.append(body[end + 2 : end + 2 + size])
        start = end + 4 + size


def counts() -> dict[str, dict[str, int]]:
    """Return what the server of this test was asked for, and which faults it made."""
    from urllib.request import urlopen

    with urlopen(f"{os.environ['AWS_ENDPOINT_URL']}/-/counts") as answer:
        return dict(json.load(answer))


@contextlib.contextmanager
def small_store(*, delay: float = 0.0, rate: float = 0.0, seed: int | None = None, share: float = 0.0) -> Iterator[str]:
    """Start the server; give the URL of its bucket."""
    arguments = ["--delay", str(delay), "--rate", str(rate), "--share", str(share)]
    arguments += [] if seed is None else ["--seed", str(seed)]
    with server_process("tests.files.small_store", *arguments) as endpoint, s3_settings(endpoint):
        yield "s3://team"


async def serve(store: Store) -> None:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", store.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    print(site._server.sockets[0].getsockname()[1], flush=True)  # type: ignore[attr-defined]
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0)
    parser.add_argument("--rate", type=float, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--share", type=float, default=0)
    chosen = parser.parse_args()
    asyncio.run(serve(Store(chosen.delay, chosen.rate, chosen.seed, chosen.share)))
