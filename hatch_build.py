"""Compiles the C part of Chatmill while it is installed: with the compiler of the machine, or with Zig from PyPI.

`python hatch_build.py` compiles it in the source tree alone.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script, or imported by a test, where nothing is being installed
    BuildHookInterface = object

FOLDER = Path("src/chatmill/core/native")
SOURCE = "columns.c"
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
LIBRARY = f"_columns{SUFFIX}"
FLAGS = ("-O3", "-std=c11", "-fPIC", "-shared", "-fvisibility=hidden")
ZIG = "ziglang>=0.14,<0.16"
"""A wheel with a C compiler, for machines that have none, and for the wheels of other machines."""
TARGET = "CHATMILL_TARGET"
"""Set in the environment to one of `TARGETS`: the wheel of that platform is built."""
TARGETS = {
    "x86_64-linux-gnu.2.17": ("manylinux_2_17_x86_64.manylinux2014_x86_64", ".so"),
    "aarch64-linux-gnu.2.17": ("manylinux_2_17_aarch64.manylinux2014_aarch64", ".so"),
    "x86_64-macos.11.0": ("macosx_11_0_x86_64", ".dylib"),
    "aarch64-macos.11.0": ("macosx_11_0_arm64", ".dylib"),
}
"""What Zig calls a platform, what wheels call it, and the suffix of its libraries."""


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc]
    """Puts the library beside its source (editable installs use it there) and into wheels."""

    def dependencies(self) -> list[str]:
        """What a build needs beyond hatchling."""
        return [ZIG] if self.target_name == "wheel" and next(machine_compilers(), None) is None else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before files are collected."""
        if self.target_name != "wheel":
            return
        folder, target = Path(self.root) / FOLDER, os.environ.get(TARGET)
        tag, suffix = TARGETS[target] if target else (platform_tag(), SUFFIX)
        library = f"_columns{suffix}"
        compile_library(folder / SOURCE, folder / library, target=target)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"
        build_data["artifacts"].append(f"/{FOLDER.as_posix()}/{library}")


def compile_library(source: Path, library: Path, *, more: Sequence[str] = (), target: str | None = None) -> None:
    """Compile one C file to a shared library, which appears whole or not at all; `RuntimeError` if that fails."""
    checksum = f"-DSOURCE_CHECKSUM={source_checksum(source)}"
    temporary = library.with_name(f"{library.name}.{os.getpid()}.tmp")
    reasons = []
    try:
        for compiler in compilers(target):
            command = [*compiler, *FLAGS, checksum, *more, str(source), "-o", str(temporary)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                os.replace(temporary, library)
                return
            reasons.append(f"{' '.join(compiler)} ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    finally:
        temporary.unlink(missing_ok=True)
    none = f"no C compiler found ($CC, cc, gcc, clang); install one, or {ZIG.partition('>')[0]} from PyPI"
    raise RuntimeError(f"{source.name} was not compiled: {'; '.join(reasons) or none}")


def compilers(target: str | None = None) -> Iterator[list[str]]:
    """C compilers as commands: those of this machine, then Zig; Zig alone if they compile for another machine."""
    if target is None:
        yield from machine_compilers()
    if importlib.util.find_spec("ziglang"):
        zig = [sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline"]
        yield zig if target is None else [*zig, "-target", target]


def machine_compilers() -> Iterator[list[str]]:
    """The C compilers of this machine, the one that is asked for first; none of them twice."""
    seen = set()
    for command in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"):
        words = shlex.split(command or "")
        if words and shutil.which(words[0]) and words[0] not in seen:
            seen.add(words[0])
            yield words


def source_checksum(source: Path) -> int:
    """Tells one state of the source and the headers beside it from another; the library knows it."""
    files = [source, *sorted(source.parent.glob("*.h"))]
    return zlib.crc32(b"".join(path.read_bytes() for path in files))


def platform_tag() -> str:
    """The platform of this machine, as the name of a wheel says it, without a claim about other Linux systems."""
    from packaging.tags import sys_tags

    return next(tag.platform for tag in sys_tags() if "manylinux" not in tag.platform and "musl" not in tag.platform)


if __name__ == "__main__":
    here = Path(__file__).parent / FOLDER
    compile_library(here / SOURCE, here / LIBRARY)
