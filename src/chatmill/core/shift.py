"""The next-token shift, written once: token-aligned values in, label-aligned out, numpy or torch alike.

Alignment: a token-aligned value at position `t` is that of token `t`; a label-aligned value at position `t`
is that of token `t + 1`, the one a model predicts at position `t`. Polarity: a mask value other than 0 means
"train on this token". Torch is never imported here: tensors are only sliced, cloned and assigned to.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from chatmill.errors import DataError

IGNORE_INDEX = -100
"""The target value that a cross-entropy loss leaves out."""

ArrayT = TypeVar("ArrayT")
"""A numpy array or a torch tensor; what goes in comes out."""
ScalarT = TypeVar("ScalarT", bound=np.generic)


def model_inputs(values: ArrayT) -> ArrayT:
    """Return the positions a model reads: all but the last, `(..., S)` -> `(..., S - 1)`; a view."""
    array: Any = values
    return array[..., :-1]  # type: ignore[no-any-return]


def next_token(values: ArrayT) -> ArrayT:
    """Token-aligned `(..., S)` to label-aligned `(..., S - 1)`: `t` gets what token `t + 1` has; a view."""
    array: Any = values
    return array[..., 1:]  # type: ignore[no-any-return]


def inputs_and_targets(
    ids: ArrayT, mask: Any | None = None, *, ignore_index: int = IGNORE_INDEX
) -> tuple[ArrayT, ArrayT]:
    """Inputs `x` and targets `y` of token-aligned `ids` `(..., S)`: `(..., S - 1)`, with `y[t] == ids[t+1]`.

    `mask` is token-aligned, numpy or torch as `ids`; where its shifted value is 0, `y` is `ignore_index`.
    `x` is a view of `ids`; `y` is a copy, in the dtype of `ids` (int64 where that is unsigned).
    """
    if mask is not None and tuple(mask.shape) != tuple(ids.shape):  # type: ignore[attr-defined]
        raise DataError(
            f"ids have the shape {tuple(ids.shape)} and the mask {tuple(mask.shape)}; "  # type: ignore[attr-defined]
            "a token-aligned mask has one value per token"
        )
    targets = _signed_copy(next_token(ids))
    if mask is not None:
        targets[next_token(mask) == 0] = ignore_index
    return model_inputs(ids), targets


def shift_left(values: ArrayT, fill: int | float = 0) -> ArrayT:
    """Token-aligned to label-aligned at the same length: `values[1:] + [fill]` on the last axis; a copy."""
    array: Any = values
    shifted: Any = array.copy() if isinstance(array, np.ndarray) else array.clone()
    if array.shape[-1]:
        shifted[..., :-1] = next_token(array)
        shifted[..., -1] = fill
    return shifted  # type: ignore[no-any-return]


def shift_left_ragged(
    values: NDArray[ScalarT], offsets: NDArray[np.integer], fill: int | float = 0
) -> NDArray[ScalarT]:
    """`shift_left` of each piece `offsets[i]:offsets[i+1]` of a flat array; each piece ends in `fill`.

    The pieces cover all of `values`, so nothing of one piece becomes the label of another.
    """
    shifted = shift_left(values, fill)
    ends = np.asarray(offsets[1:])[np.diff(offsets) > 0] - 1
    shifted[ends] = fill
    return shifted


def _signed_copy(values: Any) -> Any:
    """Return a writable copy that can hold a negative ignore index."""
    if isinstance(values, np.ndarray):
        return values.astype(values.dtype if values.dtype.kind == "i" else np.int64)
    return values.clone() if values.dtype.is_signed else values.long()
