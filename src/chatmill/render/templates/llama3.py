"""Llama 3: `<|start_header_id|>role<|end_header_id|>`, a blank line, the trimmed content, `<|eot_id|>`."""

from __future__ import annotations

import numpy as np

from chatmill.core.conversation import Conversation, Role
from chatmill.core.conversations import Conversations
from chatmill.render.emitter import Emitter
from chatmill.render.events import EventColumns
from chatmill.render.frames import Frame
from chatmill.render.template import DOCUMENT, KINDS_OF, Template
from chatmill.tokenizer.protocol import Tokenizer

BOS, HEADER, HEADER_END, EOT = "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"


class Llama3(Template):
    """The published Llama 3 template; contents are trimmed on both sides."""

    name = "llama3"
    control_tokens = (BOS, HEADER, HEADER_END, EOT)
    writes_columns = True
    declares = "White space around contents is trimmed; reasoning is not shown."

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Encode what is fixed."""
        super().__init__(tokenizer)
        self._bos = self.fixed([(self.literal(BOS), DOCUMENT)])
        self._assistant = self.literal(HEADER, "assistant", HEADER_END, "\n\n")
        self._eot = self.literal(EOT)
        self._frames = {role: self._role_frame(role) for role in Role}

    def _role_frame(self, role: Role) -> Frame:
        """The blank line and the content are one piece, as the reference encodes them; not for an assistant."""
        kinds = KINDS_OF[role]
        after = [(self._eot, kinds.terminator)]
        if role is Role.ASSISTANT:
            return self.frame(kinds.content, before=[(self._assistant, kinds.header)], after=after)
        header = self.literal(HEADER, role.value, HEADER_END)
        return self.frame(kinds.content, before=[(header, kinds.header)], head=("\n\n", kinds.header), after=after)

    def emit(self, conversation: Conversation, out: Emitter) -> None:
        """Write BOS, then every message in order."""
        out.message(-1)
        out.fixed(self._bos)
        for index, message in enumerate(conversation.messages):
            out.message(index)
            content = message.content.strip()
            out.framed(self._frames[message.role], content)
            out.stripped += len(message.content) - len(content) + len(message.reasoning or "")

    def write_messages(self, batch: Conversations) -> EventColumns:
        """The same from columns."""
        contents, firsts = batch.messages.contents, batch.offsets[:-1]
        trimmed = contents.stripped()
        out = self.write_framed(batch, self._frames, trimmed, opened=firsts)
        out.put(out.first[firsts], self._bos.number)
        changed = np.flatnonzero(trimmed.lengths != contents.lengths)
        out.stripped[changed] += contents.take(changed).characters() - trimmed.take(changed).characters()
        return out

    def emit_generation_prompt(self, conversation: Conversation, out: Emitter) -> None:
        """The assistant header and its blank line."""
        out.put(self._assistant, KINDS_OF[Role.ASSISTANT].header)


TEMPLATE = Llama3
