"""Keys by which a record says how a part of a message is trained: they are not understood here, and refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from chatmill.errors import RecordError

BEGINNINGS = (b"train", b"weight", b"mask", b"loss")
"""What such keys begin with, in whatever case; the compiled scanner (messages.h) has the same list."""
OTHER_MEANINGS = frozenset({"weight_version"})
"""Keys that begin like these and say something else: which state of a model gave an answer."""


def speaks_of_training(key: object) -> bool:
    """Return whether a key is one by which people say how something is trained."""
    if not isinstance(key, str) or key in OTHER_MEANINGS:
        return False
    return key.encode(errors="surrogatepass").lower().startswith(BEGINNINGS)


def refuse_part_training(item: Mapping[str, Any], path: str, known: Collection[str] = ()) -> None:
    """Refuse a message, a part of one or a call that says how it is trained in keys other than the `known` ones.

    Read past, they would train what a record says is not to be trained. `path` is the place of the item.
    """
    for key, value in item.items():
        says_nothing = value is None or (isinstance(value, str | list | dict) and not value)
        if speaks_of_training(key) and key not in known and not says_nothing:
            raise RecordError(
                f"{key!r} says how something is trained, and only 'weight' and 'train' of a whole message are read: "
                "use these, leave such records out (on_error: quarantine), or take the key away to train all alike",
                code="part_training",
                path=f"{path}.{key}" if path else key,
            )
