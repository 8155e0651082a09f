"""Sampled tokens in their places: the answers of a rendering become the ids that a model gave.

The ids of a message stand where the template writes its answer. Both are compared byte by byte, control tokens as
such, so that every sampled token has the kind of the text it stands for.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.kinds import REPEATED, Part, RoleCode, kind, parts_of, roles_of
from chatmill.core.native.gather import gathered
from chatmill.core.sampled import IDS, LENGTH, LOGPROBS, flat
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
ENDED_AND_CUT = "'finish_reason' is 'length', and token_ids end with a stop: one of the two is wrong"
SHOWN = 40
"""Characters that an error shows of both sides."""


class Sampled(NamedTuple):
    """What became of documents with sampled tokens."""

    tokens: Tokens
    counts: Ints
    """One line per document, a column for each of `NOTES`."""
    failed: dict[int, RecordError]
    """Records whose tokens do not fit, by their number in the batch."""
    doubtful: Ints
    """Messages, counted in the batch, that are not trained and whose tokens no document shows: the template may have
    changed them in the history, or they say something else."""


class _Spans(NamedTuple):
    """The answers of messages in documents, as ranges of runs."""

    documents: Ints
    places: Ints
    """The messages, counted in the batch."""
    first: Ints
    tail: Ints
    """The first of the terminators that an answer ends with; `stop` if there is none."""
    stop: Ints
    """After its last run."""
    is_whole: Flags
    """Whether nothing of another message is inside."""
    is_context: Flags
    """Whether the answer is not trained in this document."""

    def take(self, chosen: Ints | Flags) -> _Spans:
        columns: Any = [column[chosen] for column in self]
        return _Spans(*columns)


def has_samples(batch: Conversations) -> bool:
    """Return whether any message carries tokens, or says that its answer was cut off."""
    messages = batch.messages
    return bool(len(messages.token_ids.data) and messages.token_ids.present.any()) or bool(cut_off(batch).any())


def cut_off(batch: Conversations) -> Flags:
    """Messages whose answer ended at a limit."""
    reasons = batch.messages.finish_reasons
    is_cut: Flags = reasons.lengths == len(LENGTH)
    letters = reasons.starts[is_cut, None] + np.arange(len(LENGTH))
    is_cut[is_cut] = (reasons.data[letters] == np.frombuffer(LENGTH.encode(), dtype=np.uint8)).all(axis=1)
    return is_cut


def with_samples(tokens: Tokens, kept: Ints, batch: Conversations, chat: ModelTemplate) -> Sampled:
    """Put the sampled tokens of messages into their documents; `kept` has the record of each document."""
    is_cut = cut_off(batch)
    spans = _spans(tokens, kept, batch, batch.messages.token_ids.present | is_cut)
    sampled = np.flatnonzero(batch.messages.token_ids.present[spans.places])
    answers = _Given(tokens, spans.take(sampled), batch)
    stops = {chat.tokenizer.control_ids.get(name) for name in chat.stops.names}
    matches = {
        number: _match(answers, number, chat, stops) for number in np.flatnonzero(~answers.is_canonical).tolist()
    }
    is_same, is_ended, is_taken = answers.is_canonical.copy(), answers.is_ended.copy(), answers.is_canonical.copy()
    for number, match in matches.items():
        is_same[number], is_ended[number], is_taken[number] = match.is_same, match.is_ended, match.is_taken
    counts = np.zeros((len(tokens), len(NOTES)), dtype=np.int64)
    answers.count(counts, is_same)
    if chat.given.only_drift:
        answers.count_prompts(counts)
        return Sampled(tokens, counts, {}, np.empty(0, dtype=np.int64))
    is_cut_and_ended = is_cut[answers.spans.places] & is_ended
    wrong = _not_fitting(answers.spans, matches, is_taken, is_cut_and_ended, chat.tokenizer)
    is_unshown = batch.messages.token_ids.present.copy()
    is_unshown[spans.places] = False
    is_unwanted = is_unshown & (batch.messages.weights == 0)
    failed = failures(chain(_never_shown(is_unshown & ~is_unwanted), wrong), batch, kept)
    is_open = is_cut[spans.places]
    is_open[sampled] = ~is_ended & is_taken
    begins = tokens.run_offsets[spans.first]
    replaced = {int(sampled[number]): match for number, match in matches.items() if match.is_taken}
    if is_open.any() or replaced:
        tokens, begins = _rewritten(tokens, spans, is_open, replaced)
    is_known = np.zeros(len(batch.messages), dtype=np.bool_)
    is_known[answers.spans.places[is_same | ~answers.spans.is_context]] = True
    is_doubtful = is_unwanted & np.isin(batch.owners(np.arange(len(is_known))), kept)
    is_doubtful[answers.spans.places] |= ~is_known[answers.spans.places]
    doubtful = np.flatnonzero(is_doubtful)
    return Sampled(answers.with_logprobs(tokens, begins[sampled], is_taken), counts, failed, doubtful)


def _spans(tokens: Tokens, kept: Ints, batch: Conversations, wanted: Flags) -> _Spans:
    """Return where the answers of the wanted messages are."""
    documents = np.repeat(np.arange(len(tokens)), np.diff(tokens.document_runs))
    places = np.where(tokens.run_messages < 0, -1, batch.offsets[kept[documents]] + tokens.run_messages)
    parts = parts_of(tokens.run_kinds)
    is_answer = (roles_of(tokens.run_kinds) == RoleCode.ASSISTANT) & np.isin(parts, ANSWER) & (tokens.run_lengths > 0)
    runs = np.flatnonzero(is_answer & (places >= 0) & np.append(wanted, False)[places])
    keys = np.stack([documents[runs], places[runs]])
    opens = np.append(True, (np.diff(keys) != 0).any(axis=0))[: len(runs)]
    first, last = runs[opens], runs[np.append(opens[1:], True)[: len(runs)]]
    order = np.arange(len(parts))
    text = np.maximum.accumulate(np.where(is_answer & (parts != Part.TERMINATOR), order, -1))
    inside = (tokens.run_lengths > 0).astype(np.int64)
    strangers = offsets_of(inside * np.append(0, (np.diff(places) != 0) | (np.diff(documents) != 0))[: len(parts)])
    pairs = documents[first] * len(wanted) + places[first]
    is_single = np.isin(pairs, pairs[np.flatnonzero(np.diff(np.sort(pairs)) == 0)], invert=True)
    return _Spans(
        documents=documents[first],
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
        """Return one span of each message: where it is trained, if anywhere."""
        order = np.lexsort([self.spans.is_context, self.spans.places])
        places = self.spans.places[order]
        chosen: Ints = order[np.append(True, np.diff(places) != 0)[: len(order)]]
        return chosen

    def count(self, counts: Ints, is_same: Flags) -> None:
        """Enter messages, and those with other tokens or another text."""
        chosen = self._one_each()
        differs = ~is_same & ~self.spans.is_context  # history is what the template makes of it
        for column, which in ((0, np.ones_like(is_same)), (1, is_same & ~self.is_canonical), (2, differs)):
            np.add.at(counts[:, column], self.spans.documents[chosen], which[chosen])

    def count_prompts(self, counts: Ints) -> None:
        """Enter calls, and those whose prompt was another one than is rendered."""
        sent = self.batch.messages.prompt_token_ids
        chosen = self._one_each()
        chosen = chosen[sent.present[self.spans.places[chosen]]]
        ids, offsets = flat(sent.take(self.spans.places[chosen]).texts, IDS)
        begins = self.tokens.offsets[self.spans.documents[chosen]]
        lengths = self.begins[chosen] - begins
        fits = np.diff(offsets) == lengths
        lengths = np.where(fits, lengths, 0)
        differs = ids[ranges(offsets[:-1], lengths)] != self.tokens.ids[ranges(begins, lengths)]
        same = fits & (segment_sums(differs, offsets_of(lengths)) == 0)
        np.add.at(counts[:, 3], self.spans.documents[chosen], 1)
        np.add.at(counts[:, 4], self.spans.documents[chosen], ~same)

    def with_logprobs(self, tokens: Tokens, begins: Ints, is_taken: Flags) -> Tokens:
        """Documents with log-probabilities in the places of the tokens; `begins` are those of the answers in them."""
        logprobs = self.batch.messages.logprobs.take(self.spans.places)
        if not logprobs.present.any():
            return tokens
        values, offsets = flat(logprobs.texts, LOGPROBS)
        there = np.flatnonzero(logprobs.present & is_taken)
        per_token = np.full(len(tokens.ids), np.nan, dtype=np.float32)
        per_token[ranges(begins[there], self.counts[there])] = values[ranges(offsets[there], self.counts[there])]
        return replace(tokens, logprobs=per_token)


class _Match(NamedTuple):
    """The sampled tokens of a span that are not those of the tokenizer, next to the rendered ones."""

    ids: NDArray[Any]
    kinds: NDArray[np.uint8]
    rendered: NDArray[np.int32]
    is_known: bool
    """Whether all of them are in the vocabulary."""
    is_same: bool
    """Whether they say the same, byte by byte."""
    is_ended: bool
    """Whether they end with a stop."""
    is_taken: bool


def _match(answers: _Given, number: int, chat: ModelTemplate, stops: Container[int | None]) -> _Match:
    """Compare the sampled tokens of a span with its text."""
    spans, tokens, table = answers.spans, answers.tokens, comparable_bytes(chat.tokenizer)
    ids = answers.ids[answers.offsets[number] : answers.offsets[number + 1]]
    rendered = tokens.ids[answers.begins[number] :][: answers.whole[number]]
    mine = [table[token] if token < len(table) else b"" for token in ids.tolist()]
    theirs = [table[token] for token in rendered.tolist()]
    said, whole, body = b"".join(mine), b"".join(theirs), b"".join(theirs[: answers.body[number]])
    is_whole, is_context, is_known = bool(spans.is_whole[number]), bool(spans.is_context[number]), all(mine)
    # bytes that do not add up: only the same ids are surely the same text
    is_same = is_whole and is_known and chat.tokenizer.bytes_add_up and said in (whole, body)
    if is_same:  # a token has the kind of the one that its first byte lies in
        runs = slice(spans.first[number], spans.stop[number])
        kinds = np.repeat(tokens.run_kinds[runs], tokens.run_lengths[runs])
        starts, starts_of_mine = (offsets_of(np.array([len(token) for token in side]))[:-1] for side in (theirs, mine))
        kinds = kinds[np.searchsorted(starts, starts_of_mine, side="right") - 1]
        is_ended = len(said) == len(whole) > len(body)
    else:
        is_ended = int(ids[-1]) in stops
        kinds = np.full(len(ids), CONTENT, dtype=np.uint8)
        kinds[-1] = STOP if is_ended else CONTENT
        kinds |= np.uint8(REPEATED if is_context else 0)
    is_trusted = chat.given.trust is Trust.TOKENS and not is_context and is_whole and is_known
    return _Match(ids, kinds, rendered, is_known, is_same, is_ended, is_same or is_trusted)


@lru_cache(maxsize=1)
def comparable_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Return the bytes of every id; those of a control token are no text: a byte that UTF-8 never has, and its id."""
    special = {tokenizer.control_ids[name] for name in tokenizer.special_tokens}
    pieces = [b""] * tokenizer.vocab_size
    for number, piece in tokenizer.text_tokens.items():
        pieces[number] = piece
    for name, number in tokenizer.control_ids.items():
        pieces[number] = b"\xff" + number.to_bytes(4, "little") if number in special else name.encode()
    return pieces


