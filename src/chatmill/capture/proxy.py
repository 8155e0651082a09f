"""Forward requests and answers, and record model calls."""

from __future__ import annotations

import asyncio
import json
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from chatmill.capture.addresses import AddressReader, Destination, RefusedError, is_loopback
from chatmill.capture.call_file import CallFile
from chatmill.capture.call_record import (
    Call,
    Dialect,
    find_dialect,
    has_finish_reason,
    header_keys,
    is_last_event,
)
from chatmill.capture.server_events import EventSplitter, event_data
from chatmill.capture.token_ids import AnswerCleaner, Asking
from chatmill.read.lines import LINE_LIMIT

HOP_HEADERS = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    }
)
"""Headers between two neighbours, which are not passed on."""
OWN_HEADERS = frozenset({"host", "content-length", "expect"})
"""Headers of a request that are written anew."""
ENCODINGS = ("gzip", "deflate", "identity")
"""Content encodings that a copy can be read in; no others are asked for."""
CLIENT_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that aiohttp would add to requests."""
HEADER_LIMIT = 1 << 18
"""Bytes of a header line: sessions and keys may be long."""
KEEP_ALIVE_SECONDS = 4.0
"""Idle connections to the server are closed before uvicorn closes its own, after 5 seconds."""
CLIENT_KEEP_ALIVE_SECONDS = 600.0
CONNECT_SECONDS = 60.0
CLIENT_LEFT = "the client closed the connection"


@dataclass
class CallCounts:
    """Model calls since the start of a proxy."""

    calls: int = 0
    complete: int = 0
    lost: int = 0
    """Calls that could not be written."""
    faults: Counter[str] = field(default_factory=Counter)
    """What the proxy itself failed at, without a consequence for the client."""


class Proxy:
    """Forwards to one server and records into one file."""

    def __init__(
        self,
        upstream: str,
        file: CallFile,
        *,
        addresses: AddressReader,
        asking: Asking,
        warn: Callable[[str], None],
    ) -> None:
        """Set up a proxy without listening.

        Args:
            upstream: Address of the server, without a slash at its end.
            file: Where calls are recorded.
            addresses: Who may connect.
            asking: What is added to requests.
            warn: Called with a sentence when a call cannot be recorded.
        """
        self.counts = CallCounts()
        self._upstream = upstream
        self._file = file
        self._addresses = addresses
        self.asking = asking
        self._warn = warn
        self._writer = ThreadPoolExecutor(1, "chatmill-capture-write")
        self._syncer = ThreadPoolExecutor(1, "chatmill-capture-sync")
        self._is_sync_waiting = False
        self._session: aiohttp.ClientSession | None = None
        self._recordings: set[asyncio.Task[None]] = set()

    def app(self) -> web.Application:
        """Build the aiohttp application."""
        # 0: no limit of the size of a request, as the server has its own.
        app = web.Application(client_max_size=0)
        app.router.add_route("*", "/{path:.*}", self.handle)
        app.on_response_prepare.append(_remove_own_headers)
        app.on_startup.append(self._open)
        app.on_cleanup.append(self._close)
        return app

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        try:
            destination = self._addresses.read(request.raw_path, request.headers)
        except RefusedError as error:
            return web.Response(status=403, text=f"{error}\n")
        dialect = find_dialect(request.method, destination.path)
        if dialect is None:
            try:
                return await self._pass(request, destination)
            except ConnectionError:
                # The client has left.
                return web.Response()

        body = await request.read()
        call = Call(
            dialect=dialect,
            path=destination.path,
            run=destination.run,
            request=body,
            keys=header_keys(request.headers),
            retry=_retry_count(request.headers),
        )
        self.counts.calls += 1
        return await _Exchange(self, request, destination, call).run()

    async def send(
        self, request: web.Request, destination: Destination, data: Any, *, is_plain: bool = False
    ) -> aiohttp.ClientResponse:
        """Send a request to the server and await the headers.

        Args:
            request: As the client sent it.
            destination: Where it goes.
            data: Its body.
            is_plain: Whether the answer must come without a content encoding.
        """
        assert self._session is not None
        url = URL(self._upstream + destination.address, encoded=True)
        headers = _forwarded_headers(request.headers, is_plain=is_plain)
        if isinstance(data, aiohttp.StreamReader) and "content-length" in request.headers:
            # Without the length aiohttp would send a body that comes by and by in chunks.
            headers["content-length"] = request.headers["content-length"]
        return await self._session.request(
            request.method,
            url,
            data=data,
            headers=headers,
            allow_redirects=False,
            skip_auto_headers=CLIENT_HEADERS,
            proxy=_proxy_address(url),
        )

    async def record(self, call: Call, *, is_complete: bool, error: str = "") -> None:
        """Record a call, even after the client has left.

        A failure is counted and does not reach the client.
        """
        task = asyncio.create_task(self._record(call, is_complete, error))
        self._recordings.add(task)
        task.add_done_callback(self._recordings.discard)
        await asyncio.shield(task)

    def note_fault(self, what: str) -> None:
        """Count a fault of the proxy itself."""
        if not self.counts.faults[what]:
            self._warn(what)
        self.counts.faults[what] += 1

    async def _record(self, call: Call, is_complete: bool, error: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._writer, self._write, call, is_complete, error)
        except Exception as fault:
            self.counts.lost += 1
            self._warn(f"a call was not recorded: {fault}. Calls are still forwarded")
            return
        self.counts.complete += is_complete
        if not self._is_sync_waiting:
            self._is_sync_waiting = True
            self._syncer.submit(self._sync)

    def _write(self, call: Call, is_complete: bool, error: str) -> None:
        self._file.append(call.line(is_complete=is_complete, error=error, lost=self._file.lost))

    def _sync(self) -> None:
        # Lines that come while the disk works need another sync.
        self._is_sync_waiting = False
        try:
            self._file.sync()
        except OSError as error:
            self._warn(f"{self._file.path}: {error}")

    async def _pass(self, request: web.Request, destination: Destination) -> web.StreamResponse:
        """Forward a request without recording it."""
        data = request.content if request.body_exists else None
        try:
            upstream = await self.send(request, destination, data)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return _bad_gateway(None, error)
        async with upstream:
            response = _begin_response(upstream, length=upstream.content_length)
            await response.prepare(request)
            try:
                async for chunk in upstream.content.iter_any():
                    await response.write(chunk)
            except aiohttp.ClientError:
                _abort(request)
                return response
            await response.write_eof()
        return response

    async def _open(self, app: web.Application) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=False,
            max_line_size=HEADER_LIMIT,
            max_field_size=HEADER_LIMIT,
        )

    async def _close(self, app: web.Application) -> None:
        if self._session is not None:
            await self._session.close()
        await asyncio.gather(*self._recordings)
        self._writer.shutdown()
        self._syncer.shutdown()


class _Exchange:
    """One model call on its way through the proxy."""

    def __init__(self, proxy: Proxy, request: web.Request, destination: Destination, call: Call) -> None:
        self._proxy = proxy
        self._request = request
        self._destination = destination
        self._call = call
        self._is_recorded = False
        self._cleaner: AnswerCleaner | None = None
        self._unpacker: Any = None
        self._splitter = EventSplitter()
        self._has_finish_reason = False
        self._has_last_event = False
        self._bytes_left: int | None = None
        """Of an answer whose length is known."""

    async def run(self) -> web.StreamResponse:
        """Forward the call, and record it however it ends."""
        try:
            return await self._forward()
        except asyncio.CancelledError:
            await self._record(is_complete=False, error=CLIENT_LEFT)
            raise
        except ConnectionError:
            # Of the client: errors of the server are handled where they occur.
            await self._record(is_complete=False, error=CLIENT_LEFT)
            return web.Response()

    async def _forward(self) -> web.StreamResponse:
        body = self._ask()
        try:
            upstream = await self._proxy.send(
                self._request, self._destination, body, is_plain=self._cleaner is not None
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            await self._record(is_complete=False, error=_reason(error))
            return _bad_gateway(self._call.dialect, error)
        async with upstream:
            self._begin(upstream)
            if self._cleaner is not None and not self._call.is_stream:
                return await self._forward_whole(upstream, self._cleaner)
            return await self._forward_chunks(upstream)

    def _ask(self) -> bytes:
        """Add the proxy's own keys to the request body."""
        asking = self._proxy.asking
        is_encoded = self._request.headers.get("content-encoding", "identity") != "identity"
        if self._call.dialect is not Dialect.CHAT or asking.server is None or is_encoded:
            return self._call.request
        body, self._call.added = asking.add_to(self._call.request)
        if self._call.added:
            self._cleaner = AnswerCleaner(server=asking.server, added=self._call.added)
        return body

    def _begin(self, upstream: aiohttp.ClientResponse) -> None:
        """Take down how the answer begins."""
        self._call.status = upstream.status
        self._call.is_stream = upstream.headers.get("content-type", "").startswith("text/event-stream")
        self._call.encoding = upstream.headers.get("content-encoding", "").lower()
        self._bytes_left = upstream.content_length
        if self._call.encoding in ("gzip", "x-gzip", "deflate"):
            self._unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)
        elif self._call.encoding not in ("", "identity"):
            self._proxy.note_fault(f"an answer came with the encoding {self._call.encoding}, which was not asked for")
        if self._cleaner is not None and self._call.encoding not in ("", "identity"):
            # The client gets more than it asked for, which harms less than no answer.
            self._cleaner = None

    async def _forward_whole(self, upstream: aiohttp.ClientResponse, cleaner: AnswerCleaner) -> web.StreamResponse:
        """Forward a whole answer without the added ids."""
        try:
            async for chunk in upstream.content.iter_any():
                self._keep(chunk)
        except aiohttp.ClientError as error:
            return await self._break_off(None, error)
        body = bytes(self._call.answer)
        try:
            body = cleaner.clean_body(body)
        except Exception as fault:
            self._proxy.note_fault(f"token ids were left in an answer: {fault}")
        response = _begin_response(upstream, length=len(body))
        await self._record(is_complete=True)
        await response.prepare(self._request)
        await response.write(body)
        await response.write_eof()
        return response

    async def _forward_chunks(self, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """Forward an answer chunk by chunk.

        The record is on disk before the last bytes are sent.
        """
        length = None if self._cleaner is not None else upstream.content_length
        response = _begin_response(upstream, length=length)
        await response.prepare(self._request)
        try:
            async for chunk in upstream.content.iter_any():
                out = self._take(chunk)
                if self._has_last_event or self._bytes_left == 0:
                    await self._record(is_complete=self._is_complete())
                if out:
                    await response.write(out)
        except aiohttp.ClientError as error:
            return await self._break_off(response, error)
        if self._cleaner is not None and self._splitter.rest:
            await response.write(self._splitter.rest)
        await self._record(is_complete=self._is_complete())
        await response.write_eof()
        return response

    def _take(self, chunk: bytes) -> bytes:
        """Copy a chunk and return the client's part of it."""
        self._keep(chunk)
        if not self._call.is_stream:
            return chunk
        try:
            plain = chunk if self._unpacker is None else self._unpacker.decompress(chunk)
        except zlib.error as fault:
            self._proxy.note_fault(f"a stream could not be unpacked: {fault}")
            return chunk
        events = self._splitter.feed(plain)
        for event in events:
            self._look_for_end(event)
        if self._cleaner is None:
            return chunk
        return b"".join(self._clean(event, self._cleaner) for event in events)

    def _clean(self, event: bytes, cleaner: AnswerCleaner) -> bytes:
        try:
            return cleaner.clean_event(event)
        except Exception as fault:
            self._proxy.note_fault(f"token ids were left in an event: {fault}")
            return event

    def _keep(self, chunk: bytes) -> None:
        # A line that is too long for the reader is written without its bodies.
        if len(self._call.answer) < LINE_LIMIT:
            self._call.answer += chunk
        if self._bytes_left is not None:
            self._bytes_left -= len(chunk)

    def _look_for_end(self, event: bytes) -> None:
        data = event_data(event)
        if data is None:
            return
        if self._call.dialect is Dialect.CHAT:
            self._has_finish_reason = self._has_finish_reason or has_finish_reason(data)
        self._has_last_event = self._has_last_event or is_last_event(data)

    def _is_complete(self) -> bool:
        """Check for the proper end of the answer."""
        return not self._call.is_stream or self._has_last_event or self._has_finish_reason

    async def _break_off(self, response: web.StreamResponse | None, error: Exception) -> web.StreamResponse:
        """End the answer as the server did: in its middle."""
        await self._record(is_complete=False, error=_reason(error))
        _abort(self._request)
        return response or web.Response()

    async def _record(self, *, is_complete: bool, error: str = "") -> None:
        if not self._is_recorded:
            self._is_recorded = True
            await self._proxy.record(self._call, is_complete=is_complete, error=error)


def _forwarded_headers(headers: CIMultiDictProxy[str], *, is_plain: bool) -> CIMultiDict[str]:
    """Build the headers for the server."""
    connection = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    forwarded: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        lower = name.lower()
        if lower in HOP_HEADERS or lower in OWN_HEADERS or lower in connection:
            continue
        if lower == "accept-encoding":
            value = "identity" if is_plain else _known_encodings(value)
        forwarded.add(name, value)
    return forwarded


def _known_encodings(value: str) -> str:
    """Keep the content encodings known to the recorder."""
    names = [part.strip() for part in value.split(",")]
    known = [name for name in names if name.partition(";")[0].strip().lower() in ENCODINGS]
    return ", ".join(known) or "identity"


def _begin_response(upstream: aiohttp.ClientResponse, *, length: int | None = None) -> web.StreamResponse:
    """Begin an answer with the server's status and headers."""
    response = web.StreamResponse(status=upstream.status, reason=upstream.reason)
    connection = {name.strip().lower() for name in upstream.headers.get("connection", "").split(",")}
    for name, value in upstream.headers.items():
        lower = name.lower()
        if lower in HOP_HEADERS or lower in connection or lower == "content-length":
            continue
        response.headers.add(name, value)
    if length is not None:
        response.content_length = length
    response["names"] = {name.lower() for name in response.headers}
    return response


async def _remove_own_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Remove the headers added by aiohttp."""
    names = response.get("names")
    for name in ("Content-Type", "Date", "Server"):
        if names is not None and name.lower() not in names:
            response.headers.pop(name, None)


def _bad_gateway(dialect: Dialect | None, error: Exception) -> web.Response:
    """Build the error answer for an unreachable server."""
    message = f"chatmill capture: the server cannot be reached: {_reason(error)}"
    body: dict[str, Any] = {"error": {"message": message, "type": "api_error"}}
    if dialect is Dialect.MESSAGES:
        body = {"type": "error", **body}
    return web.Response(status=502, text=json.dumps(body), content_type="application/json")


def _reason(error: Exception) -> str:
    """Describe an error without the address and its secrets."""
    system_error = getattr(error, "os_error", None)
    words = getattr(system_error, "strerror", None) or getattr(error, "strerror", None)
    name = type(error).__name__
    return f"{name}: {words}" if words else name


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _retry_count(headers: Mapping[str, str]) -> int:
    """Read the number of earlier tries from the headers."""
    value = headers.get("x-stainless-retry-count", "")
    return int(value) if value.isdecimal() and len(value) < 4 else 0


def _proxy_address(url: URL) -> str | None:
    """Find the HTTP proxy in the environment."""
    host = url.host or ""
    if is_loopback(host) or urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies().get(url.scheme)
