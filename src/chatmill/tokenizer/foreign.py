"""Text to ids by any tokenizer object, Chatmill's or foreign, with a format's markers and a watch on control ids."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.tokens import offsets_of
from chatmill.errors import TokenizerError
from chatmill.tokenizer.tokenizer import Tokenizer


class AnyTokenizer:
    """A tokenizer object seen through three questions: a marker's id, the ids of texts, a control id among them."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a Chatmill tokenizer, or any object with `encode(text)` (a list, or an object with `.ids`)."""
        self.tokenizer = tokenizer
        self.is_foreign = not isinstance(tokenizer, Tokenizer)
        if self.is_foreign and not callable(getattr(tokenizer, "encode", None)):
            raise TokenizerError(f"a {type(tokenizer).__name__} is not a tokenizer: it has no method encode(text)")
        refuse_altering(tokenizer)

    def marker_ids(self, names: Mapping[str, str]) -> dict[str, int]:
        """Look up the id of each marker; `names` maps a short key ("sys") to the token's spelling.

        A foreign object answers by `special_token_ids()` (short keys), `token_to_id` or `convert_tokens_to_ids`.
        """
        by_key = {key: self._find(key, spelling) for key, spelling in names.items()}
        missing = [names[key] for key, token_id in by_key.items() if token_id is None]
        if missing:
            raise TokenizerError(
                f"the {type(self.tokenizer).__name__} has no token {', '.join(missing)}. Add the markers as special "
                "tokens, or use chatmill.with_control_tokens(chatmill.load_tokenizer(...), [...])"
            )
        try:
            ids = {key: whole_id(token_id) for key, token_id in by_key.items()}
        except (TypeError, ValueError):
            raise TokenizerError(f"the tokenizer gives ids that are no whole numbers: {by_key}") from None
        if len(set(ids.values())) < len(ids):
            raise TokenizerError(
                f"the {type(self.tokenizer).__name__} gives the same id to different markers: {ids}. Each must be a "
                "token of its own, not the one for unknown tokens"
            )
        return ids

    def _find(self, key: str, spelling: str) -> int | None:
        if not self.is_foreign:
            return self.tokenizer.control_ids.get(spelling)  # type: ignore[no-any-return]
        special_ids = getattr(self.tokenizer, "special_token_ids", None)
        if callable(special_ids):
            listed = special_ids()
            return listed.get(key, listed.get(spelling))  # type: ignore[no-any-return]
        find = getattr(self.tokenizer, "token_to_id", None) or getattr(self.tokenizer, "convert_tokens_to_ids", None)
        token_id = find(spelling) if find else None
        return None if token_id == getattr(self.tokenizer, "unk_token_id", None) else token_id

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        """Encode texts to flat ids and offsets, without the special tokens that a tokenizer would add."""
        if not self.is_foreign:
            ids, offsets = self.tokenizer.encode_batch(texts)
            return ids, offsets
        encode = self.tokenizer.encode
        options = {"add_special_tokens": False} if _takes_add_special_tokens(encode) else {}
        encoded = [encode(text, **options) for text in texts]
        rows = [getattr(encoding, "ids", encoding) for encoding in encoded]
        flat = np.fromiter((operator.index(token) for row in rows for token in row), dtype=np.int64)
        return flat, offsets_of(np.array(list(map(len, rows)), dtype=np.int64))

    def first_control(
        self, ids: NDArray[np.integer], offsets: NDArray[np.int64], names: Mapping[str, str]
    ) -> tuple[int, str] | None:
        """Find the first text that became a control token, and say so; Chatmill's own tokenizer never makes one.

        `names` are the markers, as in `marker_ids`, that are control tokens too, if the tokenizer has them.
        """
        if not self.is_foreign or not len(ids):
            return None
        control = self._listed_control()
        control |= {int(number): name for key, name in names.items() if (number := self._find(key, name)) is not None}
        hits = np.flatnonzero(np.isin(ids, list(control)))
        if not len(hits):
            return None
        token = control[int(ids[hits[0]])]
        return int(np.searchsorted(offsets, hits[0], side="right")) - 1, (
            f"the {type(self.tokenizer).__name__} turns the content into the control token {token}; "
            "chatmill.load_tokenizer(...) gives a tokenizer that keeps text as text"
        )

    def _listed_control(self) -> dict[int, str]:
        """Collect the ids that a foreign tokenizer lists as special, with their spelling."""
        tokenizer, control = self.tokenizer, dict[int, str]()
        added = getattr(tokenizer, "added_tokens_decoder", None)
        if added is None and hasattr(tokenizer, "get_added_tokens_decoder"):
            added = tokenizer.get_added_tokens_decoder()
        for token_id, token in dict(added or {}).items():
            if getattr(token, "special", True):
                control[int(token_id)] = str(getattr(token, "content", token))
        special = zip(
            getattr(tokenizer, "all_special_ids", ()),
            getattr(tokenizer, "all_special_tokens", ()),
            strict=False,
        )
        for token_id, name in special:
            control.setdefault(int(token_id), str(name))
        special_ids = getattr(tokenizer, "special_token_ids", None)
        for name, token_id in special_ids().items() if callable(special_ids) else ():
            control.setdefault(int(token_id), str(name))
        return control


def whole_id(value: Any) -> int:
    """Check a token id: an integer >= 0; `TypeError` or `ValueError` for floats, digit strings, bools, ..."""
    number = operator.index(value)
    if isinstance(value, bool) or number < 0:
        raise ValueError
    return number


def refuse_altering(tokenizer: Any) -> None:
    """Refuse a `tokenizers.Tokenizer` that would truncate or pad texts."""
    for name in ("truncation", "padding"):
        settings = getattr(tokenizer, name, None)
        if isinstance(settings, Mapping):
            limits = ", ".join(f"{key}={value!r}" for key, value in settings.items() if key in ("max_length", "length"))
            raise TokenizerError(
                f"the {type(tokenizer).__name__} has {name} on ({limits}), which alters texts silently: call its "
                f"no_{name}() first, or use chatmill.load_tokenizer(tokenizer)"
            )


def _takes_add_special_tokens(encode: Any) -> bool:
    try:
        parameters = inspect.signature(encode).parameters
    except (TypeError, ValueError):  # a built-in without a signature
        return False
    return "add_special_tokens" in parameters
