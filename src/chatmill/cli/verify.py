"""Check a built dataset: files, hashes, columns and ledger; with --deep every record against its source.

Exit status 0: nothing is wrong; 1: something differs; 2: it cannot be checked.

Examples:
    chatmill verify data/built
    chatmill verify data/built --deep
    chatmill verify data/built --deep --sample 20 --json
    chatmill verify data/megatron/synth_kd_v1
    chatmill verify data/built-hf
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chatmill.cli import options
from chatmill.cli.options import argument, flag, option
from chatmill.console import shown_count
from chatmill.errors import ConfigError
from chatmill.look.safe_text import visible

if TYPE_CHECKING:
    from chatmill.prove.report import VerifyReport

SHOWN = 10
"""Findings that are printed; --json has more."""


def command(
    directory: Annotated[Path, argument("DIR", "Dataset of `chatmill build` or `synth-kd`, or an export.")],
    deep: Annotated[bool, flag("--deep", "Read the inputs again and derive every record by the slow path.")] = False,
    sample: Annotated[int | None, option("--sample", "N", "With --deep: only N chunks, evenly spread.", min=1)] = None,
    workers: Annotated[int | None, options.WORKERS] = None,
    quiet: Annotated[bool, options.QUIET] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Check a dataset."""
    from chatmill.distill.check import is_synth_kd, verify_synth_kd
    from chatmill.export.check import is_export, verify_export
    from chatmill.prove.verify import verify

    directory = options.dataset_folder(directory, whole=True)
    with shown_count(quiet) as on_progress:
        if is_synth_kd(directory):
            report = verify_synth_kd(directory, deep, sample, on_progress=on_progress)
        elif is_export(directory):
            if deep or sample is not None:
                raise ConfigError(
                    f"{directory} is an export: check it without --deep and --sample, and the dataset it was made of "
                    "with them"
                )
            report = verify_export(directory, on_progress=on_progress)
        else:
            with _in_folder_of_build(directory) if deep else contextlib.nullcontext(directory) as named:
                report = verify(
                    named,
                    deep=deep,
                    sample=sample,
                    workers=workers,
                    on_progress=on_progress,
                )
    if as_json:
        typer.echo(json.dumps(report.as_json(), ensure_ascii=False))
    else:
        _show(report)
    raise typer.Exit(report.exit_status)


@contextlib.contextmanager
def _in_folder_of_build(directory: Path) -> Iterator[Path]:
    """Work in the folder from which a build's sources and model are there; yield the name of its dataset."""
    from chatmill.store.named_paths import folder_of_build
    from chatmill.store.receipts import read_manifest

    manifest = read_manifest(directory)
    recipe = {} if manifest is None else manifest["recipe"]
    names: list[str] = []
    for source in recipe.get("sources", ()):
        names += [source["path"]] if isinstance(source["path"], str) else source["path"]
    names += [name for name in (recipe.get("tokenizer"), recipe.get("template")) if name and os.sep in name]
    folder = folder_of_build(names, directory.absolute())
    if folder is None:
        yield directory
        return
    absolute = directory.absolute()
    typer.secho(f"The sources are looked up from {folder}, as the build had them.", fg="yellow", err=True)
    with contextlib.chdir(folder):
        yield absolute


def _show(report: VerifyReport) -> None:
    for finding in report.findings[:SHOWN]:
        typer.secho(f"! {visible(str(finding), mark_newlines=False)}", fg="red")
    if report.differences > SHOWN:
        typer.secho(f"! and {report.differences - SHOWN:,} more", fg="red")
    for sentence in report.compared:
        typer.echo(f"  compared: {sentence}")
    for sentence in report.unchecked:
        typer.echo(f"  not checked: {visible(sentence, mark_newlines=False)}")
    if report.blocked:
        typer.secho(f"  not checked: {visible(report.blocked, mark_newlines=False)}", fg="yellow")
    counts = report.counts
    typer.echo(
        f"  {counts.get('episodes', 0):,} episodes, {counts.get('tokens', 0):,} tokens, "
        f"{counts.get('trained_tokens', 0):,} trained, {counts.get('double_bos', 0):,} double BOS"
    )
    outcome = f"{report.differences:,} differences" if report.differences or report.deep else "nothing wrong"
    typer.secho(
        f"{report.directory}: {outcome if not report.blocked or report.differences else 'not fully checked'} "
        f"({report.seconds:.1f} s)",
        bold=True,
        fg="green" if report.passed else "red",
    )
