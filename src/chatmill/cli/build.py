"""Compile files of conversations into a dataset on disk, on all cores, resumable, with a receipt.

Example: chatmill build recipe.yaml --out data/built

Example: chatmill build chats/*.jsonl -t ./Qwen3-0.6B -T qwen3_training --out data/built
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from chatmill.build.run import BuildResult


def command(
    inputs: Annotated[list[str], typer.Argument(help="One recipe (.yaml), or files of conversations.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the dataset; made, and never overwritten.")],
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", "-t", help="As in a recipe.")] = None,
    template: Annotated[str | None, typer.Option("--template", "-T", help="As in a recipe.")] = None,
    policy: Annotated[str | None, typer.Option("--policy", "-p", help="What is trained.")] = None,
    max_length: Annotated[int | None, typer.Option("--max-length", help="Longest episode, or tokens of a row.")] = None,
    overflow: Annotated[str | None, typer.Option("--overflow", help="What happens to longer conversations.")] = None,
    pack: Annotated[str | None, typer.Option("--pack", help="Packing strategy of the format blocks.")] = None,
    format_: Annotated[str | None, typer.Option("--format", help="episodes or blocks.")] = None,
    shape: Annotated[str | None, typer.Option("--shape", help="Shape of the records.")] = None,
    val_fraction: Annotated[float | None, typer.Option("--val-fraction", help="Share of records for val.")] = None,
    on_error: Annotated[str | None, typer.Option("--on-error", help="fail or quarantine.")] = None,
    add_control_tokens: Annotated[
        bool, typer.Option("--add-control-tokens", help="Add control tokens that the tokenizer lacks.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option("--workers", "-w", min=0, help="Processes; default: all cores.")
    ] = None,
    engine: Annotated[str, typer.Option("--engine", help="local or ray.")] = "local",
    ray_address: Annotated[str | None, typer.Option("--ray-address", help="An existing Ray cluster.")] = None,
    shard: Annotated[str | None, typer.Option("--shard", help="i/N: do the i-th of N shares, then merge.")] = None,
    chunk_bytes: Annotated[
        int, typer.Option("--chunk-bytes", min=1, help="Input bytes of one piece of work; changes no output.")
    ] = 32 << 20,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a build that was stopped.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Build a dataset."""
    from chatmill.build.progress import shown_progress
    from chatmill.build.run import run_build

    options: dict[str, Any] = {
        "tokenizer": tokenizer, "template": template, "policy": policy, "format": format_, "on_error": on_error,
        "packing.max_length": max_length, "packing.overflow": overflow, "packing.packing_strategy": pack,
        "split.val_fraction": val_fraction, "add_control_tokens": add_control_tokens or None,
    }  # fmt: skip
    recipe = recipe_of_options(inputs, options, shape)
    with shown_progress() as on_progress:
        result = run_build(
            recipe,
            out,
            workers=workers,
            executor=_executor(engine, ray_address, workers),
            resume=resume,
            shard=_share(shard),
            chunk_bytes=chunk_bytes,
            on_progress=on_progress,
        )
    show_result(result, as_json=as_json)


def recipe_of_options(inputs: list[str], options: dict[str, Any], shape: str | None) -> dict[str, Any] | str:
    """A recipe file's path, or a recipe made of files and options."""
    from chatmill.errors import ConfigError

    given = {key: value for key, value in options.items() if value is not None}
    if len(inputs) == 1 and inputs[0].endswith((".yaml", ".yml")):
        if given or shape:
            raise ConfigError(f"{inputs[0]} is a recipe, which holds all options; remove {', '.join(given) or 'shape'}")
        return inputs[0]
    recipe: dict[str, Any] = {
        "sources": [{"path": inputs, "shape": shape}],
        "tokenizer": "o200k",
        "template": "chatml",
        # the defaults fit each other: o200k gets ChatML's control tokens; a tokenizer that is named is left as it is
        "add_control_tokens": "tokenizer" not in given and "template" not in given,
        "packing": {},
        "split": {},
    }
    for key, value in given.items():
        *outer, name = key.split(".")
        place = recipe[outer[0]] if outer else recipe
        place[name] = value
    return recipe


def _executor(engine: str, address: str | None, workers: int | None) -> Any:
    from chatmill.errors import UnknownNameError

    if engine == "local":
        return None
    if engine == "ray":
        from chatmill.build.engines.ray_engine import RayExecutor

        return RayExecutor(address, workers=workers)
    raise UnknownNameError("engine", engine, ["local", "ray"])


def _share(text: str | None) -> tuple[int, int] | None:
    from chatmill.errors import ConfigError

    if text is None:
        return None
    first, _, count = text.partition("/")
    if not (first.isdigit() and count.isdigit() and int(first) < int(count)):
        raise ConfigError(f"--shard is i/N with i from 0 to N-1, not {text!r}")
    return int(first), int(count)


def show_result(result: BuildResult, *, as_json: bool) -> None:
    """The manifest as JSON, or one summary table."""
    from rich.console import Console

    from chatmill.build.run import Outcome
    from chatmill.look.ledger import ledger_table

    if as_json:
        typer.echo(json.dumps(result.manifest))
        return
    console = Console(highlight=False)
    if result.outcome is Outcome.SHARD_DONE:
        console.print(f"This share is done. When all are: chatmill merge {result.directory}")
        return
    if result.outcome is Outcome.ALREADY_BUILT:
        console.print(f"{result.directory} already holds exactly this build; nothing to do.")
    console.print(ledger_table(result.manifest))
    if result.outcome is Outcome.ALREADY_BUILT:
        return
    rate = sum(split["tokens"] for split in result.manifest["splits"].values()) / max(result.seconds, 1e-9)
    console.print(f"{result.directory} in {result.seconds:.1f} s ({rate / 1e6:.1f} M tokens/s)")
