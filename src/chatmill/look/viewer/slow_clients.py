"""Connections that dawdle are closed: whoever sends a request, or takes an answer, too slowly does not hold a place."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

SLOW_SECONDS = 30.0
"""For a whole request to arrive, and for a client to take the next piece of an answer."""


class ImpatientProtocol(H11Protocol):
    """HTTP as uvicorn speaks it, with two deadlines; how long an answer takes to be made is not limited."""

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


def impatient(slow_seconds: float) -> type[ImpatientProtocol]:
    """The protocol with these deadlines."""
    return type("ImpatientProtocol", (ImpatientProtocol,), {"slow_seconds": slow_seconds})
