"""A folder for tests that write and sync a lot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.writing import folder


@pytest.fixture
def home() -> Iterator[Path]:
    with folder() as path:
        yield path