class Wrong(NamedTuple):
    """What is wrong with a field of a message, which is counted in the batch."""

    place: int
    field: str
    """Empty for the whole message."""
    code: str
    says: str


def failures(wrongs: Iterable[Wrong], batch: Conversations, records: Container[int]) -> dict[int, RecordError]:
    """Return the first error of each of the records."""
    failed: dict[int, RecordError] = {}
    for place, field, code, sentence in wrongs:
        record = int(batch.owners(np.array([place]))[0])
        if record in records and record not in failed:
            path = f"messages[{place - int(batch.offsets[record])}]" + (field and f".{field}")
            failed[record] = RecordError(sentence, code=code, path=path)
    return failed


def _never_shown(is_unshown: Flags) -> Iterator[Wrong]:
    """Messages with sampled tokens that no document shows, though they are to be trained."""
    for place in np.flatnonzero(is_unshown).tolist():
        says = "the template writes nothing where these tokens belong"
        yield Wrong(place, "token_ids", code="tokens_differ", says=says)


def _not_fitting(
    spans: _Spans, matches: Mapping[int, _Match], is_taken: Flags, is_cut_and_ended: Flags, tokenizer: Tokenizer
) -> Iterator[Wrong]:
    """Messages whose sampled tokens are not what they must be."""
    wrong = ~spans.is_context & ~is_taken
    wrong_ones = np.flatnonzero(wrong | (is_cut_and_ended & is_taken))
    for number in wrong_ones[np.argsort(spans.places[wrong_ones], kind="stable")].tolist():
        place = int(spans.places[number])
        if wrong[number]:
            yield _difference(place, matches[number], tokenizer)
        else:
            yield Wrong(place, "finish_reason", code="bad_token_ids", says=ENDED_AND_CUT)


