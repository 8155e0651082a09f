"""Tests of this folder run one way; those that write in bulk ask for both ways themselves."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def way() -> str:
    """Templates that write one conversation at a time use no compiled part."""
    return "one by one"
