"""Options that several commands have: one name, one short form, one help and one completion for each."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer


def _tokenizers() -> list[str]:
    return ["o200k", "bytes"]


def _templates() -> list[str]:
    from chatmill.render.registry import template_names

    return list(template_names())


def _policies() -> list[str]:
    from chatmill.label.presets import PRESETS, packaged_policies

    return [*PRESETS, *packaged_policies()]


def _shapes() -> list[str]:
    from chatmill.read.shapes import SHAPES, packaged_shapes

    return [*SHAPES, *packaged_shapes()]


def _members(module: str, name: str) -> Callable[[], list[str]]:
    """Completes the members of an enumeration, which is imported when it is asked for."""
    return lambda: list(map(str, getattr(importlib.import_module(f"chatmill.{module}"), name)))


def _splits() -> list[str]:
    """Folders with files in them, below the dataset that is already on the command line.

    The line is read from what the shell sends (bash, then the others): typer parses no half-written one.
    """
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    folders = [Path(word).expanduser() for word in line.split()[2:]]
    return sorted({path.name for folder in folders if folder.is_dir() for path in folder.iterdir() if _is_split(path)})


def _is_split(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".") and any(path.iterdir())


TOKENIZER: Any = typer.Option(
    "--tokenizer", "-t", metavar="NAME", autocompletion=_tokenizers,
    help="o200k, bytes, a tokenizer.json or its folder, a cached hub model, or a .tiktoken file.",
)  # fmt: skip
PATTERN: Any = typer.Option("--pattern", metavar="REGEX", help="Split pattern of a .tiktoken file.")
TEMPLATE: Any = typer.Option(
    "--template", "-T", metavar="NAME", autocompletion=_templates,
    help="A model folder, a bundled template's name, or a .jinja or .py file.",
)  # fmt: skip
TRUST_TEMPLATE: Any = typer.Option(
    "--trust-template", metavar="SHA256", help="Run the Python template that the data names, if this is its hash."
)
TEMPLATE_OPTION: Any = typer.Option(
    "--template-option", metavar="NAME=VALUE", help="An option the template reads, such as enable_thinking=false."
)
DATE: Any = typer.Option("--date", metavar="YYYY-MM-DD", help="Today's date, for templates that ask for it.")
EXPAND: Any = typer.Option(
    "--expand", metavar="NAME", autocompletion=_members("render.jinja.options", "Expand"),
    help="Turns that later messages change: turns (own rows), last, or none.",
)  # fmt: skip
UNPROVED: Any = typer.Option(
    "--unproved", metavar="NAME", autocompletion=_members("render.jinja.options", "Unproved"),
    help="Answers without a proof: refuse the record, or train none of that turn.",
)  # fmt: skip
STRICT_TEXT: Any = typer.Option("--strict-text", help="Text never becomes an added token, such as <think>.")
POLICY: Any = typer.Option(
    "--policy", "-p", metavar="NAME", autocompletion=_policies,
    help="What is trained: a policy's name or .json file; default: the template's own.",
)  # fmt: skip
SHAPE: Any = typer.Option(
    "--shape",
    metavar="NAME",
    autocompletion=_shapes,
    help="Shape of the records: a name, or the path of a shape file; default: detected.",
)
MAP: Any = typer.Option(
    "--map", metavar="NAME=FIELD", help="A field of the records: user=question, assistant=answer, messages=dialog, ..."
)
PREFERENCES: Any = typer.Option(
    "--preferences", metavar="NAME", autocompletion=lambda: ["chosen"],
    help="chosen: train the chosen answers of preference pairs, leave out label: false.",
)  # fmt: skip
OVERFLOW: Any = typer.Option(
    "--overflow",
    metavar="NAME",
    autocompletion=_members("pack.overflow", "Overflow"),
    help="What happens to what is longer than --max-length.",
)
PACK: Any = typer.Option(
    "--pack", metavar="NAME", autocompletion=_members("pack.plan", "Strategy"), help="How rows are packed."
)
SPLIT: Any = typer.Option("--split", metavar="NAME", autocompletion=_splits, help="Only this split, such as train.")
WORKERS: Any = typer.Option("--workers", "-w", metavar="N", min=0, help="Processes; default: all cores.")
RESUME: Any = typer.Option("--resume", help="Continue where an earlier run stopped.")
QUIET: Any = typer.Option("--quiet", "-q", help="No progress bar (there is none without a terminal).")
ON_ERROR: Any = typer.Option(
    "--on-error",
    metavar="NAME",
    autocompletion=_members("compiler.recipe", "OnError"),
    help="fail or quarantine.",
)
ENGINE: Any = typer.Option("--engine", metavar="NAME", autocompletion=lambda: ["local", "ray"], help="local or ray.")
RAY_ADDRESS: Any = typer.Option("--ray-address", metavar="URL", help="An existing Ray cluster.")
JSON: Any = typer.Option("--json", help="Print JSON instead, for scripts.")
COUNT: Any = typer.Option("--count", "-n", metavar="N", min=0, help="How many to show.")
FULL: Any = typer.Option("--full", help="Show long texts whole.")
"""Each is the second argument of an `Annotated`; typer copies it for every command."""


def shape_or_map(shape: str | None, pairs: list[str] | None) -> str | None:
    """The shape that `--shape` names or `--map` describes; None for neither."""
    if not pairs:
        return shape
    from chatmill.errors import ConfigError
    from chatmill.read.field_maps import mapped_shape, parse_map

    if shape is not None:
        raise ConfigError(f"--map says what the fields are called, and so does --shape {shape}: give one of them")
    return mapped_shape(parse_map(pairs))


def report_not_read(patterns: list[str]) -> None:
    """What is not read in folders that are given as input: one line each on standard error."""
    from chatmill.compiler.paths import not_read_sentences
    from chatmill.look.safe_text import visible

    for sentence in not_read_sentences(patterns):
        typer.secho(visible(sentence), fg="yellow", err=True)


def report_missing_library() -> None:
    """One line on standard error where the compiled part is missing, with the way to get it."""
    from chatmill.core.native.library import is_missing

    if is_missing():
        typer.secho(
            "The compiled part of Chatmill is missing, so this build is slower. To get it, install a wheel for this "
            "platform; or install a C compiler, and then Chatmill again.",
            fg="yellow",
            err=True,
        )


def template_options(given: list[str] | None) -> dict[str, Any] | None:
    """`NAME=VALUE` pairs; a value that is JSON is taken as such, anything else as text."""
    from chatmill.errors import ConfigError

    found: dict[str, Any] = {}
    for pair in given or ():
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise ConfigError(f"--template-option is NAME=VALUE, not {pair!r}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found or None
