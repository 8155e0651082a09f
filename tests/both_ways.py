"""A fixture for folders of tests that are to pass with the compiled part and without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from chatmill.core.native.library import SWITCH

Made = TypeVar("Made")


WAYS = {"compiled": "1", "python": "0"}
BOTH = pytest.mark.parametrize("way", ["both"], indirect=True)
"""For tests that draw at random, and take each way themselves."""


def in_each_way(work: Callable[[], Made]) -> tuple[Made, Made]:
    """What some work makes with the compiled part and without it, for tests in which the rest is the same for both."""
    made = []
    for switch in WAYS.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(SWITCH, switch)
            made.append(work())
    return made[0], made[1]


@pytest.fixture(scope="module", params=list(WAYS), autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways to make columns of lines, and to copy ranges; processes that a test starts inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, WAYS.get(request.param, "1"))
        yield request.param
