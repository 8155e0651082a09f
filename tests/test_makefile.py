"""What the Makefile calls is there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_modules_and_scripts_of_the_makefile_exist() -> None:
    text = (ROOT / "Makefile").read_text()
    modules = re.findall(r"python -m (\S+)", text)
    assert {"pytest", "benchmarks.run"} <= set(modules)
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    scripts = re.findall(r"python (\S+\.py)", text)
    assert "examples/demo.py" in scripts
    assert [name for name in scripts if not (ROOT / name).is_file()] == []
