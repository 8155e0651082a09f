"""The ids of o200k Harmony that the distillation dataset uses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import Part, RoleCode, kind

BOS = 199998
EOD = 199999
"""`<|endoftext|>`: once after every conversation, not trained."""
RETURN, CHANNEL, START, END, CALL = 200002, 200005, 200006, 200007, 200012
CHANNEL_NAMES = {1: 35644, 2: 17196}
"""The token after `<|channel|>` in each span: `analysis` in 1, `final` in 2."""
VOCAB_SIZE = 201088
"""Ids of o200k Harmony, padded."""
ROLE_NAMES = {
    RoleCode.SYSTEM: 17360,
    RoleCode.DEVELOPER: 77944,
    RoleCode.USER: 1428,
    RoleCode.ASSISTANT: 173781,
}
"""The token after `<|start|>` of each role that the dataset has."""
ANALYSIS, FINAL = kind(RoleCode.ASSISTANT, Part.REASONING), kind(RoleCode.ASSISTANT, Part.CONTENT)
"""The kinds that stand for the spans 1 and 2 where documents are episodes; all else is 0."""


def kinds_of_spans(spans: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the kind of each span."""
    return _either(spans == 1, ANALYSIS, spans == 2, FINAL)


def spans_of_kinds(kinds: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the span of each kind that `kinds_of_spans` gives."""
    return _either(kinds == ANALYSIS, 1, kinds == FINAL, 2)


def spans_of_ids(ids: NDArray[np.integer], offsets: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Give every token of whole documents the span of its message, wrappers included.

    Text never becomes a control token, so a message goes from `<|start|>` to the next or to the EOD, the token after
    it is the role, and the one after `<|channel|>` the channel.
    """
    starts, channels = np.flatnonzero(ids == START), np.flatnonzero(ids[:-1] == CHANNEL)
    names, owners = ids[channels + 1], np.searchsorted(starts, channels, side="right") - 1
    message_spans = np.zeros(len(starts) + 1, dtype=np.uint8)  # the last is for tokens before any message
    for span, name in CHANNEL_NAMES.items():
        message_spans[owners[names == name]] = span
    message_spans[:-1][ids[np.minimum(starts + 1, len(ids) - 1)] != ROLE_NAMES[RoleCode.ASSISTANT]] = 0
    borders = np.concatenate([[0], starts, [len(ids)]])
    spans = np.repeat(np.append(np.uint8(0), message_spans[:-1]), np.diff(borders))
    spans[offsets[1:] - 1] = 0
    return spans


def _either(
    first: NDArray[np.bool_], first_code: int, second: NDArray[np.bool_], second_code: int
) -> NDArray[np.uint8]:
    """`first_code` where `first`, `second_code` where `second`, else 0."""
    # Much faster than a lookup table, which numpy indexes with 8 bytes; bytes multiply faster than booleans.
    codes: NDArray[np.uint8] = first.view(np.uint8) * np.uint8(first_code)
    codes |= second.view(np.uint8) * np.uint8(second_code)
    return codes
