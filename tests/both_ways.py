"""A fixture for folders of tests that are to pass with the compiled part and without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chatmill.core.native.library import SWITCH


@pytest.fixture(scope="module", params=["compiled", "msgspec"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways to make columns of lines, and to copy ranges; processes that a test starts inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "1" if request.param == "compiled" else "0")
        yield request.param
