"""The viewer's server: GET alone, a token for every request; data never becomes code."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import sys
from collections.abc import Callable, Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from chatmill.errors import ConfigError
from chatmill.look.viewer.pages import PageAnswer, Viewer

FIRST_PORT, PORTS = 8420, 20
"""Ports that are tried when none is asked for."""
SLOW_SECONDS = 30.0
"""For a client to send the next piece of a request, or to take that of an answer."""
COOKIE = "chatmill_view"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class _Handler(BaseHTTPRequestHandler):
    """One connection; the server has the viewer and the token."""

    server: ViewServer
    timeout = SLOW_SECONDS
    server_version, sys_version = "chatmill", ""

    def do_GET(self) -> None:
        """Answer the request if it has the token."""
        try:
            url = urlsplit(self.path)
        except ValueError as error:
            self._send(PageAnswer([f"not an address: {error}\n"], 400, "text/plain; charset=utf-8"))
            return
        pairs = parse_qsl(url.query, keep_blank_values=True)
        refused = self._refused([value for name, value in pairs if name == "token"])
        if refused:
            self._send(PageAnswer([refused], 403, "text/plain; charset=utf-8"))
            return
        query = {name: value for name, value in pairs if name != "token"}
        if len(query) < len(pairs) and self.server.token is not None:
            # from here on the token is in the cookie: a copied address does not reveal it
            # (browsers read two slashes, or backslashes, as the begin of a host)
            path = "/" + url.path.lstrip("/\\")
            place = f"{path}{'?' if query else ''}{urlencode(query)}"
            self._send(PageAnswer(status=303, location=place), cookie=True)
            return
        self._send(self.server.viewer.answer(url.path, query))

    do_HEAD = do_GET  # noqa: N815

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send the errors of http.server: other methods, and requests that are not HTTP."""
        status, words = (405, "the viewer only shows: GET and HEAD") if code == 501 else (code, message or "")
        self._send(PageAnswer([f"{words}\n"], status, "text/plain; charset=utf-8"))
        self.close_connection = True

    def _refused(self, tokens: list[str]) -> str:
        token, host = self.server.token, self.headers.get("host", "")
        if token is None:
            name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
            return "" if name in LOOPBACK else f"not a name of this machine: {host!r}; use 127.0.0.1\n"
        candidates = [*tokens, *self._cookie_values()]
        if any(secrets.compare_digest(candidate.encode(), token.encode()) for candidate in candidates):
            return ""
        return "the address must end in ?token=..., as chatmill view printed it\n"

    def _cookie_values(self) -> list[str]:
        """Return the values of all cookies of our name.

        Every program of this machine can set cookies, which a browser sends to all ports: those of others may be
        anything, and may have our name too.
        """
        values = []
        for header in self.headers.get_all("cookie", []):
            for cookie in header.split(";"):
                name, _, value = cookie.strip().partition("=")
                if name == self._cookie:
                    values.append(value)
        return values

    @property
    def _cookie(self) -> str:
        """Cookies are shared by all ports of a host, so the port is part of the name."""
        return f"{COOKIE}_{self.server.server_address[1]}"

    def _send(self, answer: PageAnswer, *, cookie: bool = False) -> None:
        self.send_response(answer.status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("content-type", answer.kind)
        self.send_header("connection", "close")
        if answer.location:
            self.send_header("location", answer.location)
        if cookie:
            self.send_header("set-cookie", f"{self._cookie}={self.server.token}; Path=/; HttpOnly; SameSite=Strict")
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            for part in [answer.body] if isinstance(answer.body, bytes) else answer.body:
                self.wfile.write(part if isinstance(part, bytes) else part.encode("utf-8", errors="replace"))
        finally:  # a client that goes away ends its search
            if isinstance(answer.body, Generator):
                answer.body.close()

    def log_message(self, *_: object) -> None:
        return


class ViewServer(ThreadingHTTPServer):
    """A server that is listening; `serve_forever` answers."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, viewer: Viewer, *, host: str = "127.0.0.1", port: int | None = None, use_token: bool = True
    ) -> None:
        """Without a port the first free one from 8420 on; 0 takes any. Without a token only this machine may look."""
        if not use_token and not is_loopback(host):
            raise ConfigError(f"--no-token is for this machine alone: whoever can reach {host} could read the dataset")
        self.viewer = viewer
        self.token = secrets.token_urlsafe(18) if use_token else None
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        problem: Exception | None = None
        for number in [port] if port is not None else [*range(FIRST_PORT, FIRST_PORT + PORTS), 0]:
            try:
                super().__init__((host, number), _Handler)
                break
            except (OSError, OverflowError) as error:
                problem = error
        else:
            raise ConfigError(
                f"cannot listen on {host} port {port}: {getattr(problem, 'strerror', None) or problem}; give another "
                "--port (0 takes any that is free) or --host"
            )
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.server_address[1]}/" + (f"?token={self.token}" if self.token else "")
        """What to open in a browser."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that go away or are too slow; report anything else."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host name or address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(viewer: Viewer, on_ready: Callable[[str], None], **how: Any) -> None:
    """Serve until interrupted; `on_ready` gets the address. `how` as for `ViewServer`."""
    with ViewServer(viewer, **how) as server:
        on_ready(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:  # Ctrl-C stops the server
            return
