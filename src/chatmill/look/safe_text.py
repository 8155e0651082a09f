"""Text of conversations made safe for a terminal: nothing in it moves the cursor, colours or turns the line around."""

from __future__ import annotations

DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that turn the reading direction, and would so change what other text seems to say."""
FORMATS = (0xAD, 0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180E, 0x200B, *range(0x2060, 0x2070), *range(0xFFF9, 0xFFFC))
"""Characters without a picture; those that join letters and emoji are left alone."""
UNSEEN = (*range(0x80, 0xA0), 0x2028, 0x2029, 0xFEFF, *FORMATS, *DIRECTIONS)

_SHOWN: dict[int, str] = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\u2421"}
_SHOWN |= {code: f"\\u{code:04x}" for code in UNSEEN}
_PLAIN = _SHOWN | {0x0A: "\n", 0x09: "    "}
_MARKED = _SHOWN | {0x0A: "\u23ce\n", 0x09: "\u21e5\t"}


def visible(text: str, *, mark_newlines: bool = True) -> str:
    """Make control and direction characters visible; the result is safe to print in a terminal.

    Newlines and tabs are marked and kept; without `mark_newlines` a newline is only kept, and a tab is four blanks.
    """
    return text.translate(_MARKED if mark_newlines else _PLAIN)
