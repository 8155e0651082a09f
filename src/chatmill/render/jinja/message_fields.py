"""Fields of a message, which a template reads by their names alone.

Readers keep neither the order of a message's fields nor those that mean nothing here, and transformers adds some. So
what a template makes of all of them (`m|tojson`, `m.items()`) is not known, and refuses the record.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any

from chatmill.render.jinja.traced import OriginLost


def refuse_all_fields() -> OriginLost:
    """Return the refusal of a template that goes over the fields of a message."""
    return OriginLost(
        "all fields of a message, whose order is not kept, nor those that Chatmill gives no meaning to: a template has "
        "to read them by name"
    )


class MessageFields(dict[str, Any]):
    """The fields of one message, traced."""

    __slots__ = ()

    def __iter__(self) -> Iterator[str]:
        raise refuse_all_fields()
        yield ""  # asking for an iterator, as the test `iterable` does, is no look at the fields

    __reversed__ = __iter__

    def __len__(self) -> int:
        raise refuse_all_fields()

    def __bool__(self) -> bool:
        return True

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """Return what knows the fields by name; likewise the others."""
        return KeysView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]  # noqa: D102
        return ValuesView(self)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]  # noqa: D102
        return ItemsView(self)

    def copy(self) -> MessageFields:
        """Return the same: no template can change it."""
        return self

    def __str__(self) -> str:
        raise refuse_all_fields()

    __repr__ = __str__
