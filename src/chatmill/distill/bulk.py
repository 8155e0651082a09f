"""The fast path of the distillation dataset: many rows at once, with exactly the ids of the official renderer.

What differs between rows is their text; all else repeats. The system and developer messages that a row begins with are
one literal, rendered by the official library once for each spelling of them. A header is a literal, rendered once for
each role, channel, recipient, name and content type. All texts of a batch are encoded in one call, and laid out with
the literals between them. A row of any other form is rendered whole by the official library.

The texts of most rows come from a stencil (see `chatmill.distill.stencil`), those of the others from a decoder.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from chatmill.core.harmony_ids import CALL, END, EOD, RETURN
from chatmill.core.native.gather import gathered
from chatmill.core.tokens import offsets_of
from chatmill.distill.columns import RowTexts
from chatmill.distill.draft import Draft, KDBatch, with_rendered
from chatmill.distill.stencil import Filled, Stencil
from chatmill.errors import RecordError
from chatmill.systems.synth_kd import SPANS, OfficialRows, Rendered
from chatmill.tokenizer.tiktoken_file import load_o200k

CLOSE = ord("}")
TOGETHER = 16
"""Rows whose JSON is decoded in one call."""
MAX_PREFIXES = 512
MAX_FORMS = 4096
MAX_SHAPES = 256
"""When one of the first two caches is larger than this between two batches, all are forgotten and made anew."""
PAUSE = 16
"""Batches after one of which less than half fitted the stencil, until it is tried again."""


class _Text(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    text: str
    type: Literal["text"]


class _Message(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A message as nearly all are; any other form is an error of the decoder, and the row takes the slow way."""

    role: Literal["user", "assistant"]
    content: tuple[_Text]
    channel: str | None = None
    recipient: str | None = None
    name: str | None = None
    content_type: str | None = None


class _SpelledText(msgspec.Struct):
    text: msgspec.Raw


class _SpelledMessage(msgspec.Struct):
    content: tuple[_SpelledText]


class FormKey(NamedTuple):
    """What decides the header of a message."""

    role: str
    channel: str | None
    recipient: str | None
    name: str | None
    content_type: str | None


def _message_type(form: FormKey) -> Any:
    """The type of messages of one form and no other: its fields have exactly these values."""
    fields = [(name, Literal[value]) for name, value in form._asdict().items() if value is not None]
    return msgspec.defstruct("_Exact", [*fields, ("content", tuple[_Text])], gc=False, forbid_unknown_fields=True)


