"""Adds a third sidecar to a distillation set: a teacher's log-probability of every token, matched by record id.

    chatmill synth-kd data/synth_harmony --out data/kd --record-ids
    python examples/megatron/add_teacher_logprob.py data/kd

The values come from another program, at another time, in any order: the record id says whose they are. Here that
program is `teacher`, which counts tokens; a real one runs a model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from chatmill.core.shift import shift_left
from chatmill.store.kd import find_kd_root
from chatmill.store.kd_shard import KDShard, sidecar_prefix
from chatmill.store.megatron import MegatronWriter


def teacher(conversations: Iterable[tuple[str, NDArray[np.int32]]]) -> dict[str, NDArray[np.float32]]:
    """By record id, the log-probability of each token: a unigram model of what it is given."""
    known = dict(conversations)
    ids, counts = np.unique(np.concatenate(list(known.values())), return_counts=True)
    logprobs = np.log(counts / counts.sum()).astype(np.float32)
    return {record_id: logprobs[np.searchsorted(ids, tokens)] for record_id, tokens in known.items()}


def add_teacher(root: str) -> int:
    """Write `shard_NN_teacher_logprob` next to the tokens of every shard; the number of documents."""
    documents = 0
    for prefixes in find_kd_root(root).splits.values():
        for prefix in prefixes:
            shard = KDShard.open(prefix)
            record_ids = shard.record_ids()
            found = teacher((record_id, shard.document(number)[0]) for number, record_id in enumerate(record_ids))
            with MegatronWriter(sidecar_prefix(prefix, "teacher_logprob"), np.float32) as writer:
                for record_id in record_ids:
                    values = shift_left(found[record_id])  # at each token, that of the next one: label-aligned
                    writer.append(values, np.array([len(values)]))
            documents += len(shard)
    return documents


def teacher_dataset() -> type:
    """The dataset class that serves it; Megatron Core is imported here, since adding the sidecar does not need it."""
    from chatmill import SynthKDDataset

    class TeacherDataset(SynthKDDataset):
        sidecars = ("teacher_logprob",)

    return TeacherDataset


if __name__ == "__main__":
    print(f"{add_teacher(sys.argv[1]):,} documents have a teacher_logprob")
