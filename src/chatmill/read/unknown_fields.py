"""Fields of records and messages without a meaning here, as the compiled scanner notes them: counts and kept values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from chatmill.core.messages import Objects, sparse_objects
from chatmill.core.native.scan import Scanned
from chatmill.core.native.text_ranges import distinct
from chatmill.core.texts import Texts
from chatmill.core.tokens import offsets_of
from chatmill.json_values import decoded

Ints = NDArray[np.int64]
FieldRecords = Iterator[tuple[str, Ints]]
"""Fields, each with the records that have something in it, in order."""


def record_fields(scanned: Scanned, data: bytes) -> FieldRecords:
    """Yield the fields of records that mean nothing."""
    records, starts, lengths = scanned.unused.T
    return _group_by_name(_texts(data, starts, lengths), records)


def message_fields(parts: Sequence[Scanned], data: bytes | NDArray[np.uint8], content: str) -> FieldRecords:
    """Yield the fields of messages, and of parts of their contents, that mean nothing, with their records.

    Args:
        parts: Scans of the same records, each for other messages.
        data: What was scanned.
        content: The field of a message that the parts are in.
    """
    fields = []
    records = []
    for scanned in parts:
        held = scanned.extras[scanned.extras["holds"] != 0]
        fields.append(held)
        records.append(np.searchsorted(scanned.offsets, held["message"], side="right") - 1)
    joined = np.concatenate(fields)
    owners = np.concatenate(records)
    for in_part, prefix in enumerate(("messages[].", f"messages[].{content}[].")):
        chosen = joined["in_part"] == in_part
        names = _texts(data, joined["start"][chosen], joined["length"][chosen])
        for name, named in _group_by_name(names, owners[chosen]):
            yield prefix + name, named


def kept_fields(scanned: Scanned, data: bytes | NDArray[np.uint8], names: Collection[str]) -> Objects:
    """Decode the fields of messages that have one of these names, as a column of mappings."""
    extras = scanned.extras[scanned.extras["in_part"] == 0]
    fields: dict[int, dict[str, object]] = {}
    if names and len(extras):
        given = _texts(data, extras["start"], extras["length"])
        values = _texts(data, extras["value"], extras["value_length"])
        which, firsts = distinct(given.data, given.starts, given.lengths)
        spelled = given.take(firsts)[:]
        wanted = np.array([name in names for name in spelled], dtype=np.bool_)
        for index in np.flatnonzero(wanted[which]).tolist():
            of_message = fields.setdefault(int(extras["message"][index]), {})
            of_message[spelled[which[index]]] = decoded(values.raw(np.array([index]))[0])
    return sparse_objects(len(scanned.messages), fields)


def message_field_ids(parts: Sequence[Scanned], data: bytes) -> list[Ints]:
    """Intern the unknown fields of every message as they are written.

    Messages of all parts with the same id have the same fields with the same values; 0 means none.
    """
    extras = np.concatenate([scanned.extras for scanned in parts])
    firsts = offsets_of(np.array([len(scanned.messages) for scanned in parts], dtype=np.int64))
    messages = np.repeat(firsts[:-1], [len(scanned.extras) for scanned in parts]) + extras["message"]
    written = _texts(data, extras["start"], extras["value"] + extras["value_length"] - extras["start"])
    spelled, _ = distinct(written.data, written.starts, written.lengths)
    codes = 2 * spelled + extras["in_part"]
    counts = np.bincount(messages, minlength=int(firsts[-1]))
    offsets = offsets_of(counts)
    ids = np.zeros(int(firsts[-1]), dtype=np.int64)
    for index in range(int(counts.max(initial=0))):
        some = np.flatnonzero(counts > index)
        pairs = ids[some] * 2 * (len(spelled) + 1) + codes[offsets[some] + index]
        ids[some] = np.unique(pairs, return_inverse=True)[1] + 1 + index * len(ids)
    return np.split(ids, firsts[1:-1])


def _texts(data: bytes | NDArray[np.uint8], starts: Ints, lengths: Ints) -> Texts:
    """Make a column of texts in scanned data."""
    return Texts(np.frombuffer(data, dtype=np.uint8), starts, lengths)


def _group_by_name(names: Texts, records: Ints) -> FieldRecords:
    """Yield every name once with its records, each once.

    The work is as large as the number of fields: all of them may have different names.
    """
    which, firsts = distinct(names.data, names.starts, names.lengths)
    ordered = records[np.lexsort((records, which))]
    ends = offsets_of(np.bincount(which, minlength=len(firsts))).tolist()
    for index, first in enumerate(firsts.tolist()):
        owners = ordered[ends[index] : ends[index + 1]]
        yield names[first], owners[np.diff(owners, prepend=-1) > 0]
