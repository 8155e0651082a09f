"""Adds a third sidecar to a distillation set: a teacher's log-probability of every token, matched by document number.

    chatmill synth-kd data/synth_harmony --out data/kd
    python examples/megatron/add_teacher_logprob.py data/kd

The values come from another program, at another time, in any order: the number of the document in its shard, which
is its place in the input, says whose they are. Here that program is `teacher`, which counts tokens; a real one runs a
model.
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


def teacher(conversations: Iterable[tuple[int, NDArray[np.int32]]]) -> dict[int, NDArray[np.float32]]:
    """By document number, the log-probability of each token: a unigram model of what it is given."""
    known = dict(conversations)
    ids, counts = np.unique(np.concatenate(list(known.values())), return_counts=True)
    logprobs = np.log(counts / counts.sum()).astype(np.float32)
    return {number: logprobs[np.searchsorted(ids, tokens)] for number, tokens in known.items()}


def add_teacher(root: str) -> int:
    """Write `shard_NN_teacher_logprob` next to the tokens of every shard; the number of documents."""
    documents = 0
    for prefixes in find_kd_root(root).splits.values():
        for prefix in prefixes:
            shard = KDShard.open(prefix)
            logprobs = teacher((number, shard.document(number)[0]) for number in range(len(shard)))
            with MegatronWriter(sidecar_prefix(prefix, "teacher_logprob"), np.float32) as writer:
                for number in range(len(shard)):
                    values = shift_left(logprobs[number])  # at each token, that of the next one: label-aligned
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
