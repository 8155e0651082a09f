"""Folders for builds that sync quickly."""

from __future__ import annotations

from tests.compiler.conftest import fast, fast_module

__all__ = ["fast", "fast_module"]
