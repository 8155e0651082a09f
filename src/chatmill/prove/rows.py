"""One row by the slow, obvious path: texts encoded one at a time, and a kind and a weight for every single token."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate

import numpy as np

from chatmill.core.conversation import Message
from chatmill.core.kinds import MARK, REPEATED, Part, RoleCode, kind, part_of, role_of
from chatmill.label.policy import ANSWER, Policy, Scope
from chatmill.render.document_items import Ids, TextPart
from chatmill.tokenizer.tokenizer import Tokenizer

NO_LOGPROB = float("nan")
Answer = tuple[int, int, int]
"""Where an answer begins, where the terminators at its end do, and where it ends."""


@dataclass(slots=True)
class PlainRow:
    """The tokens of a document; lists of one length."""

    ids: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)
    """Index of the message each token belongs to; -1 for none."""
    logprobs: list[float] = field(default_factory=list)
    """NaN where none is known."""
    weights: list[float] = field(default_factory=list)
    """Empty until the row is whole."""
    stated: list[float | None] = field(default_factory=list)
    """What parts of messages say about the weight of each token; None where no part is near."""
    mixed: list[bool] = field(default_factory=list)
    """Tokens that cover parts of different weights."""

    def add(
        self, ids: Sequence[int], kinds: Sequence[int], message: int, logprobs: Sequence[float | None] = ()
    ) -> None:
        """Append tokens of one message."""
        self.stated += [None] * len(ids)
        self.mixed += [False] * len(ids)
        self.ids += ids
        self.kinds += kinds
        self.messages += [message] * len(ids)
        self.logprobs += [NO_LOGPROB if logprob is None else logprob for logprob in logprobs or [None] * len(ids)]

    def extend(self, other: PlainRow) -> None:
        """Append the tokens of another row."""
        self.ids += other.ids
        self.kinds += other.kinds
        self.messages += other.messages
        self.logprobs += other.logprobs
        self.stated += other.stated
        self.mixed += other.mixed

    def part(self, start: int, stop: int | None) -> PlainRow:
        """Return some tokens of the row, without weights."""
        at = slice(start, stop)
        ids, kinds, messages = self.ids[at], self.kinds[at], self.messages[at]
        return PlainRow(ids, kinds, messages, self.logprobs[at], stated=self.stated[at], mixed=self.mixed[at])

    def answer_of(self, message: int) -> Answer | None:
        """Return where the answer of a message is; None if the row has none."""
        tokens = [n for n, owner in enumerate(self.messages) if owner == message and is_answer(self.kinds[n])]
        if not tokens:
            return None
        tail = tokens[-1] + 1
        while tail > tokens[0] and part_of(self.kinds[tail - 1]) is Part.TERMINATOR:
            tail -= 1
        return tokens[0], tail, tokens[-1] + 1


@cache
def is_answer(code: int) -> bool:
    """Return whether a token is of what an assistant says, and not of what a template writes around it."""
    return role_of(code) is RoleCode.ASSISTANT and part_of(code) in ANSWER


def plain_row(
    items: Sequence[Ids | TextPart],
    tokenizer: Tokenizer,
    ids_of: dict[str, list[int]],
    weigh: Callable[[Sequence[TextPart]], Sequence[float] | None] | None = None,
) -> PlainRow:
    """Return the tokens of a document; `ids_of` keeps the ids of texts, so that shared beginnings are encoded once.

    `weigh` says what every character of a piece weighs, None where no part of a message has a weight of its own.
    """
    row = PlainRow()
    piece: list[TextPart] = []
    for item in (*items, Ids((), 0, -1)):
        if piece and (isinstance(item, Ids) or item.opens):
            begin = len(row.ids)
            _encode(row, piece, tokenizer, ids_of)
            weights = None if weigh is None else weigh(piece)
            if weights is not None:
                text = "".join(part.text for part in piece)
                for at, covered in enumerate(covered_characters(text, row.ids[begin:], tokenizer), begin):
                    found = {weights[place] for place in covered}
                    row.stated[at] = min(found, default=None)
                    row.mixed[at] = len(found) > 1
            piece = []
        if isinstance(item, Ids):
            row.add(item.ids, [item.kind] * len(item.ids), item.message)
        else:
            piece.append(item)
    return row


def _encode(row: PlainRow, piece: Sequence[TextPart], tokenizer: Tokenizer, ids_of: dict[str, list[int]]) -> None:
    """The parts as one text; a token has the kind of the part its first byte lies in."""
    text = "".join(part.text for part in piece)
    if text not in ids_of:
        ids_of[text] = tokenizer.encode(text)
    ids = ids_of[text]
    ends = [_tokens_before(prefix, text, ids, tokenizer) for prefix in accumulate(part.text for part in piece[:-1])]
    for start, end, part in zip([0, *ends], [*ends, len(ids)], piece, strict=True):
        row.add(ids[start:end], [part.kind] * len(ids[start:end]), part.message)


def _tokens_before(prefix: str, text: str, ids: list[int], tokenizer: Tokenizer) -> int:
    """Return how many tokens of a text begin inside its prefix."""
    if not tokenizer.bytes_add_up:
        assert tokenizer.reference is not None
        return int(tokenizer.reference.tokens_before([text], [len(prefix)])[0])
    size, at = len(tokenizer.normalize(prefix).encode()), 0
    for count, token in enumerate(ids):
        if at >= size:
            return count
        at += len(tokenizer.token_bytes(token))
    return len(ids)


def covered_characters(text: str, ids: Sequence[int], tokenizer: Tokenizer) -> list[range]:
    """Return the characters of a text that each of its tokens covers, one at least in part."""
    if not text:
        return []
    if tokenizer.bytes_add_up:
        sizes = [0, *accumulate(len(character.encode()) for character in text)]
        if tokenizer.normalize(text) != text:
            sizes = [len(tokenizer.normalize(text[:place]).encode()) for place in range(len(text) + 1)]
        ends = list(accumulate(len(tokenizer.token_bytes(token)) for token in ids))
        # a character is in a token if it ends after the token's first byte, and begins before its last
        return [
            range(bisect_right(sizes, begin) - 1, bisect_left(sizes, end))
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
    counts = [_tokens_before(text[:place], text, list(ids), tokenizer) for place in range(len(text) + 1)]
    first = [bisect_right(counts, number) - 1 for number in range(len(ids))]
    # several tokens may begin at one character: its bytes
    return [range(begin, max(end, begin + 1)) for begin, end in zip(first, [*first[1:], len(text)], strict=False)]


def token_weights(policy: Policy, row: PlainRow, sources: Sequence[Message], *, is_last: bool = True) -> list[float]:
    """Return the weight of every token: the policy's table, its scope, and the weight of the token's own message.

    What is around an answer has a weight where the answer is not repeated; what is no assistant's, and what is around
    no answer at all, in the last document.
    """
    table = {kind(role, part): weight for (role, part), weight in policy.weights.items()}
    last_user = max((place for place, code in enumerate(row.kinds) if role_of(code) is RoleCode.USER), default=-1)
    default = 0.0 if policy.only_weighted_messages else 1.0
    pairs = list(zip(row.kinds, row.messages, strict=True))
    answered = {k for code, k in pairs if is_answer(code) and not code & REPEATED}
    repeated = {k for code, k in pairs if is_answer(code) and code & REPEATED}
    weights: list[float] = []
    for place, (code, message) in enumerate(pairs):
        weight = 0.0 if code & REPEATED else table.get(code & ~MARK, 0.0)
        if role_of(code) is not RoleCode.ASSISTANT:
            weight = weight if is_last else 0.0
        elif not is_answer(code) and message >= 0 and message not in answered:
            weight = weight if is_last and message not in repeated else 0.0
        if weight == 0 or (policy.scope is Scope.LAST_TURN and place <= last_user):
            weights.append(0.0)
            continue
        own = sources[message].weight if message >= 0 else None
        part = row.stated[place] if row.stated else None
        stated = own if part is None else part
        if part is not None and own is None:
            stated = min(part, default)
        weights.append(float(np.float32(weight) * np.float32(default if stated is None else stated)))  # as it is stored
    return weights
