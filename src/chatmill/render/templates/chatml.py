"""ChatML: `<|im_start|>role\\ncontent<|im_end|>\\n`."""

from __future__ import annotations

from typing import ClassVar

from chatmill.core.conversation import Conversation, Role
from chatmill.core.conversations import Conversations
from chatmill.render.emitter import Emitter
from chatmill.render.events import EventColumns
from chatmill.render.frames import Frame
from chatmill.render.template import KINDS_OF, Template, reasoning_length
from chatmill.tokenizer.protocol import Tokenizer

IM_START, IM_END = "<|im_start|>", "<|im_end|>"


class ChatML(Template):
    """The plain form: every role the same, no tools, reasoning not shown."""

    name = "chatml"
    control_tokens: ClassVar[tuple[str, ...]] = (IM_START, IM_END)
    writes_columns: ClassVar[bool] = True
    declares = "Contents as they are; reasoning is not shown."

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Encode what is fixed."""
        super().__init__(tokenizer)
        self._start = self.literal(IM_START)
        self._assistant = self.literal(IM_START, "assistant\n")
        self._end = self.literal(IM_END)
        self._newline = self.literal("\n")
        self._closing = {
            role: [(self._end, KINDS_OF[role].terminator), (self._newline, KINDS_OF[role].separator)] for role in Role
        }
        self._frames = {role: self._role_frame(role) for role in Role}

    def _role_frame(self, role: Role) -> Frame:
        """Head and content are one piece, as the reference encodes them; but an assistant's own text stands alone."""
        kinds = KINDS_OF[role]
        if role is Role.ASSISTANT:
            return self.frame(kinds.content, before=[(self._assistant, kinds.header)], after=self._closing[role])
        return self.frame(
            kinds.content,
            before=[(self._start, kinds.header)],
            head=(f"{role.value}\n", kinds.header),
            after=self._closing[role],
        )

    def write_messages(self, batch: Conversations) -> EventColumns:
        """Every message is its content in the frame of its role."""
        return self.write_framed(batch, self._frames)

    def emit(self, conversation: Conversation, out: Emitter) -> None:
        """Write every message in order."""
        out.framed_messages(conversation.messages, self._frames)
        out.stripped += reasoning_length(conversation.messages)

    def emit_generation_prompt(self, conversation: Conversation, out: Emitter) -> None:
        """`<|im_start|>assistant` and a newline."""
        out.put(self._assistant, KINDS_OF[Role.ASSISTANT].header)


TEMPLATE = ChatML
