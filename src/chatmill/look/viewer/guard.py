"""The check before every request: who may ask; and the headers that keep a page from running anything foreign."""

from __future__ import annotations

import secrets
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse

COOKIE = "chatmill_view"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


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
        request = Request(scope)
        # cookies are shared by all ports of a host, so the port is part of the name
        cookie = f"{COOKIE}_{(scope.get('server') or ('', 0))[1]}"
        refused = self._refused(request, cookie)

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if refused is None and self.token is not None and "token" in request.query_params:
                    headers.append("set-cookie", f"{cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict")
            await send(message)

        await (refused or self.app)(scope, receive, guarded)

    def _refused(self, request: Request, cookie: str) -> PlainTextResponse | None:
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("the viewer only shows: GET and HEAD\n", 405)
        if self.token is None:
            host = request.headers.get("host", "")
            name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
            words = f"not a name of this machine: {host!r}; use 127.0.0.1\n"
            return None if name in LOOPBACK else PlainTextResponse(words, 403)
        given = [*request.query_params.getlist("token"), request.cookies.get(cookie, "")]
        if any(secrets.compare_digest(one.encode(), self.token.encode()) for one in given):
            return None
        return PlainTextResponse("the address must end in ?token=..., as chatmill view printed it\n", 403)