def _difference(place: int, match: _Match, tokenizer: Tokenizer) -> Wrong:
    """Return what is wrong with the tokens of one span."""
    if not match.is_known:
        table = comparable_bytes(tokenizer)
        strange = next(token for token in match.ids.tolist() if token >= len(table) or not table[token])
        where = f"the vocabulary of {tokenizer.name!r}"
        says = f"the id {strange} is not in {where}: was another model sampled?"
        return Wrong(place, "token_ids", code="bad_token_ids", says=says)
    said, text = tokenizer.decode(match.ids), tokenizer.decode(match.rendered)
    at = common_length(np.array(list(said)), np.array(list(text)))
    says = (
        f"the tokens do not say what the template writes for this message: from character {at} on they say "
        f"{said[at : at + SHOWN]!r}, the message {text[at : at + SHOWN]!r}. To train the tokens as they are: trust: "
        "tokens (--set trust=tokens); the text: take token_ids away"
    )
    return Wrong(place, "token_ids", code="tokens_differ", says=says)


def _rewritten(tokens: Tokens, spans: _Spans, is_open: Flags, matches: Mapping[int, _Match]) -> tuple[Tokens, Ints]:
    """The documents with sampled tokens in the place of answers, and where the answers of all spans begin in them.

    `matches` are the tokens of the spans that have their sampled ones.
    What is open has no stop of its own: one that the template writes before later messages is context, and where the
    conversation ends there is none.
    """
    places = np.array(list(matches), dtype=np.int64)
    keeps, kinds = np.ones(len(tokens.run_kinds), dtype=np.bool_), tokens.run_kinds.copy()
    until = np.where(is_open, spans.tail, spans.stop)
    keeps[ranges(spans.first[places], (until - spans.first)[places])] = False
    shown = np.where(tokens.run_lengths > 0, tokens.run_messages, -1)
    last = np.maximum.reduceat(shown, tokens.document_runs[:-1]) if len(tokens) else until
    goes_on = last[spans.documents] > tokens.run_messages[spans.first]
    inner, ending = np.flatnonzero(is_open & goes_on), np.flatnonzero(is_open & ~goes_on)
    kinds[ranges(spans.tail[inner], (spans.stop - spans.tail)[inner])] |= np.uint8(REPEATED)
    ends = tokens.document_runs[spans.documents[ending] + 1]
    keeps[ranges(spans.tail[ending], ends - spans.tail[ending])] = False

    ids = np.concatenate([tokens.ids[:0], *(match.ids.astype(np.int32) for match in matches.values())])
    new = np.concatenate([kinds[:0], *(match.kinds for match in matches.values())])
    owner = np.repeat(np.arange(len(places)), np.array([len(match.ids) for match in matches.values()], dtype=np.int64))
    opens = np.append(True, (np.diff(owner) != 0) | (np.diff(new) != 0))[: len(ids)]
    first = np.flatnonzero(opens)
    owners, sizes = owner[first], np.diff(np.append(first, len(ids)))
    old = np.flatnonzero(keeps)
    run_of = np.concatenate([old, spans.first[places][owners]])
    is_old = np.arange(len(run_of)) < len(old)
    order = np.argsort(2 * run_of + is_old, kind="stable")
    which = np.append(np.zeros(len(old), np.uint8), np.ones(len(first), np.uint8))[order]
    starts = np.append(tokens.run_offsets[old], first)[order]
    sizes = np.append(tokens.run_lengths[old], sizes)[order]
    run_offsets = offsets_of(sizes)
    document_runs = np.searchsorted(run_of[order], tokens.document_runs)
    rewritten = replace(
        tokens,
        ids=gathered([tokens.ids, ids], which, starts, sizes),
        offsets=run_offsets[document_runs],
        run_offsets=run_offsets,
        part_weights=None
        if tokens.part_weights is None
        else gathered([tokens.part_weights, np.full(len(ids), np.nan, np.float32)], which, starts, sizes),
        run_kinds=np.append(kinds[old], new[first])[order],
        run_messages=np.append(tokens.run_messages[old], tokens.run_messages[spans.first[places][owners]])[order],
        document_runs=document_runs,
    )
    first_runs = np.searchsorted((2 * run_of + is_old)[order], 2 * spans.first)
    return rewritten, run_offsets[first_runs]
