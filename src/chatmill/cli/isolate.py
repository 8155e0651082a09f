"""Find out how a model of yours keeps packed documents apart.

MODEL_DIR is a folder that transformers can load; nothing is downloaded. Rows
come from PACKED (a .parquet or .arrow file, a folder of them, or a folder made
by Dataset.save_to_disk), or are made of random ids. The model is called on them
in every way that models read document boundaries. Each time the tokens of one document after the other are changed,
and the logits of the others must not move; and each document must give the
logits it gives alone. Shown are the ways that isolate, and the fewest keys that
do. Exit status 1 when nothing isolates.

Rows of trees (chatmill export --to hf of a build with expand: tree) are checked
as such: branches do not see each other, and logits, loss and, with --gradients,
gradients are those of the rows one by one. Of rows with pictures, those of one
document are changed with its words.

Examples:
    chatmill isolate ./my-model
    chatmill isolate ./my-model built-hf --split train
    chatmill isolate ./my-hybrid --random-weights --reference-kernels --json
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatmill.cli import options
from chatmill.cli.options import argument, flag, option
from chatmill.errors import ConfigError, DataError, UnknownNameError

if TYPE_CHECKING:
    from chatmill.look.packed_split import PackedSplit
    from chatmill.train.isolation_ways import Ways


DTYPES = ("float64", "float32", "bfloat16", "float16")
KEYS = {"dtype": str, "device": str, "attention": str}
COLUMNS = {
    "ends": ("input_ids", "position_ids", "ends", "labels"),
    "image_bytes": ("input_ids", "labels", "seq_lengths", "images", "image_bytes"),
    "": (),
}
"""What rows of trees, rows with pictures and plain rows must have, by a column that only they have."""


def command(
    model_dir: Annotated[Path, argument("MODEL_DIR", "Folder with config.json and weights.")],
    packed: Annotated[Path | None, argument("PACKED", "Packed rows to check with; else random ids.")] = None,
    rows: Annotated[int, option("--rows", "N", "How many rows to check.", min=1)] = 2,
    max_length: Annotated[int, option("--max-length", "N", "Rows are cut to this many tokens.", min=8)] = 256,
    random_weights: Annotated[
        bool, flag("--random-weights", "Read config.json alone and check the architecture.")
    ] = False,
    reference_kernels: Annotated[
        bool, flag("--reference-kernels", "Run recurrent layers in plain PyTorch, which keeps documents apart.")
    ] = False,
    gradients: Annotated[bool, flag("--gradients", "For trees: compare gradients too.")] = False,
    images: Annotated[
        str, option("--images", "DIR", "For rows with pictures: the folder their paths start from.")
    ] = ".",
    split: Annotated[str | None, options.SPLIT] = None,
    settings: Annotated[
        list[str] | None, option("--set", "KEY=VALUE", "dtype=float64, device=cuda, attention=eager (of transformers).")
    ] = None,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Check isolation."""
    if split is not None and packed is None:
        raise ConfigError("--split needs PACKED: without it the rows are random ids")
    from chatmill.train.hf_model import load_hf_model

    chosen = {"attention": "sdpa", "dtype": "float32", "device": "cpu", **options.settings(settings, KEYS)}
    if chosen["dtype"] not in DTYPES:
        raise UnknownNameError("dtype", chosen["dtype"], list(DTYPES))
    device = chosen.pop("device")
    kind, features = ("", []) if packed is None else _stored_rows(packed, split, rows, max_length)
    if gradients and kind != "ends":
        raise ConfigError("--gradients is for rows of trees: export a build with expand: tree to hf")
    model = load_hf_model(
        model_dir,
        **chosen,
        random_weights=random_weights,
        seed=0,
        way_out="--random-weights",
        reference_kernels=reference_kernels,
        pictures=kind == "image_bytes",
    ).to(device)
    if not kind:
        from chatmill.train.isolation_ways import try_ways

        ways = try_ways(model, features or _random_rows(model.config, rows, max_length), max_length=max_length)
        typer.echo(json.dumps(_as_dict(ways)) if as_json else _as_text(ways))
        raise typer.Exit(ways.smallest is None)
    if kind == "ends":
        from chatmill.train.tree_isolation import check_trees

        report = check_trees(model, features, gradients=gradients)
    else:
        from chatmill.load.collate import DataCollatorForCausalLM
        from chatmill.load.pictures import PictureCollator
        from chatmill.train.picture_isolation import check_pictures

        plain = DataCollatorForCausalLM(SimpleNamespace(pad_token_id=0, eos_token_id=None), model=model)
        report = check_pictures(model, features, PictureCollator(plain, model_dir, images))
    typer.echo(json.dumps(_report(report)) if as_json else str(report))
    raise typer.Exit(not report.passed)


