"""Sampled tokens by the slow, obvious path: one message after the other, tokens compared as lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.kinds import REPEATED, Part, RoleCode, kind
from chatmill.core.sampled import LENGTH
from chatmill.errors import RecordError
from chatmill.prove.rows import Answer, PlainRow
from chatmill.render.jinja.options import Expand, Trust
from chatmill.render.model_template import ModelTemplate

UNKNOWN: list[bytes | int] = [-1]
"""What ids say of which one is in no vocabulary."""


class PlainSamples:
    """What a template's rows become with the tokens that messages carry, and what the ledger notes of it."""

    def __init__(self, chat: ModelTemplate) -> None:
        """`chat` is bound to the reference tokenizer."""
        self._given, self._tokenizer = chat.given, chat.tokenizer
        control = chat.tokenizer.control_ids
        self._stops = {control[name] for name in chat.stops.names if name in control}
        self._special = {control[name] for name in chat.tokenizer.special_tokens}

    def is_calls(self, conversation: Conversation) -> bool:
        """Return whether a record is taken as the calls that it holds."""
        return not self._given.only_drift and any(m.prompt_token_ids is not None for m in conversation.messages)

    def call_rows(self, conversation: Conversation) -> tuple[list[PlainRow], Counter[str]]:
        """Return the rows of a record of calls."""
        rows: list[PlainRow] = []
        answers = [k for k, message in enumerate(conversation.messages) if message.role is Role.ASSISTANT]
        calls = [k for k in answers if conversation.messages[k].token_ids or conversation.messages[k].weight != 0]
        only_last = self._given.expand is Expand.LAST or self._given.last_turn_only
        for k in calls:
            message = conversation.messages[k]
            if message.prompt_token_ids is None or message.token_ids is None:
                raise _bad_ids("an answer has no prompt_token_ids", k)
            sent, ids = list(message.prompt_token_ids), list(message.token_ids)
            if max(sent + ids) >= self._tokenizer.vocab_size:
                raise _bad_ids("an id is not in the vocabulary", k)
            row = next((candidate for candidate in reversed(rows) if sent[: len(candidate.ids)] == candidate.ids), None)
            if row is None:
                row = PlainRow()
                rows.append(row)
            new = sent[len(row.ids) :]
            row.add(new, [kind(RoleCode.NONE, Part.CONTENT)] * len(new), -1)
            if ids[-1] in self._stops and message.finish_reason == LENGTH:
                raise _bad_ids("cut off, and ends with a stop", k)
            flag = REPEATED if message.weight == 0 or (only_last and k != calls[-1]) else 0
            row.add(ids, self._plain_kinds(ids, flag), k, message.logprobs or ())
        return rows, Counter({"calls_joined": len(calls) - len(rows), "calls_apart": len(rows) - 1})

    def _plain_kinds(self, ids: Sequence[int], flag: int) -> list[int]:
        """Content, and the stop that ends it."""
        kinds = [kind(RoleCode.ASSISTANT, Part.CONTENT) | flag] * len(ids)
        if ids[-1] in self._stops:
            kinds[-1] = kind(RoleCode.ASSISTANT, Part.TERMINATOR) | flag
        return kinds

    def put(self, rows: Sequence[PlainRow], conversation: Conversation) -> tuple[list[PlainRow], Counter[str]]:
        """Rows with sampled tokens in the places of their answers."""
        sampled, notes = list(rows), Counter[str]()
        for k, message in enumerate(conversation.messages):
            if message.token_ids is None and message.finish_reason != LENGTH:
                continue
            answers = {n: place for n, row in enumerate(rows) if (place := row.answer_of(k)) is not None}
            trained = [n for n, place in answers.items() if not rows[n].kinds[place[0]] & REPEATED]
            if message.token_ids is not None and answers:
                notes += self._notes(rows, answers, trained, message)
            if self._given.only_drift:
                continue
            if trained and self._spelled(message.token_ids or ()) == UNKNOWN:
                raise _bad_ids("an id is not in the vocabulary", k)
            is_other = message.token_ids is not None and not answers and message.weight != 0
            for n, place in answers.items():
                says = self._says(rows[n], place, message)
                wants = n in trained and self._given.trust is Trust.TOKENS and _is_whole(rows[n], place)
                if message.token_ids is None or says or wants:
                    sampled[n] = self._with_answer(sampled[n], message, k, same=says)
                elif n in trained:
                    is_other = True
                    break
            if is_other:
                raise RecordError("the tokens say something else", code="tokens_differ", path=f"messages[{k}]")
        return sampled, notes

    def doubtful(self, rows: Sequence[PlainRow], conversation: Conversation) -> list[int]:
        """Return the messages with sampled tokens that are not trained, and whose tokens no row shows."""
        found = []
        for k, message in enumerate(conversation.messages):
            answers = [(row, place) for row in rows if (place := row.answer_of(k)) is not None]
            is_context = all(row.kinds[place[0]] & REPEATED for row, place in answers)
            is_trained = not is_context or (not answers and message.weight != 0)
            if message.token_ids is None or is_trained or self._given.only_drift:
                continue
            if not any(self._says(row, place, message) for row, place in answers):
                found.append(k)
        return found

    def _notes(
        self, rows: Sequence[PlainRow], answers: Mapping[int, Answer], trained: Sequence[int], message: Message
    ) -> Counter[str]:
        n = trained[0] if trained else next(iter(answers))
        row, (first, tail, stop) = rows[n], answers[n]
        is_same = self._says(row, (first, tail, stop), message)
        is_canonical = list(message.token_ids or ()) in (row.ids[first:stop], row.ids[first:tail])
        notes = Counter(
            sampled_messages=1,
            sampled_otherwise=is_same and not is_canonical,
            sampled_differ=n in trained and not is_same,
        )
        if self._given.only_drift and message.prompt_token_ids is not None:
            notes["prompts_compared"] = 1
            notes["prompts_differ"] = row.ids[:first] != list(message.prompt_token_ids)
        return notes

    def _says(self, row: PlainRow, place: Answer, message: Message) -> bool:
        """Return whether sampled tokens are the text of an answer, with or without its stop."""
        first, tail, stop = place
        if not _is_whole(row, place):
            return False
        ids, written = list(message.token_ids or ()), (row.ids[first:stop], row.ids[first:tail])
        if not self._tokenizer.bytes_add_up:
            return ids in written
        return self._spelled(ids) in [self._spelled(spelling) for spelling in written]

    def _with_answer(self, row: PlainRow, message: Message, k: int, *, same: bool) -> PlainRow:
        """Return a row with one answer as it was sampled, or as its text is where it was cut off."""
        place = row.answer_of(k)
        assert place is not None
        first, tail, stop = place
        answered = row.part(0, first)
        if message.token_ids is None:
            ended = False
            answered.extend(row.part(first, tail))
        else:
            ids = list(message.token_ids)
            if same:
                ended = tail < stop and self._spelled(ids) == self._spelled(row.ids[first:stop])
                kinds = self._kinds_by_bytes(ids, row.part(first, stop))
            else:
                ended = ids[-1] in self._stops
                kinds = self._plain_kinds(ids, row.kinds[first] & REPEATED)
            if ended and message.finish_reason == LENGTH:
                raise _bad_ids("cut off, and ends with a stop", k)
            answered.add(ids, kinds, k, message.logprobs or ())
        if not ended and max(row.messages[stop:], default=-1) <= k:
            return answered
        rest = row.part(stop if ended else tail, None)
        missing = 0 if ended else stop - tail  # a stop that the model did not write
        rest.kinds = [code | (REPEATED if n < missing else 0) for n, code in enumerate(rest.kinds)]
        answered.extend(rest)
        return answered

    def _spelled(self, ids: Sequence[int]) -> list[bytes | int]:
        """Return what ids say: texts, and control tokens as numbers."""
        spelled: list[bytes | int] = []
        for number in ids:
            if number in self._special:
                spelled.append(number)
            elif number not in self._tokenizer.text_tokens and number not in self._tokenizer.control_ids.values():
                return UNKNOWN
            elif spelled and isinstance(spelled[-1], bytes):
                spelled[-1] += self._tokenizer.token_bytes(number)
            else:
                spelled.append(self._tokenizer.token_bytes(number))
        return spelled

    def _kinds_by_bytes(self, ids: Sequence[int], written: PlainRow) -> list[int]:
        """Return the kind of the byte that each token begins with."""
        size_of = {number: len(self._tokenizer.token_bytes(number)) for number in {*ids, *written.ids}}
        per_byte = [
            code for number, code in zip(written.ids, written.kinds, strict=True) for _ in range(size_of[number])
        ]
        kinds, at = [], 0
        for number in ids:
            kinds.append(per_byte[at])
            at += size_of[number]
        return kinds


def _is_whole(row: PlainRow, place: Answer) -> bool:
    """Return whether nothing of another message is inside of an answer."""
    return set(row.messages[place[0] : place[2]]) == {row.messages[place[0]]}


def _bad_ids(why: str, message: int) -> RecordError:
    return RecordError(why, code="bad_token_ids", path=f"messages[{message}]")
