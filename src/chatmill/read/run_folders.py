"""Find runs of agents in several files of one folder."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from chatmill.read.agents.openhands_marks import is_completion_log, is_openhands_event

EVENTS = "events"
SUBAGENTS = "subagents"
DEEPEST = 4
"""Folders between a named one and the events in it: OpenHands has `users/NAME/conversations/ID/events`."""
EVENT_NAME = re.compile(r"(?:event-)?(\d+)(?:-.*)?\.json")
"""Names of OpenHands: `17.json`, and `event-00017-ID.json`."""
CALL_NAME = re.compile(r".+?-(\d+(?:\.\d+)?)(?:-[0-9a-f]{4,})?(?:-error)?\.json")
"""Names of OpenHands' completion logs: the model, the time, and in newer releases four digits."""
SUBAGENT_NAME = "agent-*.jsonl"
TRAJECTORY_ENDINGS = (".traj", ".traj.json")
"""SWE-agent and mini-swe-agent write one file into a folder for each task."""
ROLLOUT_NAME = re.compile(r"rollout-\d{4}-\d\d-\d\dT.+\.jsonl(\.zst)?")
"""Names of Codex, which packs old files; a file that is there twice counts as it is unpacked."""
SESSION_NAME = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\.jsonl")
"""Names of Claude Code."""
EARLY_SUBAGENT_NAME = re.compile(r"agent-[0-9a-f]+\.jsonl")
"""Early releases write the files of subagents next to those of sessions."""
HEAD = 1 << 20
"""Bytes from which one file is told to be an event or a call."""


@dataclass(frozen=True)
class RunFiles:
    """The files of one run, in order."""

    files: tuple[Path, ...]

    @property
    def state(self) -> str:
        """Names, sizes and times of the files, as a text."""
        found: list[tuple[str, int, int]] = []
        for path in self.files:
            status = path.stat()
            found.append((str(path), status.st_size, status.st_mtime_ns))
        return json.dumps(found)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.files)

    @property
    def mtime_ns(self) -> int:
        """Time of the last change."""
        return max(path.stat().st_mtime_ns for path in self.files)

    def write(self, out: IO[bytes]) -> None:
        """Write the files as lines.

        A file of JSON becomes one line.
        """
        for path in self.files:
            with path.open("rb") as source:
                if path.suffix == ".jsonl":
                    _copy_lines(source, out)
                else:
                    # Line ends between the parts of a JSON value are only white space.
                    out.write(source.read().replace(b"\r", b" ").replace(b"\n", b" ") + b"\n")


def run_files(folder: Path) -> RunFiles | None:
    """Find the files of the one run in a folder.

    Returns None for every other folder.
    """
    for find in (_event_files, _call_files, _session_files):
        files = find(folder)
        if files:
            return RunFiles(tuple(files))
    return None


def agent_inputs(folder: Path) -> list[str]:
    """List the runs of agents in a folder: folders and files."""
    if run_files(folder) is not None:
        return [str(folder)]
    sessions = _project_sessions(folder)
    if sessions:
        return sessions
    found = list(_runs_below(folder, DEEPEST))
    # Files in the folder itself are read as those of any folder.
    is_deep = any(path.parent != folder or path.is_dir() for path in found)
    return [str(path) for path in found] if is_deep else []


def _event_files(folder: Path) -> list[Path]:
    """List the events of a conversation of OpenHands."""
    home = folder if _has_events(folder) else folder / EVENTS
    if not _has_events(home):
        return []
    return [path for _, path in sorted(_numbered(home, EVENT_NAME, int))]


def _has_events(folder: Path) -> bool:
    return _first_fits(_numbered(folder, EVENT_NAME, int), is_openhands_event)


def _call_files(folder: Path) -> list[Path]:
    """List the completion logs of a folder, by time."""
    found = sorted(_numbered(folder, CALL_NAME, float))
    return [path for _, path in found] if _first_fits(found, is_completion_log) else []


def _session_files(folder: Path) -> list[Path]:
    """List the files of a session and its subagents."""
    if not (folder / SUBAGENTS).is_dir():
        return []
    agents = sorted((folder / SUBAGENTS).rglob(SUBAGENT_NAME))
    own = folder.with_name(f"{folder.name}.jsonl")
    return [own, *agents] if agents and own.is_file() else agents


def _project_sessions(folder: Path) -> list[str]:
    """List the sessions of a project with subagents."""
    found: list[str] = []
    has_subagents = False
    for name in _names(folder):
        path = folder / name
        if path.suffix == ".jsonl" and path.is_file():
            run = _with_subagents(path)
            has_subagents = has_subagents or run != path
            found.append(str(run))
    return found if has_subagents else []


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the runs below a folder."""
    names = _names(folder) if depth else []
    packed = packed_copies(names)
    for name in names:
        path = folder / name
        if path.is_file():
            if _is_run_file(name) and name not in packed:
                yield _with_subagents(path)
        elif _event_files(path):
            yield path
        elif f"{name}.jsonl" not in names:
            yield from _runs_below(path, depth - 1)


def packed_copies(names: list[str]) -> set[str]:
    """Find packed rollouts that are also there unpacked."""
    known = set(names)
    packed = [name for name in names if name.endswith(".zst") and ROLLOUT_NAME.fullmatch(name)]
    return {name for name in packed if name.removesuffix(".zst") in known}


def _is_run_file(name: str) -> bool:
    """Check for a file name that only agents give."""
    if name.endswith(TRAJECTORY_ENDINGS):
        return True
    return any(pattern.fullmatch(name) for pattern in (ROLLOUT_NAME, SESSION_NAME, EARLY_SUBAGENT_NAME))


def _with_subagents(session: Path) -> Path:
    """Find the folder of a session with subagents, or else the file itself."""
    home = session.with_suffix("")
    return home if _session_files(home) else session


def _names(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError:
        return []


def _numbered(
    folder: Path, pattern: re.Pattern[str], number: Callable[[str], float]
) -> list[tuple[tuple[float, str], Path]]:
    """List the files with numbered names."""
    found: list[tuple[tuple[float, str], Path]] = []
    for name in _names(folder):
        match = pattern.fullmatch(name)
        if match is not None:
            found.append(((number(match[1]), name), folder / name))
    return found


def _first_fits(found: list[tuple[tuple[float, str], Path]], fits: Callable[[Mapping[str, Any]], bool]) -> bool:
    """Check the first JSON file for a kind."""
    for _, path in sorted(found)[:3]:
        try:
            with path.open("rb") as file:
                value = json.loads(file.read(HEAD))
        except (OSError, ValueError, RecursionError):
            continue
        return isinstance(value, dict) and fits(value)
    return False


def _copy_lines(source: IO[bytes], out: IO[bytes]) -> None:
    """Copy a file of lines, and end its last line."""
    shutil.copyfileobj(source, out)
    source.seek(0, os.SEEK_END)
    if source.tell():
        source.seek(-1, os.SEEK_END)
        if source.read(1) != b"\n":
            out.write(b"\n")
