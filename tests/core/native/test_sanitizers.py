"""Every function of the compiled part under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hatch_build
from chatmill.core.native.trees import RowColumns, grow_trees, tree_ends

ROOT = Path(hatch_build.__file__).parent
SOURCE = ROOT / hatch_build.FOLDER / hatch_build.SOURCE
DRIVER = Path(__file__).with_name("sanitized.c")
FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
QUIET = "detect_leaks=0:allocator_may_return_null=1"
"""Looking for leaks needs more rights; an array that is too large is an error of NumPy."""


def exported() -> set[str]:
    """The functions that the library has for Python."""
    sources = [SOURCE, *SOURCE.parent.glob("*.h")]
    return {name for path in sources for name in re.findall(r"^EXPORT .*?(chatmill_\w+)\(", path.read_text(), re.M)}


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The library as the sanitizers need it, and the environment of a process that loads it."""
    libraries = []
    for name in ("libasan.so", "libubsan.so"):
        found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=False)
        if found.returncode or not Path(found.stdout.strip()).is_absolute():
            pytest.skip(f"no gcc with {name} here")
        libraries.append(found.stdout.strip())
    library = tmp_path_factory.mktemp("sanitized") / hatch_build.LIBRARY
    command = ["gcc", "-std=c11", "-fPIC", "-shared", *FLAGS, str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True)
    # before all others, as address sanitizers must be; Python's and NumPy's memory comes from it then
    quiet = {"ASAN_OPTIONS": QUIET, "PYTHONMALLOC": "malloc", "LD_PRELOAD": ":".join(libraries)}
    return library, {**os.environ, **quiet}


@pytest.mark.parametrize(("rounds", "seed"), [(100, 1), pytest.param(4000, 10**6, marks=pytest.mark.slow)])
def test_no_wrapper_lets_a_number_lead_out_of_an_array(
    sanitized: tuple[Path, dict[str, str]], rounds: int, seed: int
) -> None:
    library, environment = sanitized
    command = [sys.executable, "-m", "tests.core.native.fuzz_wrappers", str(library), str(rounds), str(seed)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    by_driver = set(re.findall(r"chatmill_\w+", DRIVER.read_text()))
    missed = exported() - set(done.stdout.split()) - by_driver
    assert missed <= {"chatmill_abi_version", "chatmill_source_checksum"}, "these run under no sanitizer"
    assert len(set(done.stdout.split())) > 30


def test_the_sanitizers_see_what_leads_out_of_an_array(sanitized: tuple[Path, dict[str, str]]) -> None:
    """Otherwise a silent test above would say nothing."""
    library, environment = sanitized
    code = (
        "import sys; from pathlib import Path; import numpy as np; from chatmill.core.native import library\n"
        "library.PATH = Path(sys.argv[1]); data = np.zeros(8, dtype=np.uint8)\n"
        "library.call('chatmill_count_lines', data, 0, 9)"
    )
    command = [sys.executable, "-c", code, str(library)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


def test_parents_and_counts_that_lead_out_of_their_arrays_are_refused() -> None:
    none = np.empty(0, dtype=np.int64)
    for parent in (-2, 1, 5, 1 << 62, -(1 << 63)):
        rows = RowColumns(
            ids=np.zeros(2, dtype=np.int32),
            offsets=np.array([0, 1, 2]),
            kinds=np.zeros(2, dtype=np.uint8),
            weights=np.zeros(2, dtype=np.float32),
            kept=np.ones(2, dtype=np.uint8),
            later=np.zeros(2, dtype=np.uint8),
            parents=np.array([-1, parent]),
            begins=np.zeros(2, dtype=np.int64),
        )
        with pytest.raises(IndexError):
            grow_trees(rows, np.array([0, 2]), 8)
    huge = np.full(4, 1 << 62)
    for lengths, branches in ((np.ones(4, dtype=np.int64), huge), (huge, np.zeros(4, dtype=np.int64))):
        with pytest.raises(IndexError):
            tree_ends(lengths, branches, none, none)
