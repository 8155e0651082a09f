"""Names of the columns of tables: one that stands twice is an error, since only one of the two could be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from chatmill.errors import DataError
from chatmill.read.places import Place


def refuse_repeated_names(names: Iterable[str], where: Place, inside: str = "") -> None:
    """Raise an error if two columns, or two fields of the structs in the column `inside`, have one name."""
    for name, count in Counter(names).items():
        if count > 1:
            what = f"two fields named {name!r} in its column {inside!r}" if inside else f"two columns named {name!r}"
            raise DataError(f"{where} has {what}: rename one")


def refuse_repeated_fields(schema: Any, where: Place) -> None:
    """Raise the same error for the columns of an Arrow schema and the structs inside of them."""
    import pyarrow

    refuse_repeated_names(schema.names, where)
    waiting = [(field.type, field.name) for field in schema]
    while waiting:
        type_, column = waiting.pop()
        fields = [type_.field(number) for number in range(type_.num_fields)] if pyarrow.types.is_nested(type_) else []
        if pyarrow.types.is_struct(type_):
            refuse_repeated_names([field.name for field in fields], where, column)
        waiting += [(field.type, column) for field in fields]
