"""Finds JSON that came out of Arrow or Parquet, where every object has all fields that any object in its place has.

`datasets` and others store the arguments of all calls as one struct: in JSON that is written from there, each call has
the arguments of all functions, null but for its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NAMES = ("name", "function_name")
ARGUMENTS = ("arguments", "input")
"""What calls have their function's name and its arguments in."""
DEEPEST = 32
Place = tuple[str, ...]


def has_arrow_nulls(records: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether nulls in calls, or in definitions of tools, can be nothing but fields that other objects have.

    Objects in the same place all have the same keys, in the same order, as Arrow has it; and calls of different
    functions, or the schemas of parameters, which are never null, have nulls.
    """
    keys: dict[Place, tuple[str, ...]] = {}
    called: set[str] = set()
    is_certain = has_nulls = False
    for place, value in (item for record in records for item in _objects(record, ())):
        if keys.setdefault(place, tuple(value)) != tuple(value):
            return False
        for name in ARGUMENTS:
            if isinstance(value.get(name), Mapping):
                called |= {str(value[key]) for key in NAMES if value.get(key)}
                has_nulls |= None in value[name].values()
        is_certain |= place[-1:] == ("properties",) and None in value.values()
    return is_certain or (has_nulls and len(called) > 1)


def _objects(value: Any, place: Place) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Yield all objects in a value, with the keys that lead to them, up to a depth that no schema has."""
    if isinstance(value, Mapping):
        yield place, value
        for key, item in value.items() if len(place) < DEEPEST else ():
            yield from _objects(item, (*place, key))
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, Mapping):
                yield from _objects(item, place)
