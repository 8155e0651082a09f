"""Build Megatron datasets for distillation from Harmony conversations: tokens, loss mask, span.

IN is a folder with manifest.json and synth_harmony_shard_NN.parquet. ROOT gets
train/ and valid/ with three IndexedDatasets a shard, and manifest.json last.
The bytes are the same for any number of workers and after any interruption.

Examples:
    chatmill synth-kd data/synth_harmony --out data/megatron/synth_kd_v1
    chatmill synth-kd data/synth_harmony -o smoke --max-rows-per-shard 1000
    chatmill synth-kd data/synth_harmony --out data/megatron/synth_kd_v1 --resume
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chatmill.cli import options
from chatmill.cli.options import argument, option

if TYPE_CHECKING:
    from chatmill.distill.run import SynthKDResult

KEYS = {"max_tokens": int, "max_tokens_per_shard": int, "tokenizer_path": str}


def command(
    inputs: Annotated[str, argument("IN", "Folder with manifest.json and the Parquet shards.")] = "data/synth_harmony",
    out: Annotated[Path, option("--out -o", "ROOT", "New folder of the dataset; never overwritten.")] = Path(
        "data/megatron/synth_kd_v1"
    ),
    valid_fraction: Annotated[float, option("--valid-fraction", "F", "Share of the rows in the split valid.")] = 0.001,
    max_rows: Annotated[int | None, option("--max-rows", "N", "Use only the first N rows of all shards.")] = None,
    max_rows_per_shard: Annotated[
        int | None, option("--max-rows-per-shard", "N", "Use only the first N rows of each shard.")
    ] = None,
    workers: Annotated[int | None, options.WORKERS] = None,
    engine: Annotated[str, options.ENGINE] = "local",
    audit: Annotated[
        float, option("--audit", "RATE", "Share of the rows that the official renderer checks; 0: none.")
    ] = 1 / 200,
    on_error: Annotated[str, options.ON_ERROR] = "fail",
    settings: Annotated[
        list[str] | None, option("--set", "KEY=VALUE", "max_tokens=N, max_tokens_per_shard=N, tokenizer_path=FILE.")
    ] = None,
    resume: Annotated[bool, options.RESUME] = False,
    quiet: Annotated[bool, options.QUIET] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Build a distillation dataset."""
    from chatmill.compiler.engines.ray_engine import named_executor
    from chatmill.compiler.progress import shown_progress
    from chatmill.distill.run import build_synth_kd

    with shown_progress(quiet) as on_progress:
        result = build_synth_kd(
            inputs,
            out,
            valid_fraction=valid_fraction,
            max_rows=max_rows,
            max_rows_per_shard=max_rows_per_shard,
            workers=workers,
            executor=named_executor(engine, workers),
            audit=audit,
            on_error=on_error,
            resume=resume,
            on_progress=on_progress,
            **options.settings(settings, KEYS),
        )
    if as_json:
        typer.echo(json.dumps(result.manifest))
    else:
        _show(result)


def _show(result: SynthKDResult) -> None:
    """Print what the dataset holds, a line per split."""
    from chatmill.compiler.progress import rate_words
    from chatmill.compiler.run import Outcome
    from chatmill.store.kd import blend_arguments

    if result.outcome is Outcome.ALREADY_BUILT:
        typer.echo(f"{result.root} already holds exactly this build; nothing to do.")
    tokens = 0
    for name, split in result.manifest["splits"].items():
        spans = split["span_tokens"]
        tokens += split["tokens"]
        typer.echo(
            f"  {name:<6}{split['rows']:>12,} rows {split['tokens']:>16,} tokens, {split['trained_tokens']:,} trained "
            f"({int(spans['1']):,} analysis, {int(spans['2']):,} final)"
        )
    failed = result.manifest["failed"]
    if failed["rows"]:
        reasons = ", ".join(f"{count:,} {code}" for code, count in failed["reasons"].items())
        typer.secho(f"  {failed['rows']:,} rows could not be used ({reasons}): see {failed['file']['path']}", fg="red")
    if result.outcome is Outcome.BUILT:
        typer.echo(f"  {result.audited:,} rows compared with the official renderer, no difference")
        typer.echo(f"  for Megatron-LM:\n{blend_arguments(result.root)}")
        typer.echo(f"{result.root} in {result.seconds:.1f} s ({rate_words(tokens, result.seconds)})")
