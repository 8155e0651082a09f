"""Brings the faults of `tests/faults.py` into fresh interpreters that have this folder in PYTHONPATH."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[1] / "faults.py"))["install"]()
