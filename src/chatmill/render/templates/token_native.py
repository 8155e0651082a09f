"""The token-native SFT format (spec 1): `[role id] + content + [eot]`, and a system message always."""

from __future__ import annotations

from typing import ClassVar

from chatmill.core.conversation import Conversation, Role
from chatmill.errors import RecordError
from chatmill.render.template import KINDS_OF, Emitter, Template
from chatmill.tokenizer.tokenizer import Tokenizer

DEFAULT_SYSTEM_TEXT = "you are a helpful assistant."
SUFFIX = "84a5023f67d74cf29cc4001becde983c"
SYS, USR, ASST, EOT = (f"<|ngpt_{name}_{SUFFIX}|>" for name in ("sys", "usr", "asst", "eot"))


class TokenNative(Template):
    """Four control tokens, no white space added; the default system text is written where the record has none."""

    name = "token_native"
    control_tokens = (SYS, USR, ASST, EOT)
    stop_tokens = (EOT,)
    text_options = ("default_system_text",)
    roles: ClassVar[frozenset[Role]] = frozenset({Role.SYSTEM, Role.USER, Role.ASSISTANT})
    declares = "Contents as they are; reasoning is not shown; a default system message is added where there is none."

    def __init__(self, tokenizer: Tokenizer, default_system_text: str = DEFAULT_SYSTEM_TEXT) -> None:
        """Encode the markers once."""
        super().__init__(tokenizer)
        self._default_system = default_system_text
        self._eot = self.literal(EOT)
        openings = {Role.SYSTEM: SYS, Role.USER: USR, Role.ASSISTANT: ASST}
        self._open = {role: self.literal(marker) for role, marker in openings.items()}

    @classmethod
    def check(cls, conversation: Conversation) -> None:
        """Refuse what the format cannot write, and a system message that is not the first."""
        super().check(conversation)
        for index, message in enumerate(conversation.messages):
            if message.role is Role.SYSTEM and index:
                raise RecordError(
                    "a system message must be the first message in the token-native format",
                    code="late_system",
                    path=f"messages[{index}].role",
                )

    def emit(self, conversation: Conversation, out: Emitter) -> None:
        """Write the system turn, then every message in order."""
        if not conversation.messages or conversation.messages[0].role is not Role.SYSTEM:
            out.message(-1)
            out.turn(Role.SYSTEM, self._open[Role.SYSTEM], self._default_system, self._eot)
        for index, message in enumerate(conversation.messages):
            out.message(index)
            out.turn(message.role, self._open[message.role], message.content, self._eot)

    def emit_generation_prompt(self, conversation: Conversation, out: Emitter) -> None:
        """The assistant marker."""
        out.put(self._open[Role.ASSISTANT], KINDS_OF[Role.ASSISTANT].header)


TEMPLATE = TokenNative
