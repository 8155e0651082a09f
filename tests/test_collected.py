"""No folder of tests is left out: pytest passes by folders with some names, such as `build`, unless told otherwise."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def test_every_folder_of_tests_is_collected(pytestconfig: pytest.Config) -> None:
    patterns = pytestconfig.getini("norecursedirs")
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    assert Path("build") in folders
    assert not [folder for folder in folders if any(fnmatch(part, p) for part in folder.parts for p in patterns)]
