"""Renderings of one conversation as paths: most begin as the whole conversation does, and leave it somewhere.

A rendering is a list of fragments. Of P(i), A(i) and F the first fragments are the same, so that each is kept as where
it leaves F and what it has from there on:

    F       u0  a1  u2  a3           Path(4, [])
    A(1)    u0  a1'                  Path(1, [a1'])
    P(3)    u0  a1  u2  prompt       Path(3, [prompt])

Two paths that leave F at different fragments part at the first of these, so that comparing them takes no look at what
they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from chatmill.render.jinja.tries import Output


class Path(NamedTuple):
    """A rendering by where it leaves the rendering of the whole conversation."""

    shared: int
    """Fragments that it begins with, as many as both have in common."""
    own: list[Output]
    """Its fragments from there on."""


class Paths:
    """Compares and reads the renderings of one conversation."""

    def __init__(self, whole: list[Output]) -> None:
        """`whole` is the rendering of the whole conversation; empty where the template refuses it."""
        self.whole = whole
        self.whole_path = Path(len(whole), [])

    def path(self, outputs: list[Output]) -> Path:
        """Make a path of a whole list of fragments."""
        shared = count_common(self.whole, outputs)
        return Path(shared, outputs[shared:])

    def size(self, path: Path) -> int:
        """Count the fragments of a path."""
        return path.shared + len(path.own)

    def part(self, path: Path, first: int, stop: int | None = None) -> list[Output]:
        """List the fragments from one place to another, or to the end."""
        shared, own = path
        if first >= shared:
            return own[first - shared : None if stop is None else max(stop - shared, 0)]
        if stop is not None and stop <= shared:
            return self.whole[first:stop]
        return self.whole[first:shared] + own[: None if stop is None else stop - shared]

    def listed(self, path: Path) -> list[Output]:
        """List all fragments of a path."""
        return self.part(path, 0)

    def at(self, path: Path, place: int) -> Output:
        """Return one fragment."""
        return self.whole[place] if place < path.shared else path.own[place - path.shared]

    def joined(self, path: Path, stop: int, more: Sequence[Output]) -> Path:
        """Make a path of the first fragments of one, and of others after them."""
        shared = min(path.shared, stop)
        own = [*self.part(path, shared, stop), *more]
        more_shared = count_common(self.whole[shared:], own)
        return Path(shared + more_shared, own[more_shared:])

    def common(self, one: Path, other: Path) -> int:
        """Count the fragments that two paths begin with alike."""
        if one.shared != other.shared:
            return min(one.shared, other.shared)
        return one.shared + count_common(one.own, other.own)


def count_common(one: Sequence[Output], other: Sequence[Output]) -> int:
    """Count the fragments that two lists begin with alike."""
    low = 0
    high = min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    if high > 2 and one[: high - 2] == other[: high - 2]:  # most part near the end
        low = high - 2
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
