"""A plugin of pytest that writes, for each test that passes, its seconds and the blocks of Chatmill it reaches."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import sitecustomize  # type: ignore[import-not-found]  # the file next to this

FOLDER = Path(os.environ["CHATMILL_REACHED"])
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
FILE = FOLDER / f"{WORKER}.txt"
os.environ["CHATMILL_REACHED_FILE"] = str(FILE)
states: dict[str, tuple[bool, float]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Collect what one test reaches."""
    sitecustomize.seen.clear()
    FILE.write_text("")
    result = yield
    passed, seconds = states.pop(item.nodeid, (False, 0.0))
    if passed:
        blocks = sorted(set(FILE.read_text().split()))
        with (FOLDER / f"{WORKER}.jsonl").open("a") as file:
            file.write(json.dumps({"name": item.nodeid, "seconds": round(seconds, 3), "blocks": blocks}) + "\n")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note whether all stages passed, and their seconds."""
    report = yield
    passed, seconds = states.get(item.nodeid, (True, 0.0))
    states[item.nodeid] = (passed and report.passed, seconds + report.duration)
    return report
