"""Train a transformers model on a built dataset or on marker transcripts, in one small reference loop.

CONFIG is YAML, or the XML config of the loaders; POST_TRAINING and WARMUP_PCT in the environment replace its keys. A
run that finds checkpoints in its folder resumes from the newest. SIGTERM saves a checkpoint and ends with status 143
(Ctrl-C: 130).

Examples:
    chatmill train train.yaml
    POST_TRAINING=1 WARMUP_PCT=0.1 chatmill train train.yaml
    chatmill train config.xml --model ./Qwen3-0.6B --data built --out runs/first
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chatmill.cli import options
from chatmill.cli.options import argument, flag, option

if TYPE_CHECKING:
    from chatmill.train.trainer import FitResult

SIGNAL_STATUS = 128
"""A run that a signal ended has this status plus the signal's number, as shells have it."""


def command(
    config: Annotated[Path, argument("CONFIG", "Options of loader and training (.yaml, .xml).")],
    model: Annotated[str | None, option("--model", "DIR", "The model folder, in place of the config's.")] = None,
    data: Annotated[str | None, option("--data", "DIR", "The dataset, in place of the config's.")] = None,
    out: Annotated[str | None, option("--out -o", "DIR", "Log and checkpoints, in place of the config's.")] = None,
    fresh: Annotated[bool, flag("--fresh", "Refuse to resume from checkpoints that are already there.")] = False,
    quiet: Annotated[bool, options.QUIET] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Read the config, train, and report."""
    from chatmill.train.run import train

    with _log_lines(not quiet):
        result = train(config, resume=not fresh, model=model, dataset_dir=data, out=out)
    _report(result, as_json=as_json)
    if result.signal is not None:
        raise typer.Exit(SIGNAL_STATUS + result.signal)


@contextmanager
def _log_lines(shown: bool) -> Iterator[None]:
    """Send log lines of the run to standard error, and leave the logger as it was."""
    logger = logging.getLogger("chatmill")
    level = logger.level
    handler: logging.Handler = logging.NullHandler()
    if shown:
        handler = logging.StreamHandler(sys.stderr)
        logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _report(result: FitResult, *, as_json: bool) -> None:
    checkpoint = None if result.checkpoint is None else str(result.checkpoint)
    if as_json:
        said = {"outcome": str(result.outcome), "step": result.step, "loss": result.loss, "checkpoint": checkpoint}
        typer.echo(json.dumps(said | {"data": result.data}))
        return
    for name, count in result.data.items():
        if count:
            typer.echo(f"{name.replace('_', ' ')}: {count:,.6g}")
    loss = "" if result.loss is None else f", loss {result.loss:.4f}"
    typer.echo(f"{result.outcome.replace('_', ' ')}: step {result.step}{loss}; checkpoint: {checkpoint}")
