"""The collator: padding, labels, boundaries and masks, checked row by row against plain loops."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.errors import DataError
from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.load.document_masks import ends_of, mask_mod
from chatmill.load.row_columns import trainer_columns
from chatmill.load.teacher import TEACHER_COLUMNS
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.load.sets import Special

EOS = Special.eos_token_id
PACKED: list[dict[str, Any]] = [
    {"input_ids": [5, 6, EOS, 7, EOS], "document_starts": [0, 3]},
    {"input_ids": [9, 8, EOS], "document_starts": [0]},
]
IDS = [[5, 6, EOS, 7, EOS], [9, 8, EOS, EOS, EOS]]
ALL_LABELS = [[5, 6, EOS, 7, EOS], [9, 8, EOS, -100, -100]]
POSITIONS = [[0, 1, 2, 0, 1], [0, 1, 2, 0, 1]]
NO_SPECIALS = SimpleNamespace()


def collate(features: list[dict[str, Any]], tokenizer: Any = None, **options: Any) -> Any:
    return DataCollatorForCausalLM(tokenizer or Special(), **options)(features)


def lists(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch as lists; `use_cache`, which comes with position ids and nowhere else, is looked at and left out."""
    assert batch.get("use_cache") is (False if "position_ids" in batch else None)
    return {name: value.tolist() for name, value in batch.items() if name != "use_cache"}


def without(name: str, features: list[dict[str, Any]] = PACKED) -> list[dict[str, Any]]:
    return [{k: v for k, v in feature.items() if k != name} for feature in features]


@st.composite
def feature_lists(draw: st.DrawFn) -> list[dict[str, Any]]:
    features = []
    for lengths in draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4)):
        ids = draw(st.lists(st.integers(0, 4), min_size=sum(lengths), max_size=sum(lengths)))
        starts = [sum(lengths[:d]) for d in range(len(lengths))]
        mask = draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
        features.append({"input_ids": ids, "document_starts": starts, "loss_mask": mask})
    return features


OPTIONS = st.fixed_dictionaries(
    {
        "pad_to_multiple_of": st.sampled_from([None, 1, 4, 8]),
        "max_length": st.sampled_from([None, 3, 7]),
        "mask_document_starts": st.booleans(),
        "return_flattened": st.booleans(),
    }
)


