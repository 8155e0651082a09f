"""Tokens that a model sampled, as messages carry them: the checks of their fields, and lists of numbers as columns.

A list of numbers lies in a column of texts as its bytes: int32 for ids, float32 for log-probabilities, which are NaN
if there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.texts import OptionalTexts, Texts
from chatmill.core.tokens import offsets_of
from chatmill.errors import RecordError

IDS, LOGPROBS = np.dtype("<i4"), np.dtype("<f4")
NUMBER_FIELDS: Mapping[str, np.dtype[Any]] = {"token_ids": IDS, "prompt_token_ids": IDS, "logprobs": LOGPROBS}
"""Fields of a message that hold a list of numbers, and what their columns hold."""
SAMPLED_FIELDS = frozenset({*NUMBER_FIELDS, "finish_reason"})
MAX_ID = 2**31 - 1
MAX_LOGPROB = 1e30
"""No log-probability is further from 0; float32 ends not far above."""
LENGTH = "length"
"""The finish reason of an answer that was cut off: no stop ends it."""


def sampled_fields(item: Mapping[str, Any], path: str, *, is_assistant: bool) -> dict[str, Any]:
    """Check what a message says about its tokens and return fields of `Message`; empty if it says nothing."""
    fields: dict[str, Any] = {}
    if (reason := item.get("finish_reason")) is not None:
        if not isinstance(reason, str):
            raise _wrong("'finish_reason' must be a string", path, "finish_reason")
        fields["finish_reason"] = reason
    for name in ("token_ids", "prompt_token_ids"):
        if item.get(name) is not None:
            fields[name] = _ids(item[name], path, name)
            if not is_assistant:
                raise _wrong("only the assistant's messages hold sampled tokens: remove it here", path, name)
    if "token_ids" not in fields:
        if "prompt_token_ids" in fields:
            raise _wrong("'prompt_token_ids' without 'token_ids': give both, or neither", path, "prompt_token_ids")
        return fields
    if item.get("logprobs") is not None:
        fields["logprobs"] = _logprobs(item["logprobs"], path)
        if len(fields["logprobs"]) != len(fields["token_ids"]):
            counts = f"{len(fields['logprobs'])} for {len(fields['token_ids'])} token_ids"
            raise _wrong(f"'logprobs' must have one number for each id, found {counts}", path, "logprobs")
    return fields


def _ids(value: object, path: str, name: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise _wrong(f"{name!r} must be a list of token ids that is not empty", path, name)
    if set(map(type, value)) != {int} or not 0 <= min(value) <= max(value) <= MAX_ID:
        place = next(n for n, number in enumerate(value) if type(number) is not int or not 0 <= number <= MAX_ID)
        shown = str(value[place])[:40]
        raise _wrong(f"a token id is a whole number from 0 to {MAX_ID}, found {shown}", path, f"{name}[{place}]")
    return tuple(value)


def _logprobs(value: object, path: str) -> tuple[float | None, ...]:
    """Parse a list of numbers and nulls, or the format of the chat completions API."""
    if isinstance(value, dict) and isinstance(value.get("content"), list):
        value = [entry.get("logprob") if isinstance(entry, dict) else "" for entry in value["content"]]
    if not isinstance(value, list | tuple):
        raise _wrong("'logprobs' must be a list of numbers", path, "logprobs")
    for place, entry in enumerate(value):
        if entry is not None and (type(entry) not in (float, int) or not -MAX_LOGPROB <= entry <= 0):
            shown = str(entry)[:40]
            says = f"a log-probability is a number from -{MAX_LOGPROB:g} to 0, or null, found {shown}"
            raise _wrong(says, path, f"logprobs[{place}]")
    return unpacked_logprobs(np.array(value, dtype=np.float64).astype(LOGPROBS))  # NaN in the place of None


def _wrong(message: str, path: str, name: str) -> RecordError:
    return RecordError(message, code="bad_token_ids", path=f"{path}.{name}" if path else name)


def unpacked_logprobs(numbers: NDArray[Any]) -> tuple[float | None, ...]:
    """Return the numbers of a list, None if there is none."""
    if not np.isnan(numbers).any():
        return tuple(numbers.tolist())
    return tuple(None if value != value else value for value in numbers.tolist())


def numbers_column(
    count: int, entries: Sequence[tuple[int, Sequence[float | None] | None]], dtype: np.dtype[Any]
) -> OptionalTexts:
    """Make a column of lists from (place, list or None) entries; all others are missing."""
    there = [(place, values) for place, values in entries if values is not None]
    lists = [np.array(values, dtype=dtype).tobytes() for _, values in there]
    lengths = np.array([len(raw) for raw in lists], dtype=np.int64)
    data = np.frombuffer(b"".join(lists), dtype=np.uint8)
    places = np.array([place for place, _ in there], dtype=np.int64)
    return OptionalTexts.sparse(count, places, Texts.packed_in(data, lengths))


def lists_of(column: OptionalTexts, part: slice, dtype: np.dtype[Any]) -> list[tuple[Any, ...] | None]:
    """Decode the lists of part of a column."""
    if not column.present[part].any():
        return [None] * len(range(*part.indices(len(column))))
    raw = [column.raw(number) for number in range(*part.indices(len(column)))]
    if dtype == LOGPROBS:
        return [None if data is None else unpacked_logprobs(np.frombuffer(data, dtype)) for data in raw]
    return [None if data is None else tuple(np.frombuffer(data, dtype).tolist()) for data in raw]


def flat(column: Texts, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Concatenate the numbers of lists, and return the offsets of each list."""
    whole = column.packed()
    return whole.data.view(dtype), offsets_of(whole.lengths // dtype.itemsize)
