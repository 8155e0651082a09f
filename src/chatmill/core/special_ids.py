"""The BOS, EOS and PAD id of any tokenizer object: Chatmill's own or one of transformers."""

from __future__ import annotations

from typing import Any


def special_id(tokenizer: Any, name: str) -> int | None:
    """The id of "bos", "eos" or "pad"; None where the tokenizer has no such token.

    A transformers tokenizer says it as `eos_token_id`, a Chatmill tokenizer as `eos_id`.
    """
    for attribute in (f"{name}_token_id", f"{name}_id"):
        value = getattr(tokenizer, attribute, None)
        if value is not None:
            return int(value)
    return None
