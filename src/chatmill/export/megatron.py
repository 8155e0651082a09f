"""The export to Megatron Core: indexed datasets of tokens, loss mask and span, as spec 5 lays them out.

Mask and span are written label-aligned, `values[1:] + [0]` of each document: no token predicts the first token of a
document. A span is 1 for trained reasoning and 2 for the rest of what is trained; see `spans_of`.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.checksums import FileRecord
from chatmill.core.kinds import Part, RoleCode, parts_of, roles_of
from chatmill.core.shift import shift_left_ragged
from chatmill.errors import ConfigError
from chatmill.export.row_layout import MAX_ID, RowBatch, with_ends
from chatmill.store.kd_shard import LOSSMASK, SPAN, TOKENS
from chatmill.store.megatron import MegatronWriter
from chatmill.store.split import Documents

if TYPE_CHECKING:
    from chatmill.export.targets import Export

SPAN_REASONING, SPAN_OTHER = 1, 2
OTHER_WEIGHTS = (
    "the loss mask only says trained or not: {:,} tokens have another weight than 0 and 1, and count like all others"
)


def to_megatron(export: Export, *, eod_id: int | None = None) -> None:
    """`SPLIT/shard_NN_{tokens,lossmask,span}.{bin,idx}`: one document each, in the order of the build."""
    if eod_id is not None and eod_id > MAX_ID:
        raise ConfigError(f"eod_id is {eod_id:,}; token ids are stored as int32, up to {MAX_ID:,}")
    for split, rows in export.documents("Megatron").items():
        for number, batches in enumerate(export.shards(split, rows, added=int(eod_id is not None))):
            with MegatronShard(export.folder / split / f"shard_{number:02d}") as shard:
                for batch in batches:
                    shard.append(*_columns(export, batch, eod_id))
            export.hashed |= {f"{split}/{name}": record for name, record in shard.files.items()}
    _say_what_is_lost(export, eod_id)


def _columns(export: Export, batch: RowBatch, eod_id: int | None) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Ids, lengths, and label-aligned span of some documents."""
    ids, offsets, spans = batch.ids, batch.documents.offsets, spans_of(batch.documents)
    weights = batch.documents.full_weights
    export.lose(int(np.count_nonzero((weights != 0) & (weights != 1))), OTHER_WEIGHTS)
    spans[~export.targets(batch)] = 0
    if eod_id is not None:
        ids, offsets, spans = with_ends(ids, offsets, eod_id, spans)
    return ids, np.diff(offsets), shift_left_ragged(spans, offsets)


def spans_of(documents: Documents) -> NDArray[np.uint8]:
    """The span of every token, token-aligned: 0 not trained, 1 trained reasoning of the assistant, 2 other trained.

    A header counts to what it opens: that of a Harmony analysis message, say, to its reasoning. Without kinds all
    that is trained is 2.
    """
    spans = np.where(documents.trained, np.uint8(SPAN_OTHER), np.uint8(0))
    if documents.kinds is None or not len(spans):
        return spans
    assistant = roles_of(documents.kinds) == RoleCode.ASSISTANT
    parts = parts_of(documents.kinds)
    reasoning = assistant & (parts == Part.REASONING)
    header = assistant & (parts == Part.HEADER)
    places = np.arange(len(spans))
    opened = np.minimum.accumulate(np.where(header, len(spans), places)[::-1])[::-1]
    document_ends = np.repeat(documents.offsets[1:], np.diff(documents.offsets))
    opens_reasoning = header & (opened < document_ends) & reasoning[np.minimum(opened, len(spans) - 1)]
    spans[(reasoning | opens_reasoning) & (spans > 0)] = SPAN_REASONING
    return spans


def _say_what_is_lost(export: Export, eod_id: int | None) -> None:
    facts = [name for name in export.stored if name not in ("kinds", "logprobs")]
    splits = export.source.splits.values()
    if facts:
        export.say(
            f"{', '.join(facts)}: indexed datasets hold no facts about records; their order is that of the build"
        )
    if not all(documents.has_masks for documents in splits):
        export.say("the dataset stores no masks: every token but the first of a document is trained")
    if not export.holds_kinds:
        export.say("kinds are not stored, so every trained token has the span 2; none is known to be reasoning")
    else:
        export.say("kinds are not kept: the span says 1 for trained reasoning of the assistant, 2 for all else trained")
    if "logprobs" in export.stored:
        export.say("logprobs: indexed datasets have no place for the log-probabilities of sampled tokens")
    if eod_id is None:
        export.say(
            "no end-of-document token was added: where Megatron packs samples, documents follow each other as they end "
            f"in the dataset. --eod-id N adds one{export.eod_advice}"
        )


class MegatronShard(ExitStack):
    """The datasets of one shard while they grow: tokens, loss mask and span.

    For a `with` block: they are finished when it ends well, else discarded.
    """

    def __init__(self, prefix: Path) -> None:
        """`prefix` is `SPLIT/shard_NN`; its folder is made."""
        super().__init__()
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._writers = {
            column: self.enter_context(MegatronWriter(f"{prefix}_{column}", np.int32 if column == TOKENS else np.uint8))
            for column in (TOKENS, LOSSMASK, SPAN)
        }

    @property
    def tokens(self) -> int:
        """Tokens written so far."""
        return self._writers[TOKENS].values

    @property
    def documents(self) -> int:
        """Documents written so far."""
        return self._writers[TOKENS].documents

    def append(self, ids: NDArray[Any], lengths: NDArray[np.integer], span: NDArray[np.uint8]) -> None:
        """Write whole documents; `span` is label-aligned, and the mask is 1 where it is not 0."""
        self._writers[TOKENS].append(ids, lengths)
        self._writers[SPAN].append(span, lengths)
        self._writers[LOSSMASK].append((span != 0).view(np.uint8), lengths)

    @property
    def files(self) -> dict[str, FileRecord]:
        """Every file by its name, once the block has ended."""
        return {
            writer.paths[kind].name: record
            for writer in self._writers.values()
            for kind, record in writer.records.items()
        }
