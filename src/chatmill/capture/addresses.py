"""Parse proxy addresses: token, name of the run, path."""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from chatmill.errors import ConfigError

TOKEN_PREFIX = "/token/"
RUN_PREFIX = "/run/"
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
RUN_HEADERS = ("x-session-id", "session_id", "session-id", "x-claude-code-session-id")
"""Headers in which clients name their session, in the order in which they count."""
VERSIONED = re.compile(r"/v1/?$")


@dataclass(frozen=True, kw_only=True)
class Destination:
    """A request as the server is to get it."""

    address: str
    """Path and query."""
    run: str | None
    """Name of the run in the address or the headers."""

    @property
    def path(self) -> str:
        """The path without its query."""
        return self.address.partition("?")[0]


class RefusedError(Exception):
    """A request without the right to use the proxy."""


@dataclass(frozen=True, kw_only=True)
class AddressReader:
    """Parser of request addresses."""

    token: str | None
    """Secret in the address; None: only this machine can connect."""

    def read(self, address: str, headers: Mapping[str, str]) -> Destination:
        """Return the destination of a request.

        Raises:
            RefusedError: The token is missing, or the name of the host is foreign.
        """
        if not address.startswith("/"):
            raise RefusedError("the address must begin with a slash")
        if self.token is None:
            _check_host(headers.get("host", ""))
        else:
            address = self._check_token(address)
        run = None
        if address.startswith(RUN_PREFIX):
            run, slash, rest = address.removeprefix(RUN_PREFIX).partition("/")
            if not RUN_NAME.fullmatch(run):
                raise RefusedError("a name of a run has letters, digits, dots, hyphens and underscores, at most 128")
            address = slash + rest or "/"
        return Destination(address=address, run=run or _session_name(headers))

    def _check_token(self, address: str) -> str:
        found, slash, rest = address.removeprefix(TOKEN_PREFIX).partition("/")
        is_right = secrets.compare_digest(found.encode(errors="replace"), str(self.token).encode())
        if not address.startswith(TOKEN_PREFIX) or not is_right:
            raise RefusedError("the address must begin with /token/..., as chatmill capture printed it")
        return slash + rest


def check_upstream(url: str) -> str:
    """Check and normalise the address of a model server.

    Raises:
        ConfigError: It is no address, or has what clients add.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is no address of a server: give one such as http://127.0.0.1:8000")
    if parts.query or parts.fragment:
        raise ConfigError(f"{url!r} has a query: give the address without it")
    if parts.username is not None or parts.password is not None:
        raise ConfigError("the address of the server has a user or password: let the client send its key in a header")
    if VERSIONED.search(parts.path):
        raise ConfigError(f"leave /v1 out of {url}: clients add it, and what they add comes after the address")
    return url.rstrip("/")


def is_loopback(host: str) -> bool:
    """Check for a loopback host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_host(host: str) -> None:
    """Refuse foreign host names, against DNS rebinding."""
    name = urlsplit(f"//{host}").hostname or ""
    if not is_loopback(name):
        raise RefusedError("not a name of this machine: use 127.0.0.1")


def _session_name(headers: Mapping[str, str]) -> str | None:
    for name in RUN_HEADERS:
        value = headers.get(name, "")
        if RUN_NAME.fullmatch(value):
            return value
    return None
