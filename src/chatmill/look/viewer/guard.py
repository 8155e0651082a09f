"""The check before every request: who may ask; and the headers that keep a page from running anything foreign."""

from __future__ import annotations

import secrets
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import parse_qs

COOKIE = "chatmill_view"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


class Guard:
    """An ASGI app around another one.

    With a token the address must bring it once; a cookie then carries it. Without one only requests to a loopback name
    are answered, so that no foreign page can reach the viewer under a name of its own.
    """

    def __init__(self, app: Any, *, token: str | None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, or refuse."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refused = self._refused(scope)
        extra = [] if refused else self._cookie(scope)

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                given = [pair for pair in message["headers"] if pair[0].lower() != b"cache-control"]
                message = {**message, "headers": [*given, *HEADERS, *extra]}
            await send(message)

        if refused:
            status, text = refused
            plain = [(b"content-type", b"text/plain; charset=utf-8")]
            await guarded({"type": "http.response.start", "status": status, "headers": plain})
            await guarded({"type": "http.response.body", "body": text.encode()})
        else:
            await self.app(scope, receive, guarded)

    def _refused(self, scope: Any) -> tuple[int, str] | None:
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "the viewer only shows: GET and HEAD\n"
        if self.token is None:
            host = _header(scope, b"host")
            name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
            return None if name in LOOPBACK else (403, f"not a name of this machine: {host!r}; use 127.0.0.1\n")
        if any(secrets.compare_digest(given.encode(), self.token.encode()) for given in self._given(scope)):
            return None
        return 403, "the address must end in ?token=..., as chatmill view printed it\n"

    def _given(self, scope: Any) -> list[str]:
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [])
        cookie = SimpleCookie(_header(scope, b"cookie")).get(self._cookie_name(scope))
        return [*given, *([cookie.value] if cookie else [])]

    def _cookie(self, scope: Any) -> list[tuple[bytes, bytes]]:
        """Remember a token that the address brought."""
        if self.token is None or b"token=" not in scope.get("query_string", b""):
            return []
        text = f"{self._cookie_name(scope)}={self.token}; Path=/; HttpOnly; SameSite=Strict"
        return [(b"set-cookie", text.encode())]

    @staticmethod
    def _cookie_name(scope: Any) -> str:
        """Cookies are shared by all ports of a host, so the port is part of the name."""
        server = scope.get("server") or ("", 0)
        return f"{COOKIE}_{server[1]}"


def _header(scope: Any, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")
