"""Check on a model of yours that packed documents do not see each other.

MODEL_DIR is a folder that transformers can load; nothing is downloaded. Rows
come from PACKED (a .parquet or .arrow file, a folder of them, or a folder made
by Dataset.save_to_disk), or are made of random ids. The tokens of one document
after the other are changed, and the logits of the others must not move; and
each document must give the logits it gives alone. Exit status 1 when it does
not.

Examples:
    chatmill isolate ./my-model
    chatmill isolate ./my-model built-hf --split train --compare
    chatmill isolate ./my-model --random-weights --attention eager --json
"""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatmill.cli import options
from chatmill.cli.options import argument, flag, option
from chatmill.errors import ConfigError, DataError

if TYPE_CHECKING:
    from chatmill.train.isolation import IsolationReport


class Dtype(StrEnum):
    """Number formats a model can be checked in."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def command(
    model_dir: Annotated[Path, argument("MODEL_DIR", "Folder with config.json and weights.")],
    packed: Annotated[Path | None, argument("PACKED", "Packed rows to check with; else random ids.")] = None,
    rows: Annotated[int, option("--rows", "N", "How many rows to check.", min=1)] = 2,
    max_length: Annotated[int, option("--max-length", "N", "Rows are cut to this many tokens.", min=8)] = 256,
    probes: Annotated[int, option("--probes", "N", "Documents per row that are changed, at most.", min=1)] = 8,
    attention: Annotated[str, option("--attention", "NAME", "Attention of transformers: sdpa, eager, ...")] = "sdpa",
    dtype: Annotated[Dtype, option("--dtype", "NAME", "float64, float32, bfloat16 or float16.")] = Dtype.float32,
    device: Annotated[str, option("--device", "NAME", "Where to run: cpu, cuda, ...")] = "cpu",
    random_weights: Annotated[
        bool, flag("--random-weights", "Read config.json alone and check the architecture.")
    ] = False,
    use_cache: Annotated[bool, flag("--use-cache", "Switch the cache on, as a call without use_cache does.")] = False,
    compare: Annotated[bool, flag("--compare", "Also try other ways to call the model, and list them.")] = False,
    split: Annotated[str | None, options.SPLIT] = None,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Check isolation."""
    if split is not None and packed is None:
        raise ConfigError("--split is one of PACKED, and there are only rows of random ids: give PACKED too")
    from chatmill.train.hf_model import load_hf_model

    how: dict[str, Any] = {"random_weights": random_weights, "seed": 0, "way_out": "--random-weights"}
    model = load_hf_model(model_dir, attention=attention, dtype=dtype, **how).to(device)
    from chatmill.train.isolation import check_isolation

    batch = _batch(model.config, packed, split, rows=rows, max_length=max_length)
    report = check_isolation(model, batch, max_probes=probes, use_cache=use_cache)
    others = _other_ways(model, batch, probes) if compare else {}
    if as_json:
        result = _as_dict(report) | ({"ways": {n: _as_dict(r) for n, r in others.items()}} if compare else {})
        typer.echo(json.dumps(result))
    else:
        typer.echo(str(report))
        if compare:
            typer.echo("\n" + _table(others))
    if not report.passed:
        raise typer.Exit(1)


def _batch(config: Any, packed: Path | None, split: str | None, *, rows: int, max_length: int) -> dict[str, Any]:
    """Rows with at least two documents each, collated as for training."""
    from types import SimpleNamespace

    from chatmill.load.collate import DataCollatorForCausalLM

    features = (
        _random_rows(config, rows, max_length) if packed is None else _stored_rows(packed, split, rows, max_length)
    )
    eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    special = SimpleNamespace(pad_token_id=config.pad_token_id, eos_token_id=eos)
    collator = DataCollatorForCausalLM(special, truncation=True, max_length=max_length, return_seq_idx=True)
    batch: dict[str, Any] = collator(features)
    del batch["labels"]
    return batch


def _random_rows(config: Any, rows: int, max_length: int) -> list[dict[str, Any]]:
    import numpy as np

    random = np.random.RandomState(0)
    lengths = [max_length - 3 * row for row in range(rows) if max_length - 3 * row >= 8]
    return [
        {
            "input_ids": random.randint(config.get_text_config().vocab_size, size=length),
            "document_starts": [0, length // 2, length // 2 + 1, 3 * length // 4],
        }
        for length in lengths
    ]


def _stored_rows(packed: Path, split: str | None, rows: int, max_length: int) -> list[dict[str, Any]]:
    import numpy as np

    from chatmill.look.packed_rows import open_packed
    from chatmill.look.packed_split import item_of_row

    found: list[dict[str, Any]] = []
    batches = open_packed(packed, split).batches()
    for row in (item_of_row(batch.slice(n, 1), first + n) for first, batch in batches for n in range(len(batch))):
        if row.problem is not None:
            raise DataError(f"{packed}: {row.problem}")
        if np.count_nonzero(row.starts < max_length) > 1:
            found.append({"input_ids": row.ids, "document_starts": row.starts})
        if len(found) == rows:
            break
    if not found:
        raise DataError(f"{packed} has no row with two documents within {max_length} tokens: raise --max-length")
    return found


def _other_ways(model: Any, batch: dict[str, Any], probes: int) -> dict[str, IsolationReport]:
    """How the same rows fare when the model is called in the ways that people call it."""
    import torch

    from chatmill.load.document_masks import dense_document_mask
    from chatmill.train.isolation import check_isolation

    allowed = dense_document_mask(batch["seq_idx"], model.dtype)
    bare = {name: value for name, value in batch.items() if name != "position_ids"}
    ones = torch.ones_like(batch["input_ids"])
    ways: dict[str, tuple[dict[str, Any], bool]] = {
        "position_ids": (batch, False),
        "position_ids, cache on (the default)": (batch, True),
        "position_ids + attention_mask of ones": (batch | {"attention_mask": ones}, False),
        "position_ids + 4D bool mask": (batch | {"attention_mask": allowed == 0}, False),
        "position_ids + 4D float mask": (batch | {"attention_mask": allowed}, False),
        "neither positions nor mask": (bare, False),
    }
    return {
        name: check_isolation(model, inputs, max_probes=probes, use_cache=cache)
        for name, (inputs, cache) in ways.items()
    }


def _table(ways: dict[str, IsolationReport]) -> str:
    lines = [f"{'the same rows, called with':<40}  {'moved':>8}  {'alone':>8}"]
    for name, report in ways.items():
        verdict = "isolated" if report.passed else "LEAKS"
        lines.append(f"{name:<40}  {report.moved:>8.3g}  {report.alone:>8.3g}  {verdict}")
    return "\n".join(lines)


def _as_dict(report: IsolationReport) -> dict[str, Any]:
    return {"passed": report.passed, "moved": report.moved, "alone": report.alone} | asdict(report)
