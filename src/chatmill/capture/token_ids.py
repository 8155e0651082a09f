"""Request token ids, and hide them from the client."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from chatmill.capture.json_edits import (
    Edit,
    Member,
    Removal,
    add_member,
    apply_edits,
    members,
    remove_members,
)
from chatmill.capture.server_events import event_data
from chatmill.errors import RecordError

IDS_KEY = "return_token_ids"
LOGPROBS_KEY = "logprobs"
ANSWER_IDS = frozenset({"token_ids", "response_token_ids", "prompt_token_ids"})


class TokenServer(StrEnum):
    """A server with token ids on request."""

    VLLM = "vllm"
    """Ids in streams too. It writes `null` where nobody asked."""
    SGLANG = "sglang"
    """Ids in whole answers alone, streams with them are refused. It writes no key where nobody asked."""


@dataclass(frozen=True, kw_only=True)
class Asking:
    """Additions to requests for chat completions."""

    server: TokenServer | None = None
    """The server to ask for token ids; None: not asked for."""
    logprobs: bool = False
    """Whether to ask for log-probabilities too."""

    def add_to(self, body: bytes) -> tuple[bytes, tuple[str, ...]]:
        """Add the missing keys to a request.

        Returns the new body and the added keys.
        """
        if self.server is None:
            return body, ()
        try:
            request = msgspec.json.decode(body)
            text = body.decode()
        except (ValueError, RecursionError):
            return body, ()
        if not isinstance(request, dict):
            return body, ()
        if self.server is TokenServer.SGLANG and request.get("stream"):
            return body, ()

        added: list[str] = []
        if self.logprobs and LOGPROBS_KEY not in request:
            text = add_member(text, LOGPROBS_KEY, "true")
            added.append(LOGPROBS_KEY)
        if IDS_KEY not in request:
            text = add_member(text, IDS_KEY, "true")
            added.append(IDS_KEY)
        return text.encode(), tuple(reversed(added))


@dataclass(frozen=True, kw_only=True)
class AnswerCleaner:
    """Remover of the additions from an answer."""

    server: TokenServer
    added: tuple[str, ...]

    def clean_body(self, body: bytes) -> bytes:
        """Return a whole answer as the client asked for it.

        Raises:
            RecordError: The answer is no JSON object.
        """
        text = _decode(body)
        return apply_edits(text, self._edits(text)).encode()

    def clean_event(self, event: bytes) -> bytes:
        """Clean one event of a stream.

        Returns nothing for an event sent for its ids alone.
        """
        data = event_data(event)
        if data is None or not data.startswith(b"{") or event.count(data) != 1:
            return event
        text = _decode(data)
        if self._is_extra(text):
            return b""
        return event.replace(data, apply_edits(text, self._edits(text)).encode())

    def _edits(self, text: str) -> list[Edit]:
        removal = Removal.NULL if self.server is TokenServer.VLLM else Removal.NOTHING
        found = members(text, 0)
        edits: list[Edit] = []
        if IDS_KEY in self.added:
            edits += remove_members(text, found, ANSWER_IDS, removal)
        for choice in _choices(text, found):
            if IDS_KEY in self.added:
                edits += remove_members(text, choice, ANSWER_IDS, removal)
            if LOGPROBS_KEY in self.added:
                # Both servers write null where nobody asked for them.
                edits += remove_members(text, choice, frozenset({LOGPROBS_KEY}), Removal.NULL)
        return edits

    def _is_extra(self, text: str) -> bool:
        """Check for a chunk with nothing but ids."""
        chunk = msgspec.json.decode(text)
        choices = chunk.get("choices")
        if self.server is not TokenServer.VLLM or not choices:
            return False
        for choice in choices:
            has_own_logprobs = choice.get("logprobs") is not None and LOGPROBS_KEY not in self.added
            is_empty = choice.get("delta") == {} and choice.get("finish_reason") is None
            if has_own_logprobs or not is_empty:
                return False
        return True


def _choices(text: str, found: list[Member]) -> list[list[Member]]:
    """Return the members of each choice."""
    choices: list[list[Member]] = []
    for member in found:
        if member.key == "choices" and text[member.value_start] == "[":
            for item in members(text, member.value_start):
                choices.append(members(text, item.value_start))
    return choices


def _decode(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RecordError(f"not UTF-8: {error.reason}", code="not_utf8") from None
