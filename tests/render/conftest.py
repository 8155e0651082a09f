"""Every test of this folder runs with the compiled part and without it."""

from __future__ import annotations

from tests.both_ways import way

__all__ = ["way"]