def _stored_rows(packed: Path, split: str | None, count: int, most: int) -> tuple[str, list[dict[str, Any]]]:
    """Read the first rows that can be checked, and the column that tells their kind; empty for plain text."""
    from chatmill.look.packed_rows import packed_files
    from chatmill.look.packed_split import PackedSplit

    stored = PackedSplit(packed_files(options.dataset_folder(packed), split), packed.name)
    kind = next(name for name in COLUMNS if not name or name in stored.features)
    if missing := [name for name in COLUMNS[kind] if name not in stored.features]:
        raise DataError(f"{packed}: rows with {kind} need {', '.join(missing)}: export to hf")
    rows = list(islice(_rows(stored, kind, most), count))
    if not rows:
        raise DataError(f"{packed} has no rows of two documents within {most} tokens: raise --max-length")
    return kind, rows


def _rows(stored: PackedSplit, kind: str, most: int) -> Iterator[dict[str, Any]]:
    """Yield trees of at most `most` tokens, or rows with two documents within them."""
    from chatmill.look.packed_split import item_of_row

    for first, batch in stored.stored_batches(COLUMNS[kind] or None):
        if kind:
            for row in batch.to_pylist():
                fits = len(row["input_ids"]) <= most
                if fits and (kind == "ends" or (row["images"] and len(row["seq_lengths"]) > 1)):
                    yield row
            continue
        for item in (item_of_row(batch.slice(place, 1), first + place) for place in range(len(batch))):
            if item.problem is not None:
                raise DataError(f"{stored.name}: {item.problem}")
            if (item.starts < most).sum() > 1:
                yield {"input_ids": item.ids, "document_starts": item.starts}


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


def _as_text(ways: Ways) -> str:
    lines = [str(ways.report), "", f"{'the same rows, called with':<42}  {'moved':>8}  {'alone':>8}"]
    for name, outcome in ways.tried.items():
        if isinstance(outcome, str):
            lines.append(f"{name:<42}  {outcome}"[:80])
        else:
            verdict = "isolated" if outcome.passed else "LEAKS"
            lines.append(f"{name:<42}  {outcome.moved:>8.3g}  {outcome.alone:>8.3g}  {verdict}")
    if ways.smallest is None and ways.failed:
        conclusion = f"Nothing isolates here. {ways.failed} --reference-kernels shows which keys the model reads."
    elif ways.smallest is None:
        conclusion = "Nothing isolates: put one document into a row (chatmill export --pack alone)."
    else:
        conclusion = f"The fewest keys that isolate: {', '.join(['position_ids', 'use_cache', *ways.smallest.names])}"
    return "\n".join([*lines, "", *textwrap.wrap(conclusion, 80)])


def _as_dict(ways: Ways) -> dict[str, Any]:
    smallest = ways.smallest
    return _report(ways.report) | {
        "smallest": None if smallest is None else ["position_ids", "use_cache", *smallest.names],
        "ways": {name: _report(outcome) for name, outcome in ways.tried.items()},
    }


def _report(report: Any) -> dict[str, Any]:
    if isinstance(report, str):
        return {"error": report}
    counted = {name: getattr(report, name) for name in ("passed", "moved", "alone") if hasattr(report, name)}
    return counted | asdict(report)
