"""What a source of a recipe says of files that agents left: tools, system prompt, unknown prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chatmill.compiler.recipe import Source
from chatmill.errors import ConfigError, RecordError
from chatmill.json_values import decoded
from chatmill.read.agents.branches import AgentOptions
from chatmill.read.agents.responses_items import plain_tools
from chatmill.read.part_shapes import plain_tool
from chatmill.read.shapes import find_shape


def agent_options(source: Source, base: Path | None = None) -> AgentOptions:
    """Read the files that a source names; relative names start from `base` (default: the current folder)."""
    home = base or Path()
    tools: tuple[Any, ...] = ()
    system = ""
    if source.tools_file is not None:
        tools = _read_tools(home / source.tools_file, source.tools_file)
    if source.system_file is not None:
        # One line end at the end of the file is the editor's, not the prompt's.
        system = _read_text(home / source.system_file, source.system_file).removesuffix("\n")
    return AgentOptions(
        format=None if source.shape is None else find_shape(source.shape).key,
        tools=tools,
        system=system,
        unknown_prompt=source.unknown_prompt,
    )


def _read_tools(path: Path, name: str) -> tuple[Any, ...]:
    try:
        tools = decoded(_read_text(path, name).encode())
    except RecordError as error:
        raise ConfigError(f"tools_file {name}: {error.message}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"tools_file {name} must hold a JSON list of tool definitions")
    return tuple(plain_tool(tool) for tool in plain_tools(tools) or ())


def _read_text(path: Path, name: str) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not UTF-8 text") from None