class _Outline(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[msgspec.Raw]


class _Role(msgspec.Struct):
    role: str


_decode_tail = msgspec.json.Decoder(list[_Message]).decode
_decode_spelled = msgspec.json.Decoder(list[_SpelledMessage]).decode
_outline = msgspec.json.Decoder(_Outline).decode
_role = msgspec.json.Decoder(_Role).decode


class _Prefix(NamedTuple):
    """How rows begin: up to the first message that is neither system nor developer."""

    start: bytes
    size: int
    literal: int
    """The rendered messages."""


class _Shape(NamedTuple):
    """Which forms of message a row has, in order; most rows have that of the row before."""

    forms: tuple[int, ...]
    decode: Callable[[bytes], list[tuple[Any, ...]]]
    """Decodes rows of exactly this shape, several at once."""


class BulkRows:
    """Renders batches of rows; keeps its literals from batch to batch."""

    def __init__(self, vocabulary: Path) -> None:
        """`vocabulary` is a checked o200k file."""
        self.official = OfficialRows(vocabulary)
        self._encode = load_o200k(vocabulary).encode_batch
        self._forget()

    def _forget(self) -> None:
        """Begin with empty caches."""
        self._literals: list[list[int]] = []
        self._table: tuple[NDArray[np.int32], NDArray[np.int64]] | None = None
        self._end, self._return, self._call, self._eod = map(self._literal, ([END], [RETURN], [CALL], [EOD]))
        self._prefixes: dict[bytes, _Prefix] = {}
        self._prefix = _Prefix(b"\xff", 1, 0)
        """The one that the last row had; at first one that no row has."""
        self._forms: dict[tuple[str, str | None, str | None, str | None, str | None], int] = {}
        """Each `FormKey` with its number, in the order of the numbers."""
        self._form_headers: list[int] = []
        self._form_ends: list[int] = []
        self._form_spans: list[int] = []
        self._shapes: dict[tuple[int, ...], _Shape] = {}
        self._shape: _Shape | None = None
        self._stencils: dict[tuple[int, tuple[int, ...]], Stencil] = {}
        """By the literal of the prefix and the forms."""
        self._known_stencil: tuple[int, tuple[int, ...]] | None = None
        """The one that the last decoded row fits."""
        self._pause = 0

    def render(self, rows: Sequence[bytes | None]) -> KDBatch:
        """Render rows given as JSON texts; a row that fails does not touch the others."""
        if len(self._prefixes) > MAX_PREFIXES or len(self._forms) > MAX_FORMS:
            self._forget()
        texts = RowTexts.of(rows)
        filled = self._fit(texts)
        draft = Draft() if filled is None or self._known_stencil is None else Draft(filled, *self._known_stencil)
        others = np.setdiff1d(np.arange(len(texts)), draft.filled.places, assume_unique=True).tolist()
        for first in range(0, len(others), TOGETHER):
            places = others[first : first + TOGETHER]
            group = [texts[place] for place in places]
            decoded = self._texts_of_shape(group)
            if decoded is not None and self._shape is not None:
                draft.add(places, self._prefix.literal, self._shape.forms, decoded)
                continue
            for place, row in zip(places, group, strict=True):
                try:
                    self._add(place, row, draft)
                except RecordError as error:
                    draft.failed.append((place, error))
        return self._lay_out(draft)

    def _fit(self, rows: RowTexts) -> Filled | None:
        """The rows that fit the stencil of the last decoded row; while few do, that is not tried often."""
        if self._known_stencil is None or self._pause:
            self._pause = max(0, self._pause - 1)
            return None
        filled = self._stencils[self._known_stencil].fit(rows)
        if filled is None or 2 * len(filled.places) < len(rows):
            self._pause = PAUSE
        return filled

    def _learn(self, row: bytes, forms: tuple[int, ...]) -> None:
        """Take the stencil of a decoded row with the known prefix for the rows to come."""
        key = (self._prefix.literal, forms)
        if key not in self._stencils and len(self._stencils) < MAX_SHAPES:
            stencil = self._stencil_of(row, forms)
            if stencil is not None:
                self._stencils[key] = stencil
        if key in self._stencils and key != self._known_stencil:
            self._known_stencil, self._pause = key, 0

    def _stencil_of(self, row: bytes, forms: tuple[int, ...]) -> Stencil | None:
        """The stencil of a row; None where its holes are not where its texts stand, as decoding it filled tells."""
        prefix = self._prefix
        spelled = [bytes(message.content[0].text) for message in _decode_spelled(b"[" + row[prefix.size : -1])]
        stencil = Stencil.of(row, prefix.size, spelled)
        marks = [f"text {number} of {len(spelled)}" for number in range(len(spelled))]
        if stencil is None or any(mark.encode() in row for mark in marks):
            return None
        known = self._known(stencil.filled([mark.encode() for mark in marks]))
        if known is None or known[0] != prefix or tuple(known[2]) != forms:
            return None
        return stencil if _texts(known[1]) == marks else None

    def _texts_of_shape(self, rows: Sequence[bytes | None]) -> list[str] | None:
        """All texts of rows that begin like the row before them and have its shape; None where one does not."""
        start, size = self._prefix.start, self._prefix.size
        tails = [row[size:-1] for row in rows if row is not None and row.startswith(start) and row[-1] == CLOSE]
        if self._shape is None or len(tails) != len(rows):
            return None
        try:
            found = self._shape.decode(b"[[" + b",[".join(tails) + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if len(found) != len(rows):  # one of them closed its list and opened another
            return None
        return [message.content[0].text for messages in found for message in messages]

    def _add(self, place: int, row: bytes | None, draft: Draft) -> None:
        messages: list[_Message] = []
        if row is not None and row.startswith(self._prefix.start) and row[-1] == CLOSE:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                messages = _decode_tail(b"[" + row[self._prefix.size : -1])
        forms = self._known_forms(messages)
        if row is None or not any(map(self._form_spans.__getitem__, forms)):
            self._add_unusual(place, row, draft)
            return
        draft.add([place], self._prefix.literal, forms, _texts(messages))
        self._shape = self._shape_of(forms)
        self._learn(row, forms)

    def _shape_of(self, forms: tuple[int, ...]) -> _Shape | None:
        """The shape of a row, with its decoder; None where there are too many."""
        shape = self._shapes.get(forms)
        if shape is None and len(self._shapes) < MAX_SHAPES:
            keys = [FormKey(*key) for key in self._forms]
            row_type: Any = tuple[tuple(_message_type(keys[form]) for form in forms)]  # type: ignore[misc]
            shape = self._shapes[forms] = _Shape(forms, msgspec.json.Decoder(list[row_type]).decode)
        return shape

    def _known_forms(self, messages: list[_Message]) -> tuple[int, ...]:
        """The numbers of the messages' forms; empty where one has not been seen before."""
        forms = self._forms
        try:
            return tuple(forms[m.role, m.channel, m.recipient, m.name, m.content_type] for m in messages)
        except KeyError:
            return ()

    def _add_unusual(self, place: int, row: bytes | None, draft: Draft) -> None:
        """A row with a beginning or a header that was not seen just before, or of a form that is not known at all."""
        known = self._known(row) if row is not None else None
        if known is None:
            draft.rendered[place] = self.official.render(row)
            return
        prefix, messages, forms = known
        self._prefix = prefix
        draft.add([place], prefix.literal, forms, _texts(messages))

    def _known(self, row: bytes) -> tuple[_Prefix, list[_Message], list[int]] | None:
        """The parts of a row that can be laid out; None where only the official library can say what it means."""
        try:
            raws = [bytes(raw) for raw in _outline(row).messages]
            roles = [_role(raw).role for raw in raws]
            leading = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), len(raws))
            messages = _decode_tail(b"[" + b",".join(raws[leading:]) + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if not any(m.role == "assistant" for m in messages):
            return None
        forms = [form for form in map(self._form, messages) if form is not None]
        if len(forms) != len(messages):
            return None
        return self._prefix_of(row, raws[:leading], raws[leading]), messages, forms

    def _prefix_of(self, row: bytes, leading: Sequence[bytes], after: bytes) -> _Prefix:
        at = row.index(b"[") + 1
        for raw in (*leading, after):
            at = row.index(raw, at) + len(raw)
        start = row[: at - len(after)]
        found = self._prefixes.get(start)
        if found is None:
            ids = self.official.ids([json.loads(raw) for raw in leading]) if leading else []
            found = self._prefixes[start] = _Prefix(start, len(start), self._literal(ids))
        return found

    def _form(self, message: _Message) -> int | None:
        """The number of a message's form; a new one is rendered with an empty text. None: unknown to the rules."""
        key = FormKey(message.role, message.channel, message.recipient, message.name, message.content_type)
        if key in self._forms:
            return self._forms[key]
        if message.role == "assistant" and message.channel not in SPANS:
            return None
        fields = {field: value for field, value in key._asdict().items() if value is not None}
        empty = {**fields, "content": [{"type": "text", "text": ""}]}
        # Not the last message, so that a final one does not end in <|return|>.
        follower = {"role": "user", "content": []}
        ids = self.official.ids([empty, follower])
        behind = len(self.official.ids([follower]))
        end = ids[-behind - 1]
        if end not in (END, CALL):
            return None
        self._form_headers.append(self._literal(ids[: -behind - 1]))
        self._form_ends.append(self._end if end == END else self._call)
        self._form_spans.append(SPANS[message.channel or ""] if message.role == "assistant" else 0)
        self._forms[key] = len(self._form_spans) - 1
        return self._forms[key]

    def _literal(self, ids: list[int]) -> int:
        self._literals.append(ids)
        self._table = None
        return len(self._literals) - 1

    def _literal_table(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """All literals flat, and their offsets."""
        if self._table is None:
            lengths = np.array([len(ids) for ids in self._literals], dtype=np.int64)
            flat = np.array([i for ids in self._literals for i in ids], dtype=np.int32)
            self._table = flat, offsets_of(lengths)
        return self._table

    def _lay_out(self, draft: Draft) -> KDBatch:
        """Columns of a batch. A row is the runs: prefix, then header, text and end of each message, then EOD."""
        flat, starts = self._literal_table()
        pieces = [(flat, starts), self._encode(draft.filled.texts), self._encode(draft.texts)]
        rows, prefixes, counts, forms, texts = draft.in_order()
        headers = 1 + 2 * np.repeat(np.arange(len(counts)), counts) + 3 * np.arange(len(forms))
        """The run of each message's header; its text and its end follow."""
        firsts = 3 * offsets_of(counts) + 2 * np.arange(len(counts) + 1)
        form_spans = np.array(self._form_spans, dtype=np.uint8)[forms] if len(forms) else np.empty(0, np.uint8)
        last = np.zeros(len(forms), dtype=np.bool_)
        last[offsets_of(counts)[1:][counts > 0] - 1] = True

        runs = np.full(int(firsts[-1]), self._eod, dtype=np.int64)
        runs[firsts[:-1]] = prefixes
        if len(forms):
            runs[headers] = np.array(self._form_headers, dtype=np.int64)[forms]
            ends = np.array(self._form_ends, dtype=np.int64)[forms]
            runs[headers + 1] = len(self._literals) + texts  # their pieces stand behind those of the literals
            runs[headers + 2] = np.where(last & (form_spans == SPANS["final"]), self._return, ends)
        lengths = np.concatenate([np.diff(offsets) for _, offsets in pieces])[runs]
        run_spans = np.zeros(len(runs), dtype=np.uint8)
        for step in range(3):
            run_spans[headers + step] = form_spans
        batch = KDBatch(
            ids=gathered(
                [ids for ids, _ in pieces],
                np.repeat(np.arange(3, dtype=np.uint8), [len(offsets) - 1 for _, offsets in pieces])[runs],
                np.concatenate([offsets[:-1] for _, offsets in pieces])[runs],
                lengths,
            ),
            spans=np.repeat(run_spans, lengths),
            lengths=np.add.reduceat(lengths, firsts[:-1]) if len(counts) else np.empty(0, np.int64),
            rows=rows,
            official=frozenset(draft.rendered),
            failed=tuple(draft.failed),
        )
        return with_rendered(batch, draft.rendered) if draft.rendered else batch


def _texts(messages: list[_Message]) -> list[str]:
    return [message.content[0].text for message in messages]


class OfficialBatches:
    """The same service by the official library alone."""

    def __init__(self, vocabulary: Path) -> None:
        """`vocabulary` is a checked o200k file."""
        self.official = OfficialRows(vocabulary)

    def render(self, rows: Sequence[bytes | None]) -> KDBatch:
        """Render rows one after the other."""
        rendered: dict[int, Rendered] = {}
        failed: list[tuple[int, RecordError]] = []
        for place, row in enumerate(rows):
            try:
                rendered[place] = self.official.render(row)
            except RecordError as error:
                failed.append((place, error))
        none: Any = np.empty(0, np.int64)
        batch = KDBatch(
            ids=none.astype(np.int32), spans=none.astype(np.uint8), lengths=none, rows=none,
            official=frozenset(rendered), failed=tuple(failed),
        )  # fmt: skip
        return with_rendered(batch, rendered) if rendered else batch
