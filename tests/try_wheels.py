"""Tries wheels in fresh environments: `python -m tests.try_wheels FOLDER`, as `make wheels` does.

Each wheel is installed alone with what it needs, names its version, builds the bundled conversations and verifies the
result. All wheels must give the same files.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHATS = ROOT / "examples" / "data" / "conversations.jsonl"
WITHOUT = "without its compiled part"


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
    version = run(env / "chatmill", "--version").strip()
    is_pure = wheel.name.endswith("-none-any.whl")
    if is_pure != (WITHOUT in version):
        sys.exit(f"{wheel.name} says {version!r}")
    said = run(
        env / "chatmill",
        "build",
        CHATS,
        "-t",
        "bytes",
        "-T",
        "chatml",
        "--add-control-tokens",
        "--on-error",
        "quarantine",
        "-o",
        home / "built",
    )
    if said.count("compiled part") != is_pure:
        sys.exit(f"{wheel.name}: a build says {said.count('compiled part')} times that the compiled part is missing")
    run(env / "chatmill", "verify", home / "built", "--deep")
    print(f"{wheel.name}: {version}; built and verified", flush=True)
    files = (path for path in (home / "built").rglob("*") if path.is_file() and path.name != "manifest.json")
    return {path.relative_to(home / "built").as_posix(): path.read_bytes() for path in files}


def main() -> None:
    wheels = sorted(Path(sys.argv[1]).glob("*.whl"))
    if not wheels:
        sys.exit(f"no wheels in {sys.argv[1]}")
    made = []
    for wheel in wheels:
        with tempfile.TemporaryDirectory() as home:
            made.append(tried(wheel.resolve(), Path(home)))
    if any(files != made[0] for files in made):
        sys.exit("the wheels build different files")
    print(f"{len(wheels)} wheels build the same {len(made[0])} files")


if __name__ == "__main__":
    main()
