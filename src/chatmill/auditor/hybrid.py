"""Check sets for models with recurrent layers: what batches must hold besides positions, and padding on the left."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from chatmill.auditor.findings import RawFinding
from chatmill.core.trainer_columns import TrainerRows
from chatmill.load.model_needs import HybridModel


def check_hybrid(
    model: HybridModel,
    data: TrainerRows,
    pads: Sequence[int],
    columns: Collection[str],
    batch_keys: frozenset[str] | None,
) -> Iterator[RawFinding]:
    """Find rows that nothing keeps apart, rows and batches without the keys that the model reads, and left padding.

    `pads` are ids that may pad rows: no text begins with two of them. `batch_keys` are those that all batches have,
    with `attention_mask` only if it is over pairs of tokens; None for stored rows, which have `columns`.
    """
    keys = frozenset(columns) - {"attention_mask"} if batch_keys is None else batch_keys
    first = data.offsets[:-1][np.diff(data.offsets) > 1]
    is_pad = data.padding | np.isin(data.ids, pads)
    left = first[data.padding[first] | (is_pad[first] & is_pad[first + 1])]
    left = left[np.isin(data.row_of(left), data.row_of(np.flatnonzero(~is_pad)))]
    yield RawFinding("padding_left", left, left + 1, len(data))
    rows = data.packed_rows
    missing = [] if model.needs is None else [name for name in model.needs.names if name not in keys]
    code = "keys_missing"
    if model.is_known and model.needs is None:
        detail = f"Nothing keeps documents apart in {model.kind}: one document a row (--pack alone)"
    elif missing and batch_keys is not None:
        detail = f"{model.kind} reads {', '.join(missing)} too, and the batches do not have it"
    elif missing:
        code = "keys_needed"
        detail = f"{model.kind} reads {', '.join(missing)}, and the rows do not have it. {_makers(model, keys)}"
    else:
        return
    yield RawFinding(code, data.offsets[:-1][rows], data.offsets[1:][rows], len(data), detail)


def _makers(model: HybridModel, keys: frozenset[str]) -> str:
    """Say which collators add the missing keys to batches of these rows."""
    is_by_trl = model.is_by_trl and "seq_lengths" in keys
    trl = ", and so does TRL with padding_free=True" if is_by_trl else "; TRL does not"
    return f"DataCollatorForCausalLM(tokenizer, model=model) adds it{trl}"
