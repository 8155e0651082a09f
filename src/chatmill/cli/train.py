"""Train a small GPT, or a transformers model, on a built dataset or on marker transcripts.

The recipe names model, data and options; every key of its sections data and train is also an environment
variable in capitals. A run that finds checkpoints in its folder goes on from the newest. SIGTERM saves a
checkpoint and ends with status 143 (Ctrl-C: 130).

Example: chatmill train train.yaml

Example: POST_TRAINING=1 LEARNING_RATE=1e-4 chatmill train train.yaml

Example: torchrun --no-python --nproc_per_node=2 chatmill train train.yaml
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatmill.cli import options

if TYPE_CHECKING:
    from chatmill.train.trainer import FitResult

SIGNAL_STATUS = 128
"""A run that a signal ended has this status plus the signal's number, as shells have it."""


def command(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A training recipe (.yaml).")],
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Refuse to go on from checkpoints that are already there.")
    ] = False,
    quiet: Annotated[bool, options.QUIET] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Read the recipe, open data and model, and fit."""
    from chatmill.cli.train_data import make_model, open_data
    from chatmill.cli.train_recipe import read_recipe
    from chatmill.train.trainer import fit

    first = os.environ.get("RANK", "0") == "0"
    _show_log(first and not quiet)
    settings = read_recipe(recipe, os.environ)
    log = logging.getLogger("chatmill.train")
    for name, value in settings.from_environment.items():
        log.info("from the environment: %s=%s", name, value)
    loader, val_loader, vocabulary = open_data(settings)
    model = make_model(settings, vocabulary)
    log.info("model: %s parameters", f"{sum(p.numel() for p in model.parameters()):,}")
    result = fit(
        model,
        loader,
        val_loader=val_loader,
        out=settings.out,
        resume=not fresh,
        config=settings.train,
        tokenizer=vocabulary,
        notes=vocabulary.notes,
        progress=not quiet,
    )
    if first:
        _report(result, as_json=as_json)
    if result.signal is not None:
        raise typer.Exit(SIGNAL_STATUS + result.signal)


def _show_log(shown: bool) -> None:
    """Lines of the run go to standard error."""
    logger = logging.getLogger("chatmill")
    handler: logging.Handler = logging.NullHandler()
    if shown:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.setLevel(logging.INFO)
    logger.addHandler(handler)


def _report(result: FitResult, *, as_json: bool) -> None:
    said: dict[str, Any] = {
        "outcome": str(result.outcome),
        "step": result.step,
        "loss": result.loss,
        "skipped_blocks": result.skipped_blocks,
        "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
    }
    if as_json:
        typer.echo(json.dumps(said))
        return
    loss = "" if result.loss is None else f", loss {result.loss:.4f}"
    typer.echo(f"{said['outcome'].replace('_', ' ')}: step {result.step}{loss}; checkpoint: {said['checkpoint']}")
