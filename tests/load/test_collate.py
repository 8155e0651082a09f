"""The collator: padding, labels and boundaries, checked row by row against plain loops."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.errors import DataError
from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.load.row_columns import trainer_columns
from chatmill.load.teacher import TEACHER_COLUMNS
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.load.packed_features import EOS, PACKED, Special, collate, feature_lists, lists, without_starts


class NoSpecials:
    """No BOS, no EOS, no PAD."""


def test_a_packed_batch() -> None:
    batch = collate(PACKED)
    assert batch.pop("use_cache") is False
    assert {name: (value.dtype, value.shape) for name, value in batch.items()} == {
        "input_ids": (torch.int64, (2, 5)),
        "labels": (torch.int64, (2, 5)),
        "position_ids": (torch.int64, (2, 5)),
    }
    assert lists(collate(PACKED)) == {
        "input_ids": [[5, 6, EOS, 7, EOS], [9, 8, EOS, EOS, EOS]],
        # The first token of the second document has no label; the real EOS keeps its own.
        "labels": [[5, 6, EOS, -100, EOS], [9, 8, EOS, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1], [0, 1, 2, 0, 1]],
    }


@settings(max_examples=200)
@given(
    features=feature_lists(),
    multiple=st.sampled_from([None, 1, 4, 8]),
    cut=st.sampled_from([None, 3, 7]),
    keep_loss_mask=st.booleans(),
    mask_starts=st.booleans(),
    flattened=st.booleans(),
)
def test_every_value_equals_the_plain_loop(
    features: list[dict[str, Any]],
    multiple: int | None,
    cut: int | None,
    keep_loss_mask: bool,
    mask_starts: bool,
    flattened: bool,
) -> None:
    if not keep_loss_mask:
        features = [{k: v for k, v in feature.items() if k != "loss_mask"} for feature in features]
    batch = collate(
        features,
        truncation=cut is not None,
        max_length=cut,
        pad_to_multiple_of=multiple,
        mask_document_starts=mask_starts,
        return_flattened=flattened,
        return_cu_seqlens=True,
        return_seq_idx=True,
        return_attention_mask=True,
    )
    rows: list[list[tuple[int, int, int, int]]] = []  # (id, label, position, segment) of every real token
    for feature in features:
        row: list[tuple[int, int, int, int]] = []
        document, start = -1, 0
        for t, token in enumerate(feature["input_ids"][:cut]):
            if t in feature["document_starts"]:
                document, start = document + 1, t
            trained = feature.get("loss_mask", [1] * (t + 1))[t]
            across = t == start and (t > 0 or (flattened and any(rows)))
            label = token if trained and not (mask_starts and across) else -100
            row.append((token, label, t - start, document))
        rows.append(row)
    if flattened:
        joined: list[tuple[int, int, int, int]] = []
        for row in rows:
            first = joined[-1][3] + 1 if joined else 0
            joined += [(token, label, position, first + segment) for token, label, position, segment in row]
        rows = [joined]
    width = max(map(len, rows))
    width = -(-width // (multiple or 1)) * (multiple or 1)
    padded = [row + [(EOS, -100, t, row[-1][3] + 1) for t in range(width - len(row))] for row in rows]
    for name, field in {"input_ids": 0, "labels": 1, "position_ids": 2, "seq_idx": 3}.items():
        assert batch[name].tolist() == [[token[field] for token in row] for row in padded], name
    assert batch["attention_mask"].tolist() == [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    borders = [i for i, token in enumerate(t for row in padded for t in row) if token[2] == 0]
    assert batch["cu_seqlens"].tolist() == [*borders, len(padded) * width]
    assert batch["cu_seqlens"].dtype == batch["max_seqlen"].dtype == batch["seq_idx"].dtype == torch.int32
    assert batch["max_seqlen"].item() == max(np.diff(batch["cu_seqlens"].numpy()))


@pytest.mark.parametrize("as_type", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_features_may_be_lists_arrays_or_tensors(as_type: Any) -> None:
    features = [{name: as_type(value) for name, value in feature.items()} for feature in PACKED]
    assert lists(collate(features)) == lists(collate(PACKED))


def test_none_gives_positions_exactly_when_there_are_starts() -> None:
    assert "position_ids" in collate(PACKED)
    plain = collate(without_starts(PACKED))
    assert set(plain) == {"input_ids", "labels"}
    assert plain["labels"].tolist() == [[5, 6, EOS, 7, EOS], [9, 8, EOS, -100, -100]]


def test_true_falls_back_to_the_eos_id() -> None:
    with pytest.warns(UserWarning, match=f"EOS id {EOS}: this batch"):
        batch = collate(without_starts(PACKED), packed_sequences=True)
    assert lists(batch) == lists(collate(PACKED))
    with_starts = collate([{"input_ids": [5, EOS, 6], "document_starts": [0]}], packed_sequences=True)
    assert with_starts["position_ids"].tolist() == [[0, 1, 2]], "explicit starts come before the EOS"
    with pytest.raises(ValueError, match="no document_starts and the tokenizer has no EOS"):
        collate(without_starts(PACKED), NoSpecials(), packed_sequences=True)
    assert "position_ids" in collate(PACKED, NoSpecials(), packed_sequences=True)


def test_false_ignores_the_starts_for_labels_too() -> None:
    batch = collate(PACKED, packed_sequences=False, return_seq_idx=True)
    assert set(batch) == {"input_ids", "labels", "seq_idx"}
    assert batch["labels"].tolist() == [[5, 6, EOS, 7, EOS], [9, 8, EOS, -100, -100]]
    assert batch["seq_idx"].tolist() == [[0] * 5, [0, 0, 0, 1, 1]]


@pytest.mark.parametrize("packed", [None, True, False])
def test_starts_on_some_features_only_are_an_error(packed: bool | None) -> None:
    with pytest.raises(ValueError, match=r"only 1 of 2 features carry 'document_starts' \(row 1"):
        collate([PACKED[0], {"input_ids": [1, 2]}], packed_sequences=packed)
    with pytest.raises(ValueError, match=r"row 1"):
        collate([PACKED[0], {"input_ids": [1, 2], "document_starts": None}], packed_sequences=packed)


# ---- padding and labels


@pytest.mark.parametrize(
    ("tokenizer", "pad"),
    [(Special(), EOS), (byte_tokenizer(), 258), (byte_tokenizer(["<|eos|>"]), 256), (NoSpecials(), 0)],
)
def test_the_pad_id_is_pad_else_eos_else_zero(tokenizer: Any, pad: int) -> None:
    batch = collate([{"input_ids": [5, 6]}, {"input_ids": [7]}], tokenizer)
    assert batch["input_ids"].tolist() == [[5, 6], [7, pad]]
    assert batch["labels"].tolist() == [[5, 6], [7, -100]]


def test_padding_to_max_length_and_to_a_multiple() -> None:
    assert collate(PACKED, padding="max_length", max_length=5)["input_ids"].shape == (2, 5)
    assert collate(PACKED, pad_to_multiple_of=4)["input_ids"].shape == (2, 8)
    assert collate(PACKED, padding="max_length", max_length=7, pad_to_multiple_of=4)["input_ids"].shape == (2, 8)
    assert collate(PACKED, padding=True)["input_ids"].shape == (2, 5)
    assert collate(PACKED, padding="max_length", max_length=8)["position_ids"].tolist() == [
        [0, 1, 2, 0, 1, 0, 1, 2],
        [0, 1, 2, 0, 1, 2, 3, 4],
    ]
    with pytest.raises(ValueError, match="row 0 has 5 tokens, more than max_length 4"):
        collate(PACKED, padding="max_length", max_length=4)
    with pytest.raises(ValueError, match="padding is off, but rows have 3 to 5 tokens"):
        collate(PACKED, padding=False)
    assert collate(PACKED[:1], padding=False)["input_ids"].shape == (1, 5)


def test_the_limit_of_the_tokenizer_stands_in_for_max_length() -> None:
    class Limited(Special):
        model_max_length = 4

    assert collate(PACKED, Limited(), truncation=True, padding="max_length")["input_ids"].shape == (2, 4)
    with pytest.raises(ValueError, match="need max_length"):
        DataCollatorForCausalLM(Special(), truncation=True)


def test_own_labels_and_loss_masks_are_respected() -> None:
    features = [
        {"input_ids": [5, 6, 7, 8], "document_starts": [0, 2], "labels": [-100, 60, 70, -100]},
        {"input_ids": [1, 2], "document_starts": [0], "labels": [10, 20]},
    ]
    assert collate(features)["labels"].tolist() == [[-100, 60, -100, -100], [10, 20, -100, -100]]
    unchanged = collate(features, mask_document_starts=False)["labels"].tolist()
    assert unchanged == [[-100, 60, 70, -100], [10, 20, -100, -100]]
    masks = [[0, 1, 1, 1], [True, False]]
    features = [dict(feature, loss_mask=mask) for feature, mask in zip(features, masks, strict=True)]
    assert collate(features)["labels"].tolist() == [[-100, 60, -100, -100], [10, -100, -100, -100]]
    for feature in features:
        del feature["labels"]
    assert collate(features, ignore_index=-1)["labels"].tolist() == [[-1, 6, -1, 8], [1, -1, -1, -1]]
    weighted = [dict(features[0], loss_mask=[0.25, 0.5, 0.0, 2.0]), dict(features[1], loss_mask=[0.1, 0.0])]
    assert collate(weighted, ignore_index=-1)["labels"].tolist() == [[5, 6, -1, 8], [1, -1, -1, -1]]


def test_names_of_inputs_and_labels() -> None:
    batch = collate(PACKED, input_name="tokens", labels_name="targets")
    assert set(batch) == {"tokens", "targets", "position_ids", "use_cache"}
    inputs, labels = collate(PACKED, labels_name=None)
    assert set(inputs) == {"input_ids", "position_ids", "use_cache"}
    assert labels.tolist() == collate(PACKED)["labels"].tolist()
    assert collate([{"tokens": [1, 2]}], input_name="tokens")["tokens"].tolist() == [[1, 2]]
    features = [{"input_ids": [1, 2], "labels": [-100, 2]}]
    assert collate(features, labels_name="targets")["targets"].tolist() == [[-100, 2]]
    features[0]["targets"] = [7, 8]
    assert collate(features, labels_name="targets")["targets"].tolist() == [[7, 8]], "the own name comes first"


def test_numpy_instead_of_torch() -> None:
    options = {"return_cu_seqlens": True, "return_seq_idx": True, "return_document_mask": True}
    batch = collate(PACKED, return_tensors="np", **options)
    assert all(isinstance(value, np.ndarray) for name, value in batch.items() if name != "use_cache")
    assert lists(batch) == lists(collate(PACKED, **options))
    _, labels = collate(PACKED, return_tensors="np", labels_name=None)
    assert isinstance(labels, np.ndarray)


def test_wrong_options_and_features_are_refused() -> None:
    for options, message in [
        ({"pading": "longest"}, "unknown collator option 'pading'. Did you mean 'padding'"),
        ({"padding": "shortest"}, "unknown padding 'shortest'"),
        ({"return_tensors": "tf"}, "unknown return_tensors 'tf'"),
        ({"padding_side": "left"}, "padding is on the right"),
        ({"return_document_mask": "bool"}, "unknown document mask 'bool'.* dense, flex"),
        ({"return_document_mask": "flex", "return_tensors": "np"}, "torch only"),
        ({"return_flattened": True, "padding": "max_length", "max_length": 8}, "without padding"),
        ({"return_flattened": True, "packed_sequences": False}, "nothing would say where they meet"),
    ]:
        with pytest.raises(ValueError, match=message):
            DataCollatorForCausalLM(Special(), **options)
    with pytest.raises(ValueError, match="empty list"):
        collate([])
    with pytest.raises(ValueError, match="carry no 'input_ids'; they have: ids"):
        collate([{"ids": [1]}])
    with pytest.raises(ValueError, match="input_ids of row 1 must be a flat list of integers"):
        collate([{"input_ids": [1]}, {"input_ids": [[1]]}])
    for name in ("loss_mask", "labels", "logprobs", "position_ids"):
        with pytest.raises(DataError, match=rf"{name} of row 1 has the shape \(1,\), but the row has 2 tokens"):
            collate([{"input_ids": [1, 2], name: [0, 1]}, {"input_ids": [1, 2], name: [0]}])


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize("most", [None, 3])
def test_trees_see_what_their_ends_say(flattened: bool, most: int | None) -> None:
    trees = [([0, 1, 2, 3, 2, 3], [6, 6, 4, 4, 6, 6]), ([0, 1, 1, 0], [3, 2, 3, 4]), ([0, 1], [2, 2])]
    features = [{"input_ids": [5] * len(at), "position_ids": at, "ends": ends} for at, ends in trees]
    options = {"truncation": most is not None, "max_length": most, "return_flattened": flattened}
    batch = collate(features, return_document_mask=True, **options)
    cut = [(at[:most], ends[:most]) for at, ends in trees]
    first = 0  # token of a tree in the joined row
    for row, (at, ends) in enumerate(cut):
        which, inside = (0, slice(first, first + len(at))) if flattened else (row, slice(len(at)))
        assert batch["position_ids"][which, inside].tolist() == at
        seen = [[k <= q < ends[k] for k in range(len(at))] for q in range(len(at))]
        shown = batch["document_mask"][which, 0, inside] == 0
        assert shown[:, inside].tolist() == seen
        assert shown.sum() == sum(map(sum, seen)), "and nothing outside of the tree"
        first += len(at)


def test_empty_rows_are_all_padding() -> None:
    batch = collate([{"input_ids": [1, 2], "document_starts": [0]}, {"input_ids": [], "document_starts": []}])
    assert lists(batch) == {
        "input_ids": [[1, 2], [EOS, EOS]],
        "labels": [[1, 2], [-100, -100]],
        "position_ids": [[0, 1], [0, 1]],
    }


def test_falling_back_to_eos_warns_once_and_counts_documents() -> None:
    collator = DataCollatorForCausalLM(Special(), packed_sequences=True)
    rows = [{"input_ids": [5, EOS, 6, 7, EOS, 8]}, {"input_ids": [5, 6]}]
    with pytest.warns(UserWarning, match="4 documents in 2 rows.*cut at every message"):
        collator(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collator(rows)


def test_seq_lengths_say_where_documents_begin() -> None:
    features = [{"input_ids": f["input_ids"], "seq_lengths": n} for f, n in zip(PACKED, ([3, 2], [3]), strict=True)]
    assert lists(collate(features)) == lists(collate(PACKED))
    assert collate(features, model="sdpa")["attention_mask"].shape == (2, 1, 5, 5)
    assert "position_ids" not in collate(features, packed_sequences=False)
    for lengths, said in (([3, 3], "sum to 6, but the row has 5"), ([5, 0], "sum to 5")):
        with pytest.raises(DataError, match=rf"seq_lengths of row 0 .*{said}"):
            collate([{**features[0], "seq_lengths": lengths}])
    columns = {name: [f[name] for f in features] for name in ("input_ids", "seq_lengths")}
    starts = {name: [f[name] for f in PACKED] for name in ("input_ids", "document_starts")}
    assert trainer_columns(columns) == trainer_columns(starts)


def test_distributions_of_different_sizes_become_a_grid() -> None:
    ids, logprobs, rest = [[], [7, 8], [9]], [[], [-0.5, -1.5], [-0.25]], [0.0, 0.125, 0.5]
    teacher = dict(zip(TEACHER_COLUMNS, (ids, logprobs, rest), strict=True))
    batch = collate([{"input_ids": [1, 2, 3], **teacher}, {"input_ids": [4], **{k: v[2:] for k, v in teacher.items()}}])
    nothing = [-math.inf, -math.inf]
    assert batch[TEACHER_COLUMNS[0]].tolist() == [[[0, 0], [7, 8], [9, 0]], [[9, 0], [0, 0], [0, 0]]]
    said = [-0.25, -math.inf]
    assert batch[TEACHER_COLUMNS[1]].tolist() == [[nothing, [-0.5, -1.5], said], [said, nothing, nothing]]
    assert batch[TEACHER_COLUMNS[2]].tolist() == [[0.0, 0.125, 0.5], [0.5, 0.0, 0.0]]
