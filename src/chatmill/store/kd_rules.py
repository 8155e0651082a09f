"""What holds at every position of a distillation shard: mask and span agree with each other, and with the ids.

Sidecars that are off by one have the right lengths, and a span that is a copy of the mask agrees with the mask. Only
the ids show it: EOD at the end, role and channel of each message. What the ids must be holds for the documents of
`synth-kd`; an export of another template has only its EOD, if any.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.harmony_ids import CHANNEL_NAMES, EOD, START, spans_of_ids
from chatmill.core.json_files import read_object
from chatmill.core.shift import shift_left_ragged
from chatmill.store.receipts import EXPORT_MANIFEST, KD_SCHEMA, MANIFEST, manifest_kind

OTHER_MASK = "lossmask is not 1 exactly where the span is 1 or 2"
OTHER_SPAN = "a span other than 0, 1 and 2"
LATE_LABEL = "a label behind the end of a document"
NO_EOD = "EOD inside of a document, or none at its end"
OTHER_IDS = "a span is not that of the message by its role and channel"


@dataclass(frozen=True, slots=True)
class ShardRules:
    """The rules for the shards in a folder, by what is known of their ids."""

    eod: int | None = None
    """The last token of every document; None where it is not known."""
    harmony: bool = False
    """Whether documents are Harmony conversations, trained as `synth-kd` does it."""

    @classmethod
    def of_root(cls, folder: Path) -> ShardRules:
        """Those of a root, from its manifest.json or export.json; none if neither says anything."""
        is_kd = manifest_kind(folder) == KD_SCHEMA
        path = folder / (MANIFEST if is_kd else EXPORT_MANIFEST)
        said = read_object(path).get("tokenizer" if is_kd else "options") if path.is_file() else None
        found = said.get("eod_id") if isinstance(said, dict) else None
        eod = found if type(found) is int else None
        return cls(eod=EOD if is_kd and eod is None else eod, harmony=is_kd)

    def broken(
        self, ids: NDArray[Any], mask: NDArray[np.uint8], span: NDArray[np.uint8], ends: NDArray[np.int64]
    ) -> dict[str, NDArray[np.bool_]]:
        """For whole documents, the positions at which each rule is broken.

        `mask` and `span` are label-aligned; `ends` are the positions of the last tokens.
        """
        is_end = np.zeros(len(ids), dtype=np.bool_)
        is_end[ends] = True
        found = {
            OTHER_MASK: mask != (span > 0),
            OTHER_SPAN: span > max(CHANNEL_NAMES),
            LATE_LABEL: is_end & (span != 0),
        }
        if self.eod is not None:
            # Documents of other templates may use the EOD between messages.
            found[NO_EOD] = (ids == self.eod) != is_end if self.harmony else (ids != self.eod) & is_end
        if self.harmony:
            offsets = np.append(0, ends + 1)
            # Only what begins as Harmony does is held to its rules.
            known = np.repeat(ids[offsets[:-1]] == START, np.diff(offsets))
            found[OTHER_IDS] = known & (span != shift_left_ragged(spans_of_ids(ids, offsets), offsets))
        return found
