"""Datasets to look at, made once per process: nasty conversations as episodes, packed rows, and rows of files."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import chatmill
from chatmill.export.export import export_dataset
from chatmill.look.decoder import Decoder
from chatmill.look.item_view import ItemView, view_item
from chatmill.look.packed_split import item_of_row
from chatmill.store.megatron import MegatronWriter
from chatmill.tokenizer.tokenizer import Tokenizer
from tests.compiler.builds import OPEN_GATES, chats, plain_recipe, talk, write_jsonl
from tests.kd_manifest import write_kd_manifest

HOSTILE = {
    "script": "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">",
    "closing": "</style></div></main></html><!-- ]]> &amp; &lt; '\"",
    "rtl": "\u202egnp.exe\u202c \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "controls": "nul \x00 escape \x1b[31mred\x1b[0m bell \x07 c1 \x9b31m line\u2028separator",
    "spelled": "what does <|im_end|> mean? And <|im_start|>?",
    "long": "long " * 6_000,
}
"""Answers to the user who says the same; the key is the record's id."""


def records() -> list[dict[str, Any]]:
    hostile = [{"id": name, "source": "hostile", "messages": talk(text, text)} for name, text in HOSTILE.items()]
    return [*hostile, *chats(60, 5), {"id": "pope", "messages": [{"role": "pope", "content": "x"}]}]


@cache
def tokenizer_once(source: Any, engine: Any = None) -> Any:
    """`load_tokenizer`, once per process: patched in where many tests look at the same sets."""
    return chatmill.load_tokenizer(source)


@cache
def folder() -> Path:
    """`episodes`, `rows` (packed), `hf` and `parquet` (of the rows) and `kd`, with train and val each."""
    place = Path(tempfile.mkdtemp(prefix="chatmill-look-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    path = write_jsonl(place / "chats.jsonl", records())
    more = {"split": {"val_fraction": 0.2}, "on_error": "quarantine", "shard_bytes": 8000}
    recipe = plain_recipe(path, sources=[{"path": str(path), "name": "plain"}], gates=OPEN_GATES, **more)
    chatmill.build(recipe, place / "episodes", workers=0)
    packed = {"packing": {"overflow": "cut"}, "pack": {"length": 1024}}
    chatmill.build({**recipe, **packed}, place / "rows", workers=0)
    for target in ("hf", "parquet"):
        export_dataset(place / "rows", target, place / target)
    write_kd(place / "kd")
    return place


KD = {
    "train": [("What is 2 + 2?", "add them", "4"), ("Hi", "greet back", "Hello!")],
    "valid": [("Bye", "part", "Farewell.")],
}


def write_kd(root: Path) -> None:
    """A distillation set in o200k: a question, analysis and final, label-aligned on disk."""
    tokenizer = tokenizer_once("o200k")
    for split, documents in KD.items():
        (root / split).mkdir(parents=True)
        columns: dict[str, list[Any]] = {"tokens": [], "lossmask": [], "span": []}
        for parts in documents:
            pieces = [np.array(tokenizer.encode(part), dtype=np.int32) for part in parts]
            span = np.repeat([0, 1, 2], [len(piece) for piece in pieces])
            label_aligned = np.append(span[1:], [0, 0])
            columns["tokens"].append(np.append(np.concatenate(pieces), tokenizer.eos_id))
            columns["span"].append(label_aligned)
            columns["lossmask"].append(label_aligned > 0)
        write_columns(root / split / "shard_00", columns)
    write_kd_manifest(root)


def write_columns(shard: Path, columns: dict[str, list[Any]]) -> None:
    """The columns of one shard of a distillation set, which have a value for every token of its documents."""
    for name, values in columns.items():
        with MegatronWriter(Path(f"{shard}_{name}"), np.int32 if name == "tokens" else np.uint8) as writer:
            writer.append(np.concatenate(values), np.array([len(value) for value in values]))


def view_block(row: dict[str, Any], tokenizer: Tokenizer | None = None, number: int = 0) -> ItemView:
    """A stored block, cut into its documents."""
    item = item_of_row(pa.RecordBatch.from_pylist([row]), number)
    return view_item(item, Decoder(tokenizer) if tokenizer else None, "block")
