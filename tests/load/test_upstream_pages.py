"""The reports for transformers: their reproductions run, print what the pages say, and are short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "upstream"


@pytest.mark.slow  # what they show is in transformers, of a pinned version
@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_a_reproduction_prints_what_its_page_says(page: Path) -> None:
    (script,), (printed,) = (
        re.findall(rf"```{kind}\n(.*?)```", page.read_text(), re.DOTALL) for kind in ("python", "text")
    )
    assert len(script.splitlines()) <= 40
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == printed
