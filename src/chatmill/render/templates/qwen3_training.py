"""Qwen3 for training: the thinking block stands in every assistant turn, so that turns never change later."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from chatmill.core.batch import ConversationBatch
from chatmill.core.conversation import Message, Role
from chatmill.render.emitter import Emitter
from chatmill.render.frames import Frame
from chatmill.render.templates.qwen3 import THINK_END, Before, Qwen3
from chatmill.tokenizer.protocol import Tokenizer


class Qwen3Training(Qwen3):
    """Equal to TRL's training template in ids and, with the policy `trl`, in what is trained."""

    name = "qwen3_training"
    prefix_stable = True
    writes_single_messages = True
    default_policy = "trl"
    declares = (
        "Every assistant turn has a thinking block, empty where there is no reasoning; newlines around reasoning and "
        "before the answer are trimmed; reasoning written as <think>...</think> inside a content without reasoning of "
        "its own is taken out of it."
    )

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Encode what is fixed."""
        super().__init__(tokenizer)
        self._plain_frames: dict[Role, Frame] = {**self._frames, Role.ASSISTANT: self._forms[Before.NO_REASONING].whole}
        del self._plain_frames[Role.TOOL]

    @property
    def plain_frames(self) -> Mapping[Role, Frame] | None:
        """All roles but tool results, which stand together in one turn."""
        return self._plain_frames

    def plain_messages(self, batch: ConversationBatch) -> NDArray[np.bool_]:
        """Not answers that are trimmed or taken apart."""
        plain = super().plain_messages(batch)
        changed = [
            role is Role.ASSISTANT and (content[:1] == "\n" or THINK_END in content)
            for role, content in zip(batch.roles, batch.contents, strict=True)
        ]
        plain[changed] = False
        return plain

    def emit_message(self, message: Message, before: Role | None, after: Role | None, out: Emitter) -> None:
        """Write one message; here it never depends on any but its neighbours."""
        if message.role is Role.ASSISTANT:
            self._emit_assistant(message, 0, 1, -1, out)
            return
        if message.role is Role.TOOL:
            self._emit_tool(message, before, after, out)
        else:
            out.framed(self._frames[message.role], message.content)
        out.stripped += len(message.reasoning or "")

    def _shows_reasoning(self, index: int, count: int, last_query: int, reasoning: str) -> bool:
        return True


TEMPLATE = Qwen3Training
