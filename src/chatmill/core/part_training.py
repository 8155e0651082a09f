"""What a record says about the training of parts of a message: read as weights of characters, or refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from chatmill.core.weight_spans import WeightSpan
from chatmill.errors import RecordError

BEGINNINGS = (b"train", b"weight", b"mask", b"loss")
"""What such keys begin with, in whatever case; the compiled scanner (messages.h) has the same list."""
OTHER_MEANINGS = frozenset({"weight_version"})
"""Keys that begin like these and say something else: which state of a model gave an answer."""
DETAIL = "train_detail"
"""The key of a list that says which characters of a text are trained, as axolotl has it."""
DETAIL_KEYS = ("begin_offset", "end_offset", "train")
FIELD_KEY = "field"
"""Which field of its message an entry is about, if not the content."""


class PartWeight(NamedTuple):
    """One part of a text, and what it says about its training."""

    text: str
    weight: float | None
    """None where the part says nothing, or no more than that it is trained."""
    says_something: bool


@lru_cache(maxsize=4096)  # the same few keys are in every record
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
        if key in known or not speaks_of_training(key):
            continue
        says_nothing = value is None or (isinstance(value, str | list | dict) and not value)
        if not says_nothing:
            raise part_error(
                f"{key!r} says how something is trained, and is not understood here: 'weight' and 'train' of messages "
                f"and text parts are, and {DETAIL!r} of messages and functions. Use these, leave such records out "
                "(on_error: quarantine), or take the key away to train all alike",
                f"{path}.{key}" if path else key,
            )


def part_error(sentence: str, path: str) -> RecordError:
    """Make the error of a record that says how a part is trained in a way that cannot be followed."""
    return RecordError(sentence, code="part_training", path=path)


def spans_of_parts(parts: Sequence[PartWeight], field: str) -> list[WeightSpan]:
    """Return the weights of the parts that a text is joined of; a part that says nothing has none of its own."""
    spans: list[WeightSpan] = []
    begin = 0
    for part in parts:
        end = begin + len(part.text)
        if part.weight is not None and begin < end:
            spans.append(WeightSpan(field, 0, begin, end, part.weight))
        begin = end
    return spans


def spans_of_detail(
    detail: object, texts: Mapping[str, str], field: str, path: str, call: int = 0
) -> dict[str, list[WeightSpan]]:
    """Read `train_detail`: for each field that it speaks of, the characters that have weight 0.

    `end_offset` is the last character, as in axolotl. Characters that no entry has are not trained, and those that are
    trained have the weight of their message. `texts` are the fields that entries may name, `field` is the one they are
    about if they name none.
    """
    if not isinstance(detail, list):
        raise part_error(f"{DETAIL!r} must be a list of objects with {', '.join(DETAIL_KEYS)}", path)
    trained: dict[str, list[tuple[int, int, bool]]] = {}
    for i, entry in enumerate(detail):
        place = f"{path}[{i}]"
        name = _field_of(entry, texts, field, place)
        trained.setdefault(name, []).append(_range_of(entry, texts[name], place))
    spans: dict[str, list[WeightSpan]] = {}
    for name, found in trained.items():
        found.sort()
        for before, after in pairwise(found):
            if after[0] < before[1]:
                raise part_error(f"two entries overlap at character {after[0]} of the {name}: which one counts?", path)
        spans[name] = _untrained(found, len(texts[name]), name, call)
    return spans


def _field_of(entry: object, texts: Mapping[str, str], field: str, path: str) -> str:
    """Return the field that an entry is about."""
    if not isinstance(entry, dict):
        raise part_error(f"an entry must be an object with {', '.join(DETAIL_KEYS)}", path)
    unknown = [key for key in entry if key not in (*DETAIL_KEYS, FIELD_KEY)]
    if unknown:
        raise part_error(f"{unknown[0]!r} is not understood here: {', '.join((*DETAIL_KEYS, FIELD_KEY))} are", path)
    name = entry.get(FIELD_KEY) or field
    if not isinstance(name, str) or name not in texts:
        fields = ", ".join(texts) or "no field"
        raise part_error(f"{FIELD_KEY!r} names {name!r}, and the message has {fields} as text", path)
    return name


def _range_of(entry: Mapping[str, Any], text: str, path: str) -> tuple[int, int, bool]:
    """Return the characters of an entry, the last one not included, and whether they are trained."""
    begin, last, train = (entry.get(key) for key in DETAIL_KEYS)
    if type(begin) is not int or type(last) is not int or not isinstance(train, bool):
        raise part_error("begin_offset and end_offset must be whole numbers, and train true or false", path)
    if not 0 <= begin <= last < len(text):
        raise part_error(
            f"characters {begin} to {last} (end_offset is the last one) are not in a text of {len(text):,} characters",
            path,
        )
    return begin, last + 1, train


def _untrained(found: Sequence[tuple[int, int, bool]], size: int, field: str, call: int) -> list[WeightSpan]:
    """Return what entries say is not trained, and what is between them."""
    spans: list[WeightSpan] = []
    begin = 0
    for start, end, is_trained in [*found, (size, size, True)]:
        if is_trained:
            if begin < start:
                spans.append(WeightSpan(field, call, begin, start, 0.0))
            begin = end
    return spans
