"""One captured call as a line of JSON, without headers."""

from __future__ import annotations

import base64
import json
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum

import msgspec

from chatmill.capture.server_events import EventSplitter, event_data
from chatmill.json_values import is_too_deep
from chatmill.read.agents.request_logs import KEY_MARK
from chatmill.read.lines import LINE_LIMIT

VERSION = 1
"""Of the lines."""
KEY_HEADERS = ("authorization", "proxy-authorization", "x-api-key", "api-key", "x-goog-api-key")
SHORTEST_KEY = 12
"""Characters of the shortest key with a digit that is removed from bodies."""
SHORTEST_WORD = 20
"""Characters of the shortest key without a digit that is removed from bodies: `anything` is a word, too."""
DONE = b"[DONE]"
LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete", "response.failed")


class Dialect(StrEnum):
    """An API of model servers."""

    CHAT = "chat"
    """Chat completions."""
    RESPONSES = "responses"
    """OpenAI's Responses."""
    MESSAGES = "messages"
    """Anthropic's Messages."""


PATH_ENDS = {
    "/chat/completions": Dialect.CHAT,
    "/responses": Dialect.RESPONSES,
    "/messages": Dialect.MESSAGES,
}


def find_dialect(method: str, path: str) -> Dialect | None:
    """Find the dialect of a request.

    Returns None for requests other than model calls.
    """
    for end, dialect in PATH_ENDS.items():
        if method == "POST" and path.endswith(end):
            return dialect
    return None


def current_time() -> str:
    """Return the time in UTC, to the microsecond."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def header_keys(headers: Mapping[str, str]) -> tuple[bytes, ...]:
    """Collect the keys in the headers of a request."""
    keys: set[bytes] = set()
    for name in KEY_HEADERS:
        value = headers.get(name, "")
        # "Bearer KEY": the scheme is no secret.
        for word in value.split():
            has_digit = any(character.isdigit() for character in word)
            if len(word) >= (SHORTEST_KEY if has_digit else SHORTEST_WORD):
                key = word.encode(errors="surrogateescape")
                # JSON may have a slash with a backslash before it.
                keys |= {key, key.replace(b"/", b"\\/")}
    # The longest first, so that no key is left with the end of another one.
    return tuple(sorted(keys, key=len, reverse=True))


@dataclass(kw_only=True)
class Call:
    """A call while it goes on."""

    dialect: Dialect
    path: str
    """Without the query, which may hold a key."""
    run: str | None
    request: bytes
    """The body as the client sent it."""
    keys: tuple[bytes, ...] = ()
    added: tuple[str, ...] = ()
    """Keys that the proxy added to the request."""
    retry: int = 0
    """How often the client had tried before, by what it says."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: str = field(default_factory=current_time)
    status: int | None = None
    """Of the answer; None if there was none."""
    is_stream: bool = False
    """Whether the answer was a stream of events."""
    encoding: str = ""
    """The content encoding of the answer."""
    answer: bytearray = field(default_factory=bytearray)
    """The body of the answer as the server sent it."""

    def line(self, *, is_complete: bool, error: str = "", lost: int = 0) -> bytes:
        """Return the line of the call.

        Args:
            is_complete: Whether the answer came to its proper end.
            error: Why it did not, or what else went wrong.
            lost: Calls before this one that could not be written.
        """
        parts: dict[str, bytes] = {
            "version": b"%d" % VERSION,
            "id": _encode(self.id),
            "run": _encode(self.run),
            "dialect": _encode(self.dialect),
            "path": _encode(self.path),
            "started": _encode(self.started),
            "ended": _encode(current_time()),
            "status": _encode(self.status),
            "complete": _encode(is_complete),
            "stream": _encode(self.is_stream),
            "request": exact_json(self._without_keys(self.request)),
            "response": b"null",
        }
        answer = decode_body(bytes(self.answer), self.encoding)
        if answer is None:
            parts["response"] = in_base64(self.answer)
        elif self.is_stream:
            parts["events"] = events_json(self._without_keys(answer))
        elif answer:
            parts["response"] = exact_json(self._without_keys(answer))
        parts["added"] = _encode(list(self.added))
        if self.retry:
            parts["retry"] = _encode(self.retry)
        if lost:
            parts["lost"] = _encode(lost)
        if error:
            parts["error"] = _encode(error)

        line = _join(parts)
        if len(line) < LINE_LIMIT:
            return line
        reason = f"the call takes {len(line):,} bytes, more than a line may have, so its bodies were left out"
        parts |= {"request": b"null", "response": b"null", "complete": b"false", "error": _encode(reason)}
        parts.pop("events", None)
        return _join(parts)

    def _without_keys(self, body: bytes) -> bytes:
        """Replace keys in a body by a mark."""
        for key in self.keys:
            body = body.replace(key, KEY_MARK.encode())
        return body


def decode_body(body: bytes, encoding: str) -> bytes | None:
    """Undo the content encoding of a body, complete or cut.

    Returns None for an unknown encoding.
    """
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        return None
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        return unpacker.decompress(body)
    except zlib.error:
        return None


def exact_json(body: bytes) -> bytes:
    """Put a JSON body on one line, unchanged.

    Other bodies become base64.
    """
    if not _is_json(body):
        return in_base64(body)
    # Outside of strings line ends are only white space, and inside JSON has none.
    return body.replace(b"\r", b" ").replace(b"\n", b" ").strip()


def events_json(body: bytes) -> bytes:
    """Turn a stream into a JSON list of its events.

    JSON data stays unchanged, other data becomes text.
    """
    splitter = EventSplitter()
    events: list[bytes] = []
    for event in splitter.feed(body):
        data = event_data(event)
        if data is not None:
            events.append(_event_json(data))
    if splitter.rest.strip():
        # A stream that was cut inside of an event: what came of it stays, as the text it is.
        events.append(_encode(splitter.rest.decode(errors="replace")))
    return b"[" + b",".join(events) + b"]"


def is_last_event(data: bytes) -> bool:
    """Check for the last event of a stream."""
    if data == DONE:
        return True
    if not any(name.encode() in data for name in LAST_EVENTS):
        return False
    try:
        event = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(event, dict) and event.get("type") in LAST_EVENTS


def has_finish_reason(data: bytes) -> bool:
    """Check for a chunk with a finish reason."""
    if b"finish_reason" not in data:
        return False
    try:
        event = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return False
    choices = event.get("choices") if isinstance(event, dict) else None
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and choice.get("finish_reason") is not None:
            return True
    return False


def in_base64(body: bytes | bytearray) -> bytes:
    """Wrap bytes as base64 in an object."""
    return b'{"base64":"' + base64.b64encode(body) + b'"}'


def _event_json(data: bytes) -> bytes:
    if data != DONE and _is_json(data):
        return data.replace(b"\r", b" ").replace(b"\n", b" ")
    return _encode(data.decode(errors="replace"))


def _is_json(body: bytes) -> bool:
    if not body or is_too_deep(body):
        return False
    try:
        msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return False
    return True


def _encode(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


def _join(parts: Mapping[str, bytes]) -> bytes:
    pieces = [_encode(name) + b":" + value for name, value in parts.items()]
    return b"{" + b",".join(pieces) + b"}"
