"""Sampled tokens by the slow, obvious path: one message after the other, tokens compared as lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.kinds import REPEATED, Part, RoleCode, kind, part_of, role_of
from chatmill.core.sampled import LENGTH
from chatmill.errors import RecordError
from chatmill.label.policy import ANSWER
from chatmill.prove.plain_row import PlainTokens
from chatmill.render.jinja.options import Expand, Trust
from chatmill.render.model_template import ModelTemplate
from chatmill.tokenizer.tokenizer import Tokenizer

UNKNOWN: list[bytes | int] = [-1]
"""What ids say of which one is in no vocabulary."""
Answer = tuple[int, int, int]
"""Where an answer begins, where the terminators at its end do, and where it ends."""


class PlainSamples:
    """What a template's rows become with the tokens that messages carry, and what the ledger notes of it."""

    def __init__(self, chat: ModelTemplate) -> None:
        """`chat` is bound to the reference tokenizer."""
        self._given, self._tokenizer = chat.given, chat.tokenizer
        names = [name for name in chat.stops.names if name in chat.tokenizer.control_ids]
        self._stops = {chat.tokenizer.control_ids[name] for name in names}

    def is_calls(self, conversation: Conversation) -> bool:
        """Whether a record is taken as the calls that it holds."""
        return not self._given.only_drift and any(m.prompt_token_ids is not None for m in conversation.messages)

    def call_rows(self, conversation: Conversation) -> tuple[list[PlainTokens], Counter[str]]:
        """The rows of a record of calls."""
        rows: list[PlainTokens] = []
        answers = [k for k, message in enumerate(conversation.messages) if message.role is Role.ASSISTANT]
        calls = [k for k in answers if conversation.messages[k].token_ids or conversation.messages[k].weight != 0]
        only_last = self._given.expand is Expand.LAST or self._given.last_turn_only
        for k in calls:
            message = conversation.messages[k]
            if message.prompt_token_ids is None or message.token_ids is None:
                raise RecordError("an answer has no prompt_token_ids", code="bad_token_ids", path=f"messages[{k}]")
            sent, ids = list(message.prompt_token_ids), list(message.token_ids)
            if max(sent + ids) >= self._tokenizer.vocab_size:
                raise RecordError("an id is not in the vocabulary", code="bad_token_ids", path=f"messages[{k}]")
            row = next((one for one in reversed(rows) if sent[: len(one.ids)] == one.ids), None)
            if row is None:
                row = PlainTokens()
                rows.append(row)
            new = sent[len(row.ids) :]
            row.add(new, [kind(RoleCode.NONE, Part.CONTENT)] * len(new), -1)
            flag = REPEATED if message.weight == 0 or (only_last and k != calls[-1]) else 0
            row.add(ids, self._plain_kinds(message, k, flag), k, message.logprobs or ())
        return rows, Counter({"calls_joined": len(calls) - len(rows), "calls_apart": len(rows) - 1})

    def _plain_kinds(self, message: Message, k: int, flag: int) -> list[int]:
        """Content, and the stop that ends it."""
        assert message.token_ids is not None
        kinds = [kind(RoleCode.ASSISTANT, Part.CONTENT) | flag] * len(message.token_ids)
        if message.token_ids[-1] in self._stops:
            if message.finish_reason == LENGTH:
                raise RecordError("cut off, and ends with a stop", code="bad_token_ids", path=f"messages[{k}]")
            kinds[-1] = kind(RoleCode.ASSISTANT, Part.TERMINATOR) | flag
        return kinds

    def put(self, rows: Sequence[PlainTokens], conversation: Conversation) -> tuple[list[PlainTokens], Counter[str]]:
        """Rows with sampled tokens in the places of their answers."""
        made, notes = list(rows), Counter[str]()
        for k, message in enumerate(conversation.messages):
            places = [answer_of(row, k) for row in rows]
            if message.token_ids is not None:
                self._note(rows, places, message, notes)
            if self._given.only_drift or (message.token_ids is None and message.finish_reason != LENGTH):
                continue
            there = {n: place for n, place in enumerate(places) if place is not None}
            trained = [n for n, place in there.items() if not rows[n].kinds[place[0]] & REPEATED]
            if trained and _spelled(message.token_ids or (), self._tokenizer) == UNKNOWN:
                raise RecordError("an id is not in the vocabulary", code="bad_token_ids", path=f"messages[{k}]")
            for n, place in there.items():
                says = self._says(rows[n], place, message)
                wants = n in trained and self._given.trust is Trust.TOKENS and is_whole(rows[n], place)
                if message.token_ids is None or says or wants:
                    made[n] = self._with_answer(made[n], message, k, same=says)
                elif n in trained:
                    raise RecordError("the tokens say something else", code="tokens_differ", path=f"messages[{k}]")
            if message.token_ids is not None and not there:
                raise RecordError("the tokens say something else", code="tokens_differ", path=f"messages[{k}]")
        return made, notes

    def _note(
        self, rows: Sequence[PlainTokens], places: Sequence[Answer | None], message: Message, notes: Counter[str]
    ) -> None:
        there = [(n, place) for n, place in enumerate(places) if place is not None]
        if not there:
            return
        n, (first, tail, stop) = next((one for one in there if not rows[one[0]].kinds[one[1][0]] & REPEATED), there[0])
        ids = list(message.token_ids or ())
        is_same = self._says(rows[n], (first, tail, stop), message)
        is_canonical = ids in (rows[n].ids[first:stop], rows[n].ids[first:tail])
        notes["sampled_messages"] += 1
        notes["sampled_otherwise"] += is_same and not is_canonical
        notes["sampled_differ"] += not is_same and not rows[n].kinds[first] & REPEATED
        if self._given.only_drift and message.prompt_token_ids is not None:
            notes["prompts_compared"] += 1
            notes["prompts_differ"] += rows[n].ids[:first] != list(message.prompt_token_ids)

    def _says(self, row: PlainTokens, place: Answer, message: Message) -> bool:
        """Whether sampled tokens are the text of an answer, with or without its stop."""
        first, tail, stop = place
        if not is_whole(row, place):
            return False
        ids = list(message.token_ids or ())
        if not self._tokenizer.bytes_add_up:
            return ids in (row.ids[first:stop], row.ids[first:tail])
        return _spelled(ids, self._tokenizer) in (
            _spelled(row.ids[first:stop], self._tokenizer),
            _spelled(row.ids[first:tail], self._tokenizer),
        )

    def _with_answer(self, row: PlainTokens, message: Message, k: int, *, same: bool) -> PlainTokens:
        """A row with one answer as it was sampled, or as its text is where it was cut off."""
        place = answer_of(row, k)
        assert place is not None
        first, tail, stop = place
        flag = row.kinds[first] & REPEATED
        logprobs: Sequence[float | None] = ()
        if message.token_ids is None:
            ids, kinds, ended = row.ids[first:tail], row.kinds[first:tail], False
        else:
            ids, logprobs = list(message.token_ids), message.logprobs or ()
            if same:
                ended = tail < stop and _spelled(ids, self._tokenizer) == _spelled(row.ids[first:stop], self._tokenizer)
                kinds = _kinds_by_bytes(ids, row.ids[first:stop], row.kinds[first:stop], self._tokenizer)
            else:
                kinds = self._plain_kinds(message._replace(finish_reason=None), k, flag)
                ended = ids[-1] in self._stops
            if ended and message.finish_reason == LENGTH:
                raise RecordError("cut off, and ends with a stop", code="bad_token_ids", path=f"messages[{k}]")
        made = PlainTokens(row.ids[:first], row.kinds[:first], row.messages[:first], row.logprobs[:first])
        made.add(ids, kinds, k, logprobs)
        rest = stop if ended else tail
        if not ended and max(row.messages[stop:], default=-1) <= k:
            return made
        made.ids += row.ids[rest:]
        made.kinds += [code | (REPEATED if n < stop else 0) for n, code in enumerate(row.kinds[rest:], rest)]
        made.messages += row.messages[rest:]
        made.logprobs += row.logprobs[rest:]
        return made


