"""Train a small GPT, or a transformers model, on a built dataset or on marker transcripts.

The recipe names model, data and options; every key of its sections data and train is also an environment
variable: CHATMILL_ and the key in capitals (an empty one unsets the key). POST_TRAINING and WARMUP_PCT need no
prefix. A run that finds checkpoints in its folder resumes from the newest. SIGTERM saves a
checkpoint and ends with status 143 (Ctrl-C: 130).

Examples:
    chatmill train train.yaml
    POST_TRAINING=1 CHATMILL_LEARNING_RATE=1e-4 chatmill train train.yaml
    torchrun --no-python --nproc_per_node=2 chatmill train train.yaml
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatmill.cli import options
from chatmill.cli.options import argument, flag, option
from chatmill.cli.pack import packing_line

if TYPE_CHECKING:
    from chatmill.cli.train_recipe import TrainRecipe
    from chatmill.train.trainer import FitResult

SIGNAL_STATUS = 128
"""A run that a signal ended has this status plus the signal's number, as shells have it."""


def command(
    recipe: Annotated[Path, argument("RECIPE", "A training recipe (.yaml), or a config of the loaders (.xml).")],
    data: Annotated[Path | None, option("--data", "DIR", "The dataset, in place of the recipe's.")] = None,
    out: Annotated[Path | None, option("--out -o", "DIR", "Log and checkpoints, in place of the recipe's.")] = None,
    fresh: Annotated[bool, flag("--fresh", "Refuse to resume from checkpoints that are already there.")] = False,
    quiet: Annotated[bool, options.QUIET] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Read the recipe, open data and model, and fit."""
    from chatmill.cli.train_recipe import read_recipe

    first = os.environ.get("RANK", "0") == "0"
    with _log_lines(first and not quiet):
        settings = read_recipe(recipe, os.environ, dataset=data, out=out)
        if first:
            _report_overrides(settings)
        result = _run(settings, fresh=fresh, quiet=quiet)
    if first:
        _report(result, as_json=as_json)
    if result.signal is not None:
        raise typer.Exit(SIGNAL_STATUS + result.signal)


def _run(settings: TrainRecipe, *, fresh: bool, quiet: bool) -> FitResult:
    from chatmill.cli.train_data import make_model, open_data
    from chatmill.train.trainer import fit

    loader, val_loader, vocabulary = open_data(settings)
    model = make_model(settings, vocabulary)
    parameters = sum(p.numel() for p in model.parameters())
    logging.getLogger("chatmill.train").info("model: %s parameters", f"{parameters:,}")
    return fit(
        model,
        loader,
        val_loader=val_loader,
        out=settings.out,
        resume=not fresh,
        config=settings.train,
        tokenizer=vocabulary,
        notes=vocabulary.notes,
        settings=settings.settings(loader.config),
        progress=not quiet,
    )


def _report_overrides(settings: TrainRecipe) -> None:
    """What the environment changed, also where nothing else is printed."""
    from chatmill.cli.train_recipe import PREFIX

    for name, value in settings.from_environment.items():
        typer.echo(
            f"from the environment: {name}={value}" if value else f"from the environment: {name} is unset", err=True
        )
    for name, value in settings.of_other_phase.items():
        typer.echo(
            f"train.{name}={value} is the length of the other phase and is not applied to post-training", err=True
        )
    for name in settings.not_read:
        typer.echo(f"{name} is in the environment and is not read; {PREFIX}{name} would be", err=True)


@contextmanager
def _log_lines(shown: bool) -> Iterator[None]:
    """Log lines of the run go to standard error, and the logger is left as it was."""
    logger = logging.getLogger("chatmill")
    level = logger.level
    handler: logging.Handler = logging.NullHandler()
    if shown:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _report(result: FitResult, *, as_json: bool) -> None:
    said: dict[str, Any] = {
        "outcome": str(result.outcome),
        "step": result.step,
        "loss": result.loss,
        "skipped_blocks": result.skipped_blocks,
        "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
        "data": result.data,
    }
    if as_json:
        typer.echo(json.dumps(said))
        return
    if result.data:
        typer.echo(f"data: {data_line(result.data)}")
    loss = "" if result.loss is None else f", loss {result.loss:.4f}"
    typer.echo(f"{said['outcome'].replace('_', ' ')}: step {result.step}{loss}; checkpoint: {said['checkpoint']}")


def data_line(data: dict[str, Any]) -> str:
    """What of the data was not trained, in words."""
    if "documents" in data:
        return packing_line(data)
    if "assistant_tokens" not in data:
        said = f"{data['episodes']:,} episodes, {data['tokens_left_out']:,} tokens left out"
        reasons = {"trained_tokens_left_out": "trained tokens", "episodes_cut": "episodes cut to a row",
                   "episodes_dropped": "episodes longer than a row", "episodes_too_short": "episodes too short",
                   "rows_left_out": "rows at the end of an epoch"}  # fmt: skip
        parts = [f"{data[name]:,} {words}" for name, words in reasons.items() if data[name]]
        return said + (f" ({', '.join(parts)})" if parts else "")
    lost = data["assistant_tokens"] - data["trained_tokens"]
    return (
        f"{data['records']:,} records, {data['records_cut']:,} of them cut; {data['left_out']:,} tokens left out; "
        f"{lost:,} of {data['assistant_tokens']:,} assistant tokens ({data['lost_at_edges']:.2%}) lost at block edges"
    )
