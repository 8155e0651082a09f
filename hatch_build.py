"""Compiles the C part of Chatmill while it is installed; without a compiler the install goes on, and is slower.

`python hatch_build.py` compiles it in the source tree alone.
"""

from __future__ import annotations

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
REQUIRE = "CHATMILL_REQUIRE_NATIVE"
"""Set to 1 in the environment: a library that cannot be built is an error instead of a warning; to 0: none is built."""


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc]
    """Puts the library beside its source (editable installs use it there) and into wheels."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before files are collected."""
        if self.target_name != "wheel" or os.environ.get(REQUIRE) == "0":
            return
        folder = Path(self.root) / FOLDER
        try:
            compile_library(folder / SOURCE, folder / LIBRARY)
        except RuntimeError as error:
            if os.environ.get(REQUIRE) == "1":
                raise
            (folder / LIBRARY).unlink(missing_ok=True)  # of an older source
            self.app.display_warning(f"chatmill: {error}. It works without its compiled part, and is slower.")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"
        build_data["artifacts"].append(f"/{FOLDER.as_posix()}/{LIBRARY}")


def compile_library(source: Path, library: Path, *, more: Sequence[str] = ()) -> None:
    """Compile one C file to a shared library, which appears whole or not at all; `RuntimeError` where that fails."""
    checksum = f"-DSOURCE_CHECKSUM={source_checksum(source)}"
    temporary = library.with_name(f"{library.name}.{os.getpid()}.tmp")
    reasons = []
    try:
        for compiler in compilers():
            command = [*compiler, *FLAGS, checksum, *more, str(source), "-o", str(temporary)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                os.replace(temporary, library)
                return
            reasons.append(f"{compiler[0]} ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    finally:
        temporary.unlink(missing_ok=True)
    raise RuntimeError(
        f"{source.name} was not compiled: {'; '.join(reasons) or 'no C compiler found ($CC, cc, gcc, clang)'}"
    )


def compilers() -> Iterator[list[str]]:
    """The C compilers of this machine as commands, the one that is asked for first; none of them twice."""
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
