"""Whole calls of a model: the prompt that was sent and the tokens that it sampled, with no template between.

Calls of one record whose prompts go on where an earlier call ends share a row; where the history was rewritten another
row begins. What was sampled is trained, and all of it once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.kinds import REPEATED, Part, RoleCode, kind
from chatmill.core.native.gather import gathered
from chatmill.core.sampled import IDS, LENGTH, LOGPROBS, flat
from chatmill.core.tokens import Tokens, offsets_of, ranges, segment_sums
from chatmill.errors import RecordError
from chatmill.render.jinja.options import Expand
from chatmill.render.model_template import ModelTemplate
from chatmill.render.sampled import CONTENT, NOTES, STOP

Ints = NDArray[np.int64]
PROMPT = kind(RoleCode.NONE, Part.CONTENT)
"""The kind of what was sent: of which messages it is nobody can tell."""
JOINED, APART = NOTES.index("calls_joined"), NOTES.index("calls_apart")


class Laid(NamedTuple):
    """The rows of records of calls."""

    tokens: Tokens
    kept: Ints
    """The record of each row."""
    counts: Ints
    """A column for each of `NOTES`."""
    failed: tuple[tuple[int, RecordError], ...]


class _Segment(NamedTuple):
    """A range of the ids that were sent (0) or sampled (1)."""

    which: int
    start: int
    size: int
    kind: int
    message: int


def find_calls(batch: Conversations) -> NDArray[np.bool_] | None:
    """Which conversations are records of calls: those with the prompt of an answer; None where none is."""
    sent = batch.messages.prompt_token_ids
    if not len(sent.data) or not sent.present.any():
        return None
    found = np.zeros(len(batch), dtype=np.bool_)
    found[batch.owners(np.flatnonzero(sent.present))] = True
    return found


def lay_calls(batch: Conversations, places: Ints, chat: ModelTemplate) -> Laid:
    """The rows of the records at these places."""
    writer = _Writer(batch, chat)
    rows: list[list[_Segment]] = []
    kept, counts, failed = [], [], []
    for record in places.tolist():
        try:
            made, apart = writer.rows(record)
        except RecordError as error:
            error.record_id, error.where = batch.ids[record], batch.wheres[record]
            failed.append((record, error))
            continue
        rows += made
        kept += [record] * len(made)
        counts += [apart, *([(0, 0)] * (len(made) - 1))]
    noted = np.zeros((len(rows), len(NOTES)), dtype=np.int64)
    noted[:, [JOINED, APART]] = np.array(counts, dtype=np.int64).reshape(-1, 2)
    return Laid(
        writer.tokens(rows, np.array(kept, dtype=np.int64)), np.array(kept, dtype=np.int64), noted, tuple(failed)
    )


class _Writer:
    """Joins the calls of records into rows."""

    def __init__(self, batch: Conversations, chat: ModelTemplate) -> None:
        messages = batch.messages
        self._batch, self._weights = batch, messages.weights
        self._sent, self._sent_offsets = flat(messages.prompt_token_ids.texts, IDS)
        self._ids, self._offsets = flat(messages.token_ids.texts, IDS)
        self._raw = [ids.tobytes() for ids in (self._sent, self._ids)]
        self._borders = [(IDS.itemsize * offsets).tolist() for offsets in (self._sent_offsets, self._offsets)]
        self._has_prompt = messages.prompt_token_ids.present
        names = [name for name in chat.stops.names if name in chat.tokenizer.control_ids]
        self._stops = {chat.tokenizer.control_ids[name] for name in names}
        self._vocabulary = chat.tokenizer.vocab_size
        self._only_last = chat.given.expand is Expand.LAST or chat.given.last_turn_only
        is_wrong = (messages.roles == RoleCode.ASSISTANT) & (messages.weights != 0) & ~self._has_prompt
        for ids, offsets in ((self._sent, self._sent_offsets), (self._ids, self._offsets)):
            is_wrong |= segment_sums(ids >= self._vocabulary, offsets) > 0
        self._wrong = set(batch.owners(np.flatnonzero(is_wrong)).tolist())
        """Records with an answer that cannot be taken."""

    def rows(self, record: int) -> tuple[list[list[_Segment]], tuple[int, int]]:
        """The rows of a record; how many of its calls go on where another ends, and how many begin a row anew."""
        first, last = self._batch.offsets[record : record + 2].tolist()
        if record in self._wrong:
            self._refuse(first, last)
        calls = (first + np.flatnonzero(self._has_prompt[first:last])).tolist()
        rows: list[list[_Segment]] = []
        texts: list[bytes] = []
        for place in calls:
            sent, given = (raw[at[place] : at[place + 1]] for raw, at in zip(self._raw, self._borders, strict=True))
            row = next((n for n in range(len(rows) - 1, -1, -1) if sent.startswith(texts[n])), len(rows))
            known = 0
            if row == len(rows):
                rows.append([])
                texts.append(sent)
            else:
                known = len(texts[row])
            if len(sent) > known:
                start = (self._borders[0][place] + known) // IDS.itemsize
                rows[row].append(_Segment(0, start, (len(sent) - known) // IDS.itemsize, PROMPT, -1))
            is_context = self._only_last and place != calls[-1]
            rows[row] += self._answer(place, place - first, is_context=is_context)
            texts[row] = sent + given
        return rows, (len(calls) - len(rows), len(rows) - 1)

    def _refuse(self, first: int, last: int) -> None:
        """Say what is wrong with a record: all answers must have their prompts, or texts next to them would be lost."""
        for place in range(first, last):
            is_answer = self._batch.messages.roles[place] == RoleCode.ASSISTANT and self._weights[place] != 0
            if is_answer and not self._has_prompt[place]:
                raise RecordError(
                    "other answers of this record have prompt_token_ids, and this one has none: give all of them, or "
                    "take prompt_token_ids away to train token_ids in the conversation that the template renders",
                    code="bad_token_ids",
                    path=f"messages[{place - first}].prompt_token_ids",
                )
            for ids, offsets in ((self._sent, self._sent_offsets), (self._ids, self._offsets)):
                largest = int(ids[offsets[place] : offsets[place + 1]].max(initial=0))
                if largest >= self._vocabulary:
                    raise RecordError(
                        f"the id {largest} is not in the vocabulary of {self._vocabulary:,} ids: was another model "
                        "sampled?",
                        code="bad_token_ids",
                        path=f"messages[{place - first}]",
                    )

    def _answer(self, place: int, message: int, *, is_context: bool) -> list[_Segment]:
        """What was sampled; the stop at its end has a kind of its own."""
        flag = REPEATED if is_context or self._weights[place] == 0 else 0
        start, stop = self._offsets[place : place + 2].tolist()
        size = stop - start
        if int(self._ids[stop - 1]) not in self._stops:
            return [_Segment(1, start, size, CONTENT | flag, message)]
        if self._batch.messages.finish_reasons[place] == LENGTH:
            raise RecordError(
                "'finish_reason' is 'length', and token_ids end with a stop: one of the two is wrong",
                code="bad_token_ids",
                path=f"messages[{message}].finish_reason",
            )
        parts = [_Segment(1, start, size - 1, CONTENT | flag, message)] if size > 1 else []
        return [*parts, _Segment(1, start + size - 1, 1, STOP | flag, message)]

    def tokens(self, rows: list[list[_Segment]], kept: Ints) -> Tokens:
        """Rows as columns."""
        segments = [segment for row in rows for segment in row]
        which, starts, sizes, kinds, owners = np.array(segments, dtype=np.int64).reshape(-1, 5).T
        run_offsets, batch = offsets_of(sizes), self._batch
        sequence_runs = offsets_of(np.array([len(row) for row in rows], dtype=np.int64))
        counts = np.diff(batch.offsets)[kept]
        return Tokens(
            ids=gathered([self._sent, self._ids], which, starts, sizes),
            offsets=run_offsets[sequence_runs],
            run_offsets=run_offsets,
            run_kinds=kinds.astype(np.uint8),
            run_messages=owners.astype(np.int32),
            sequence_runs=sequence_runs,
            message_offsets=offsets_of(counts),
            message_weights=batch.messages.weights[ranges(batch.offsets[kept], counts)].astype(np.float32),
            logprobs=self._logprobs(which, starts, sizes),
        )

    def _logprobs(self, which: Ints, starts: Ints, sizes: Ints) -> NDArray[np.float32] | None:
        """Those of the tokens that were sampled."""
        given = self._batch.messages.logprobs
        if not given.present.any():
            return None
        values = np.full(len(self._ids), np.nan, dtype=np.float32)
        there = np.flatnonzero(given.present)
        values[ranges(self._offsets[there], np.diff(self._offsets)[there])] = flat(given.texts, LOGPROBS)[0]
        nothing = np.full(len(self._sent), np.nan, dtype=np.float32)
        return gathered([nothing, values], which, starts, sizes)
