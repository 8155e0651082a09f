"""Tries wheels in fresh environments: `python -m tests.try_wheels FOLDER`, as `make wheels` does.

The wheel that this machine can use is installed with every Python of `PYTHONS`, by uv, where no compiler can be found
and nothing is built: it starts, builds the bundled conversations, verifies the result, and never needs torch. The
source distribution is compiled. All must give the same files.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHATS = ROOT / "examples" / "data" / "conversations.jsonl"
CONSTRAINTS = ROOT / "constraints.txt"
PYTHONS = ("3.11", "3.12", "3.13")
SHELLS = ("bash", "zsh", "fish")
UV = Path(sys.executable).parent / "uv"
NO_TOOLS = "/nonexistent"
"""A PATH without a compiler, or anything else."""
WITHOUT_TORCH = """
import importlib.util
assert importlib.util.find_spec("torch") is None, "torch is installed"
assert importlib.util.find_spec("transformers") is None, "transformers is installed"
"""


def run(*command: str | Path, path: str | None = None, **variables: str) -> str:
    """Run a command that must succeed; gives what it printed.

    Args:
        command: The command and its arguments.
        path: The PATH; None for our own.
        variables: Further variables of the environment.
    """
    environment = {**os.environ, **variables}
    environment.pop("PYTHONPATH", None)
    if path is not None:
        environment["PATH"] = path
    words = [str(word) for word in command]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=environment, cwd=tempfile.gettempdir()
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def interpreter(version: str) -> Path | None:
    """Find a Python, or fetch it if the network allows; None where there is none."""
    for command in (("find",), ("install", "--quiet"), ("find",)):
        words = [UV, "python", *command, version]
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
        found = done.stdout.strip()
        if command == ("find",) and not done.returncode and found:
            return Path(found)
    return None


def install(package: Path, python: Path | str, env: Path, *, compiled: bool) -> None:
    """Make an environment with a package and what it needs.

    Args:
        package: The wheel, or the source distribution.
        python: The interpreter, or its version.
        env: The folder of the environment.
        compiled: Whether packages may be compiled, with the tools of this machine.
    """
    run(UV, "venv", "--quiet", "--python", python, env)
    here: list[str | Path] = [UV, "pip", "install", "--quiet", "--python", env / "bin" / "python", "-c", CONSTRAINTS]
    if compiled:
        run(*here, package)
    else:
        run(*here, "--only-binary", ":all:", package, path=NO_TOOLS)


def build(env: Path, home: Path, path: str | None) -> dict[str, bytes]:
    """Build and verify the bundled conversations; gives the files of the dataset."""
    chatmill = env / "bin" / "chatmill"
    options = ("-t", "bytes", "-T", "qwen3", "--add-control-tokens")
    run(chatmill, "build", CHATS, *options, "-o", home / "built", path=path)
    run(chatmill, "verify", home / "built", "--deep", path=path)
    files = (path for path in (home / "built").rglob("*") if path.is_file() and path.name != "manifest.json")
    return {path.relative_to(home / "built").as_posix(): path.read_bytes() for path in files}


def try_wheel(wheel: Path, python: Path, home: Path) -> dict[str, bytes]:
    """Try a wheel with one Python, without a compiler; gives the files that it builds."""
    env = home / "env"
    install(wheel, python, env, compiled=False)
    run(env / "bin" / "python", "-c", WITHOUT_TORCH, path=NO_TOOLS)

    # Both ways to start, and the words that a shell completes with.
    for command in ((env / "bin" / "chatmill",), (env / "bin" / "python", "-m", "chatmill")):
        assert "inspect" in run(*command, "--help", path=NO_TOOLS)
    for shell in SHELLS:
        script = run(env / "bin" / "chatmill", "--show-completion", shell, path=NO_TOOLS)
        assert "_CHATMILL_COMPLETE" in script, script
    completed = run(
        env / "bin" / "chatmill",
        path=NO_TOOLS,
        _CHATMILL_COMPLETE="complete_bash",
        COMP_WORDS="chatmill ins",
        COMP_CWORD="1",
    )
    assert completed.split() == ["inspect"], completed

    files = build(env, home, NO_TOOLS)
    print(f"{wheel.name}: built and verified with Python {run(python, '-V').split()[1]}", flush=True)
    return files


def try_tool(wheel: Path) -> None:
    """Start a wheel as a tool that is not installed, with `uvx`."""
    help_text = run(UV, "tool", "run", "--from", wheel, "chatmill", "--help")
    assert "inspect" in help_text, help_text
    print(f"uvx --from {wheel.name} chatmill --help: starts", flush=True)


def main() -> None:
    """Try the wheel for this machine and the source distribution of a folder."""
    here = f"{'macosx' if sys.platform == 'darwin' else 'linux'}*_{platform.machine()}"
    folder = Path(sys.argv[1])
    wheels, sources = sorted(folder.glob(f"*{here}.whl")), sorted(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sources) != 1:
        sys.exit(f"{folder} must have a wheel for this machine ({here}) and a source distribution, one of each")
    wheel, source = wheels[0].resolve(), sources[0].resolve()

    made = []
    for version in PYTHONS:
        python = interpreter(version)
        if python is None:
            print(f"Python {version}: NOT TRIED, none is here and none can be fetched", flush=True)
            continue
        with tempfile.TemporaryDirectory() as home:
            made.append(try_wheel(wheel, python, Path(home)))
    if not made:
        sys.exit("the wheel was tried with no Python")
    try_tool(wheel)

    with tempfile.TemporaryDirectory() as home:
        env = Path(home) / "env"
        install(source, sys.executable, env, compiled=True)
        made.append(build(env, Path(home), None))
        print(f"{source.name}: compiled, built and verified", flush=True)

    if any(files != made[0] for files in made):
        sys.exit("they build different files")
    print(f"all build the same {len(made[0])} files")


if __name__ == "__main__":
    main()
