"""Sides: which answer of a pair a document holds, or whether people liked it."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import MARK, Part, RoleCode, kind


class Side(IntEnum):
    """What people said of an answer; a pair is a chosen document, followed by the rejected one."""

    NONE = 0
    """Nothing: an ordinary document."""
    CHOSEN = 1
    REJECTED = 2
    LIKED = 3
    """A document without a partner, whose label is true (KTO)."""
    DISLIKED = 4
    PAIR = 5
    """Both documents of a pair as one tree: the trunk ends in the chosen answer, the branch in the rejected one."""


IS_ANSWER: NDArray[np.bool_] = np.zeros(256, dtype=np.bool_)
"""For each kind, whether it is that of an answer which is not context."""
for _part in (Part.CONTENT, Part.REASONING, Part.TOOL_CALL, Part.TERMINATOR):
    IS_ANSWER[[kind(RoleCode.ASSISTANT, _part), kind(RoleCode.ASSISTANT, _part) | MARK]] = True
SIDE_NAMES = {side.value: side.name.lower() for side in Side}
