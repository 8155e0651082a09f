"""Distillation sets to look at: every token carries its own span, whatever the files are aligned to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from chatmill.look.counting import count_tokens
from chatmill.look.dataset import open_for_looking
from chatmill.look.splits import LookLayout
from chatmill.store.megatron import MegatronWriter
from tests.kd_manifest import write_kd_manifest
from tests.megatron.kd_sets import Document, make_documents, on_disk

TRAIN = [make_documents(30, 1, 1000), make_documents(11, 2, 50_000)]
VALID = [make_documents(6, 3, 90_000)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split, shards in (("train", TRAIN), ("valid", VALID)):
        (tmp_path / "kd" / split).mkdir(parents=True)
        for number, documents in enumerate(shards):
            for column, values in on_disk(documents).items():
                prefix = tmp_path / "kd" / split / f"shard_{number:02d}_{column}"
                with MegatronWriter(prefix, np.int32 if column == "tokens" else np.uint8) as writer:
                    writer.append(np.concatenate(values), np.array([len(document) for document in values]))
    write_kd_manifest(tmp_path / "kd")
    return tmp_path / "kd"


def everything(splits: dict[str, list[list[Document]]]) -> dict[str, list[Document]]:
    return {name: [document for shard in shards for document in shard] for name, shards in splits.items()}


def test_every_token_has_its_own_span(root: Path) -> None:
    found = open_for_looking(root)
    wanted = everything({"train": TRAIN, "valid": VALID})
    assert list(found.splits) == list(wanted)
    for name, documents in wanted.items():
        split = found.splits[name]
        assert (len(split), split.layout, split.has_spans) == (len(documents), LookLayout.KD, True)
        assert split.tokens.tolist() == [len(document.ids) for document in documents]
        for number, document in enumerate(documents):
            item = split.item(number)
            assert item.ids.tolist() == document.ids
            assert item.spans is not None
            assert item.spans.tolist() == document.spans
            assert item.is_trained.tolist() == [span > 0 for span in document.spans]
            assert item.trained == sum(span > 0 for span in document.spans) > 0
        assert count_tokens(split).trained.tolist() == [
            sum(span > 0 for span in document.spans) for document in documents
        ]
    train = found.splits["train"]
    assert train.item(30).source == "shard_01 document 0"
    assert train.sources is not None
    assert np.bincount(train.sources).tolist() == [30, 11]
    assert train.source_names == ("shard_00", "shard_01")
