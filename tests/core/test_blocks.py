"""Packed rows, ours and those that trainers wrote: documents, positions, cu_seqlens, padding and shifted labels."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.blocks import boundaries_from_starts, boundaries_from_token, whole_rows
from chatmill.core.model_vocabulary import ModelVocabulary, model_vocabulary, refuse_beyond
from chatmill.core.shift import IGNORE_INDEX
from chatmill.core.tokens import offsets_of
from chatmill.core.trainer_columns import Column, label_shift, read_columns
from chatmill.errors import ChatmillError, ConfigError, DataError

Rows = list[tuple[int, list[int]]]
"""Tokens and document starts of each row."""
DOCUMENTS = st.lists(st.integers(1, 5), max_size=5)
PACKED = st.lists(DOCUMENTS.map(lambda own: (sum(own), list(np.cumsum([0, *own])[:-1]))), min_size=1, max_size=5)


def reference(rows: Rows, width: int) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Positions, segment numbers and cu_seqlens, token by token: padding is one more segment."""
    positions, segments, cu_seqlens = [], [], []
    for r, (tokens, starts) in enumerate(rows):
        row_positions: list[int] = []
        row_segments: list[int] = []
        for t in range(width):
            if t in starts or t == tokens or t == 0:
                cu_seqlens.append(r * width + t)
                row_positions.append(0)
                row_segments.append(row_segments[-1] + 1 if row_segments else 0)
            else:
                row_positions.append(row_positions[-1] + 1)
                row_segments.append(row_segments[-1])
        positions.append(row_positions)
        segments.append(row_segments)
    return positions, segments, [*cu_seqlens, len(rows) * width]


@settings(max_examples=200)
@given(PACKED, st.integers(0, 4), st.integers(1, 12))
def test_rows_laid_out_joined_and_cut_equal_the_token_by_token_reference(rows: Rows, more: int, most: int) -> None:
    lengths = np.array([tokens for tokens, _ in rows], dtype=np.int64)
    boundaries = boundaries_from_starts([starts for _, starts in rows], lengths)
    width = int(lengths.max()) + more
    positions, segments, cu_seqlens = reference(rows, width)
    laid = boundaries.segments(width)
    assert laid.position_ids.tolist() == positions
    assert laid.seq_idx.tolist() == segments
    assert laid.cu_seqlens().tolist() == cu_seqlens
    assert laid.max_seqlen == max(np.diff(cu_seqlens), default=0)
    later = [r * width + start for r, (_, starts) in enumerate(rows) for start in starts if start]
    assert boundaries.later_documents(width).tolist() == later
    joined = boundaries.joined()
    before = offsets_of(lengths).tolist()
    assert joined.starts.tolist() == [before[r] + start for r, (_, starts) in enumerate(rows) for start in starts]
    assert joined.lengths.tolist() == before[-1:]
    assert joined.counts.tolist() == [len(joined.starts)]
    cut = boundaries.cut(most)
    assert cut.lengths.tolist() == [min(tokens, most) for tokens, _ in rows]
    assert cut.starts.tolist() == [s for _, starts in rows for s in starts if s < most]
    assert cut.counts.tolist() == [sum(s < most for s in starts) for _, starts in rows]


@given(st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=4), st.booleans())
def test_boundaries_from_a_token(rows: list[list[int]], after: bool) -> None:
    found = boundaries_from_token([np.array(row, dtype=np.int64) for row in rows], 2, after=after)
    expected = [[t for t in range(len(row)) if t == 0 or (row[t - 1] == 2 if after else row[t] == 2)] for row in rows]
    assert found.starts.tolist() == [t for row in expected for t in row]
    assert found.counts.tolist() == [len(row) for row in expected]


def test_cu_seqlens_of_a_fixed_size_repeat_the_last_value() -> None:
    laid = boundaries_from_starts(np.array([[0, 2, -1], [0, -1, -1]]), np.array([3, 4])).segments(5)
    assert laid.cu_seqlens().tolist() == [0, 2, 3, 5, 9, 10], "a matrix of starts is padded with -1"
    padded = laid.cu_seqlens(9)
    assert padded.tolist() == [0, 2, 3, 5, 9, 10, 10, 10, 10]
    assert padded.dtype == np.int32
    with pytest.raises(DataError, match=r"5 segments.*6 cu_seqlens.*cu_seqlens_size is 5"):
        laid.cu_seqlens(5)
    assert whole_rows(np.array([3, 0])).starts.tolist() == [0]


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([[0, 2], [1, 3]], r"row 1: entry 0 is 1; the first entry must be 0"),
        ([[0, 2], [0, 3, 3]], r"row 1: entry 2 is 3; entries must increase"),
        ([[0], [0, 4]], r"row 1: entry 1 is 4; entries must lie inside the row \(the row has 4 tokens"),
        ([[0], [0, -1]], r"row 1: entry 1 is -1; entries must increase"),
        ([[0], []], r"row 1 is empty, but the row has 4 tokens"),
        ([[0], [0.0, 1.5]], r"row 1 must be a flat list of integers"),
        ([[0], [[0, 1]]], r"row 1 must be a flat list of integers"),
        ([[0]], r"has 1 rows, but the batch has 2"),
        (np.array([[0, -1, 2], [0, 1, -1]]), r"row 0: entry 1 is -1"),
        (np.array([[0, -1, -1], [-1, -1, -1]]), r"row 1 is empty"),
    ],
)
def test_wrong_starts_are_refused_with_row_and_value(starts: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        boundaries_from_starts(starts, np.array([5, 4]))  # type: ignore[arg-type]
    assert isinstance(caught.value, ChatmillError)


def column(rows: list[list[int]]) -> Column:
    flat = np.array([value for row in rows for value in row], dtype=np.int64)
    return flat, offsets_of(np.array(list(map(len, rows)), dtype=np.int64))


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=4))
def test_pad_tokens_at_the_ends_of_rows(rows: list[list[int]]) -> None:
    """They have nothing but pad tokens before them, or after them; a mask hides what is inside of a row."""
    columns = {"input_ids": column(rows)}
    padded = [not any(row[: at + 1]) or not any(row[at:]) for row in rows for at in range(len(row))]
    assert read_columns(columns, pad_id=0).padding.tolist() == padded or not any(map(any, rows))
    assert not read_columns(columns).padding.any()
    masks = {"attention_mask": column([[int(token > 0) for token in row] for row in rows])}
    masked = read_columns(columns | masks, pad_id=1)
    is_zero = (columns["input_ids"][0] == 0).tolist()
    assert masked.padding.tolist() == [zero and end for zero, end in zip(is_zero, padded, strict=True)]
    assert masked.hidden.tolist() == [at for at, end in enumerate(padded) if is_zero[at] and not end]


def test_documents_of_one_token_at_the_end_of_a_row_fill_it_up() -> None:
    rows = [[4, 5, 9, 9], [9, 9, 4, 4], [9, 9], [4, 9, 9, 5]]
    positions = [[0, 1, 0, 0], [0, 0, 0, 1], [0, 1], [0, 0, 0, 0]]
    columns = {"input_ids": column(rows), "position_ids": column(positions)}
    assert np.flatnonzero(read_columns(columns).padding).tolist() == [2, 3, 5, 6, 7, 11, 12, 13]
    trained = {"assistant_masks": column([[0, 0, 1, 0], [0, 0, 0, 1], [1, 1], [0, 0, 0, 1]])}
    assert np.flatnonzero(read_columns(columns | trained).padding).tolist() == [3]


def test_errors_of_columns_name_the_row() -> None:
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