@settings(max_examples=200)
@given(features=feature_lists(), options=OPTIONS, keep_loss_mask=st.booleans())
def test_every_value_equals_the_plain_loop(
    features: list[dict[str, Any]], options: dict[str, Any], keep_loss_mask: bool
) -> None:
    features = features if keep_loss_mask else without("loss_mask", features)
    cut, flattened = options["max_length"], options["return_flattened"]
    forms = ("return_cu_seqlens", "return_seq_idx", "return_attention_mask", "return_document_mask")
    batch = collate(features, truncation=cut is not None, **options, **dict.fromkeys(forms, True))
    made: list[list[tuple[int, int, int, int]]] = []  # (id, label, position, segment) of every real token
    for feature in features:
        row: list[tuple[int, int, int, int]] = []
        document, start = -1, 0
        for t, token in enumerate(feature["input_ids"][:cut]):
            if t in feature["document_starts"]:
                document, start = document + 1, t
            trained = feature.get("loss_mask", [1] * (t + 1))[t]
            across = t == start and (t > 0 or (flattened and any(made)))
            label = token if trained and not (options["mask_document_starts"] and across) else -100
            row.append((token, label, t - start, document))
        made.append(row)
    if flattened:
        joined: list[tuple[int, int, int, int]] = []
        for row in made:
            first = joined[-1][3] + 1 if joined else 0
            joined += [(token, label, position, first + segment) for token, label, position, segment in row]
        made = [joined]
    multiple = options["pad_to_multiple_of"] or 1
    width = -(-max(map(len, made)) // multiple) * multiple
    padded = [row + [(EOS, -100, t, row[-1][3] + 1) for t in range(width - len(row))] for row in made]
    for name, field in {"input_ids": 0, "labels": 1, "position_ids": 2, "seq_idx": 3}.items():
        assert batch[name].tolist() == [[token[field] for token in row] for row in padded], name
    assert batch["attention_mask"].tolist() == [[1] * len(row) + [0] * (width - len(row)) for row in made]
    borders = [i for i, token in enumerate(t for row in padded for t in row) if token[2] == 0]
    assert batch["cu_seqlens"].tolist() == [*borders, len(padded) * width]
    assert batch["cu_seqlens"].dtype == batch["max_seqlen"].dtype == batch["seq_idx"].dtype == torch.int32
    assert batch["max_seqlen"].item() == max(np.diff(batch["cu_seqlens"].numpy()))
    # All forms of a mask say the same.
    segments = [[token[3] for token in row] for row in padded]
    allowed = torch.tensor(
        [[[k <= q and row[k] == row[q] for k in range(width)] for q in range(width)] for row in segments]
    )
    mask = batch["document_mask"]
    assert (mask.shape, mask.dtype) == ((len(padded), 1, width, width), torch.float32)
    assert torch.equal(mask[:, 0], torch.where(allowed, 0, torch.finfo(torch.float32).min))
    index, each = torch.arange(width), torch.arange(len(padded))[:, None, None]
    assert torch.equal(mask_mod(ends_of(batch["seq_idx"]))(each, torch.tensor(0), index[:, None], index), allowed)


@pytest.mark.parametrize("as_type", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_features_may_be_lists_arrays_or_tensors(as_type: Any) -> None:
    batch = collate([{name: as_type(value) for name, value in feature.items()} for feature in PACKED])
    # The first token of the second document has no label; the real EOS keeps its own.
    labels = [[5, 6, EOS, -100, EOS], [9, 8, EOS, -100, -100]]
    assert lists(batch) == {"input_ids": IDS, "labels": labels, "position_ids": POSITIONS}
    assert {value.dtype for name, value in batch.items() if name != "use_cache"} == {torch.int64}
    empty = collate([{"input_ids": [1, 2], "document_starts": [0]}, {"input_ids": [], "document_starts": []}])
    labels = [[1, 2], [-100, -100]]
    assert lists(empty) == {"input_ids": [[1, 2], [EOS, EOS]], "labels": labels, "position_ids": [[0, 1], [0, 1]]}


# ---- packed_sequences


def test_true_falls_back_to_the_eos_id_and_warns_once() -> None:
    collator = DataCollatorForCausalLM(Special(), packed_sequences=True)
    with pytest.warns(UserWarning, match=f"EOS id {EOS}: this batch has 3 documents in 2 rows.*cut at every message"):
        batch = collator(without("document_starts"))
    assert lists(batch) == lists(collate(PACKED))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collator(without("document_starts"))
    with_starts = collate([{"input_ids": [5, EOS, 6], "document_starts": [0]}], packed_sequences=True)
    assert with_starts["position_ids"].tolist() == [[0, 1, 2]], "explicit starts come before the EOS"
    with pytest.raises(ValueError, match="no document_starts and the tokenizer has no EOS"):
        collate(without("document_starts"), NO_SPECIALS, packed_sequences=True)
    assert "position_ids" in collate(PACKED, NO_SPECIALS, packed_sequences=True)


def test_none_without_starts_and_false_see_no_documents() -> None:
    assert lists(collate(without("document_starts"))) == {"input_ids": IDS, "labels": ALL_LABELS}
    batch = collate(PACKED, packed_sequences=False, return_seq_idx=True)
    assert lists(batch) == {"input_ids": IDS, "labels": ALL_LABELS, "seq_idx": [[0] * 5, [0, 0, 0, 1, 1]]}


@pytest.mark.parametrize("packed", [None, True, False])
def test_starts_on_some_features_only_are_an_error(packed: bool | None) -> None:
    for other in ({}, {"document_starts": None}):
        with pytest.raises(ValueError, match=r"only 1 of 2 features carry 'document_starts' \(row 1"):
            collate([PACKED[0], {"input_ids": [1, 2], **other}], packed_sequences=packed)


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


# ---- padding and labels


@pytest.mark.parametrize(
    ("tokenizer", "pad"),
    [(Special(), EOS), (byte_tokenizer(), 258), (byte_tokenizer(["<|eos|>"]), 256), (NO_SPECIALS, 0)],
)
def test_the_pad_id_is_pad_else_eos_else_zero(tokenizer: Any, pad: int) -> None:
    batch = collate([{"input_ids": [5, 6]}, {"input_ids": [7]}], tokenizer)
    assert lists(batch) == {"input_ids": [[5, 6], [7, pad]], "labels": [[5, 6], [7, -100]]}


def test_padding_to_max_length_and_to_a_multiple() -> None:
    limited = SimpleNamespace(eos_token_id=EOS, model_max_length=4)  # which stands in for max_length
    for features, tokenizer, options, shape in (
        (PACKED, None, {"padding": "max_length", "max_length": 5}, (2, 5)),
        (PACKED, None, {"pad_to_multiple_of": 4}, (2, 8)),
        (PACKED, None, {"padding": "max_length", "max_length": 7, "pad_to_multiple_of": 4}, (2, 8)),
        (PACKED, None, {"padding": True}, (2, 5)),
        (PACKED[:1], None, {"padding": False}, (1, 5)),
        (PACKED, limited, {"truncation": True, "padding": "max_length"}, (2, 4)),
    ):
        assert collate(features, tokenizer, **options)["input_ids"].shape == shape
    wide = collate(PACKED, padding="max_length", max_length=8)["position_ids"].tolist()
    assert wide == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 0, 1, 2, 3, 4]]


