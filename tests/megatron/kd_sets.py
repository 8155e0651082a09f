"""Small distillation sets for tests, written by Megatron's own builder, and the obvious form of what is in them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.harmony_ids import EOD
from tests.kd_manifest import write_kd_manifest


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document, token-aligned as a person would write it down."""

    ids: list[int]
    spans: list[int]
    """Of each token; a trained token is one with a span."""


def make_documents(count: int, seed: int, first_id: int = 1) -> list[Document]:
    """Documents of 4 to 40 tokens: context, mostly analysis, final, EOD; ids tell where a token came from."""
    rng = np.random.default_rng(seed)
    documents, next_id = [], first_id
    for _ in range(count):
        context, analysis, final = (int(rng.integers(low, 14)) for low in (1, 0, 2))
        length = context + analysis + final
        documents.append(
            Document(
                ids=[*range(next_id, next_id + length), EOD],
                spans=[0] * context + [1] * analysis + [2] * final + [0],
            )
        )
        next_id += length
    return documents


def on_disk(documents: list[Document]) -> dict[str, list[list[int]]]:
    """The three columns of a shard, the sidecars label-aligned: `values[1:] + [0]`."""
    spans = [[*document.spans[1:], 0] for document in documents]
    return {
        "tokens": [document.ids for document in documents],
        "lossmask": [[int(span > 0) for span in values] for values in spans],
        "span": spans,
    }


def write_column(prefix: Path, values: list[list[int]], dtype: Any) -> None:
    """One indexed dataset, by Megatron's own builder."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in values:
        builder.add_document(np.array(document), [len(document)])
    builder.finalize(f"{prefix}.idx")


def write_shard(prefix: Path, documents: list[Document]) -> str:
    """A shard `PREFIX_{tokens,lossmask,span}`; gives its token prefix."""
    for column, values in on_disk(documents).items():
        write_column(Path(f"{prefix}_{column}"), values, np.int32 if column == "tokens" else np.uint8)
    return f"{prefix}_tokens"


def write_root(root: Path, splits: dict[str, list[list[Document]]]) -> Path:
    """`ROOT/SPLIT/shard_NN_*` and a manifest."""
    for split, shards in splits.items():
        for number, documents in enumerate(shards):
            write_shard(root / split / f"shard_{number:02d}", documents)
    write_kd_manifest(root)
    return root


LENGTH = 16
TRAIN = [make_documents(30, 1, 1000), make_documents(11, 2, 50_000)]
VALID = [make_documents(6, 3, 90_000)]
SERVED = ("tokens", "labels", "span_id", "loss_mask")


class Tokenizer:
    """What Megatron asks of a tokenizer."""

    vocab_size = 201088
    eod = EOD
    unique_identifiers = {"class": "test tokenizer"}  # noqa: RUF012  (Megatron reads it as an attribute)

    def __init__(self, pad: int | None = None) -> None:
        if pad is not None:
            self.pad = pad


def flat(documents: list[Document], order: list[int]) -> dict[str, NDArray[np.int64]]:
    """Documents one after another, with what is the label of every token inside its document."""
    ids, label_spans = [], []
    for number in order:
        document = documents[number]
        for place, token in enumerate(document.ids):
            ids.append(token)
            label_spans.append(document.spans[place + 1] if place + 1 < len(document.ids) else 0)
    return {"ids": np.array(ids), "spans": np.array(label_spans)}


def config(blends: list[Any], pad: int | None = None, **options: Any) -> Any:
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    given = {"sequence_length": LENGTH, "mid_level_dataset_surplus": 0.5, **options}
    unused = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask")
    given |= dict.fromkeys(unused, False)
    split = [None if blend is None else tuple(blend) for blend in blends]
    return GPTDatasetConfig(random_seed=5, blend_per_split=split, tokenizer=Tokenizer(pad), **given)


def dataset(prefix: str, *sidecars: str, **options: Any) -> Any:
    """All documents of one shard; as validation, so that the last, partial sample is served too."""
    from megatron.core.datasets.utils import Split

    from chatmill.megatron import SynthKDDataset

    kind: Any = type("WithSidecars", (SynthKDDataset,), {"sidecars": sidecars}) if sidecars else SynthKDDataset
    made = config([([prefix], None), None, None], drop_last_partial_validation_sequence=False, **options)
    low = kind.build_low_level_dataset(prefix, made)
    return kind(low, prefix, np.arange(len(low.sequence_lengths), dtype=np.int32), None, Split.valid, made)


def swapped(train: Path) -> None:
    for kind in ("bin", "idx"):
        (train / f"shard_00_lossmask.{kind}").rename(train / f"other.{kind}")
        (train / f"shard_00_span.{kind}").rename(train / f"shard_00_lossmask.{kind}")
        (train / f"other.{kind}").rename(train / f"shard_00_span.{kind}")


def plain(dataset: Any, numbers: Any = None) -> list[dict[str, list[int]]]:
    """Samples as lists; all, or some."""
    chosen = range(len(dataset)) if numbers is None else numbers
    return [{name: dataset[number][name].tolist() for name in SERVED} for number in chosen]
