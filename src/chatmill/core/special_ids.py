"""The BOS, EOS and PAD id of any tokenizer object: Chatmill's own or one of transformers."""

from __future__ import annotations

import operator
from typing import Any

from chatmill.errors import TokenizerError


def special_id(tokenizer: Any, name: str) -> int | None:
    """Return the id of "bos", "eos" or "pad"; None where the tokenizer has no such token.

    A transformers tokenizer says it as `eos_token_id`, a Chatmill tokenizer as `eos_id`, SentencePiece as the method
    `eos_id()`, which gives -1 if there is none.
    """
    for attribute in (f"{name}_token_id", f"{name}_id"):
        value = getattr(tokenizer, attribute, None)
        if callable(value):
            value = value()
        if value is None:
            continue
        try:
            token_id = operator.index(value)
        except TypeError:
            raise TokenizerError(
                f"the {type(tokenizer).__name__} gives {value!r} as {attribute}; a whole number is needed"
            ) from None
        if token_id >= 0:
            return token_id
    return None
