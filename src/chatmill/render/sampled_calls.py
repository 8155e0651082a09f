"""Whole calls of a model: the prompt that was sent and the tokens that it sampled, with no template between.

Calls of one record whose prompts go on where an earlier call ends share a row; where the history was rewritten another
row begins. What was sampled is trained, and all of it once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.kinds import REPEATED, Part, RoleCode, kind
from chatmill.core.native.gather import gathered
from chatmill.core.sampled import IDS, LOGPROBS, flat
from chatmill.core.tokens import Tokens, offsets_of, ranges, segment_sums
from chatmill.errors import RecordError
from chatmill.render.jinja.options import Expand
from chatmill.render.model_template import ModelTemplate
from chatmill.render.sampled import CONTENT, ENDED_AND_CUT, NOTES, STOP, Wrong, cut_off, failures

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
    failed: dict[int, RecordError]


def find_calls(batch: Conversations) -> NDArray[np.bool_] | None:
    """Return which conversations are records of calls: those with the prompt of an answer; None where none is."""
    sent = batch.messages.prompt_token_ids
    if not len(sent.data) or not sent.present.any():
        return None
    is_call = np.zeros(len(batch), dtype=np.bool_)
    is_call[batch.owners(np.flatnonzero(sent.present))] = True
    return is_call


def lay_calls(batch: Conversations, places: Ints, chat: ModelTemplate) -> Laid:
    """Return the rows of the records at these places."""
    calls = _Calls(batch, chat)
    failed = failures(calls.wrong(), batch, set(places.tolist()))
    return calls.laid(places[~np.isin(places, list(failed))], failed)


class _Calls:
    """The calls of a batch, as columns."""

    def __init__(self, batch: Conversations, chat: ModelTemplate) -> None:
        messages = batch.messages
        self._batch, self._weights = batch, messages.weights
        self._sent, self._sent_offsets = flat(messages.prompt_token_ids.texts, IDS)
        self._ids, self._offsets = flat(messages.token_ids.texts, IDS)
        self._has_prompt = messages.prompt_token_ids.present
        self._lacks_prompt = (messages.roles == RoleCode.ASSISTANT) & (self._weights != 0) & ~self._has_prompt
        self._vocabulary = chat.tokenizer.vocab_size
        self._only_last = chat.given.expand is Expand.LAST or chat.given.last_turn_only
        control_ids = chat.tokenizer.control_ids
        stops = [control_ids[name] for name in chat.stops.names if name in control_ids]
        self._is_ended = self._has_prompt.copy()
        """Calls whose tokens end with a stop."""
        self._is_ended[self._has_prompt] = np.isin(self._ids[self._offsets[1:][self._has_prompt] - 1], stops)

    def wrong(self) -> Iterator[Wrong]:
        """What is wrong with messages: all answers must have their prompts, or texts next to them would be lost."""
        is_wrong = self._lacks_prompt
        for ids, offsets in ((self._sent, self._sent_offsets), (self._ids, self._offsets)):
            is_wrong = is_wrong | (segment_sums(ids >= self._vocabulary, offsets) > 0)
        yield from map(self._problem, np.flatnonzero(is_wrong).tolist())
        for place in np.flatnonzero(self._is_ended & cut_off(self._batch)).tolist():
            yield Wrong(place, "finish_reason", "bad_token_ids", ENDED_AND_CUT)

    def _problem(self, place: int) -> Wrong:
        """Return what is wrong with the ids of a message."""
        if self._lacks_prompt[place]:
            sentence = (
                "other answers of this record have prompt_token_ids, and this one has none: give all of them, or "
                "take prompt_token_ids away to train token_ids in the conversation that the template renders"
            )
            return Wrong(place, "prompt_token_ids", "bad_token_ids", sentence)
        pairs = ((self._sent, self._sent_offsets), (self._ids, self._offsets))
        largest = max(int(ids[offsets[place] : offsets[place + 1]].max(initial=0)) for ids, offsets in pairs)
        sentence = f"the id {largest} is not in the vocabulary of {self._vocabulary:,} ids: was another model sampled?"
        return Wrong(place, "", "bad_token_ids", sentence)

    def laid(self, records: Ints, failed: dict[int, RecordError]) -> Laid:
        """Return the rows of these records: of each call what is new in its prompt, what was sampled, and the stop."""
        owners = np.full(len(self._batch), -1, dtype=np.int64)
        owners[records] = np.arange(len(records))
        calls = np.flatnonzero(self._has_prompt)
        owners = owners[self._batch.owners(calls)]
        calls, owners = calls[owners >= 0], owners[owners >= 0]
        numbers, joined_lengths = self._joined(calls, owners)
        per_record = np.zeros(len(records), dtype=np.int64)
        np.maximum.at(per_record, owners, numbers + 1)
        first_rows = offsets_of(per_record)
        rows = first_rows[owners] + numbers
        is_context = (self._only_last & (np.diff(owners, append=len(records)) == 0)) | (self._weights[calls] == 0)
        flags, is_ended = np.where(is_context, REPEATED, 0), self._is_ended[calls].astype(np.int64)
        starts, ends, messages = (
            self._offsets[calls],
            self._offsets[calls + 1],
            calls - self._batch.offsets[records][owners],
        )
        zero, ones, sent = np.zeros_like(calls), np.ones_like(calls), self._sent_offsets[calls]
        segments = np.stack(
            [
                [
                    zero,
                    sent + joined_lengths,
                    np.diff(self._sent_offsets)[calls] - joined_lengths,
                    zero + PROMPT,
                    zero - 1,
                    rows,
                ],
                [ones, starts, ends - starts - is_ended, CONTENT | flags, messages, rows],
                [ones, ends - 1, is_ended, STOP | flags, messages, rows],
            ]
        )
        columns = segments[:, :, np.argsort(rows, kind="stable")].transpose(1, 2, 0).reshape(6, -1)
        which, starts, sizes, kinds, messages, rows = columns[:, columns[2] > 0]
        kept, batch = np.repeat(records, per_record), self._batch
        run_offsets = offsets_of(sizes)
        document_runs = offsets_of(np.bincount(rows, minlength=len(kept)))
        counts = np.diff(batch.offsets)[kept]
        noted = np.zeros((len(kept), len(NOTES)), dtype=np.int64)
        noted[first_rows[:-1], JOINED] = np.bincount(owners, minlength=len(records)) - per_record
        noted[first_rows[:-1], APART] = per_record - 1
        tokens = Tokens(
            ids=gathered([self._sent, self._ids], which, starts, sizes),
            offsets=run_offsets[document_runs],
            run_offsets=run_offsets,
            run_kinds=kinds.astype(np.uint8),
            run_messages=messages.astype(np.int32),
            document_runs=document_runs,
            message_offsets=offsets_of(counts),
            message_weights=batch.messages.weights[ranges(batch.offsets[kept], counts)].astype(np.float32),
            logprobs=self._logprobs(which, starts, sizes),
        )
        return Laid(tokens, kept, noted, failed)

    def _joined(self, calls: Ints, owners: Ints) -> tuple[Ints, Ints]:
        """For each call the number of its row in its record, and how many ids of its prompt the row has before it.

        A call goes on with the last row that its prompt begins with, or else begins a row.
        """
        rows, lengths = np.zeros_like(calls), np.zeros_like(calls)
        borders = np.append(np.flatnonzero(np.diff(owners, prepend=-1)), len(calls))
        several = np.flatnonzero(np.diff(borders) > 1)
        for first, last in zip(borders[several].tolist(), borders[several + 1].tolist(), strict=True):
            texts: list[bytes] = []
            for number in range(first, last):
                place = calls[number]
                sent = self._sent[self._sent_offsets[place] : self._sent_offsets[place + 1]].tobytes()
                ids = self._ids[self._offsets[place] : self._offsets[place + 1]].tobytes()
                row = next((n for n in range(len(texts) - 1, -1, -1) if sent.startswith(texts[n])), len(texts))
                if row == len(texts):
                    texts.append(b"")
                rows[number], lengths[number] = row, len(texts[row]) // IDS.itemsize
                texts[row] = sent + ids
        return rows, lengths

    def _logprobs(self, which: Ints, starts: Ints, sizes: Ints) -> NDArray[np.float32] | None:
        """Return those of the tokens that were sampled."""
        logprobs = self._batch.messages.logprobs
        if not logprobs.present.any():
            return None
        values = np.full(len(self._ids), np.nan, dtype=np.float32)
        there = np.flatnonzero(logprobs.present)
        values[ranges(self._offsets[there], np.diff(self._offsets)[there])] = flat(logprobs.texts, LOGPROBS)[0]
        nothing = np.full(len(self._sent), np.nan, dtype=np.float32)
        return gathered([nothing, values], which, starts, sizes)
