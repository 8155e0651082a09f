"""Options that several commands have: one name, one short form, one help and one completion for each."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import typer

from chatmill.errors import ConfigError

VALUES = {int: "an integer >= 0", bool: "true or false", str: "a text", list: "a JSON list"}


def option(names: str, metavar: str, help: str, **more: Any) -> Any:
    """Declare an option with a value: `option("--out -o", "DIR", "Where to write.")`; `more` as for `typer.Option`.

    What says where to write takes no URL, unless its help says that it does.
    """
    if names.startswith(("--out", "--save")) and "URL" not in help:
        more["callback"] = refuse_url
    return typer.Option(*names.split(), metavar=metavar, help=help, **more)


def refuse_url(value: Any) -> Any:
    """Refuse a URL where only files of this machine are written."""
    if value is not None:
        from chatmill.files.remote import address

        if (url := address(value)) is not None:
            raise ConfigError(
                f"{url}: this is written to files of this machine alone; a dataset (chatmill build) and an export are "
                "what is written to a URL"
            )
    return value


def flag(names: str, help: str, **more: Any) -> Any:
    """Declare an option without a value, such as `flag("--full", "Show everything.")`."""
    return typer.Option(*names.split(), metavar="", help=help, **more)


def argument(metavar: str, help: str, **more: Any) -> Any:
    """Declare an argument, such as `argument("FILE", "What to read.")`."""
    return typer.Argument(metavar=metavar, help=help, **more)


def dataset_folder(path: Path, *, whole: bool = False) -> Path:
    """Return the folder of a dataset that may be at a URL; what the command prints has the URL then.

    `whole`: all of it is fetched at once.
    """
    from chatmill.files.remote import local_folder

    name_url(path)
    return local_folder(path, whole=whole)


def name_url(path: str | Path) -> bool:
    """Print a URL, until the command ends, in place of the local folder behind it; return whether it is one."""
    from chatmill.cli.statuses import AT_END
    from chatmill.files.remote import address, named_output

    if address(path) is None:
        return False
    AT_END.enter_context(named_output())
    return True


def _names(module: str, name: str) -> Callable[[], list[str]]:
    """Complete the members of an enumeration, the keys of a table or what a function lists, imported when needed."""

    def listed() -> list[str]:
        members = getattr(importlib.import_module(f"chatmill.{module}"), name)
        return list(map(str, members if isinstance(members, type) or not callable(members) else members()))

    return listed


def grouped(shared: Any, panel: str) -> Any:
    """Put a shared option into a group of one command's help."""
    copied = copy.copy(shared)
    copied.rich_help_panel = panel
    return copied


TOKENIZER: Any = option(
    "--model --tokenizer -m -t",
    "NAME",
    "The folder of your model, or a cached hub model; o200k, bytes, a tokenizer.json.",
    autocompletion=lambda: ["o200k", "bytes"],
)
TEMPLATE: Any = option(
    "--template -T",
    "NAME",
    "A model folder, a bundled template's name, or a .jinja file.",
    autocompletion=_names("render.registry", "bundled_names"),
)
SET: Any = option("--set", "KEY=VALUE", "Any other key of the recipe, such as pack.length=4096 or preferences=chosen.")
TEMPLATE_SET: Any = option(
    "--set",
    "KEY=VALUE",
    "date=YYYY-MM-DD, answers=, no_reasoning= and thinking_close= as in a recipe, or an option of the template: "
    "template_options.enable_thinking=false.",
)
EXPAND: Any = option(
    "--expand",
    "NAME",
    "Turns that later messages change: turns (own documents), tree (the same, stored once), last, or none.",
    autocompletion=_names("render.jinja.options", "Expand"),
)
POLICY: Any = option(
    "--policy -p",
    "NAME",
    "What is trained: a policy's name or .json file; default: the template's own.",
    autocompletion=_names("label.presets", "PRESETS"),
)
SHAPE: Any = option(
    "--shape --map",
    "NAME",
    "Shape of the records; default: detected. Others by their fields: --shape user=question --shape assistant=answer.",
    autocompletion=_names("read.shapes", "SHAPES"),
)
OVERFLOW: Any = option(
    "--overflow",
    "NAME",
    "What becomes of longer ones: error (the default), drop, drop_oldest_turns, turns, last_turns, windows or cut.",
    autocompletion=_names("pack.overflow", "Overflow"),
)
PACK: Any = option(
    "--pack",
    "NAME",
    "How rows are packed: best_fit, first_fit or greedy.",
    autocompletion=_names("pack.plan", "Strategy"),
)
SPLIT: Any = option("--split", "NAME", "Only this split, such as train.")
WORKERS: Any = option("--workers -w", "N", "Processes; default: all cores.", min=0)
RESUME: Any = flag("--resume", "Continue where an earlier run stopped.")
QUIET: Any = flag("--quiet -q", "No progress bar (there is none without a terminal).")
ON_ERROR: Any = option("--on-error", "NAME", "fail or quarantine.", autocompletion=_names("compiler.recipe", "OnError"))
ENGINE: Any = option(
    "--engine",
    "NAME",
    "local or ray (RAY_ADDRESS names a cluster).",
    autocompletion=_names("compiler.engines.ray_engine", "ENGINES"),
)
JSON: Any = flag("--json", "Print JSON instead, for scripts.")
COUNT: Any = option("--count -n", "N", "How many to show.", min=0)
FULL: Any = flag("--full", "Show long texts whole.")
"""Each is the second argument of an `Annotated`; typer copies it for every command."""


