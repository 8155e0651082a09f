"""Runs the viewer: finds a port, says the address, serves until it is stopped, and closes connections that dawdle."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from chatmill.errors import ConfigError

FIRST_PORT = 8420
PORTS = 20
"""Ports that are tried when none is asked for."""
SLOW_SECONDS = 30.0
"""For a whole request to arrive, and for a client to take the next piece of an answer."""


class ImpatientProtocol(H11Protocol):
    """HTTP as uvicorn speaks it, with two deadlines; how long an answer takes to be made is not limited.

    Whoever sends a request, or takes an answer, too slowly does not hold a place.
    """

    slow_seconds = SLOW_SECONDS
    _request: asyncio.TimerHandle | None = None
    _answer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A new connection: a request has to come."""
        super().connection_made(transport)
        self._request = self.loop.call_later(self.slow_seconds, transport.abort)

    def data_received(self, data: bytes) -> None:
        """A piece of a request; the first piece of the next one begins a new deadline."""
        if self._request is None and self.conn.their_state is h11.IDLE:
            self._request = self.loop.call_later(self.slow_seconds, self.transport.abort)
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_request_timer()

    def pause_writing(self) -> None:
        """The client does not take what was sent."""
        super().pause_writing()
        self._stop_answer_timer()
        self._answer = self.loop.call_later(self.slow_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        self._stop_answer_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is left to wait for."""
        self._stop_request_timer()
        self._stop_answer_timer()
        super().connection_lost(exc)

    def _stop_request_timer(self) -> None:
        if self._request is not None:
            self._request.cancel()
            self._request = None

    def _stop_answer_timer(self) -> None:
        if self._answer is not None:
            self._answer.cancel()
            self._answer = None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host name or address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int | None) -> socket.socket:
    """A listening socket; without a port the first free one from 8420 on, `port=0` takes any."""
    wanted = [port] if port is not None else [*range(FIRST_PORT, FIRST_PORT + PORTS), 0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    problem: OSError | None = None
    for number in wanted:
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((host, number))
            made.listen(128)
        except (OSError, OverflowError) as error:
            made.close()
            problem = error if isinstance(error, OSError) else OSError(str(error))
            continue
        return made
    raise ConfigError(
        f"cannot listen on {host} port {port}: {problem.strerror or problem if problem else ''}; give another --port "
        "(0 takes any that is free) or --host"
    )


def address(host: str, port: int, token: str | None) -> str:
    """What to open in a browser."""
    shown = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):
        shown = socket.gethostname()
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")


def serve(
    make: Callable[[str | None], Any],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    use_token: bool = True,
    on_ready: Callable[[str], None],
) -> None:
    """Serve the app that `make(token)` gives until interrupted; `on_ready` gets the address.

    The address has a random token, which every request must bring. `use_token=False` does without, on loopback alone.
    """
    with listening(make, host=host, port=port, use_token=use_token) as (server, sockets, url):
        on_ready(url)
        with contextlib.suppress(KeyboardInterrupt):  # the way to stop it
            server.run(sockets=sockets)


@contextlib.contextmanager
def listening(
    make: Callable[[str | None], Any],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    use_token: bool = True,
    slow_seconds: float = SLOW_SECONDS,
) -> Iterator[tuple[Any, list[socket.socket], str]]:
    """A uvicorn server that is ready to run, its sockets, and its address.

    Clients that take longer than `slow_seconds` to send a request or to take an answer are cut off.
    """
    if not use_token and not is_loopback(host):
        raise ConfigError(f"--no-token is for this machine alone: whoever can reach {host} could read the dataset")
    token = secrets.token_urlsafe(18) if use_token else None
    made = bind(host, port)
    try:
        config = uvicorn.Config(
            make(token),
            http=type("Protocol", (ImpatientProtocol,), {"slow_seconds": slow_seconds}),
            ws="none",
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        yield uvicorn.Server(config), [made], address(host, made.getsockname()[1], token)
    finally:
        made.close()
