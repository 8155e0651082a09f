"""The compiled part is built and used wherever a compiler is there, and everything works without it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hatch_build
from chatmill.core.native import library as loading
from chatmill.core.native.library import library, load_library

ROOT = Path(hatch_build.__file__).parent
SOURCE = ROOT / hatch_build.FOLDER / hatch_build.SOURCE
HAS_COMPILER = any(True for _ in hatch_build.compilers())
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler here")


@needs_compiler
def test_the_library_is_built_from_this_source() -> None:
    found = library()
    assert found is not None, "there is a compiler, and no library: run `python hatch_build.py`"
    assert found.chatmill_source_checksum() == hatch_build.source_checksum(SOURCE), "stale: run `python hatch_build.py`"


def test_both_sides_agree_where_the_library_lies() -> None:
    assert ROOT / hatch_build.FOLDER / hatch_build.LIBRARY == loading.PATH
    assert f"#define ABI_VERSION {loading.ABI_VERSION} " in SOURCE.read_text()


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATMILL_NATIVE", "0")
    assert library() is None
    monkeypatch.setenv("CHATMILL_NATIVE", "1")
    assert library() is load_library(loading.PATH)


def test_importing_loads_nothing() -> None:
    script = (
        "import chatmill.core.native.library as l, chatmill.core.native.gather, chatmill.core.native.scan\n"
        "assert l.load_library.cache_info().currsize == 0"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@needs_compiler
def test_a_library_of_another_version_is_not_used(tmp_path: Path) -> None:
    changed = shutil.copytree(SOURCE.parent, tmp_path / "source") / SOURCE.name
    changed.write_text(SOURCE.read_text().replace("#define ABI_VERSION ", "#define ABI_VERSION 99"))
    hatch_build.compile_library(changed, tmp_path / "other.so", more=("-O0",))
    assert load_library(tmp_path / "other.so") is None
    hatch_build.compile_library(SOURCE, tmp_path / "same.so", more=("-Wall", "-Wextra", "-Werror", "-pedantic"))
    assert load_library(tmp_path / "same.so") is not None


COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]


def test_at_least_one_compiler_looks_for_warnings() -> None:
    assert COMPILERS, "install gcc or clang: the C code is only checked where it is compiled"


PROGRAM = Path(__file__).with_name("sanitized.c")
"""What the sanitizers run; it includes the source."""


@pytest.mark.parametrize(
    ("source", "optimize"),
    [
        (SOURCE, "-O3"),
        (PROGRAM, "-O1"),
        pytest.param(SOURCE, "-O1", marks=pytest.mark.slow),
        pytest.param(PROGRAM, "-O3", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_the_source_has_no_warnings(tmp_path: Path, compiler: str, source: Path, optimize: str) -> None:
    if compiler not in COMPILERS:
        pytest.skip(f"no {compiler} here")
    flags = [optimize, "-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-fPIC", "-DSOURCE_CHECKSUM=1"]
    command = [compiler, *flags, f"-I{SOURCE.parent}", "-c", str(source), "-o", str(tmp_path / "made.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_missing_and_broken_libraries_are_not_there(tmp_path: Path) -> None:
    assert load_library(tmp_path / "none.so") is None
    (tmp_path / "broken.so").write_bytes(b"no library at all")
    assert load_library(tmp_path / "broken.so") is None


def test_a_failing_compiler_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "columns.c"
    broken.write_text("not C")
    with pytest.raises(RuntimeError, match=r"columns\.c was not compiled: "):
        hatch_build.compile_library(broken, tmp_path / "lib.so")
    monkeypatch.setattr(hatch_build, "compilers", lambda: iter(()))
    with pytest.raises(RuntimeError, match=r"no C compiler found"):
        hatch_build.compile_library(SOURCE, tmp_path / "lib.so")
    assert [path.name for path in tmp_path.iterdir()] == ["columns.c"]


def test_the_compiler_that_is_asked_for_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"'{sys.executable}' -x")
    assert next(hatch_build.compilers()) == [sys.executable, "-x"]
    monkeypatch.setenv("CC", "no-such-compiler")
    assert ["no-such-compiler"] not in list(hatch_build.compilers())
