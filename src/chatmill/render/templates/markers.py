"""Marker transcripts (spec 2): `<|ROLE|>content<|END|>` per message, `<|EOS|>` after the conversation."""

from __future__ import annotations

from typing import ClassVar

from chatmill.core.conversation import Conversation, Role
from chatmill.render.template import DOCUMENT, KINDS_OF, Emitter, Template
from chatmill.tokenizer.tokenizer import Tokenizer

SYSTEM, USER, ASSISTANT, END, EOS = "<|SYSTEM|>", "<|USER|>", "<|ASSISTANT|>", "<|END|>", "<|EOS|>"


class Markers(Template):
    """Five markers, each one id; nothing stands between spans."""

    name = "markers"
    control_tokens = (SYSTEM, USER, ASSISTANT, END, EOS)
    stop_tokens = (END,)
    roles: ClassVar[frozenset[Role]] = frozenset({Role.SYSTEM, Role.USER, Role.ASSISTANT})
    prefix_stable = True
    default_policy = "post_training"
    declares = "Contents as they are; reasoning is not shown."

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Encode the markers once."""
        super().__init__(tokenizer)
        self._end, self._eos = self.literal(END), self.literal(EOS)
        openings = {Role.SYSTEM: SYSTEM, Role.USER: USER, Role.ASSISTANT: ASSISTANT}
        self._open = {role: self.literal(marker) for role, marker in openings.items()}

    def emit(self, conversation: Conversation, out: Emitter) -> None:
        """Write every message, then the end of the conversation."""
        for index, message in enumerate(conversation.messages):
            out.message(index)
            out.turn(message.role, self._open[message.role], message.content, self._end)
        out.message(-1)
        out.put(self._eos, DOCUMENT)

    def emit_generation_prompt(self, conversation: Conversation, out: Emitter) -> None:
        """The assistant marker."""
        out.put(self._open[Role.ASSISTANT], KINDS_OF[Role.ASSISTANT].header)


TEMPLATE = Markers
