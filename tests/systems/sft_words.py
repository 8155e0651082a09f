"""A tiny tokenizer of the token-native SFT format: fixed special ids, and words split on spaces."""

from __future__ import annotations

from typing import Any

from chatmill.systems.token_native_sft import DEFAULT_SYSTEM_TEXT, serialize_chat_to_ids

SYS, USR, ASST, EOT = 1, 2, 3, 4
SPOKEN = "you are a helpful assistant. be brief hi hello bye what is it"
WORDS = {word: 10 + number for number, word in enumerate(SPOKEN.split())}


class FakeTokenizer:
    """Words split on spaces, with fixed ids; a marker's short name in angle brackets is read as the marker."""

    def special_token_ids(self) -> dict[str, int]:
        return {"sys": SYS, "usr": USR, "asst": ASST, "eot": EOT}

    def encode(self, text: str) -> list[int]:
        return [EOT if word == "<eot>" else WORDS[word] for word in text.split()]


def serialize(ex: Any, tokenizer: Any = None, default_system_text: str = DEFAULT_SYSTEM_TEXT) -> list[int]:
    return serialize_chat_to_ids(ex, tokenizer=tokenizer or FakeTokenizer(), default_system_text=default_system_text)