def test_own_labels_and_loss_masks_are_respected() -> None:
    features: list[dict[str, Any]] = [
        {"input_ids": [5, 6, 7, 8], "document_starts": [0, 2], "labels": [-100, 60, 70, -100]},
        {"input_ids": [1, 2], "document_starts": [0], "labels": [10, 20]},
    ]
    assert collate(features)["labels"].tolist() == [[-100, 60, -100, -100], [10, 20, -100, -100]]
    unchanged = collate(features, mask_document_starts=False)["labels"].tolist()
    assert unchanged == [[-100, 60, 70, -100], [10, 20, -100, -100]]
    masked = [{**f, "loss_mask": mask} for f, mask in zip(features, ([0, 1, 1, 1], [True, False]), strict=True)]
    assert collate(masked)["labels"].tolist() == [[-100, 60, -100, -100], [10, -100, -100, -100]]
    plain = without("labels", masked)
    assert collate(plain, ignore_index=-1)["labels"].tolist() == [[-1, 6, -1, 8], [1, -1, -1, -1]]
    weighted = [{**plain[0], "loss_mask": [0.25, 0.5, 0.0, 2.0]}, {**plain[1], "loss_mask": [0.1, 0.0]}]
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pading": "longest"}, "unknown collator option 'pading'. Did you mean 'padding'"),
        ({"padding": "shortest"}, "unknown padding 'shortest'"),
        ({"return_tensors": "tf"}, "unknown return_tensors 'tf'"),
        ({"padding_side": "left"}, "padding is on the right"),
        ({"return_document_mask": "bool"}, "unknown document mask 'bool'.* dense, flex"),
        ({"return_document_mask": "flex", "return_tensors": "np"}, "torch only"),
        ({"return_flattened": True, "padding": "max_length", "max_length": 8}, "without padding"),
        ({"return_flattened": True, "packed_sequences": False}, "nothing would say where they meet"),
        ({"truncation": True}, "need max_length"),
        ({"padding": "max_length", "max_length": 4}, "row 0 has 5 tokens, more than max_length 4"),
        ({"padding": False}, "padding is off, but rows have 3 to 5 tokens"),
        ({"model": "paged"}, "sdpa"),
        ({"model": "sdpa", "return_attention_mask": True}, "see each other"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collate(PACKED, **options)


TREE = {"input_ids": [1, 2, 3, 2, 5], "position_ids": [0, 1, 2, 1, 2], "ends": [5, 3, 3, 5, 5]}
PAIR = {"input_ids": [1, 2]}


@pytest.mark.parametrize(
    ("features", "options", "message"),
    [
        ([], {}, "empty list"),
        ([{"ids": [1]}], {}, "carry no 'input_ids'; they have: ids"),
        ([{"input_ids": [1]}, {"input_ids": [[1]]}], {}, "input_ids of row 1 must be a flat list of integers"),
        *(
            (
                [{**PAIR, name: [0, 1]}, {**PAIR, name: [0]}],
                {},
                rf"{name} of row 1 has the shape \(1,\), but the row has 2",
            )
            for name in ("loss_mask", "labels", "logprobs", "position_ids")
        ),
        ([{**PAIR, "position_ids": at} for at in ([0, 0], [0, 2])], {"model": "sdpa"}, "row 1 do not count"),
        ([PAIR], {"model": "sdpa"}, "neither document_starts nor seq_lengths nor position_ids"),
        ([TREE], {"packed_sequences": False}, "ignores boundaries, and the rows are trees"),
        ([TREE], {"return_document_mask": True, "return_cu_seqlens": True}, "branches of trees are none"),
        ([TREE], {"return_document_mask": True, "return_seq_idx": True}, "branches of trees are none"),
    ],
)
def test_wrong_features_are_refused(features: list[dict[str, Any]], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collate(features, **options)


# ---- trees and teachers


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize("most", [None, 3])
def test_trees_see_what_their_ends_say(flattened: bool, most: int | None) -> None:
    trees = [([0, 1, 2, 3, 2, 3], [6, 6, 4, 4, 6, 6]), ([0, 1, 1, 0], [3, 2, 3, 4]), ([0, 1], [2, 2])]
    features = [{"input_ids": [5] * len(at), "position_ids": at, "ends": ends} for at, ends in trees]
    options = {"truncation": most is not None, "max_length": most, "return_flattened": flattened}
    batch = collate(features, return_document_mask=True, **options)
    first = 0  # token of a tree in the joined row
    for row, (at, ends) in enumerate((at[:most], ends[:most]) for at, ends in trees):
        which, inside = (0, slice(first, first + len(at))) if flattened else (row, slice(len(at)))
        assert batch["position_ids"][which, inside].tolist() == at
        seen = [[k <= q < ends[k] for k in range(len(at))] for q in range(len(at))]
        shown = batch["document_mask"][which, 0, inside] == 0
        assert shown[:, inside].tolist() == seen
        assert shown.sum() == sum(map(sum, seen)), "and nothing outside of the tree"
        first += len(at)


def test_distributions_of_different_sizes_become_a_grid() -> None:
    ids, logprobs, rest = [[], [7, 8], [9]], [[], [-0.5, -1.5], [-0.25]], [0.0, 0.125, 0.5]
    teacher = dict(zip(TEACHER_COLUMNS, (ids, logprobs, rest), strict=True))
    batch = collate([{"input_ids": [1, 2, 3], **teacher}, {"input_ids": [4], **{k: v[2:] for k, v in teacher.items()}}])
    nothing = [-math.inf, -math.inf]
    assert batch[TEACHER_COLUMNS[0]].tolist() == [[[0, 0], [7, 8], [9, 0]], [[9, 0], [0, 0], [0, 0]]]
    said = [-0.25, -math.inf]
    assert batch[TEACHER_COLUMNS[1]].tolist() == [[nothing, [-0.5, -1.5], said], [said, nothing, nothing]]
    assert batch[TEACHER_COLUMNS[2]].tolist() == [[0.0, 0.125, 0.5], [0.5, 0.0, 0.0]]
