"""Rows of the distillation dataset, many at once, with exactly the ids of the official renderer.

They take the road of any build: the scanner reads them into columns, and the template `harmony` writes these by its
plans. A row that the scanner declines is read by Python; one that the template does not know for sure is rendered whole
by the official library, which also says why a row cannot be used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.conversations import Conversations
from chatmill.core.kinds import RoleCode
from chatmill.core.messages import CODES, MessageColumns
from chatmill.core.native.distinct import distinct
from chatmill.core.native.scan import MessageField, RecordField, Scanned, ShapeNames, scan_texts
from chatmill.core.texts import OptionalTexts
from chatmill.core.tokens import Tokens, offsets_of
from chatmill.errors import RecordError
from chatmill.read.columns import merged, scanned_batch
from chatmill.render.jinja.options import Expand, TemplateOptions
from chatmill.render.registry import bind
from chatmill.render.render import render
from chatmill.systems.synth_kd import ROLES, SPANS, OfficialRows, RenderedRow, checked_messages, row_text
from chatmill.tokenizer.tiktoken_file import load_o200k

_FIELDS = ("name", "recipient", "channel", "content_type")
_ROLE_OF_CONTENT = {"system_content": "system", "developer_content": "developer"}
"""The role that a Harmony content belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KDBatch:
    """Rendered rows in flat columns: those that could be rendered, in input order."""

    ids: NDArray[np.int32]
    """With an EOD at the end of each row."""
    spans: NDArray[np.uint8]
    """Token-aligned span ids."""
    lengths: NDArray[np.int64]
    """Tokens of each row."""
    rows: NDArray[np.int64]
    """The place of each row in what was given."""
    official: frozenset[int]
    """The places of rows that the official library rendered whole."""
    failed: tuple[tuple[int, RecordError], ...]
    """The places of rows that cannot be used, and why."""

    def documents(self) -> Iterator[tuple[int, RenderedRow]]:
        """Every row with its place."""
        for place, (first, last) in zip(self.rows.tolist(), pairwise(offsets_of(self.lengths).tolist()), strict=True):
            yield place, RenderedRow(self.ids[first:last], self.spans[first:last])


NO_ROWS = KDBatch(
    ids=np.empty(0, np.int32),
    spans=np.empty(0, np.uint8),
    lengths=np.empty(0, np.int64),
    rows=np.empty(0, np.int64),
    official=frozenset(),
    failed=(),
)


@cache
def _names() -> ShapeNames:
    """What rows may say for the scanner to read them: fewer names than other files may have, and no other spelling."""
    message = {"role": MessageField.ROLE, "content": MessageField.ONE_CONTENT}
    message |= {name: MessageField[name.upper()] for name in _FIELDS}
    return ShapeNames({"messages": RecordField.LIST}, message, {name: RoleCode(CODES[Role(name)]) for name in ROLES})


class BulkRows:
    """Renders batches of rows by the template; keeps its plans from batch to batch."""

    def __init__(self, vocabulary: Path) -> None:
        """`vocabulary` is a checked o200k file."""
        self.official = OfficialRows(vocabulary)
        options = TemplateOptions(options={"end_of_document": True}, expand=Expand.NONE)
        self.template = bind("harmony", load_o200k(vocabulary), options)

    def render(self, texts: OptionalTexts) -> KDBatch:
        """Render rows given as JSON texts; a row that fails does not touch the others."""
        conversations, places, spans = _read(texts)
        rendered = render(conversations, self.template, collect_failures=True)
        rows = places[rendered.kept]
        batch = KDBatch(
            ids=rendered.tokens.ids,
            spans=_token_spans(rendered.tokens, conversations.offsets[rendered.kept], spans),
            lengths=rendered.tokens.lengths,
            rows=rows,
            official=frozenset(),
            failed=(),
        )
        others = np.setdiff1d(np.arange(len(texts)), rows, assume_unique=True)
        return with_official(batch, texts, others.tolist(), self.official) if len(others) else batch


