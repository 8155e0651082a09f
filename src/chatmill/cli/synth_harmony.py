"""Turn rows of query, reasoning and answer into Harmony conversations for chatmill synth-kd.

Rows come from Parquet, JSONL (.gz, .zst) or JSON files, from several or from
a folder. Each becomes one conversation: system, developer, user, analysis,
final. OUT gets synth_harmony_shard_NN.parquet and manifest.json.

Examples:
    chatmill synth-harmony data/synth --out data/synth_harmony
    chatmill synth-harmony rows.jsonl -o out --column answer=response
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from chatmill.cli import options
from chatmill.cli.options import argument, option
from chatmill.errors import ConfigError

KEYS = {"opening": str, "allow_no_reasoning": bool, "number_rows": bool, "shards": int}


def command(
    inputs: Annotated[list[str], argument("IN", "Files, globs or folders of files.")],
    out: Annotated[Path, option("--out -o", "DIR", "New folder for the shards.")],
    column: Annotated[
        list[str] | None, option("--column", "NAME=YOURS", "Your name for query, reasoning, answer, synth_id, ...")
    ] = None,
    settings: Annotated[
        list[str] | None,
        option("--set", "KEY=VALUE", "opening=FILE, allow_no_reasoning=true, number_rows=true, shards=N."),
    ] = None,
    on_error: Annotated[str, options.ON_ERROR] = "fail",
    workers: Annotated[int | None, options.WORKERS] = None,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Read, write, report."""
    from chatmill.compiler.chunk_output import REJECTED
    from chatmill.distill.synth_harmony import write_synth_harmony
    from chatmill.yaml_files import read_mapping

    chosen = options.settings(settings, KEYS)
    if "opening" in chosen:
        chosen["opening"] = read_mapping(Path(chosen["opening"]), "opening file", "system and developer")
    result = write_synth_harmony(
        inputs,
        out,
        columns=dict(map(_pair, column or [])),
        on_error=on_error,
        workers=workers,
        **chosen,
    )
    if as_json:
        typer.echo(json.dumps(result.manifest))
        return
    for shard in result.manifest["shards"]:
        typer.echo(f"{shard['path']}  {shard['rows']:,} rows, {shard['bytes']:,} bytes")
    for reason, count in result.manifest["rejected"].items():
        typer.echo(f"rejected: {count:,} rows, {reason}; see {result.directory / REJECTED}")
    typer.echo(f"{result.rows:,} conversations -> {result.directory}")


def _pair(text: str) -> tuple[str, str]:
    name, equals, theirs = text.partition("=")
    if not (name and equals and theirs):
        raise ConfigError(f"--column {text!r} must be NAME=YOURS, as answer=response")
    return name, theirs
