"""What a token is: a role and a part, packed into one uint8 code that is written together with the token."""

from __future__ import annotations

from enum import IntEnum
from functools import cache

import numpy as np
from numpy.typing import NDArray


class RoleCode(IntEnum):
    """Who a token belongs to; `NONE` is for tokens of no message (BOS, EOD, padding)."""

    NONE = 0
    SYSTEM = 1
    DEVELOPER = 2
    USER = 3
    ASSISTANT = 4
    TOOL = 5
    IMAGE = 6
    """A picture, whoever shows it; its part is `CONTENT`, and no policy trains it."""


class Part(IntEnum):
    """Which part of its message a token is."""

    PAD = 0
    HEADER = 1
    """Everything that opens a message, up to and including the last token of a generation prompt."""
    CONTENT = 2
    REASONING = 3
    """Reasoning text with the marks around it (`<think>` ... `</think>`)."""
    TOOL_CALL = 4
    """A call with the marks around it."""
    TERMINATOR = 5
    """The token that ends a turn, which a model must learn to emit."""
    SEPARATOR = 6
    """What a template writes after the terminator (a newline in ChatML)."""
    DOCUMENT = 7
    """Beginning or end of the whole document (BOS, EOD); its role is NONE."""


PARTS = 8
KINDS = len(RoleCode) * PARTS
"""Every code without flags is smaller than this."""
MARK = 64
"""Flag of text that a template writes inside an answer or a message: the marks around reasoning and calls, say."""
REPEATED = 128
"""Flag of an answer that is context in this document: it is trained in another, has weight 0, or cannot be proved."""
PLAIN = MARK - 1
"""Takes both flags off a code."""
PICTURE = 6 * PARTS + 2
"""The code of all tokens of a picture: those that its pixels take the place of, and what begins and ends it."""
RULE = f"kinds are codes from 0 to {KINDS - 1}, with or without the flags {MARK} and {REPEATED}"
"""What a stored kind must be."""


def kind(role: RoleCode, part: Part) -> int:
    """Return the code of a role and a part, in 0..KINDS-1; `kind(NONE, PAD)` is 0."""
    return int(role) * PARTS + int(part)


@cache  # a slow reference asks for every token
def role_of(code: int) -> RoleCode:
    """Return the role of one code."""
    return RoleCode((code & PLAIN) // PARTS)


@cache
def part_of(code: int) -> Part:
    """Return the part of one code."""
    return Part(code % PARTS)


def roles_of(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Role codes of an array of kinds, element by element."""
    return (codes & np.uint8(PLAIN)) // np.uint8(PARTS)


def parts_of(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Part codes of an array of kinds, element by element."""
    return codes % np.uint8(PARTS)


def role_name(code: int) -> str:
    """Return the name of a role where tokens are counted; those of no message are `document`."""
    return "document" if code == RoleCode.NONE else RoleCode(code).name.lower()


def kind_name(code: int) -> str:
    """Return a readable name such as `assistant.content`, with its flags after a `+`; the padding kind is `pad`."""
    if code == 0:
        return "pad"
    flags = "+mark" * bool(code & MARK) + "+repeated" * bool(code & REPEATED)
    return f"{role_of(code).name.lower()}.{part_of(code).name.lower()}{flags}"
