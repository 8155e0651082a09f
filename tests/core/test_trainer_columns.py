"""Padding of rows that trainers wrote, by the attention mask, pad tokens, and documents that only fill a row up."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.core.model_vocabulary import ModelVocabulary, model_vocabulary, refuse_beyond
from chatmill.core.shift import IGNORE_INDEX
from chatmill.core.tokens import offsets_of
from chatmill.core.trainer_columns import Column, label_shift, read_columns
from chatmill.errors import ConfigError, DataError

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=4)


def column(rows: list[list[int]]) -> Column:
    flat = np.array([value for row in rows for value in row], dtype=np.int64)
    return flat, offsets_of(np.array(list(map(len, rows)), dtype=np.int64))


def padded(row: list[int]) -> list[bool]:
    """Pad tokens with nothing else before, or nothing else after them."""
    return [not any(row[: at + 1]) or not any(row[at:]) for at in range(len(row))]


@given(ROWS)
def test_pad_tokens_at_the_ends_of_rows(rows: list[list[int]]) -> None:
    columns = {"input_ids": column(rows)}
    found = read_columns(columns, pad_id=0)
    assert found.padding.tolist() == [flag for row in rows for flag in padded(row)] or not any(map(any, rows))
    assert not read_columns(columns).padding.any()
    masks = {"attention_mask": column([[int(token > 0) for token in row] for row in rows])}
    assert read_columns(columns | masks, pad_id=1).padding.tolist() == (columns["input_ids"][0] == 0).tolist()


def test_documents_of_one_token_at_the_end_of_a_row_fill_it_up() -> None:
    rows = [[4, 5, 9, 9], [9, 9, 4, 4], [9, 9], [4, 9, 9, 5]]
    positions = [[0, 1, 0, 0], [0, 0, 0, 1], [0, 1], [0, 0, 0, 0]]
    columns = {"input_ids": column(rows), "position_ids": column(positions)}
    fills = [0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]
    assert read_columns(columns).padding.tolist() == list(map(bool, fills))
    trained = {"assistant_masks": column([[0, 0, 1, 0], [0, 0, 0, 1], [1, 1], [0, 0, 0, 1]])}
    assert np.flatnonzero(read_columns(columns | trained).padding).tolist() == [3]


def test_errors_name_the_row() -> None:
    with pytest.raises(DataError, match=r"^row 12: input_ids holds -7, which is no token id"):
        read_columns({"input_ids": column([[1], [2, 3], [4, -7]])}, first=10)
    with pytest.raises(DataError, match=r"^row 1: labels and input_ids have different lengths"):
        read_columns({"input_ids": column([[1], [2, 3]]), "labels": column([[1], [2]])})


def test_the_ids_of_a_loaded_model() -> None:
    embedding = SimpleNamespace(weight=np.zeros((7, 2)))
    config = SimpleNamespace(text_config=SimpleNamespace(vocab_size=5))
    models = [SimpleNamespace(get_input_embeddings=lambda: embedding), SimpleNamespace(config=config)]
    assert [found.size for model in models if (found := model_vocabulary(model))] == [7, 5]
    assert model_vocabulary(SimpleNamespace()) is None
    vocabulary = ModelVocabulary(size=7, found_in="here")
    refuse_beyond(6, vocabulary, "the dataset has", "Train a smaller one.")
    with pytest.raises(ConfigError, match=r"the dataset has the id 7, and the model has 7 ids \(here\)"):
        refuse_beyond(7, vocabulary, "the dataset has", "Train a smaller one.")


@given(lengths=st.lists(st.integers(2, 6), min_size=1, max_size=4), shift=st.sampled_from([-1, 0, 1]))
def test_labels_may_be_ahead_of_the_ids_or_after_them(lengths: list[int], shift: int) -> None:
    offsets = offsets_of(np.array(lengths))
    ids = np.arange(offsets[-1]) + 5
    labels = np.full(len(ids), IGNORE_INDEX)
    for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        for at in range(max(first, first - shift), min(last, last - shift)):
            labels[at] = ids[at + shift]
    nothing = np.zeros(len(ids), dtype=np.bool_)
    assert label_shift(ids, offsets, labels, nothing) == shift
    # One token over and over says nothing of a shift.
    same = np.full(len(ids), 5)
    assert label_shift(same, offsets, np.where(np.arange(len(ids)) == offsets[-1] - 1, 7, same), nothing) == 0
