"""TRL's path with the installed `tokenizers`, and what it would be at its best with `tokenizers` 1.0.

    python -m benchmarks.tokenizers_one [--quick] [--json] [--size BYTES]

No figure of Chatmill: it says how far the ratios of `benchmarks.compile` would move if everybody had 1.0. The newest
transformers does not run with the release candidate, so the second side is the same Jinja and `datasets.map` with ids
by 1.0, and without the mask, for which 1.0 has no offsets. Both in 2 processes; the ids are compared first.
"""

from __future__ import annotations

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import sys

import numpy as np

from benchmarks.harness import Report, compare, flat, require_equal, run_one
from benchmarks.inputs import inputs_folder, plain_records, write_shards
from benchmarks.peers import conversations_of, ids_map, prepared, tokenizers_one, trl_map, trl_table

SIZE, QUICK_SIZE, ROUNDS = 3_000_000, 300_000, 3


def measure(*, quick: bool, size: int | None = None) -> Report:
    """Both sides on one file."""
    report = Report()
    if tokenizers_one() is None:
        report.notes.append("tokenizers 1.0 is not in .tokenizers-1 (make bench puts it there): not measured")
        return report
    size = size or (QUICK_SIZE if quick else SIZE)
    with inputs_folder() as folder:
        paths = write_shards(folder, size, originals=plain_records(), shard_bytes=size)[:1]
        table = trl_table(prepared(conversations_of(paths)))
    theirs = trl_map(table, 2)["input_ids"]
    tokens = sum(map(len, theirs))

    def check() -> str:
        require_equal("ids", flat(ids_map(table, 2)["input_ids"], np.int64), flat(theirs, np.int64))
        return f"ids equal on all {len(table):,} records"

    sides = {"one": (lambda: ids_map(table, 2), tokens), "trl": (lambda: trl_map(table, 2), tokens)}
    found = compare(sides, ours="one", check=check, rounds=ROUNDS)["trl"]
    report.compared("Jinja + tokenizers 1.0, no mask / TRL, 2 proc.", found, unit="tokens", in_chart=False)
    return report


if __name__ == "__main__":
    sys.exit(run_one("tokenizers_one", str(__doc__), measure, sizes={"size": (SIZE, "bytes of input")}))