def answer_of(row: PlainTokens, k: int) -> Answer | None:
    """Where the answer of a message begins, where the terminators at its end do, and where it ends."""
    own = [
        place
        for place, (code, message) in enumerate(zip(row.kinds, row.messages, strict=True))
        if message == k and role_of(code) is RoleCode.ASSISTANT and part_of(code) in ANSWER
    ]
    if not own:
        return None
    tail = own[-1] + 1
    while tail > own[0] and part_of(row.kinds[tail - 1]) is Part.TERMINATOR:
        tail -= 1
    return own[0], tail, own[-1] + 1


def is_whole(row: PlainTokens, place: Answer) -> bool:
    """Whether nothing of another message is inside of an answer."""
    return set(row.messages[place[0] : place[2]]) == {row.messages[place[0]]}


def _spelled(ids: Sequence[int], tokenizer: Tokenizer) -> list[bytes | int]:
    """What ids say: texts, and control tokens as numbers."""
    special = {tokenizer.control_ids[name] for name in tokenizer.special_tokens}
    found: list[bytes | int] = []
    for number in ids:
        if number in special:
            found.append(number)
        elif number not in tokenizer.text_tokens and number not in tokenizer.control_ids.values():
            return UNKNOWN
        elif found and isinstance(found[-1], bytes):
            found[-1] += tokenizer.token_bytes(number)
        else:
            found.append(tokenizer.token_bytes(number))
    return found


def _kinds_by_bytes(
    ids: Sequence[int], rendered: Sequence[int], kinds: Sequence[int], tokenizer: Tokenizer
) -> list[int]:
    """The kind of the byte that each token begins with."""
    per_byte = [code for number, code in zip(rendered, kinds, strict=True) for _ in tokenizer.token_bytes(number)]
    found, at = [], 0
    for number in ids:
        found.append(per_byte[at])
        at += len(tokenizer.token_bytes(number))
    return found
