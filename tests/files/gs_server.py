"""A small server that answers as Google's JSON API says: objects, ranges, listings in pages, and `ifGenerationMatch`.

Google has no emulator among its packages. What is asked of it is noted, and a test says what that must be:
python -m tests.files.gs_server
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

from aiohttp import web

PAGE = 50
"""Objects of a page of a listing: few, so that there are several."""
OBJECT = re.compile(r"/(?:download/)?storage/v1/b/([^/]+)/o/(.+)")


class Bucket:
    """Objects by their names, and what was asked for."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int, float]] = {}
        self.uploads: dict[str, tuple[str, bytearray, bool]] = {}
        self.asked: list[str] = []
        self.generation = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/-/asked":
            return web.json_response(self.asked)
        body = await request.read()
        query = request.query
        is_exclusive = query.get("ifGenerationMatch") == "0"
        self.asked.append(f"{request.method} {request.path.split('/')[1]}{' exclusive' if is_exclusive else ''}")
        if request.path.startswith("/upload/"):
            return self.upload(request, body, is_exclusive=is_exclusive)
        if request.path.startswith("/resumable/"):
            return self.add_to_upload(request, body)
        if (match := OBJECT.fullmatch(request.raw_path.partition("?")[0])) is not None:
            return self.one_object(request, unquote(match[2]))
        if request.path.endswith("/o"):
            return self.listing(request)
        return web.json_response({"kind": "storage#bucket", "name": "team", "storageClass": "STANDARD"})

    def put(self, name: str, data: bytes, *, is_exclusive: bool) -> web.Response:
        if is_exclusive and name in self.objects:
            return refusal(412, "conditionNotMet")
        self.generation += 1
        self.objects[name] = (data, self.generation, time.time())
        return web.json_response(self.resource(name))

    def upload(self, request: web.Request, body: bytes, *, is_exclusive: bool) -> web.Response:
        if request.query["uploadType"] == "resumable":
            place = f"/resumable/{len(self.uploads)}"
            self.uploads[place] = (str(json.loads(body)["name"]), bytearray(), is_exclusive)
            return web.Response(headers={"Location": f"http://{request.host}{place}"})
        _, about, content = body.split(b"--==0==", 2)
        name = str(json.loads(about.partition(b"\n\n")[2])["name"])
        data = content.partition(b"\n\n")[2].removesuffix(b"\n--==0==--")
        return self.put(name, data, is_exclusive=is_exclusive)

    def add_to_upload(self, request: web.Request, body: bytes) -> web.Response:
        name, data, is_exclusive = self.uploads[request.path]
        data += body
        total = int(request.headers["Content-Range"].rpartition("/")[2])
        if len(data) < total:
            return web.Response(status=308, headers={"Range": f"bytes=0-{len(data) - 1}"})
        return self.put(name, bytes(data), is_exclusive=is_exclusive)

    def resource(self, name: str) -> dict[str, Any]:
        data, generation, changed = self.objects[name]
        moment = datetime.fromtimestamp(changed, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": "team",
            "size": str(len(data)),
            "generation": str(generation),
            "etag": base64.b64encode(f"etag{generation}".encode()).decode(),
            "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(),
            "updated": moment,
            "timeCreated": moment,
        }

    def one_object(self, request: web.Request, name: str) -> web.Response:
        if name not in self.objects:
            return refusal(404, f"No such object: team/{name}")
        if request.method == "DELETE":
            del self.objects[name]
            return web.Response(status=204)
        data = self.objects[name][0]
        if request.query.get("alt") != "media":
            return web.json_response(self.resource(name))
        if "Range" not in request.headers:
            return web.Response(body=data)
        first, _, last = request.headers["Range"].removeprefix("bytes=").partition("-")
        return web.Response(status=206, body=data[int(first) : int(last or len(data)) + 1])

    def listing(self, request: web.Request) -> web.Response:
        query = request.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        found: dict[str, bool] = {}
        for name in sorted(self.objects):
            if name.startswith(prefix):
                below, is_folder, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
                found[f"{prefix}{below}{delimiter}" if is_folder else name] = bool(is_folder)
        start = int(query.get("pageToken", 0))
        page = list(found.items())[start : start + PAGE]
        answer: dict[str, Any] = {"kind": "storage#objects"}
        answer["items"] = [self.resource(name) for name, is_folder in page if not is_folder]
        answer["prefixes"] = [name for name, is_folder in page if is_folder]
        if start + PAGE < len(found):
            answer["nextPageToken"] = str(start + PAGE)
        return web.json_response(answer)


def refusal(status: int, message: str) -> web.Response:
    """Return an error as the API has it."""
    return web.json_response({"error": {"code": status, "message": message}}, status=status)


async def serve() -> None:
    """Serve until this process is killed."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", Bucket().handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    print(site._server.sockets[0].getsockname()[1], flush=True)  # type: ignore[attr-defined]
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve())