def _read(texts: OptionalTexts) -> tuple[Conversations, NDArray[np.int64], NDArray[np.uint8]]:
    """The rows whose meaning is certain, their places, and the span id of every message."""
    starts, lengths = texts.starts, np.maximum(texts.lengths, 0)
    offsets = np.append(starts, starts[-1:] + lengths[-1:]) if len(texts) else np.zeros(1, dtype=np.int64)
    scanned = scan_texts(texts.data, offsets, _names())
    sure = np.diff(offsets) == texts.lengths
    spans = _message_spans(scanned.messages)
    sure &= _is_known(scanned, spans)
    slow: dict[int, Conversation] = {}
    for place in np.flatnonzero(~sure & texts.present).tolist():
        found = _conversation(texts.raw(place))
        if found is not None:
            slow[place] = found
    places = sure.copy()
    places[list(slow)] = True
    batch = merged(scanned_batch(scanned, "row ", 1, ""), sure, slow)
    if batch.messages is not scanned.messages:
        spans = _message_spans(batch.messages)
    return batch, np.flatnonzero(places), spans


def _is_known(scanned: Scanned, spans: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which rows keep the rules of the dataset: an assistant message, and every one of them in a known channel."""
    assistant = scanned.messages.roles == RoleCode.ASSISTANT
    owners = np.repeat(np.arange(len(scanned.read)), np.diff(scanned.offsets))
    known = np.zeros(len(scanned.read), dtype=np.bool_)
    known[owners[assistant]] = True
    known[owners[assistant & (spans == 0)]] = False
    return known & scanned.read


def _message_spans(messages: MessageColumns) -> NDArray[np.uint8]:
    """The span id of every message; 0 also for an assistant message in another channel."""
    spans, channels = np.zeros(len(messages), dtype=np.uint8), messages.channels
    places = np.flatnonzero((messages.roles == RoleCode.ASSISTANT) & channels.present)
    which, firsts = distinct(channels.data, channels.starts[places], channels.lengths[places])
    known = [SPANS.get(channels[place] or "", 0) for place in places[firsts].tolist()]
    spans[places] = np.array(known, dtype=np.uint8)[which]
    return spans


def _token_spans(tokens: Tokens, firsts: NDArray[np.int64], spans: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The span id of every token: that of its message, wrappers included.

    `firsts` are the first messages of the rows, `spans` those of all messages.
    """
    of_runs = np.repeat(firsts, np.diff(tokens.sequence_runs)) + tokens.run_messages
    of_runs[tokens.run_messages < 0] = len(spans)  # what is of no message
    return tokens.per_token(np.append(spans, np.uint8(0))[of_runs])


def _conversation(row: bytes | None) -> Conversation | None:
    """A row read by Python; None where only the official library can say what it means."""
    try:
        messages = [_message(message) for message in checked_messages(row_text(row))]
        known = [message for message in messages if message is not None]
        "".join(text for message in known for text in message if isinstance(text, str)).encode()
    except (RecordError, UnicodeEncodeError):
        return None
    return Conversation(tuple(known)) if len(known) == len(messages) else None


def _message(message: Mapping[str, Any]) -> Message | None:
    """A checked message; None where it has other fields, or another content than one text."""
    fields: dict[str, Any] = {name: message.get(name) for name in _FIELDS}
    content, structured = message.get("content"), None
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        (part,) = content
        if part.keys() == {"type", "text"} and part["type"] == "text":
            content = part["text"]
        elif _ROLE_OF_CONTENT.get(part.get("type")) == message["role"]:
            content, structured = "", part
    if message.keys() - {"role", "content", *_FIELDS} or not isinstance(content, str):
        return None
    if not all(value is None or isinstance(value, str) for value in fields.values()):
        return None
    return Message(Role(message["role"]), content, structured=structured, **fields)


def with_official(batch: KDBatch, texts: OptionalTexts, places: list[int], official: OfficialRows) -> KDBatch:
    """A batch with the rows at these places between its own, rendered by the official library; they are rare."""
    pieces: dict[int, RenderedRow] = {}
    failed = list(batch.failed)
    for place in places:
        try:
            pieces[place] = official.render(texts.raw(place))
        except RecordError as error:
            failed.append((place, error))
    rendered = frozenset(pieces)
    if not pieces:
        return replace(batch, failed=tuple(failed))
    pieces |= dict(batch.documents())
    rows = sorted(pieces)
    ids, spans = (np.concatenate(column) for column in zip(*(pieces[row] for row in rows), strict=True))
    lengths = np.array([len(pieces[row].ids) for row in rows], dtype=np.int64)
    places_of_rows = np.array(rows, dtype=np.int64)
    return KDBatch(ids=ids, spans=spans, lengths=lengths, rows=places_of_rows, official=rendered, failed=tuple(failed))
