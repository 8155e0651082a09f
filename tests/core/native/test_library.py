"""The compiled part: built from this source by any compiler, loaded whole or not at all, and run under sanitizers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import struct as packing
import subprocess
import sys
from pathlib import Path

import pytest

import hatch_build
from chatmill.core.native import library as loading
from chatmill.core.native.library import call, load_library, struct
from chatmill.errors import ChatmillError
from tests.core.native.mutations import SCANNED, mutated, real_lines

ROOT = Path(hatch_build.__file__).parent
SOURCE = ROOT / hatch_build.FOLDER / hatch_build.SOURCE
PROGRAM = Path(__file__).with_name("sanitized.c")
"""What the sanitizers run; it includes the source."""


def test_the_library_is_built_from_this_source_and_lies_where_both_sides_say() -> None:
    assert call("chatmill_source_checksum") == hatch_build.source_checksum(SOURCE), "stale: run `python hatch_build.py`"
    assert ROOT / hatch_build.FOLDER / hatch_build.LIBRARY == loading.PATH
    assert f"#define ABI_VERSION {loading.ABI_VERSION} " in SOURCE.read_text()
    assert struct(None, 5).tolist() == [0, 5], "nothing is a null pointer"


def test_importing_loads_nothing() -> None:
    script = (
        "import chatmill.core.native.library as l, chatmill.core.native.gather, chatmill.core.native.scan\n"
        "assert l.load_library.cache_info().currsize == 0"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_missing_broken_and_other_libraries_are_not_used(tmp_path: Path) -> None:
    changed = shutil.copytree(SOURCE.parent, tmp_path / "source") / SOURCE.name
    changed.write_text(SOURCE.read_text().replace("#define ABI_VERSION ", "#define ABI_VERSION 99"))
    hatch_build.compile_library(changed, tmp_path / "other.so", more=("-O0",))
    with pytest.raises(ChatmillError, match=r"it is of version 99\d+, and this is .* Install Chatmill again"):
        load_library(tmp_path / "other.so")
    (tmp_path / "broken.so").write_bytes(b"no library at all")
    for name in ("none.so", "broken.so"):
        with pytest.raises(ChatmillError, match=r"cannot be loaded: .*python hatch_build.py"):
            load_library(tmp_path / name)


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
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler} here")
    flags = [optimize, "-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-fPIC", "-DSOURCE_CHECKSUM=1"]
    command = [compiler, *flags, f"-I{SOURCE.parent}", "-c", str(source), "-o", str(tmp_path / "made.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_compilers_are_asked_for_found_or_come_from_pypi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"'{sys.executable}' -x")
    assert next(hatch_build.compilers()) == [sys.executable, "-x"]
    monkeypatch.setenv("CC", "no-such-compiler")
    assert ["no-such-compiler"] not in list(hatch_build.compilers())
    broken = tmp_path / "columns.c"
    broken.write_text("not C")
    with pytest.raises(RuntimeError, match=r"columns\.c was not compiled: "):
        hatch_build.compile_library(broken, tmp_path / "lib.so")
    hook = object.__new__(hatch_build.CustomBuildHook)
    hook.target_name = "wheel"  # type: ignore[misc]
    assert hook.dependencies() == []
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert hook.dependencies() == [hatch_build.ZIG]
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: name)
        assert [command[1:4] for command in hatch_build.compilers()] == [["-m", "ziglang", "cc"]]
        assert next(hatch_build.compilers("aarch64-macos.11.0"))[-2:] == ["-target", "aarch64-macos.11.0"]
    monkeypatch.setattr(hatch_build, "compilers", lambda target: iter(()))
    with pytest.raises(RuntimeError, match=r"no C compiler found"):
        hatch_build.compile_library(SOURCE, tmp_path / "lib.so")
    assert [path.name for path in tmp_path.iterdir()] == ["columns.c"], "a failing compiler leaves nothing"


@pytest.mark.slow
def test_no_byte_outside_of_a_buffer_is_touched(tmp_path: Path) -> None:
    """The address and undefined-behaviour sanitizers, over lines that are almost right."""
    compiler = next(hatch_build.compilers(), None)
    if compiler is None:
        pytest.skip("no C compiler here")
    (tmp_path / "empty.c").write_text("int main(void) { return 0; }\n")
    sanitizers = "-fsanitize=address,undefined"
    probe = [*compiler, sanitizers, str(tmp_path / "empty.c"), "-o", str(tmp_path / "empty")]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip(f"{compiler[0]} has no sanitizers here")
    flags = ("-O1", "-g", "-std=c11", sanitizers, "-fno-sanitize-recover=all", "-Wall", "-Wextra", f"-I{SOURCE.parent}")
    program = tmp_path / "main"
    subprocess.run([*compiler, *flags, str(PROGRAM), "-o", str(program)], check=True)
    read = lines = 0
    for seed in range(10):
        batch = [line for shape in SCANNED for line in mutated(6_000, 100 + seed, shape)]
        batch += real_lines() if seed == 0 else ()
        batch += [line[: len(line) * (i % 17) // 16] for i, line in enumerate(batch[:5000])]
        given = b"".join(packing.pack("=I", len(line)) + line for line in batch)
        quiet = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # looking for leaks needs more rights
        done = subprocess.run([program], input=given, capture_output=True, check=False, env=quiet)
        assert done.returncode == 0, done.stderr.decode(errors="replace")[-3000:]
        counts = list(map(int, done.stdout.split()))
        lines, read = lines + counts[0], read + counts[1]
        assert counts[4] > 0
        assert min(counts[5:]) > 0, "no template was replayed to its end"
    assert lines > 300_000, "every line under two shapes"
    assert 0.02 * lines < read < 0.95 * lines
