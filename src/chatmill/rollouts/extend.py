"""The prompt of the next call: what was sent, what was sampled, and what the template writes after it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chatmill.core.conversation import Conversation, Message
from chatmill.core.kinds import REPEATED, Part, RoleCode, kind
from chatmill.core.tokens import Tokens
from chatmill.errors import RecordError
from chatmill.rollouts.messages import conversation as parse_conversation
from chatmill.rollouts.sampled_text import SampledText
from chatmill.rollouts.template import RolloutTemplate
from chatmill.rollouts.types import Answer, Extension, ExtensionRefused, HistoryKind, Prompt, Proof

PROBE = "Other-q0zz."
"""Content that stands for an answer without proof."""
SAMPLED = kind(RoleCode.ASSISTANT, Part.CONTENT) | REPEATED
"""The kind of sampled ids in a later prompt: context."""


class _Tail(NamedTuple):
    """What the template writes after an answer."""

    tokens: Tokens
    offset: int
    """First token after the stop."""
    conversation: Conversation


class Extender:
    """Extends one prompt by its sampled ids and new messages."""

    def __init__(
        self, template: RolloutTemplate, prompt: Prompt, sampled_ids: list[int], sampled: SampledText, answer: Answer
    ) -> None:
        """Take what was sent and sampled, and what that says."""
        self._template, self._prompt = template, prompt
        self._ids, self._sampled, self._answer = sampled_ids, sampled, answer

    def extension(self, new: tuple[Message, ...], history: HistoryKind) -> Extension:
        """Return the next prompt."""
        says = self._answer.readings[0] if self._answer.readings else self._answer.message
        message = parse_conversation([says], None).messages[0]
        tail = self._tail(message, new)
        text = self._template.plain(tail.conversation, prompt=True) or ""
        if self._answer.proof is Proof.NOT_WRITTEN:
            self._check_independent(message, new, tail)
        stop = self._stop_before(tail)
        added = tail.tokens.ids[tail.offset :].tolist()
        inserted = stop if self._sampled.stop is None else None
        sent = [*self._prompt.ids, *self._ids, *([] if inserted is None else [inserted])]
        agrees = self._agrees(tail, sent)
        if history is HistoryKind.TEMPLATE:
            return self._extension(
                tail, tail.tokens.ids.tolist(), text, agrees, None, tail.tokens.kinds, tail.tokens.messages
            )
        kinds, messages = self._columns(tail, len(sent) - len(self._prompt.ids))
        return self._extension(tail, [*sent, *added], text, agrees, inserted, kinds, messages)

    def _extension(
        self,
        tail: _Tail,
        ids: list[int],
        text: str,
        agrees: bool,
        inserted: int | None,
        kinds: np.ndarray,
        messages: np.ndarray,
    ) -> Extension:
        return Extension(
            ids=ids,
            kinds=kinds,
            messages=messages,
            conversation=tail.conversation,
            text=text,
            agrees_with_template=agrees,
            inserted_stop=inserted,
        )

    def _columns(self, tail: _Tail, sampled: int) -> tuple[np.ndarray, np.ndarray]:
        """Return kinds and messages of the next prompt."""
        index = len(self._prompt.conversation.messages)
        kinds = [self._prompt.kinds, np.full(sampled, SAMPLED, np.uint8), tail.tokens.kinds[tail.offset :]]
        owners = [self._prompt.messages, np.full(sampled, index, np.int32), tail.tokens.messages[tail.offset :]]
        return np.concatenate(kinds), np.concatenate(owners)

    def _tail(self, message: Message, new: tuple[Message, ...]) -> _Tail:
        """Render the history with the answer and the new messages, and find the end of the answer."""
        before = self._prompt.conversation
        conversation = before._replace(messages=(*before.messages, message, *new))
        try:
            tokens = self._template.prompt_tokens(conversation)
        except RecordError as error:
            raise ExtensionRefused(f"the template refuses the next prompt: {error}", error.code) from None
        offset = self._template.tail_offset(tokens, len(before.messages))
        if offset is None:
            raise ExtensionRefused(
                "the template leaves the answer out of the next prompt, so nothing says what follows it; "
                "history='template' renders the prompt without it",
                "not_shown",
            )
        return _Tail(tokens, offset, conversation)

    def _check_independent(self, message: Message, new: tuple[Message, ...], tail: _Tail) -> None:
        """Refuse an answer without proof if what follows depends on it."""
        other = self._tail(message._replace(content=PROBE, reasoning=None), new)
        same = np.array_equal(other.tokens.ids[other.offset :], tail.tokens.ids[tail.offset :])
        if not same:
            reason = "not_written" if self._answer.reason is None else self._answer.reason.value
            raise ExtensionRefused(
                f"the answer has no proof ({reason}), and what the template writes after it depends on the answer",
                reason,
            )

    def _stop_before(self, tail: _Tail) -> int:
        """Return the stop token that the template has before the new messages."""
        stop = int(tail.tokens.ids[tail.offset - 1])
        if self._sampled.stop is None and not self._is_token(stop):
            raise ExtensionRefused("the answer has no stop token, and the template writes none after it", "no_stop")
        return stop

    def _is_token(self, token_id: int) -> bool:
        return token_id in self._template.stops or token_id in self._template.special_ids

    def _agrees(self, tail: _Tail, sent: list[int]) -> bool:
        """Tell whether the template writes the same text up to the new messages."""
        own = tail.tokens.ids[: tail.offset]
        if len(own) == len(sent) and own.tolist() == sent:
            return True
        decode = self._template.tokenizer.decode
        return decode(own) == decode(np.asarray(sent))
