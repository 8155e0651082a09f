"""The compiled part is built from this source, by any compiler that is there, and loaded whole or not at all."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hatch_build
from chatmill.core.native import library as loading
from chatmill.core.native.library import call, load_library
from chatmill.errors import ChatmillError

ROOT = Path(hatch_build.__file__).parent
SOURCE = ROOT / hatch_build.FOLDER / hatch_build.SOURCE


def test_the_library_is_built_from_this_source() -> None:
    assert call("chatmill_source_checksum") == hatch_build.source_checksum(SOURCE), "stale: run `python hatch_build.py`"


def test_both_sides_agree_where_the_library_lies() -> None:
    assert ROOT / hatch_build.FOLDER / hatch_build.LIBRARY == loading.PATH
    assert f"#define ABI_VERSION {loading.ABI_VERSION} " in SOURCE.read_text()


def test_importing_loads_nothing() -> None:
    script = (
        "import chatmill.core.native.library as l, chatmill.core.native.gather, chatmill.core.native.scan\n"
        "assert l.load_library.cache_info().currsize == 0"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_library_of_another_version_is_not_used(tmp_path: Path) -> None:
    changed = shutil.copytree(SOURCE.parent, tmp_path / "source") / SOURCE.name
    changed.write_text(SOURCE.read_text().replace("#define ABI_VERSION ", "#define ABI_VERSION 99"))
    hatch_build.compile_library(changed, tmp_path / "other.so", more=("-O0",))
    with pytest.raises(ChatmillError, match=r"it is of version 99\d+, and this is .* Install Chatmill again"):
        load_library(tmp_path / "other.so")


COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]


PROGRAM = Path(__file__).with_name("sanitized.c")
"""What the sanitizers run; it includes the source."""


@pytest.mark.parametrize(
    ("source", "optimize"),
    [
        (PROGRAM, "-O1"),
        pytest.param(SOURCE, "-O3", marks=pytest.mark.slow),
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


def test_missing_and_broken_libraries(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"no library at all")
    for name in ("none.so", "broken.so"):
        with pytest.raises(ChatmillError, match=r"cannot be loaded: .*python hatch_build.py"):
            load_library(tmp_path / name)


def test_a_failing_compiler_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "columns.c"
    broken.write_text("not C")
    with pytest.raises(RuntimeError, match=r"columns\.c was not compiled: "):
        hatch_build.compile_library(broken, tmp_path / "lib.so")
    monkeypatch.setattr(hatch_build, "compilers", lambda target: iter(()))
    with pytest.raises(RuntimeError, match=r"no C compiler found"):
        hatch_build.compile_library(SOURCE, tmp_path / "lib.so")
    assert [path.name for path in tmp_path.iterdir()] == ["columns.c"]


def test_the_compiler_that_is_asked_for_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"'{sys.executable}' -x")
    assert next(hatch_build.compilers()) == [sys.executable, "-x"]
    monkeypatch.setenv("CC", "no-such-compiler")
    assert ["no-such-compiler"] not in list(hatch_build.compilers())


def test_a_machine_without_a_compiler_gets_one_from_pypi(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = object.__new__(hatch_build.CustomBuildHook)
    hook.target_name = "wheel"  # type: ignore[misc]
    assert hook.dependencies() == []
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert hook.dependencies() == [hatch_build.ZIG]
    monkeypatch.setattr(hatch_build.importlib.util, "find_spec", lambda name: name)
    assert [command[1:4] for command in hatch_build.compilers()] == [["-m", "ziglang", "cc"]]
    assert next(hatch_build.compilers("aarch64-macos.11.0"))[-2:] == ["-target", "aarch64-macos.11.0"]
