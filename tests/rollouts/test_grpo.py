"""GRPO through TRL's own trainer, on a CPU: the trainer's log-probabilities of sampled ids are the sampler's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run_example(*options: str) -> tuple[int, dict[str, Any]]:
    """Run the example; return its status and what it found."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "grpo_tool.py"), "--steps", "2", *options]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"device"')]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    return done.returncode, json.loads(lines[0])


@pytest.mark.slow
def test_the_trainer_has_the_samplers_log_probabilities() -> None:
    status, found = run_example()
    assert (status, found["log_probabilities"]) == (0, "agree")
    assert found["steps"] == 2
    assert found["rows_compared"] == found["episodes"] > 0
    assert found["proved"] == found["answers"] == 2 * found["episodes"]
    # Ids that the tokenizer would not give: it is these that re-encoding loses.
    assert found["not_canonical"] > found["episodes"] / 2


@pytest.mark.slow
def test_ids_that_are_encoded_again_are_found_by_their_log_probabilities() -> None:
    status, found = run_example("--reencode")
    assert (status, found["log_probabilities"]) == (1, "DIFFER")
    assert found["largest_difference"] > 0.1
