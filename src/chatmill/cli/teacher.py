"""Ask a teacher for its k most likely tokens at every trained position of a dataset, and add its answers.

`request` writes files of requests, with exact ids, for documents that have no answer yet. `add` checks answers against
the stored ids and adds them; what is added is there whole or not at all. chatmill stats shows how far it is.

Examples:
    chatmill teacher request data/built --out requests --max-length 32768
    chatmill teacher request data/built --out requests --form sglang
    chatmill teacher add data/built answers.jsonl
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from chatmill.cli import options
from chatmill.cli.options import argument, option
from chatmill.errors import ConfigError, UnknownNameError

STEPS = ("request", "add")


def command(
    step: Annotated[str, argument("STEP", "request, or add.", autocompletion=lambda: list(STEPS))],
    dataset: Annotated[Path, argument("DATASET", "Folder of a dataset.")],
    answers: Annotated[
        list[Path] | None, argument("ANSWERS", "add: JSONL or Parquet files of answers, or folders of them.")
    ] = None,
    out: Annotated[Path | None, option("--out -o", "DIR", "request: new folder for the files.")] = None,
    top_k: Annotated[int, option("--top-k -k", "K", "request: how many tokens of each position.", min=1)] = 64,
    max_length: Annotated[
        int | None, option("--max-length", "N", "request: the teacher's context; longer documents are cut.", min=3)
    ] = None,
    form: Annotated[str, option("--form", "NAME", "request: batch (OpenAI style), offline (vLLM), sglang.")] = "batch",
    model: Annotated[str, option("--model", "NAME", "request: the name of the teacher on its server.")] = "teacher",
    split: Annotated[str | None, options.SPLIT] = None,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Write requests, or add answers."""
    from chatmill.distill.teacher import teacher_add, teacher_request

    if step not in STEPS:
        raise UnknownNameError("step", step, list(STEPS))
    if step == "request":
        if out is None or answers:
            raise ConfigError("chatmill teacher request DATASET --out DIR: a new folder is needed, and no answers")
        counts = teacher_request(dataset, out, form=form, top_k=top_k, max_length=max_length, model=model, split=split)
        words = "{requests:,} requests, {tokens:,} tokens, {targets:,} targets; {targets_cut:,} targets are cut off"
    else:
        if not answers or out is not None:
            raise ConfigError("chatmill teacher add DATASET ANSWERS...: files of answers are needed, and no --out")
        counts = teacher_add(dataset, answers)
        words = (
            "{added:,} documents with {distributions:,} distributions were added; {there_already:,} were there "
            "already, {failed:,} requests had failed"
        )
    typer.echo(json.dumps(counts) if as_json else words.format(**counts))
