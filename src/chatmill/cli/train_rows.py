"""Packed rows for training: texts that are packed here, or files that `chatmill pack` wrote."""

from __future__ import annotations

import json
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatmill.core.whole_file import whole_file
from chatmill.errors import ConfigError, FormatError, UnknownNameError
from chatmill.load.option_checks import Flag, Number

if TYPE_CHECKING:  # they need torch, and `chatmill pack` does not
    from chatmill.cli.train_recipe import TrainRecipe
    from chatmill.cli.vocabulary import RunVocabulary

ABOUT = b"chatmill_packed_rows"
"""Key of the description in a Parquet file's metadata."""


def open_packed_rows(recipe: TrainRecipe) -> tuple[Any, Any, RunVocabulary]:
    """Loader, loader of val (or None), and the vocabulary, for `data.texts` or `data.rows`."""
    from chatmill.cli.vocabulary import vocabulary_of

    data = recipe.data
    if recipe.train.post_training:
        raise ConfigError("the post-training mode trains assistant tokens, and texts do not say which these are")
    if (data.texts and data.rows) or data.dataset:
        raise ConfigError("give one of data.dataset, data.texts and data.rows")
    if recipe.tokenizer is None:
        raise ConfigError("texts and packed rows need a tokenizer: set 'tokenizer' in the recipe")
    known = vocabulary_of(recipe, recipe.tokenizer)
    loader = _loader(recipe, known, data.texts, data.rows, "train")
    if not data.val_texts and not data.val_rows:
        return loader, None, known
    return loader, _loader(recipe, known, data.val_texts, data.val_rows, "val"), known


def _loader(
    recipe: TrainRecipe, known: RunVocabulary, texts: tuple[str, ...], files: tuple[str, ...], split: str
) -> Any:
    from chatmill.compiler.paths import local_paths
    from chatmill.load.packed_row_loader import PackedRowLoader
    from chatmill.tokenizer.load import load_tokenizer

    data = recipe.data
    if texts:
        options = {"max_length": data.block_size, "packed": True, **packing_options(data.packing, "data.packing")}
        rows, starts, report = pack_texts(local_paths(list(texts)), load_tokenizer(recipe.tokenizer), options)
    else:
        rows, starts, report = read_rows(local_paths(list(files)), known.fingerprint)
    pad_id = data.loader.get("pad_token_id", known.pad_id)
    return PackedRowLoader(
        rows,
        starts,
        batch_size=data.loader.get("val", {}).get("batch_size", data.batch_size) if split == "val" else data.batch_size,
        pad_id=0 if pad_id is None else pad_id,
        shuffle=split == "train" and data.loader.get("epoch_shuffle") is not False,
        seed=data.loader.get("epoch_seed", 1337),
        split=split,
        report=report,
    )


def packing_options(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Packing options of a recipe, a YAML file or the command line: those of `tokenize_blocks`, in their types."""
    from chatmill.systems.document_boundaries import tokenize_blocks

    known = {name: p.default for name, p in signature(tokenize_blocks).parameters.items() if p.default is not p.empty}
    checked = dict(given)
    for name, value in given.items():
        if name not in known:
            raise UnknownNameError(f"option of {where}", name, list(known))
        if isinstance(known[name], bool):
            checked[name] = Flag()(f"{where}: {name}", value)
        elif isinstance(known[name], int) or name == "max_len":
            checked[name] = Number(whole=True, optional=name == "max_len")(f"{where}: {name}", value)
    return checked


def pack_texts(
    paths: list[Path], tokenizer: Any, options: dict[str, Any], field: str = "text"
) -> tuple[list[list[int]], list[list[int]], dict[str, Any]]:
    """Rows, document starts and the report of texts in JSONL files."""
    from chatmill.read.transcripts import read_texts
    from chatmill.systems.document_boundaries import tokenize_blocks

    made = tokenize_blocks({field: list(read_texts(paths, field=field))}, tokenizer, field, **options)
    return made.input_ids, made.document_starts, asdict(made.report)


def write_rows(path: Path, rows: list[list[int]], starts: list[list[int]], about: dict[str, Any]) -> None:
    """A Parquet file with `input_ids` and `document_starts`, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = pa.list_(pa.int32())
    table = pa.table({"input_ids": pa.array(rows, kind), "document_starts": pa.array(starts, kind)})
    with whole_file(path) as partial:
        pq.write_table(table.replace_schema_metadata({ABOUT: json.dumps(about).encode()}), partial)


def read_rows(paths: list[Path], fingerprint: str | None) -> tuple[list[list[int]], list[list[int]], dict[str, Any]]:
    """The rows of such files; those that another tokenizer made are refused."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[list[int]] = []
    starts: list[list[int]] = []
    report: dict[str, Any] = {}
    for path in paths:
        try:
            table = pq.read_table(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise FormatError(f"{path} cannot be read as Parquet: {error}") from None
        for name in ("input_ids", "document_starts"):
            if name not in table.column_names:
                raise FormatError(f"{path} has no column {name}; chatmill pack writes it")
        about = json.loads((table.schema.metadata or {}).get(ABOUT, b"{}"))
        if fingerprint is not None and about.get("tokenizer", fingerprint) != fingerprint:
            raise ConfigError(f"{path} was packed with another tokenizer ({about.get('given_as')}): pack it again")
        rows += table["input_ids"].to_pylist()
        starts += table["document_starts"].to_pylist()
        for name, count in about.get("report", {}).items():
            report[name] = report.get(name, 0) + count
    return rows, starts, report
