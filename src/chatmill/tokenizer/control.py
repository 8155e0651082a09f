"""Control tokens: looking them up by name and finding them in finished documents."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from chatmill.errors import TokenizerError


def lookup(control_ids: Mapping[str, int], name: str, tokenizer: str) -> int:
    """The id of a control token, or an error that lists the ones there are."""
    found = control_ids.get(name)
    if found is None:
        listed = ", ".join(list(control_ids)[:12]) + (", ..." if len(control_ids) > 12 else "")
        raise TokenizerError(
            f"tokenizer {tokenizer!r} has no control token {name!r}. It has: {listed or 'none'}. "
            "Add it with with_control_tokens(tokenizer, [...]), or load with load_tokenizer(..., control_tokens=[...])."
        )
    return found


def control_pattern(names: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern with one group that matches any control token, longest first; None when there are none."""
    ordered = sorted(names, key=lambda name: (-len(name), name))
    return re.compile("(" + "|".join(map(re.escape, ordered)) + ")") if ordered else None
