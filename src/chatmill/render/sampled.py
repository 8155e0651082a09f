"""Sampled tokens in their places: the answers of a rendering become the ids that a model gave.

The ids of a message stand where the template writes its answer. Both are compared byte by byte, control tokens as
such, so that every sampled token has the kind of the text it stands for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.kinds import REPEATED, Part, RoleCode, kind, parts_of, roles_of
from chatmill.core.native.gather import gathered
from chatmill.core.sampled import IDS, LENGTH, LOGPROBS, flat
from chatmill.core.texts import Texts
from chatmill.core.tokens import Tokens, common_length, offsets_of, ranges, segment_sums
from chatmill.errors import RecordError
from chatmill.render.jinja.options import Trust
from chatmill.render.model_template import ModelTemplate
from chatmill.tokenizer.tokenizer import Tokenizer

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
ANSWER = (Part.CONTENT, Part.REASONING, Part.TOOL_CALL, Part.TERMINATOR)
CONTENT, STOP = kind(RoleCode.ASSISTANT, Part.CONTENT), kind(RoleCode.ASSISTANT, Part.TERMINATOR)
NOTES = (
    *("sampled_messages", "sampled_otherwise", "sampled_differ", "prompts_compared", "prompts_differ"),
    *("calls_joined", "calls_apart"),
)
"""What is counted: messages with sampled tokens; those that the tokenizer gives other tokens for; those whose tokens
say something else than their text; calls with the prompt that was sent, and whose rendered prompt is another one; calls
that go on where an earlier one of their record ends, and calls after the first that do not."""
SHOWN = 40
"""Characters that an error shows of both sides."""


class Sampled(NamedTuple):
    """What became of sequences with sampled tokens."""

    tokens: Tokens
    counts: Ints
    """One line per sequence, a column for each of `NOTES`."""
    failed: dict[int, RecordError]
    """Records whose tokens do not fit, by their number in the batch."""


class _Spans(NamedTuple):
    """The answers of messages in sequences, as ranges of runs."""

    sequences: Ints
    places: Ints
    """The messages, counted in the batch."""
    first: Ints
    tail: Ints
    """The first of the terminators that an answer ends with; `stop` where there is none."""
    stop: Ints
    """Behind its last run."""
    is_whole: Flags
    """Whether nothing of another message is inside."""
    is_context: Flags
    """Whether the answer is not trained in this sequence."""

    def take(self, chosen: Ints | Flags) -> _Spans:
        columns: Any = [column[chosen] for column in self]
        return _Spans(*columns)


def has_samples(batch: Conversations) -> bool:
    """Whether any message carries tokens, or says that its answer was cut off."""
    messages = batch.messages
    return bool(len(messages.token_ids.data) and messages.token_ids.present.any()) or bool(_cut_off(batch).any())


def _cut_off(batch: Conversations) -> Flags:
    """Messages whose answer ended at a limit."""
    reasons = batch.messages.finish_reasons
    found = np.zeros(len(reasons), dtype=np.bool_)
    for place in np.flatnonzero(reasons.lengths == len(LENGTH)).tolist():
        found[place] = reasons[place] == LENGTH
    return found


def with_samples(tokens: Tokens, kept: Ints, batch: Conversations, chat: ModelTemplate) -> Sampled:
    """Put the sampled tokens of messages into their sequences; `kept` has the record of each sequence."""
    cut_off = _cut_off(batch)
    spans = _spans(tokens, kept, batch, batch.messages.token_ids.present | cut_off)
    sampled = np.flatnonzero(batch.messages.token_ids.present[spans.places])
    given = _Given(tokens, spans.take(sampled), batch)
    match = _Match(tokens, given, np.flatnonzero(~given.is_canonical), chat.tokenizer)
    is_same, is_ended = given.is_canonical.copy(), given.is_ended.copy()
    is_same[match.which] = match.is_same
    counts = np.zeros((len(tokens), len(NOTES)), dtype=np.int64)
    given.count(counts, is_same)
    if chat.given.only_drift:
        given.count_prompts(counts)
        return Sampled(tokens, counts, {})
    stops = [chat.tokenizer.control_ids[name] for name in chat.stops.names if name in chat.tokenizer.control_ids]
    verdict = match.verdict(chat.given.trust, np.array(stops, dtype=np.int64))
    is_ended[match.which] = verdict.is_ended
    is_taken = given.is_canonical.copy()
    is_taken[match.which] = verdict.is_taken
    failed = _failures(given, match, is_taken, cut_off[given.spans.places] & is_ended, kept, chat)
    failed |= _never_shown(spans, batch, kept)
    is_open = cut_off[spans.places]
    is_open[sampled] = ~is_ended & is_taken
    begins = tokens.run_offsets[spans.first]
    if is_open.any() or verdict.is_taken.any():
        tokens, begins = _rewritten(tokens, spans, is_open, sampled[match.which[verdict.is_taken]], match, verdict)
    return Sampled(given.with_logprobs(tokens, begins[sampled], is_taken), counts, failed)


def _spans(tokens: Tokens, kept: Ints, batch: Conversations, wanted: Flags) -> _Spans:
    """Where the answers of the wanted messages are."""
    sequences = np.repeat(np.arange(len(tokens)), np.diff(tokens.sequence_runs))
    places = np.where(tokens.run_messages < 0, -1, batch.offsets[kept[sequences]] + tokens.run_messages)
    parts = parts_of(tokens.run_kinds)
    is_answer = (roles_of(tokens.run_kinds) == RoleCode.ASSISTANT) & np.isin(parts, ANSWER) & (tokens.run_lengths > 0)
    runs = np.flatnonzero(is_answer & (places >= 0) & np.append(wanted, False)[places])
    keys = np.stack([sequences[runs], places[runs]])
    opens = np.append(True, (np.diff(keys) != 0).any(axis=0))[: len(runs)]
    first, last = runs[opens], runs[np.append(opens[1:], True)[: len(runs)]]
    order = np.arange(len(parts))
    text = np.maximum.accumulate(np.where(is_answer & (parts != Part.TERMINATOR), order, -1))
    inside = (tokens.run_lengths > 0).astype(np.int64)
    strangers = offsets_of(inside * np.append(0, (np.diff(places) != 0) | (np.diff(sequences) != 0))[: len(parts)])
    pairs = sequences[first] * (len(wanted) + 1) + places[first]
    is_single = np.isin(pairs, pairs[np.flatnonzero(np.diff(np.sort(pairs)) == 0)], invert=True)
    return _Spans(
        sequences=sequences[first],
        places=places[first],
        first=first,
        tail=np.maximum(text[last], first - 1) + 1,
        stop=last + 1,
        is_whole=(strangers[last + 1] == strangers[first + 1]) & is_single,
        is_context=(tokens.run_kinds[first] & REPEATED) != 0,
    )


class _Given:
    """The sampled tokens of spans, and which of them are the ones that the tokenizer gives."""

    def __init__(self, tokens: Tokens, spans: _Spans, batch: Conversations) -> None:
        self.tokens, self.spans, self.batch = tokens, spans, batch
        self.ids, self.offsets = flat(batch.messages.token_ids.take(spans.places).texts, IDS)
        self.counts = np.diff(self.offsets)
        self.begins = tokens.run_offsets[spans.first]
        self.whole, self.body = (
            tokens.run_offsets[spans.stop] - self.begins,
            tokens.run_offsets[spans.tail] - self.begins,
        )
        fits = np.flatnonzero(spans.is_whole & ((self.counts == self.whole) | (self.counts == self.body)))
        nowhere, sizes = np.zeros(len(fits), dtype=np.uint8), self.counts[fits]
        mine = gathered([self.ids], nowhere, self.offsets[fits], sizes) if len(fits) < len(self.counts) else self.ids
        differ = np.flatnonzero(mine != gathered([tokens.ids], nowhere, self.begins[fits], sizes))
        self.is_canonical: Flags = np.zeros(len(self.counts), dtype=np.bool_)
        self.is_canonical[fits] = True
        self.is_canonical[fits[np.searchsorted(offsets_of(sizes), differ, side="right") - 1]] = False
        self.is_ended: Flags = (self.counts == self.whole) & (self.whole > self.body)

    def _one_each(self) -> Ints:
        """One span of each message: where it is trained, if anywhere."""
        order = np.lexsort([self.spans.is_context, self.spans.places])
        places = self.spans.places[order]
        chosen: Ints = order[np.append(True, np.diff(places) != 0)[: len(order)]]
        return chosen

    def count(self, counts: Ints, is_same: Flags) -> None:
        """Enter messages, and those with other tokens or another text."""
        chosen = self._one_each()
        differs = ~is_same & ~self.spans.is_context  # history is what the template makes of it
        for column, which in ((0, np.ones_like(is_same)), (1, is_same & ~self.is_canonical), (2, differs)):
            np.add.at(counts[:, column], self.spans.sequences[chosen], which[chosen])

    def count_prompts(self, counts: Ints) -> None:
        """Enter calls, and those whose prompt was another one than is rendered."""
        sent = self.batch.messages.prompt_token_ids
        chosen = self._one_each()
        chosen = chosen[sent.present[self.spans.places[chosen]]]
        ids, offsets = flat(sent.take(self.spans.places[chosen]).texts, IDS)
        begins = self.tokens.offsets[self.spans.sequences[chosen]]
        lengths = self.begins[chosen] - begins
        fits = np.diff(offsets) == lengths
        lengths = np.where(fits, lengths, 0)
        differs = ids[ranges(offsets[:-1], lengths)] != self.tokens.ids[ranges(begins, lengths)]
        same = fits & (segment_sums(differs, offsets_of(lengths)) == 0)
        np.add.at(counts[:, 3], self.spans.sequences[chosen], 1)
        np.add.at(counts[:, 4], self.spans.sequences[chosen], ~same)

    def with_logprobs(self, made: Tokens, begins: Ints, is_taken: Flags) -> Tokens:
        """Sequences with log-probabilities in the places of the tokens; `begins` are those of the answers in them."""
        given = self.batch.messages.logprobs.take(self.spans.places)
        if not given.present.any():
            return made
        values, offsets = flat(given.texts, LOGPROBS)
        there = np.flatnonzero(given.present & is_taken)
        found = np.full(len(made.ids), np.nan, dtype=np.float32)
        found[ranges(begins[there], self.counts[there])] = values[ranges(offsets[there], self.counts[there])]
        return replace(made, logprobs=found)


class _Verdict(NamedTuple):
    """What is done with each span whose tokens are not those of the tokenizer."""

    is_ended: Flags
    """Whether they end with a stop."""
    is_taken: Flags
    kinds: NDArray[np.uint8]
    """Of every sampled token."""


class _Match:
    """Sampled tokens beside the rendered ones, byte by byte, for some of the spans that have any."""

    def __init__(self, tokens: Tokens, given: _Given, which: Ints, tokenizer: Tokenizer) -> None:
        self.tokens, self.which, self.spans, self.tokenizer = tokens, which, given.spans.take(which), tokenizer
        self.ids = given.ids[ranges(given.offsets[which], given.counts[which])]
        self.offsets = offsets_of(given.counts[which])
        begins, whole = given.begins[which], given.whole[which]
        self.rendered, self.rendered_offsets = tokens.ids[ranges(begins, whole)], offsets_of(whole)
        if not len(which):  # the table of all bytes takes its time
            self.is_known = self.is_same = self._is_ended = np.zeros(0, dtype=np.bool_)
            return
        table = comparable_bytes(tokenizer)
        known = (self.ids < len(table)) & (table.lengths[np.minimum(self.ids, len(table) - 1)] > 0)
        self.is_known = segment_sums(~known, self.offsets) == 0
        self._sampled_bytes = table.take(np.where(known, self.ids, 0))
        self._rendered_bytes = table.take(self.rendered)
        size = segment_sums(self._sampled_bytes.lengths, self.offsets)
        sums = offsets_of(self._rendered_bytes.lengths)
        starts = self.rendered_offsets[:-1]
        all_bytes, body = sums[starts + whole] - sums[starts], sums[starts + given.body[which]] - sums[starts]
        fits = self.spans.is_whole & self.is_known & ((size == all_bytes) | (size == body))
        fits &= tokenizer.bytes_add_up  # else only the same ids are surely the same text
        self.is_same = fits & self._equal(np.where(fits, size, 0))
        self._is_ended = (size == all_bytes) & (all_bytes > body)

    def _equal(self, sizes: Ints) -> Flags:
        """Whether the first bytes of both are the same."""
        mine = _bytes_of(self._sampled_bytes, self.offsets, sizes)
        theirs = _bytes_of(self._rendered_bytes, self.rendered_offsets, sizes)
        same: Flags = segment_sums(mine != theirs, offsets_of(sizes)) == 0
        return same

    def verdict(self, trust: Trust, stops: Ints) -> _Verdict:
        """Which spans take their sampled tokens, and the kinds of these."""
        spans, ends = self.spans, self.ids[self.offsets[1:] - 1]
        kinds = np.full(len(self.ids), CONTENT, dtype=np.uint8)
        stopped = np.isin(ends, stops)
        kinds[self.offsets[1:][stopped] - 1] = STOP
        flags = np.where(spans.is_context, np.uint8(REPEATED), np.uint8(0))
        kinds |= np.repeat(flags, np.diff(self.offsets))
        if self.is_same.any():
            self._kinds_of_text(kinds)
        taken = self.is_same.copy()
        if trust is Trust.TOKENS:
            taken |= ~spans.is_context & spans.is_whole & self.is_known
        return _Verdict(np.where(self.is_same, self._is_ended, stopped), taken, kinds)

    def _kinds_of_text(self, kinds: NDArray[np.uint8]) -> None:
        """Where both say the same, a token has the kind of the run that its first byte lies in."""
        spans, lengths = self.spans.take(self.is_same), np.diff(self.offsets)[self.is_same]
        mine = ranges(self.offsets[:-1][self.is_same], lengths)
        sizes = segment_sums(self._sampled_bytes.lengths, self.offsets)[self.is_same]
        own = self._sampled_bytes.lengths[mine]
        at = offsets_of(own)[:-1]  # spans follow each other in both without gaps, once stops that are missing are cut
        runs = ranges(spans.first, spans.stop - spans.first)
        owners = np.repeat(np.arange(len(spans.first)), spans.stop - spans.first)
        tokens_before = self.tokens.run_offsets[runs] - np.repeat(
            self.tokens.run_offsets[spans.first], spans.stop - spans.first
        )
        sums = offsets_of(self._rendered_bytes.lengths)
        begins = self.rendered_offsets[:-1][self.is_same]
        inner = sums[begins[owners] + tokens_before] - sums[begins][owners]
        inside = (inner < sizes[owners]) & (self.tokens.run_lengths[runs] > 0)
        starts = offsets_of(sizes)[:-1][owners[inside]] + inner[inside]
        kinds[mine] = self.tokens.run_kinds[runs[inside]][np.searchsorted(starts, at, side="right") - 1]


def comparable_bytes(tokenizer: Tokenizer) -> Texts:
    """The bytes of every id; those of a control token are no text: a byte that UTF-8 never has, and its id."""
    cached = _TABLES.get(id(tokenizer))
    if cached is None or cached[0] is not tokenizer:
        special = {tokenizer.control_ids[name] for name in tokenizer.special_tokens}
        pieces = [b""] * tokenizer.vocab_size
        for number, piece in tokenizer.text_tokens.items():
            pieces[number] = piece
        for name, number in tokenizer.control_ids.items():
            pieces[number] = b"\xff" + number.to_bytes(4, "little") if number in special else name.encode()
        lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
        table = Texts.packed_in(np.frombuffer(b"".join(pieces), dtype=np.uint8), lengths)
        _TABLES.clear()
        cached = _TABLES[id(tokenizer)] = (tokenizer, table)
    return cached[1]


_TABLES: dict[int, tuple[Tokenizer, Texts]] = {}
"""The table of the tokenizer that was used last."""


def _bytes_of(pieces: Texts, offsets: Ints, sizes: Ints) -> NDArray[np.uint8]:
    """The first bytes of each span, one span after the other."""
    nowhere = np.zeros(len(pieces), dtype=np.uint8)
    data = gathered([pieces.data], nowhere, pieces.starts, pieces.lengths)
    return data[ranges(offsets_of(pieces.lengths)[offsets[:-1]], sizes)]


def _failures(
    given: _Given, match: _Match, is_taken: Flags, is_cut_and_ended: Flags, kept: Ints, chat: ModelTemplate
) -> dict[int, RecordError]:
    """Records whose sampled tokens are not what they must be."""
    spans, batch = given.spans, given.batch
    failed: dict[int, RecordError] = {}
    wrong = ~spans.is_context & ~is_taken
    found = np.flatnonzero(wrong | (is_cut_and_ended & is_taken))
    for number in found[np.argsort(spans.places[found], kind="stable")].tolist():
        record, place = int(kept[spans.sequences[number]]), int(spans.places[number])
        path = f"messages[{place - int(batch.offsets[record])}]"
        if wrong[number]:
            own = int(np.searchsorted(match.which, number))
            error = _difference(match, own, f"{path}.token_ids", chat.tokenizer)
        else:
            sentence = "'finish_reason' is 'length', and token_ids end with a stop: one of the two is wrong"
            error = RecordError(sentence, code="bad_token_ids", path=f"{path}.finish_reason")
        error.record_id, error.where = batch.ids[record], batch.wheres[record]
        failed.setdefault(record, error)
    return failed


def _difference(match: _Match, number: int, path: str, tokenizer: Tokenizer) -> RecordError:
    """What is wrong with the tokens of one span, in words."""
    ids = match.ids[match.offsets[number] : match.offsets[number + 1]]
    if not match.is_known[number]:
        strange = [int(one) for one in ids if one >= tokenizer.vocab_size or not _is_known(tokenizer, int(one))]
        sentence = f"the id {strange[0]} is not in the vocabulary of {tokenizer.name!r}: was another model sampled?"
        return RecordError(sentence, code="bad_token_ids", path=path)
    said = tokenizer.decode(ids)
    text = tokenizer.decode(match.rendered[match.rendered_offsets[number] : match.rendered_offsets[number + 1]])
    at = common_length(np.array(list(said)), np.array(list(text)))
    sentence = (
        f"the tokens do not say what the template writes for this message: from character {at} on they say "
        f"{said[at : at + SHOWN]!r}, the message {text[at : at + SHOWN]!r}. To train the tokens as they are: trust: "
        "tokens (--set trust=tokens); the text: take token_ids away"
    )
    return RecordError(sentence, code="tokens_differ", path=path)


def _is_known(tokenizer: Tokenizer, number: int) -> bool:
    return number in tokenizer.text_tokens or number in tokenizer.control_ids.values()


def _never_shown(spans: _Spans, batch: Conversations, kept: Ints) -> dict[int, RecordError]:
    """Records with sampled tokens of a message that no sequence shows."""
    shown = np.zeros(len(batch.messages), dtype=np.bool_)
    shown[spans.places] = True
    failed: dict[int, RecordError] = {}
    for place in np.flatnonzero(batch.messages.token_ids.present & ~shown).tolist():
        record = int(batch.owners(np.array([place]))[0])
        if record in kept:
            path = f"messages[{place - int(batch.offsets[record])}].token_ids"
            error = RecordError(
                "the template writes nothing where these tokens belong", code="tokens_differ", path=path
            )
            error.record_id, error.where = batch.ids[record], batch.wheres[record]
            failed.setdefault(record, error)
    return failed


def _rewritten(
    tokens: Tokens, spans: _Spans, is_open: Flags, taken: Ints, match: _Match, verdict: _Verdict
) -> tuple[Tokens, Ints]:
    """The sequences with sampled tokens in the place of answers, and where the answers of all spans begin in them.

    `taken` are the spans that have their sampled tokens.
    What is open has no stop of its own: one that the template writes before later messages is context, and where the
    conversation ends there is none.
    """
    keeps, kinds = np.ones(len(tokens.run_kinds), dtype=np.bool_), tokens.run_kinds.copy()
    until = np.where(is_open, spans.tail, spans.stop)
    keeps[ranges(spans.first[taken], (until - spans.first)[taken])] = False
    shown = np.where(tokens.run_lengths > 0, tokens.run_messages, -1)
    last = np.maximum.reduceat(shown, tokens.sequence_runs[:-1]) if len(tokens) else until
    goes_on = last[spans.sequences] > tokens.run_messages[spans.first]
    inner, ending = np.flatnonzero(is_open & goes_on), np.flatnonzero(is_open & ~goes_on)
    kinds[ranges(spans.tail[inner], (spans.stop - spans.tail)[inner])] |= np.uint8(REPEATED)
    ends = tokens.sequence_runs[spans.sequences[ending] + 1]
    keeps[ranges(spans.tail[ending], ends - spans.tail[ending])] = False

    mine = np.flatnonzero(verdict.is_taken)
    at = ranges(match.offsets[mine], np.diff(match.offsets)[mine])
    owner = np.repeat(np.arange(len(mine)), np.diff(match.offsets)[mine])
    opens = np.append(True, (np.diff(owner) != 0) | (np.diff(verdict.kinds[at]) != 0))[: len(at)]
    first = np.flatnonzero(opens)
    owners, sizes = owner[first], np.diff(np.append(first, len(at)))
    old = np.flatnonzero(keeps)
    run_of = np.concatenate([old, spans.first[taken][owners]])
    is_old = np.arange(len(run_of)) < len(old)
    order = np.argsort(2 * run_of + is_old, kind="stable")
    which = np.append(np.zeros(len(old), np.uint8), np.ones(len(first), np.uint8))[order]
    starts = np.append(tokens.run_offsets[old], at[first])[order]
    sizes = np.append(tokens.run_lengths[old], sizes)[order]
    run_offsets = offsets_of(sizes)
    sequence_runs = np.searchsorted(run_of[order], tokens.sequence_runs)
    made = replace(
        tokens,
        ids=gathered([tokens.ids, match.ids.astype(np.int32, copy=False)], which, starts, sizes),
        offsets=run_offsets[sequence_runs],
        run_offsets=run_offsets,
        run_kinds=np.append(kinds[old], verdict.kinds[at[first]])[order],
        run_messages=np.append(tokens.run_messages[old], tokens.run_messages[spans.first[taken][owners]])[order],
        sequence_runs=sequence_runs,
    )
    first_runs = np.searchsorted((2 * run_of + is_old)[order], 2 * spans.first)
    return made, run_offsets[first_runs]
