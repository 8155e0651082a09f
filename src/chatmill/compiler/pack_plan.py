"""The last step of a packed build: plan the rows of a finished split, and write the plan beside its episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.checksums import FileRecord
from chatmill.core.publish import write_whole
from chatmill.pack.plan import Strategy, plan
from chatmill.store.pack_plan import FORMAT, ORDER, PACK, PLAN, ROWS, VERSION
from chatmill.store.receipts import receipt_bytes


def write_pack_plan(
    split: Path, lengths: NDArray[np.integer], length: int, strategy: Strategy | str = Strategy.BEST_FIT
) -> dict[str, Any]:
    """Plan rows of `length` tokens over the lengths of all episodes, and write order, rows, and last plan.json.

    Gives what the manifest says of the rows.
    """
    made = plan(lengths, length, strategy)
    folder = split / PACK
    folder.mkdir(exist_ok=True)
    (folder / PLAN).unlink(missing_ok=True)
    files = {name: _write(folder / name, values) for name, values in ((ORDER, made.order), (ROWS, made.bin_offsets))}
    facts = {"rows": made.bins, "tokens": made.tokens, "lower_bound": made.lower_bound}
    content = {"format": FORMAT, "version": VERSION, "length": made.capacity, "strategy": str(made.strategy)}
    content |= {"episodes": made.documents, **facts, "files": files}
    write_whole(folder / PLAN, receipt_bytes(content))
    return {
        "rows": made.bins,
        "padding": made.bins * made.capacity - made.tokens,
        "fill": made.fill,
        "lower_bound": made.lower_bound,
    }


def _write(path: Path, values: NDArray[np.int64]) -> dict[str, Any]:
    write_whole(path, np.ascontiguousarray(values, dtype="<u8").tobytes())
    return FileRecord.of_file(path).to_json()
