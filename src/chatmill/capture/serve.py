"""Runs a capturing proxy until a signal stops it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from chatmill.capture.addresses import AddressReader, check_upstream, is_loopback
from chatmill.capture.call_file import CallFile
from chatmill.capture.proxy import CLIENT_KEEP_ALIVE_SECONDS, HEADER_LIMIT, CallCounts, Proxy
from chatmill.capture.token_ids import Asking
from chatmill.errors import ConfigError

TOKEN_VARIABLE = "CHATMILL_CAPTURE_TOKEN"
"""Environment variable with the token, for addresses that stay the same."""
SHORTEST_TOKEN = 16
STOP_SECONDS = 10.0
"""For calls that go on when the proxy is stopped."""
BACKLOG = 1024
"""Connections that wait to be taken: agents open many at once."""


class ProxyAddress(NamedTuple):
    """Where a proxy listens, as clients write it."""

    url: str

    @property
    def openai(self) -> str:
        """Base address for clients of OpenAI's APIs."""
        return f"{self.url}/v1"

    @property
    def anthropic(self) -> str:
        """Base address for clients of Anthropic's API."""
        return self.url


def capture(
    upstream: str,
    out: Path,
    *,
    host: str,
    port: int,
    asking: Asking,
    ready: Callable[[ProxyAddress], None],
    warn: Callable[[str], None],
) -> CallCounts:
    """Run a proxy until SIGINT or SIGTERM.

    Args:
        upstream: ProxyAddress of the model server.
        out: File that calls are added to.
        host: Name or number to listen on. Other machines need a token.
        port: Port to listen on; 0 takes any that is free.
        asking: What is added to requests.
        ready: Called with the address when the proxy listens.
        warn: Called with a sentence when something goes wrong that no client notices.
    """
    server = check_upstream(upstream)
    token = None if is_loopback(host) else _make_token()
    file = CallFile(out)
    try:
        proxy = Proxy(server, file, addresses=AddressReader(token=token), asking=asking, warn=warn)
        with _listen(host, port) as listener:
            url = _address(host, listener.getsockname()[1], token)
            asyncio.run(_run(proxy, listener, lambda: ready(ProxyAddress(url))))
    finally:
        file.close()
    return proxy.counts


async def _run(proxy: Proxy, listener: socket.socket, ready: Callable[[], None]) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    runner = web.AppRunner(
        proxy.app(),
        access_log=None,
        handle_signals=False,
        # A client that leaves ends the call at the server, too.
        handler_cancellation=True,
        keepalive_timeout=CLIENT_KEEP_ALIVE_SECONDS,
        shutdown_timeout=STOP_SECONDS,
        max_line_size=HEADER_LIMIT,
        max_field_size=HEADER_LIMIT,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        ready()
        await stopped.wait()
        # A second signal does not wait for the calls.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    finally:
        await runner.cleanup()


def _make_token() -> str:
    token = os.environ.get(TOKEN_VARIABLE)
    if token is None:
        return secrets.token_urlsafe(18)
    if len(token) < SHORTEST_TOKEN or not token.isascii() or "/" in token:
        raise ConfigError(
            f"{TOKEN_VARIABLE} must have {SHORTEST_TOKEN} characters or more that stand in an address, without a slash"
        )
    return token


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}; give another --port (0 takes any that is free) or --host"
        ) from None
    return listener


def _address(host: str, port: int, token: str | None) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}" + ("" if token is None else f"/token/{token}")
