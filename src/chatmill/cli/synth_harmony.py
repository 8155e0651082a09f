"""Turn rows of query, reasoning and answer into Harmony conversations for chatmill synth-kd.

Rows come from Parquet, JSONL (.gz, .zst) or JSON files, from several or from
a folder. Each becomes one conversation: system, developer, user, analysis,
final. OUT gets synth_harmony_shard_NN.parquet and, last, manifest.json.

Examples:
    chatmill synth-harmony data/synth --out data/synth_harmony
    chatmill synth-harmony rows.jsonl -o out --column answer=response
    chatmill synth-harmony data/synth --out data/synth_harmony --resume
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from chatmill.cli import options
from chatmill.cli.options import argument, flag, option
from chatmill.core.json_files import read_object
from chatmill.errors import ConfigError


def command(
    inputs: Annotated[list[str], argument("IN", "Files, globs or folders of files.")],
    out: Annotated[Path, option("--out -o", "DIR", "New folder for the shards.")],
    column: Annotated[
        list[str] | None, option("--column", "NAME=YOURS", "Your name for query, reasoning, answer, synth_id, ...")
    ] = None,
    metadata: Annotated[list[str] | None, option("--metadata", "COLUMN", "Keep this column in metadata_json.")] = None,
    system: Annotated[
        Path | None, option("--system", "FILE", "JSON file with the fields of the system message.")
    ] = None,
    model_identity: Annotated[
        str | None, option("--model-identity", "TEXT", "First line of the system message.")
    ] = None,
    reasoning_effort: Annotated[str | None, option("--reasoning-effort", "NAME", "Low, Medium or High.")] = None,
    start_date: Annotated[str | None, option("--start-date", "DATE", "The current date in the system message.")] = None,
    knowledge_cutoff: Annotated[str | None, option("--knowledge-cutoff", "MONTH", "Such as 2024-06.")] = None,
    no_system: Annotated[bool, flag("--no-system", "Write no system message.")] = False,
    developer: Annotated[str | None, option("--developer", "TEXT", "The developer message.")] = None,
    developer_file: Annotated[
        Path | None, option("--developer-file", "FILE", "A file with the developer message.")
    ] = None,
    no_developer: Annotated[bool, flag("--no-developer", "Write no developer message.")] = False,
    dataset: Annotated[str | None, option("--dataset", "NAME", "A name for the manifest.")] = None,
    id_prefix: Annotated[str | None, option("--id-prefix", "TEXT", "Make ids of this and the row's number.")] = None,
    allow_no_reasoning: Annotated[
        bool, flag("--allow-no-reasoning", "Write rows without reasoning, without analysis.")
    ] = False,
    rows_per_shard: Annotated[int, option("--rows-per-shard", "N", "Rows of a Parquet file.", min=1)] = 20_000_000,
    on_error: Annotated[str, options.ON_ERROR] = "fail",
    workers: Annotated[int | None, options.WORKERS] = None,
    resume: Annotated[bool, options.RESUME] = False,
    quiet: Annotated[bool, options.QUIET] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Read, write, report."""
    from chatmill.compiler.chunk_output import REJECTED
    from chatmill.compiler.progress import shown_progress
    from chatmill.distill.synth_harmony import write_synth_harmony
    from chatmill.distill.synth_harmony_rows import DEFAULT_DEVELOPER, DEFAULT_SYSTEM

    changed = {
        "model_identity": model_identity,
        "reasoning_effort": None if reasoning_effort is None else reasoning_effort.capitalize(),
        "conversation_start_date": start_date,
        "knowledge_cutoff": knowledge_cutoff,
    }
    with shown_progress(quiet) as on_progress:
        result = write_synth_harmony(
            inputs,
            out,
            system=_system(system, {k: v for k, v in changed.items() if v is not None}, no_system, DEFAULT_SYSTEM),
            developer=_developer(developer, developer_file, no_developer, DEFAULT_DEVELOPER),
            columns=dict(map(_pair, column or [])),
            metadata=metadata or (),
            dataset=dataset,
            id_prefix=id_prefix,
            allow_no_reasoning=allow_no_reasoning,
            rows_per_shard=rows_per_shard,
            on_error=on_error,
            workers=workers,
            resume=resume,
            on_progress=on_progress,
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


def _system(path: Path | None, changed: dict[str, Any], none: bool, default: Any) -> dict[str, Any] | None:
    if none:
        if path is not None or changed:
            raise ConfigError("--no-system and options for the system message exclude each other; remove one of them")
        return None
    fields = dict(default)
    if path is not None:
        fields = read_object(path, ConfigError)
    return fields | changed


def _developer(text: str | None, path: Path | None, none: bool, default: str) -> str | None:
    if sum((text is not None, path is not None, none)) > 1:
        raise ConfigError("give one of --developer, --developer-file and --no-developer")
    if none:
        return None
    if path is None:
        return default if text is None else text
    try:
        return path.read_text(encoding="utf-8").rstrip("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--developer-file {path} cannot be read: {error}") from None
