"""What one chunk becomes: the shards of its splits, its ledger and its rejected records."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from chatmill.compiler.batch_documents import NAMED, Compiled
from chatmill.compiler.pipeline import BATCH_BYTES, Pipeline
from chatmill.compiler.recipe import OnError, Source
from chatmill.core.checksums import FileRecord
from chatmill.core.conversations import Conversations
from chatmill.core.hash_shares import hash_limit, hashes_below
from chatmill.core.ledger import Ledger
from chatmill.errors import RecordError, fault_of
from chatmill.images.column import picture_columns
from chatmill.read.groups import no_group, record_groups
from chatmill.read.preferences import MARGIN_FIELDS
from chatmill.read.ranges import Chunk
from chatmill.read.record_shape import LABEL_FALSE
from chatmill.read.where import parse_where
from chatmill.render.jinja.options import Expand
from chatmill.store.episode_manifest import BRANCHES, COLUMNS, IMAGE_BYTES, IMAGES, KINDS, LOGPROBS, MARGIN, SIDE
from chatmill.store.shard_writer import ShardWriter, SourceCodes, as_bytes

REJECTED = "rejected.jsonl"
STATE = "state.json"
"""In the work folder: which build is at work there."""
_LINE_NUMBER = re.compile(r"\d+$")
"""What the place of a record ends in."""


class ChunkOutput:
    """The episodes of each split, the ledger, and the rejected records of one chunk.

    After its `with` block nothing is open. After an error, what was written goes with its folder.
    """

    def __init__(self, folder: Path, pipeline: Pipeline, rules: Source) -> None:
        """`rules` is the source of the recipe that all input of the chunk is of."""
        self.ledger = Ledger()
        self.read: Counter[str] = Counter()
        """Records read, by source; entered in the ledger at the end."""
        self._folder, self._pipeline, self._rules = folder, pipeline, rules
        recipe, shows = pipeline.recipe, pipeline.template.expander is not None
        present = {KINDS: recipe.keep_kinds, BRANCHES: recipe.expand is Expand.TREE, IMAGES: shows}
        present |= {IMAGE_BYTES: shows and recipe.store_images, LOGPROBS: recipe.logprobs}
        present |= dict.fromkeys((SIDE, MARGIN), recipe.preferences == "pairs")
        self._columns = [column for column in COLUMNS if present.get(column, True)]
        splits = ["train", "val"] if recipe.split.val_fraction > 0 else ["train"]
        # also those that stay empty: a shard has the number of its chunk
        self._shards = {split: ShardWriter(folder / split, self._columns, masks=True) for split in splits}
        self._sources = {split: SourceCodes() for split in splits}
        self.fields_read = _fields_read(pipeline, rules)
        """Fields that the reader does not know, and that mean something to template, policy or recipe."""
        self.message_fields = _message_fields(pipeline)
        """Those of messages."""
        self._rejected: list[str] = []
        """Entries of rejected records: JSON."""
        self._rejected_here: list[tuple[tuple[int, int], str]] = []
        """Piece, line or row, and the entry, of those of the pieces that are being read."""
        self._pieces: dict[str, tuple[int, Chunk]] = {}
        """These pieces and their numbers, by what the places of their records begin with."""
        self._named: dict[str, list[str]] = {}
        """The first records that each gate is about, in words."""
        self._left_out: dict[str, str] = {}
        """The first record that was left out for each reason, in words."""
        self._groups: list[str | None] = []
        """The group of every line or row of the piece that is being read, where records share trees."""
        self._first = 0
        """The first line or row of that piece."""
        self._waiting: list[Conversations] = []
        """Records that share trees, until the chunk was read whole."""
        self._codes: list[int] = []
        """The number of the group of each."""
        self._numbers: dict[str, int] = {}

    def reject(self, error: RecordError, source: str) -> None:
        """Quarantine a record, or end the build; answers that people did not like may be left out on request."""
        if error.code == LABEL_FALSE and self._pipeline.recipe.preferences is not None:
            self.ledger.records[source, "skipped", LABEL_FALSE] += 1
            return
        if self._pipeline.recipe.on_error is OnError.FAIL:
            raise error
        self.ledger.records[source, "quarantined", error.code] += 1
        entry = {"where": error.where, "id": error.record_id, "field": error.path, "reason": error.code}
        line = json.dumps({**entry, "message": error.message}, ensure_ascii=False)
        self._rejected_here.append((self._order_of(error.where), line))
        self._left_out.setdefault(error.code, f"{_named(error.record_id, error.where)}: {error.message}")

    def add(self, conversations: Conversations) -> None:
        """Compile a batch and append its episodes to their splits; records that share trees wait for the others."""
        if self._pipeline.recipe.tree is None:
            self._compile(conversations)
            return
        field, first = self._pipeline.recipe.tree.group, self._first
        groups = [self._groups[line_number(where) - first] for where in conversations.wheres[:]]
        for place, group in enumerate(groups):
            if group is None:
                error = no_group(field, conversations.wheres[place], conversations.ids[place])
                self.reject(error, conversations.sources[place])
        self._waiting.append(conversations.take(np.flatnonzero(np.array([group is not None for group in groups]))))
        members = (group for group in groups if group is not None)
        self._codes += [self._numbers.setdefault(group, len(self._numbers)) for group in members]

    def add_groups(self) -> None:
        """Compile the records that share trees, when all of them were read: groups in the order of their first ones.

        A batch has about `BATCH_BYTES` of text, and no group is in two of them.
        """
        if self._codes:
            codes = np.array(self._codes, dtype=np.int64)
            order = np.argsort(codes, kind="stable")
            records, codes = Conversations.joined(self._waiting).take(order), codes[order]
            text = np.append(0, np.cumsum(records.messages.contents.lengths))[records.offsets]
            begin = 0
            for end in [*(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]:
                if end == len(codes) or text[end] - text[begin] >= BATCH_BYTES:
                    self._compile(records.take(np.arange(begin, end)), codes[begin:end])
                    begin = end
        self.end_pieces()

    def _compile(self, conversations: Conversations, groups: NDArray[np.int64] | None = None) -> None:
        """Compile a batch and append its episodes; a fault of Chatmill costs the records that it comes with."""
        try:
            compiled = self._pipeline.compile(conversations, groups)
        except Exception as fault:
            self._compile_in_parts(conversations, groups, fault_of(fault))
            return
        sources = conversations.sources
        for index, error in compiled.failed:
            self.reject(error, sources[index])
        self.ledger.add(compiled.ledger)
        for gate, places in compiled.stopped_by.items():
            named = self._named.setdefault(gate, [])
            for place in places[: NAMED - len(named)].tolist():
                named.append(_named(conversations.ids[place], conversations.wheres[place]))
        for reason, place in compiled.left_out.items():
            self._left_out.setdefault(reason, _named(conversations.ids[place], conversations.wheres[place]))
        if limit := hash_limit(self._pipeline.recipe.split.val_fraction):
            goes_to_val = hashes_below(conversations.keys, limit)[compiled.source_index]
        else:
            goes_to_val = np.zeros(len(compiled.source_index), dtype=np.bool_)
        for split, chosen in (("train", ~goes_to_val), ("val", goes_to_val)):
            wanted = np.flatnonzero(chosen)
            if len(wanted):
                self._append_compiled(split, compiled, wanted, conversations)

    def _compile_in_parts(
        self, conversations: Conversations, groups: NDArray[np.int64] | None, fault: RecordError
    ) -> None:
        """Compile both halves of a batch that Chatmill failed on; reject what cannot be cut in two."""
        self._pipeline.template.store.is_in_doubt = True
        middle, every = _middle(conversations, groups), np.arange(len(conversations))
        if middle:
            for part in (slice(0, middle), slice(middle, None)):
                self._compile(conversations.take(every[part]), None if groups is None else groups[part])
            return
        for index in range(len(conversations)):
            error = RecordError(fault.message, code=fault.code)
            error.record_id, error.where = conversations.ids[index], conversations.wheres[index]
            self.reject(error, conversations.sources[index])

    def _append_compiled(
        self, split: str, compiled: Compiled, wanted: NDArray[np.int64], conversations: Conversations
    ) -> None:
        tokens, columns = compiled.tokens, self._columns
        codes = compiled.source_codes[wanted].astype(np.uint32)
        values: dict[str, Any] = {
            "ids": compiled.picked(tokens.ids, wanted).view(np.uint32),
            "mask": as_bytes(compiled.picked(compiled.weights, wanted)),
            "source": self._sources[split].translate(codes, compiled.source_names),
            "turns": compiled.turns[wanted],
            "trained": compiled.trained[wanted],
            "record_id": conversations.keys.take(compiled.source_index[wanted]),
        }
        if KINDS in columns:
            values[KINDS.name] = compiled.picked(tokens.kinds, wanted)
        if LOGPROBS in columns:
            values[LOGPROBS.name] = compiled.picked(compiled.logprobs, wanted)
        if compiled.branches is not None:
            values[BRANCHES.name] = compiled.branches.take(wanted)
        if compiled.sides is not None and compiled.margins is not None:
            values |= {SIDE.name: compiled.sides[wanted], MARGIN.name: compiled.margins[wanted]}
        if IMAGES in columns:
            images, data = picture_columns(tokens, compiled.pictures)
            values |= {IMAGES.name: images.take(wanted), IMAGE_BYTES.name: data.take(wanted)}
        self._shards[split].append(tokens.lengths[wanted], values)

    def begin_pieces(self, chunks: Sequence[Chunk]) -> None:
        """Begin pieces, which are about to be read: one, or several of different files and of one shape."""
        self._pieces = {chunk.before: (number, chunk) for number, chunk in enumerate(chunks)}
        if self._pipeline.recipe.tree is not None:
            (chunk,) = chunks  # records that share trees are counted by their lines
            self._groups = list(record_groups(chunk, self._pipeline.recipe.tree.group))
            self._first = chunk.first

    def source_of(self, where: str) -> str:
        """Return what names the record at a place in these pieces, if it does not name its own source."""
        _, chunk = self._pieces[_LINE_NUMBER.sub("", where)]
        return chunk.source

    def _order_of(self, where: str) -> tuple[int, int]:
        """Return a key that sorts places in these pieces as they were read."""
        number, _ = self._pieces.get(_LINE_NUMBER.sub("", where), (0, None))
        return number, line_number(where)

    def end_pieces(self) -> None:
        """End these pieces and put their rejected records in order: reading and rendering refuse separately."""
        self._rejected += [line for _, line in sorted(self._rejected_here, key=itemgetter(0))]
        self._rejected_here = []

    def receipt(self, number: int, **more: Any) -> dict[str, Any]:
        """Finish all files; the receipt of the chunk, of which `more` becomes part."""
        for source, count in self.read.items():
            self.ledger.records[source, "read", ""] += count
        splits = {
            split: msgspec.to_builtins(replace(writer.finish(""), sources=self._sources[split].names))
            for split, writer in self._shards.items()
        }
        rejected = None
        if self._rejected:
            path = self._folder / REJECTED
            path.write_text("".join(f"{line}\n" for line in self._rejected), encoding="utf-8")
            rejected = FileRecord.of_file(path).to_json()
        return {
            "number": number,
            "splits": splits,
            "ledger": self.ledger.as_json(),
            "rejected": rejected,
            "named": {gate: names for gate, names in sorted(self._named.items()) if names},
            "left_out": dict(sorted(self._left_out.items())),
            **more,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            for writer in self._shards.values():
                writer.discard()


def _middle(conversations: Conversations, groups: NDArray[np.int64] | None) -> int:
    """Return where a batch can be cut in two, so that no group is in both parts; 0 where it cannot."""
    starts = np.arange(1, len(conversations)) if groups is None else np.flatnonzero(np.diff(groups)) + 1
    return int(starts[len(starts) // 2]) if len(starts) else 0


def _fields_read(pipeline: Pipeline, rules: Source) -> set[str]:
    recipe = pipeline.recipe
    return {
        *(f"messages[].{name}" for name in _message_fields(pipeline)),
        *((recipe.tree.group,) if recipe.tree is not None else ()),
        *(MARGIN_FIELDS if recipe.preferences == "pairs" else ()),
        *(rules.pick.fields if rules.pick else ()),
        *(parse_where(rules.where).fields if rules.where else ()),
    }


def _message_fields(pipeline: Pipeline) -> frozenset[str]:
    """Fields of messages that the reader does not know, and that mean something to template or policy."""
    errors = pipeline.policy.errors
    of_errors = frozenset(errors.fields if errors is not None else ())
    return pipeline.template.form.more_fields | of_errors


def _named(record_id: str, where: str) -> str:
    """Return a record in the words of a message."""
    return f"{where} ({record_id})" if record_id and where else where or record_id


def line_number(where: str) -> int:
    """Return the line or row that a place such as `chats.jsonl:17` or `chats.parquet:row 17` ends in."""
    digits = _LINE_NUMBER.search(where)
    return int(digits.group()) if digits else 0