def refuse_no_model(files: list[str]) -> NoReturn:
    """Raise the error for a command that writes tokens while no model is named; files that are missing come first."""
    from chatmill.compiler.paths import resolve_paths
    from chatmill.errors import ConfigError
    from chatmill.tokenizer.hub_cache import cached_models

    resolve_paths(files)
    cached = cached_models()
    known = f" In the Hugging Face cache of this machine: {', '.join(cached[:5])}." if cached else ""
    raise ConfigError(
        f"name the model that the tokens are for: --model FOLDER, or owner/model if it is cached here.{known} To try "
        "without one: --model o200k --template harmony, or --model o200k --template chatml --add-control-tokens"
    )


def shape_of(values: list[str] | None) -> str | None:
    """Return the shape that `--shape` names, or describes field by field; None without `--shape`."""
    from chatmill.errors import ConfigError
    from chatmill.read.field_maps import map_text, parse_map

    if not values or (len(values) == 1 and "=" not in values[0]):
        return values[0] if values else None
    if named := [text for text in values if "=" not in text]:
        raise ConfigError(f"--shape {named[0]} says what all fields are called: give it alone, or NAME=FIELD pairs")
    return map_text(parse_map(values))


def report_not_read(patterns: list[str]) -> None:
    """Report what is not read in input folders: one line each on standard error."""
    from chatmill.compiler.paths import not_read_sentences
    from chatmill.look.safe_text import visible

    for sentence in not_read_sentences(patterns):
        typer.secho(visible(sentence), fg="yellow", err=True)


def template_settings(pairs: list[str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse a --set that takes options of the template, and the few keys of a recipe that are about templates."""
    from chatmill.errors import UnknownNameError

    keys = ("date", "answers", "no_reasoning", "thinking_close")
    parsed = settings(pairs)
    rest = {key: str(parsed.pop(key)) for key in keys if key in parsed}
    for key in parsed:
        if not key.startswith("template_options."):
            raise UnknownNameError("key", key, [*keys, "template_options.NAME"])
    return {key.partition(".")[2]: value for key, value in parsed.items()}, rest


def settings(pairs: list[str] | None, types: Mapping[str, type] | None = None) -> dict[str, Any]:
    """Parse the `KEY=VALUE` pairs of --set, values as JSON if possible, else as text; `a.b` names a nested key.

    `types` are the allowed keys with the types of their values; numbers must not be negative.
    """
    from chatmill.errors import ConfigError, UnknownNameError

    parsed: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"--set is KEY=VALUE, not {pair!r}")
        value: Any = text
        with suppress(ValueError):
            value = json.loads(text)
        if types is not None and key not in types:
            raise UnknownNameError("key", key, list(types))
        if types is not None and (type(value) is not types[key] or (isinstance(value, int) and value < 0)):
            raise ConfigError(f"--set {key} takes {VALUES[types[key]]}, not {value!r}")
        parsed[key] = value
    return parsed
