"""The compiled part under the address and undefined-behaviour sanitizers, over lines that are almost right."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import pytest

import hatch_build
from tests.core.native.mutations import SCANNED, mutated, real_lines

LINES = 300_000
SANITIZERS = "-fsanitize=address,undefined"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = next(hatch_build.compilers(), None)
    if compiler is None:
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("sanitized")
    source = Path(hatch_build.__file__).parent / hatch_build.FOLDER
    flags = ("-O1", "-g", "-std=c11", SANITIZERS, "-fno-sanitize-recover=all", "-Wall", "-Wextra", f"-I{source}")
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    probe = [*compiler, SANITIZERS, str(folder / "empty.c"), "-o", str(folder / "empty")]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip(f"{compiler[0]} has no sanitizers here")
    main = Path(__file__).with_name("sanitized.c")
    subprocess.run([*compiler, *flags, str(main), "-o", str(folder / "main")], check=True)
    return folder / "main"


@pytest.mark.slow
def test_no_byte_outside_of_a_buffer_is_touched(program: Path) -> None:
    read = lines = 0
    for seed in range(LINES // 30_000):
        batch = [line for shape in SCANNED for line in mutated(6_000, 100 + seed, shape)]
        batch += real_lines() if seed == 0 else ()
        batch += [line[: len(line) * (i % 17) // 16] for i, line in enumerate(batch[:5000])]
        given = b"".join(struct.pack("=I", len(line)) + line for line in batch)
        # Leaks are not looked for, which needs more rights.
        quiet = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
        done = subprocess.run([program], input=given, capture_output=True, check=False, env=quiet)
        assert done.returncode == 0, done.stderr.decode(errors="replace")[-3000:]
        counts = list(map(int, done.stdout.split()))
        lines, read = lines + counts[0], read + counts[1]
        assert counts[4] > 0
        assert min(counts[5:]) > 0, "no template was replayed, or no document written, to its end"
    assert lines > LINES, "every line under two shapes"
    assert 0.02 * lines < read < 0.95 * lines
