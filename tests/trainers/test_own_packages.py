"""The adapters, each in the real package that it is for, in a process of its own.

`make test-trainers` installs the packages into `.trainers/NAME`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKS = Path(__file__).parent / "own_packages"
STAND_INS = ROOT / "tests" / "export" / "own_readers" / "stand_ins"
NAMES = ("axolotl", "verl", "tinker", "ms-swift", "nemo-automodel", "llamafactory", "levanter")


@pytest.mark.trainers
@pytest.mark.parametrize("name", NAMES)
def test_the_adapter_runs_in_the_real_package(name: str, tmp_path: Path) -> None:
    package = ROOT / ".trainers" / name
    assert package.is_dir(), f"{package} is missing: run `make test-trainers`"
    path = os.pathsep.join(map(str, [ROOT / "src", ROOT, package, STAND_INS]))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"HF_HOME": str(tmp_path), "AXOLOTL_DO_NOT_TRACK": "1", "USE_HF": "1", "JAX_PLATFORMS": "cpu"}
    checks = CHECKS / f"{name.replace('-', '_')}_checks.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "-n", "0", str(checks)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
