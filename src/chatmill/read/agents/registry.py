"""Find the formats of agents' files, and read them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from chatmill.errors import RecordError, fault_of
from chatmill.json_values import decoded
from chatmill.read.agents.agent_file import AgentFile
from chatmill.read.agents.branches import AgentOptions, AgentRun, run_records
from chatmill.read.agents.claude_code import is_claude_code, read_claude_code
from chatmill.read.agents.codex import is_codex, read_codex
from chatmill.read.agents.openhands import read_completion_log, read_openhands_events
from chatmill.read.agents.openhands_marks import is_completion_log, is_openhands_event
from chatmill.read.agents.request_logs import is_request_log, read_request_log
from chatmill.read.agents.swe_agent import is_mini_swe_agent, is_swe_agent, read_mini_swe_agent, read_swe_agent
from chatmill.read.agents.verifiers import is_verifiers, is_verifiers_output, read_verifiers, read_verifiers_outputs
from chatmill.read.lines import BOM, LINE_LIMIT
from chatmill.read.places import Place

VERSION = 1
"""Of what is made of agents' files; another one makes them anew."""
HEAD_LINES = 32
"""Lines at the start of a file from which its format is found."""


@dataclass(frozen=True, kw_only=True)
class AgentFormat:
    """One kind of file from an agent."""

    name: str
    fits: Callable[[Mapping[str, Any]], bool]
    """Whether a line, or the one value of a file, is of this kind."""
    read: Callable[[AgentFile], Iterator[AgentRun]]


AGENT_FORMATS: Mapping[str, AgentFormat] = {
    one.name: one
    for one in (
        AgentFormat(name="verifiers", fits=is_verifiers, read=read_verifiers),
        AgentFormat(name="verifiers_outputs", fits=is_verifiers_output, read=read_verifiers_outputs),
        AgentFormat(name="claude_code", fits=is_claude_code, read=read_claude_code),
        AgentFormat(name="codex", fits=is_codex, read=read_codex),
        AgentFormat(name="swe_agent", fits=is_swe_agent, read=read_swe_agent),
        AgentFormat(name="mini_swe_agent", fits=is_mini_swe_agent, read=read_mini_swe_agent),
        AgentFormat(name="openhands_log", fits=is_completion_log, read=read_completion_log),
        AgentFormat(name="openhands", fits=is_openhands_event, read=read_openhands_events),
        AgentFormat(name="request_log", fits=is_request_log, read=read_request_log),
    )
}
"""In the order in which they are tried."""


def format_of_head(head: bytes, read_more: Callable[[int], bytes]) -> str:
    """Find the format of a file from its beginning.

    Returns "" for files of other kinds.

    Args:
        head: First bytes of the file.
        read_more: Returns so many first bytes, for a first line that is longer.
    """
    text = head.removeprefix(BOM).lstrip()
    if not text.startswith((b"{", b"[")):
        # Not JSON, perhaps a bomb: no more of it is unpacked here.
        return ""

    lines = head.removeprefix(BOM).split(b"\n")
    whole = lines if len(head) < 1 << 16 else lines[:-1]
    if not whole:
        # Graphs with token ids have lines of many megabytes.
        first = read_more(LINE_LIMIT).removeprefix(BOM).partition(b"\n")[0]
        whole = [first]
    for line in whole[:HEAD_LINES]:
        name = _format_of_line(line)
        if name:
            return name
    is_one_value = text.startswith(b"[") or (text.startswith(b"{") and whole[0].strip() == b"{")
    if is_one_value:
        return _format_of_value(read_more(LINE_LIMIT).removeprefix(BOM))
    return ""


def _format_of_line(line: bytes) -> str:
    if not line.lstrip().startswith(b"{"):
        return ""
    return _format_of_value(line)


def _format_of_value(data: bytes) -> str:
    try:
        value = decoded(data)
    except RecordError:
        return ""
    entries = value[:HEAD_LINES] if isinstance(value, list) else [value]
    for entry in entries:
        for one in AGENT_FORMATS.values():
            if isinstance(entry, Mapping) and one.fits(entry):
                return one.name
    return ""


def agent_records(path: Place, name: str, options: AgentOptions | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of an agent's file.

    They are conversations in OpenAI's form, and refusals.

    Args:
        path: The file.
        name: Name of its format.
        options: What the recipe says of it.
    """
    options = options or AgentOptions()
    try:
        for run in AGENT_FORMATS[name].read(AgentFile(path)):
            yield from run_records(run, name, options)
    except Exception as error:
        # What is left of the file is lost then, and one refused record says so.
        fault = AgentRun(path.name, [], errors=[fault_of(error)])
        yield from run_records(fault, name, options)


def options_key(options: AgentOptions, stem: str) -> str:
    """Hash everything that decides the records of a file."""
    text = json.dumps([VERSION, options.as_json(), stem], sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
