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
from chatmill.cli.options import argument, flag, option
from chatmill.errors import ConfigError


def command(
    inputs: Annotated[list[str], argument("IN", "Files, globs or folders of files.")],
    out: Annotated[Path, option("--out -o", "DIR", "New folder for the shards.")],
    column: Annotated[
        list[str] | None, option("--column", "NAME=YOURS", "Your name for query, reasoning, answer, synth_id, ...")
    ] = None,
    metadata: Annotated[list[str] | None, option("--metadata", "COLUMN", "Keep this column in metadata_json.")] = None,
    opening: Annotated[
        Path | None, option("--opening", "FILE", "YAML file with the system and developer messages.")
    ] = None,
    id_prefix: Annotated[str | None, option("--id-prefix", "TEXT", "Make ids of this, shard and row.")] = None,
    allow_no_reasoning: Annotated[
        bool, flag("--allow-no-reasoning", "Write rows without reasoning, without analysis.")
    ] = False,
    shards: Annotated[int, option("--shards", "N", "Parquet files, at most one for each input file.", min=1)] = 4,
    on_error: Annotated[str, options.ON_ERROR] = "fail",
    workers: Annotated[int | None, options.WORKERS] = None,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Read, write, report."""
    from chatmill.compiler.chunk_output import REJECTED
    from chatmill.distill.harmony_rows import DEFAULT_OPENING
    from chatmill.distill.synth_harmony import write_synth_harmony
    from chatmill.yaml_files import read_mapping

    result = write_synth_harmony(
        inputs,
        out,
        opening=DEFAULT_OPENING if opening is None else read_mapping(opening, "opening file", "system and developer"),
        columns=dict(map(_pair, column or [])),
        metadata=metadata or (),
        id_prefix=id_prefix,
        allow_no_reasoning=allow_no_reasoning,
        shards=shards,
        on_error=on_error,
        workers=workers,
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
