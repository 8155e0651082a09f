"""Make small session files with the real programs of Claude Code and Codex, which talk to a stand-in on loopback.

    python tools/agent_files/vendor_sessions.py NODE_BIN tests/data/agents

`NODE_BIN` holds `claude` (npm @anthropic-ai/claude-code 2.1.197) and `codex` (npm @openai/codex 0.169.0). Neither
needs an account. Texts of the programs themselves (system prompts, reminders) are cut to their first letters.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LONGEST = 400
PORT = 8787
CODEX = f"""model = "gpt-5"
model_provider = "standin"
[model_providers.standin]
name = "standin"
base_url = "http://127.0.0.1:{PORT}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
CODEX_FLAGS = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]


def cut(value: Any) -> Any:
    """Return a value with its long texts cut."""
    if isinstance(value, str):
        return value if len(value) <= LONGEST else f"{value[:40]}..."
    if isinstance(value, list):
        return [cut(one) for one in value]
    if isinstance(value, dict):
        # What a program tells its model in reminders is its maker's text, and no reader needs it.
        reminder = value.get("attachment")
        own = {"attachment": {"type": reminder["type"]}} if isinstance(reminder, dict) else {}
        return {key: cut(one) for key, one in value.items()} | own
    return value


def cut_lines(path: Path, home: str) -> str:
    """Return the lines of a file with long texts cut, and without the name of the folder that it was made in."""
    lines = [json.dumps(cut(json.loads(line)), ensure_ascii=False) for line in path.read_text().splitlines()]
    return re.sub(re.escape(home), "/home", "\n".join(lines)) + "\n"


def request_lines(path: Path, home: str) -> str:
    """Return the messages that were sent, without system prompts, tools and reminders."""
    lines = []
    for line in path.read_text().splitlines():
        request = json.loads(line)["request"]
        messages = cut(without_reminders(request.get("messages") or request.get("input")))
        lines.append(json.dumps(messages, ensure_ascii=False))
    return re.sub(re.escape(home), "/home", "\n".join(lines)) + "\n"


def without_reminders(value: Any) -> Any:
    """Return a value with texts that end where a reminder of the program begins."""
    if isinstance(value, str):
        return value.partition("<system-reminder>")[0].rstrip()
    if isinstance(value, list):
        return [without_reminders(one) for one in value]
    if isinstance(value, dict):
        return {key: without_reminders(one) for key, one in value.items()}
    return value


def wait_for(port: int) -> None:
    """Wait until the server takes connections."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)


def run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Run a program that may take a minute."""
    subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, check=True, timeout=120)


def main(programs: Path, out: Path) -> None:
    """Make all files."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home, "work")
        folder.mkdir()
        for name in ("claude", "codex", "subagents"):
            requests = Path(home, f"{name}.jsonl")
            here = Path(__file__).parent / "stand_in_server.py"
            server = subprocess.Popen([sys.executable, str(here), str(PORT), str(requests)])
            wait_for(PORT)
            try:
                files = RUNS[name](programs, folder, home)
            finally:
                server.terminate()
                server.wait()
            target = out / FOLDERS[name]
            target.mkdir(parents=True, exist_ok=True)
            for number, path in enumerate(files):
                place = target / f"session_{number}.jsonl"
                if "subagents" in path.parts:
                    place = target / "session_0" / "subagents" / path.name
                    place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(cut_lines(path, home))
            (target / "requests.json").write_text(request_lines(requests, home))


def claude_environment(home: str) -> dict[str, str]:
    """Return the environment in which Claude Code talks to the stand-in."""
    environment = {**os.environ, "HOME": home, "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{PORT}"}
    return environment | {
        "ANTHROPIC_API_KEY": "sk-none",
        "DISABLE_TELEMETRY": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def run_subagents(programs: Path, folder: Path, home: str) -> list[Path]:
    """Run a session that gives a task to a subagent; its own file comes first."""
    away = Path(home, "elsewhere")
    away.mkdir()
    flags = ["--allowedTools", "Bash,Agent", "--model", "claude-sonnet-4-5"]
    environment = claude_environment(home)
    run([str(programs / "claude"), "-p", "Delegate.", *flags], away, environment)
    (project,) = Path(home, ".claude", "projects").glob("*elsewhere")
    return sorted(project.rglob("*.jsonl"), key=lambda path: len(path.parts))


def run_claude(programs: Path, folder: Path, home: str) -> list[Path]:
    """Run a session, go on, compact it, go on, and fork it."""
    environment = claude_environment(home)
    flags = ["--allowedTools", "Bash", "--model", "claude-sonnet-4-5"]
    program = str(programs / "claude")
    run([program, "-p", "List what there is.", *flags], folder, environment)
    for text in ("And again.", "/compact", "Once more."):
        run([program, "-p", text, "-c", *flags], folder, environment)
    run([program, "-p", "Fork it.", "-c", "--fork-session", *flags], folder, environment)
    return sorted(Path(home, ".claude", "projects").rglob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)


def run_codex(programs: Path, folder: Path, home: str) -> list[Path]:
    """Run a session, and go on."""
    settings = Path(home, "codex-home")
    settings.mkdir()
    (settings / "config.toml").write_text(CODEX)
    environment = {**os.environ, "HOME": home, "CODEX_HOME": str(settings), "OPENAI_API_KEY": "none"}
    program = str(programs / "codex")
    run([program, "exec", *CODEX_FLAGS, "List what there is."], folder, environment)
    run([program, "exec", "resume", "--last", *CODEX_FLAGS, "And again."], folder, environment)
    return sorted((settings / "sessions").rglob("rollout-*.jsonl"))


RUNS = {"claude": run_claude, "codex": run_codex, "subagents": run_subagents}
FOLDERS = {"claude": "claude_code", "codex": "codex", "subagents": "claude_code_subagents"}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
