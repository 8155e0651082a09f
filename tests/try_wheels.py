"""Tries wheels in fresh environments: `python -m tests.try_wheels FOLDER`, as `make wheels` does.

Each one that this machine can use, and the source distribution, is installed with what it needs, builds the bundled
conversations and verifies the result. All must give the same files.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHATS = ROOT / "examples" / "data" / "conversations.jsonl"


def run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def tried(wheel: Path, home: Path) -> dict[str, bytes]:
    """The files that a build makes in an environment with this wheel alone."""
    venv.create(home / "env", with_pip=True)
    env = home / "env" / "bin"
    run(env / "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel)
    options = ("-t", "bytes", "-T", "qwen3", "--add-control-tokens")
    run(env / "chatmill", "build", CHATS, *options, "-o", home / "built")
    run(env / "chatmill", "verify", home / "built", "--deep")
    print(f"{wheel.name}: built and verified", flush=True)
    files = (path for path in (home / "built").rglob("*") if path.is_file() and path.name != "manifest.json")
    return {path.relative_to(home / "built").as_posix(): path.read_bytes() for path in files}


def main() -> None:
    here = f"{'macosx' if sys.platform == 'darwin' else 'linux'}*_{platform.machine()}"
    folder = Path(sys.argv[1])
    wheels = [*sorted(folder.glob(f"*{here}.whl")), *folder.glob("*.tar.gz")]
    if len(wheels) != 2:
        sys.exit(f"{folder} has {len(wheels)} of a wheel for this machine ({here}) and a source distribution")
    made = []
    for wheel in wheels:
        with tempfile.TemporaryDirectory() as home:
            made.append(tried(wheel.resolve(), Path(home)))
    if any(files != made[0] for files in made):
        sys.exit("they build different files")
    print(f"both build the same {len(made[0])} files")


if __name__ == "__main__":
    main()
