"""The adapters, each with the real package that it is for.

`make test-trainers` installs every package into a folder of its own, `.trainers/NAME`, from the pins in
`own_packages/NAME.txt`. Its checks run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("renderers", "tinker", "verl")


@pytest.mark.trainers
@pytest.mark.parametrize("name", PACKAGES)
def test_the_adapter_runs_in_the_real_package(name: str) -> None:
    package = ROOT / ".trainers" / name
    assert package.is_dir(), f"{package} is missing: run `make test-trainers`"
    more = [ROOT / ".trainers" / "renderers"] if name == "tinker" else []
    path = os.pathsep.join(map(str, [ROOT / "src", ROOT, package, *more]))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    checks = Path(__file__).parent / "own_packages" / f"{name}_checks.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "-n", "0", str(checks)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
