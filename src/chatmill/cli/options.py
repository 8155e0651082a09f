"""Options that several commands have: one name, one short form, one help and one completion for each."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable
from typing import Any

import typer


def option(names: str, metavar: str, help: str, **more: Any) -> Any:
    """An option with a value, such as `option("--out -o", "DIR", "Where to write.")`; `more` as for `typer.Option`."""
    return typer.Option(*names.split(), metavar=metavar, help=help, **more)


def flag(names: str, help: str, **more: Any) -> Any:
    """An option that is there or not, such as `flag("--full", "Show everything.")`."""
    return typer.Option(*names.split(), help=help, **more)


def argument(metavar: str, help: str, **more: Any) -> Any:
    """An argument, such as `argument("FILE", "What to read.")`."""
    return typer.Argument(metavar=metavar, help=help, **more)


def _tokenizers() -> list[str]:
    return ["o200k", "bytes"]


def _templates() -> list[str]:
    from chatmill.render.registry import bundled_names

    return list(bundled_names())


def _policies() -> list[str]:
    from chatmill.label.presets import PRESETS

    return list(PRESETS)


def _shapes() -> list[str]:
    from chatmill.read.shapes import SHAPES

    return list(SHAPES)


def _members(module: str, name: str) -> Callable[[], list[str]]:
    """Completes the members of an enumeration, which is imported when it is asked for."""
    return lambda: list(map(str, getattr(importlib.import_module(f"chatmill.{module}"), name)))


def grouped(shared: Any, panel: str) -> Any:
    """A shared option in a group of the help of one command."""
    own = copy.copy(shared)
    own.rich_help_panel = panel
    return own


TOKENIZER: Any = option(
    "--model --tokenizer -m -t",
    "NAME",
    "The folder of your model, or a cached hub model; o200k, bytes, a tokenizer.json.",
    autocompletion=_tokenizers,
)
TEMPLATE: Any = option(
    "--template -T",
    "NAME",
    "A model folder, a bundled template's name, or a .jinja file.",
    autocompletion=_templates,
)
SET: Any = option("--set", "KEY=VALUE", "Any other key of the recipe, such as pack.length=4096 or preferences=chosen.")
TEMPLATE_SET: Any = option(
    "--set", "KEY=VALUE", "date=YYYY-MM-DD, or an option of the template: template_options.enable_thinking=false."
)
EXPAND: Any = option(
    "--expand",
    "NAME",
    "Turns that later messages change: turns (own sequences), tree (the same, stored once), last, or none.",
    autocompletion=_members("render.jinja.options", "Expand"),
)
POLICY: Any = option(
    "--policy -p",
    "NAME",
    "What is trained: a policy's name or .json file; default: the template's own.",
    autocompletion=_policies,
)
SHAPE: Any = option(
    "--shape",
    "NAME",
    "Shape of the records; default: detected. --map reads others.",
    autocompletion=_shapes,
)
MAP: Any = option(
    "--map", "NAME=FIELD", "A field of the records: user=question, assistant=answer, messages=dialog, ..."
)
OVERFLOW: Any = option(
    "--overflow",
    "NAME",
    "What happens to what is longer than --max-length.",
    autocompletion=_members("pack.overflow", "Overflow"),
)
PACK: Any = option("--pack", "NAME", "How rows are packed.", autocompletion=_members("pack.plan", "Strategy"))
SPLIT: Any = option("--split", "NAME", "Only this split, such as train.")
WORKERS: Any = option("--workers -w", "N", "Processes; default: all cores.", min=0)
RESUME: Any = flag("--resume", "Continue where an earlier run stopped.")
QUIET: Any = flag("--quiet -q", "No progress bar (there is none without a terminal).")
ON_ERROR: Any = option(
    "--on-error", "NAME", "fail or quarantine.", autocompletion=_members("compiler.recipe", "OnError")
)
ENGINE: Any = option("--engine", "NAME", "local or ray.", autocompletion=_members("compiler.engines.named", "ENGINES"))
RAY_ADDRESS: Any = option("--ray-address", "URL", "An existing Ray cluster.")
JSON: Any = flag("--json", "Print JSON instead, for scripts.")
COUNT: Any = option("--count -n", "N", "How many to show.", min=0)
FULL: Any = flag("--full", "Show long texts whole.")
"""Each is the second argument of an `Annotated`; typer copies it for every command."""


def shape_or_map(shape: str | None, pairs: list[str] | None) -> str | None:
    """The shape that `--shape` names or `--map` describes; None for neither."""
    if not pairs:
        return shape
    from chatmill.errors import ConfigError
    from chatmill.read.field_maps import map_text, parse_map

    if shape is not None:
        raise ConfigError(f"--map says what the fields are called, and so does --shape {shape}: give one of them")
    return map_text(parse_map(pairs))


def report_not_read(patterns: list[str]) -> None:
    """What is not read in folders that are given as input: one line each on standard error."""
    from chatmill.compiler.paths import not_read_sentences
    from chatmill.look.safe_text import visible

    for sentence in not_read_sentences(patterns):
        typer.secho(visible(sentence), fg="yellow", err=True)


def template_settings(given: list[str] | None) -> tuple[dict[str, Any], str | None]:
    """Options of the template, and the date, of a --set that takes no other keys."""
    from chatmill.errors import UnknownNameError

    found = settings(given)
    date = found.pop("date", None)
    for key in found:
        if not key.startswith("template_options."):
            raise UnknownNameError("key", key, ["date", "template_options.NAME"])
    return {key.partition(".")[2]: value for key, value in found.items()}, date


def settings(given: list[str] | None) -> dict[str, Any]:
    """`KEY=VALUE` pairs of --set, values as JSON if they are, else as text; `packing.max_length` is inside another."""
    from chatmill.errors import ConfigError

    found: dict[str, Any] = {}
    for pair in given or ():
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"--set is KEY=VALUE, not {pair!r}")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found
