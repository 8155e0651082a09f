"""The script that takes the pictures of the docs runs, and the pictures that are there are small enough."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
NAMES = {"overview", "browse", "episode", "kinds-dark", "diff", "block"}
LARGEST = 300_000


@pytest.mark.slow
def test_the_script_takes_all_pictures(tmp_path: Path, browser: Any) -> None:
    assert browser.is_connected()
    script = ROOT / "examples" / "screenshots.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {f"view-{name}.png" for name in NAMES}
    assert all(10_000 < path.stat().st_size < LARGEST for path in tmp_path.iterdir())
