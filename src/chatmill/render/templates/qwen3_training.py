"""Qwen3 for training: the thinking block stands in every assistant turn, so that turns never change later."""

from __future__ import annotations

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.render.emitter import Emitter
from chatmill.render.templates.qwen3 import THINK_END, Qwen3
from chatmill.tokenizer.protocol import Tokenizer


class Qwen3Training(Qwen3):
    """Equal to TRL's training template in ids and, with the policy `trl`, in what is trained."""

    name = "qwen3_training"
    prefix_stable = True
    default_policy = "trl"
    declares = (
        "Every assistant turn has a thinking block, empty where there is no reasoning; newlines around reasoning and "
        "before the answer are trimmed; reasoning written as <think>...</think> inside a content without reasoning of "
        "its own is taken out of it."
    )

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Encode what is fixed."""
        super().__init__(tokenizer)
        self._plain_frames = {**self._frames, Role.ASSISTANT: self._unreasoned}

    def emit(self, conversation: Conversation, out: Emitter) -> None:
        """Write the system part, then every message in order; plain conversations all at once."""
        if not conversation.tools and all(map(_is_plain, conversation.messages)):
            out.framed_messages(conversation.messages, self._plain_frames)
        else:
            super().emit(conversation, out)

    def _shows_reasoning(self, index: int, count: int, last_query: int, reasoning: str) -> bool:
        return True


def _is_plain(message: Message) -> bool:
    """Whether a message is nothing but its content, and that is written as it is."""
    if message.reasoning is not None or message.tool_calls or message.role is Role.TOOL:
        return False
    content = message.content
    return message.role is not Role.ASSISTANT or not (content.startswith("\n") or THINK_END in content)


TEMPLATE = Qwen3Training
