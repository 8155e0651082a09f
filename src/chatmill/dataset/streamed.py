"""A dataset that is compiled while it is read: only a few shards of it are there at a time."""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from chatmill.compiler.chunk_job import recipe_json
from chatmill.compiler.finish import check_gates
from chatmill.compiler.manifest import build_fingerprint
from chatmill.compiler.recipe import Recipe
from chatmill.compiler.run import driver_pipeline, run_build
from chatmill.compiler.sources import plan_sources
from chatmill.core import html
from chatmill.core.ledger import Ledger
from chatmill.core.scratch import Scratch
from chatmill.dataset.chunk_work import ChunkWork, Receipt, open_split
from chatmill.dataset.exports import Exports
from chatmill.dataset.objects import RecordFile
from chatmill.dataset.show import ShownEpisode, decoder_of
from chatmill.dataset.stored import TRAIN, Dataset
from chatmill.errors import ConfigError, MissingExtraError, need
from chatmill.look.decoder import Decoder, decoder_for
from chatmill.look.stored_splits import EpisodeSplit
from chatmill.read.places import Elsewhere

if TYPE_CHECKING:
    from chatmill.dataset.stream_loader import StreamLoader
    from chatmill.export.export import ExportResult
    from chatmill.look.stats import DatasetStats

SAFE_GATES = ("records_without_trained_tokens", "untrained_terminators", "records_quarantined")
"""Gates on counts, which only grow: one that is passed can be reported at once."""


LOST_WEIGHTS = "some tokens have a weight other than 0 and 1; labels only say trained or not, so these weights are lost"


class StreamedDataset(Exports):
    """The episodes of an input, compiled chunk by chunk when they are needed; `chatmill.compile` gives one.

    The chunks are those of `chatmill build`, so each becomes the shard that a build would write, byte by byte.
    """

    def __init__(
        self, recipe: Recipe, scratch: Scratch, *, records: RecordFile | None = None, workers: int | None = None
    ) -> None:
        """Reads the input once, to hash it and to cut it into chunks; nothing is compiled yet."""
        self.recipe = recipe
        """Everything that decides the bytes."""
        self._scratch, self._records_file, self._workers = scratch, records, workers
        self._base = records.base if records else None
        pipeline = driver_pipeline(recipe)
        self._tokenizer, self._loaded = pipeline.template.tokenizer, decoder_of(pipeline)
        self._planned = plan_sources(recipe, scratch.folder / "spool", self._base)
        self.fingerprint = build_fingerprint(recipe, self._planned.files, pipeline.fingerprints)
        """Of input, recipe, tokenizer and template: that of the build."""
        self._work = ChunkWork(
            chunks=self._planned.chunks,
            recipe=recipe_json(recipe),
            fingerprint=self.fingerprint,
            files=pipeline.files,
            answers=pipeline.answers,
            scratch=scratch,
            records=records,
        )
        self._ledger, self._seen, self._lock = Ledger(), set[int](), threading.Lock()

    @cached_property
    def _decoder(self) -> Decoder | None:
        recipe = self.recipe.as_json()
        return self._loaded or decoder_for({"recipe": recipe, "tokenizer": {"given_as": recipe["tokenizer"]}})[0]

    @property
    def chunks(self) -> int:
        """Chunks of the input; each becomes a shard."""
        return len(self._work.chunks)

    @property
    def bytes(self) -> int:
        """Bytes of the input files."""
        return sum(file.bytes for file in self._planned.files)

    def _count(self, numbers: Sequence[int], receipts: Sequence[Receipt]) -> None:
        """Add what chunks gave to the ledger, each once; a gate that is passed ends the reading."""
        with self._lock:
            for number, receipt in zip(numbers, receipts, strict=True):
                if number not in self._seen:
                    self._seen.add(number)
                    self._ledger.add(Ledger.from_json(receipt["ledger"]))
            gates = self.recipe.gates
            if len(self._seen) < self.chunks:
                others = {name: None for name in gates.__struct_fields__ if name not in SAFE_GATES}
                gates = structs.replace(gates, **others)
            hint = "Leave such records out of the input, or turn the gate off: compile(..., gates={...: None})"
            check_gates(structs.replace(self.recipe, gates=gates), self._ledger, hint)

    def __repr__(self) -> str:
        lines = [self._headline, *(f"  {words}: {count:,}" for words, count in self._counted())]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html.card(self._headline, html.table(self._counted()))

    @property
    def _headline(self) -> str:
        files = html.counted(len(self._planned.files), "file")
        return f"StreamedDataset: {files}, {self.bytes:,} bytes, compiled while it is read"

    def _counted(self) -> list[tuple[str, int]]:
        ledger = self._ledger
        found = [("chunks", self.chunks), ("compiled so far", len(self._seen))]
        for words, count in (
            ("records read", ledger.total_records("read")),
            ("records left out", ledger.total_records("quarantined") + ledger.total_records("skipped")),
            ("tokens", ledger.stored),
            ("trained", ledger.total("trained")),
            ("trained tokens lost by overflow", ledger.trained_lost),
        ):
            found += [(words, count)] if count else []
        return found

    def __iter__(self) -> Iterator[ShownEpisode]:
        """The episodes of train in the order of the input."""
        decoder, number = self._decoder, 0
        for chunk, (folder, receipts) in enumerate(self._work.folders(range(self.chunks))):
            self._count([chunk], receipts)
            if (stored := open_split(folder, TRAIN)) is not None:
                split = EpisodeSplit(stored)
                for place in range(len(split)):
                    yield self._shown(split, place, number, decoder)
                    number += 1

    def _shown(self, split: EpisodeSplit, place: int, number: int, decoder: Decoder | None) -> ShownEpisode:
        from dataclasses import replace

        item = split.item(place)
        kept = {name: None if (v := getattr(item, name)) is None else v.copy() for name in ("ids", "weights", "kinds")}
        name = item.record_id or ""
        item = replace(item, number=number, **kept)  # type: ignore[arg-type]
        return ShownEpisode(item, decoder, self._records_file.in_python(name) if self._records_file else name)

    def __getitem__(self, index: int) -> ShownEpisode:
        """One episode of train; everything before it is compiled, too."""
        if index < 0:
            raise IndexError("a streamed dataset has no end to count from: give a number from 0 on")
        found = next(itertools.islice(self, index, None), None)
        if found is None:
            raise IndexError(f"episode {index}: the input gives fewer")
        return found

    def to_torch(
        self,
        batch_size: int,
        *,
        packed: bool = False,
        length: int | None = None,
        shuffle: bool = True,
        seed: int = 1337,
        split: str = TRAIN,
        group_chunks: int = 4,
        device: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
        prefetch: bool = True,
        pin_memory: bool | None = None,
        packing_strategy: str | None = None,
    ) -> StreamLoader:
        """A resumable loader that compiles while it reads, in a process of its own.

        Batches are those of `Dataset.to_torch`. The chunks of the input come in an order of their own in each epoch;
        the rows of `group_chunks` of them are mixed and packed together. The stream has no end: `epoch()` counts.
        """
        need("torch", "giving batches as tensors", "torch")
        from chatmill.dataset.stream_loader import StreamFeed, StreamLoader
        from chatmill.load.config import DatasetMode, Planning, TrainingConfig
        from chatmill.load.long_episodes import LongEpisodes
        from chatmill.load.placement import placed

        if group_chunks < 1:
            raise ConfigError(f"group_chunks is {group_chunks}; it must be 1 or more")
        config = TrainingConfig(
            batch_size=batch_size,
            block_size=self._length(length),
            dataset_mode=DatasetMode.SFT_EPISODE,
            epoch_shuffle=shuffle,
            epoch_drop_last=False,
            epoch_seed=seed,
            use_loss_mask=True,
            pad_token_id=next(i for i in (self._tokenizer.pad_id, self._tokenizer.eos_id, 0) if i is not None),
            pack=packed,
            packing_strategy=packing_strategy,
            planning=Planning.EPOCH,
            overflow=LongEpisodes.ERROR,
        )
        place = placed(rank=rank, world_size=world_size, device=device, pin_memory=pin_memory)
        feed = StreamFeed(
            self._work,
            split,
            config,
            place,
            group_chunks=min(group_chunks, self.chunks),
            workers=1 if self._workers is None else self._workers,
            seen=self._count,
        )
        loader = StreamLoader({split: feed}, config, place, dataset=self._headline, prefetch=prefetch)
        loader.keeps = self._scratch
        return loader

    def _length(self, length: int | None) -> int:
        longest = self.recipe.packing.max_length
        if longest is None:
            raise ConfigError(
                "rows of a streamed dataset need a length that holds every episode, which is not known before the "
                'end: compile with max_length, and overflow="windows" where conversations may be longer'
            )
        if length is not None and longest > length + 1:
            raise ConfigError(
                f"length is {length:,}, and episodes have up to {longest:,} tokens (max_length), so rows would cut "
                f"them: compile with max_length={length}"
            )
        return length if length is not None else longest

    def to_hf(self, split: str = TRAIN) -> Any:
        """A `datasets.IterableDataset` with `input_ids` and `labels`, compiled while it is read; resumable as it is."""
        try:
            import datasets
        except ImportError as error:
            raise MissingExtraError("datasets", "hf", "giving a datasets.IterableDataset") from error
        chunks = list(range(self.chunks))
        return datasets.IterableDataset.from_generator(
            hf_rows, gen_kwargs={"chunks": chunks, "work": self._work, "split": split}
        )

    def compile(self) -> Dataset:
        """Compile everything into the place for temporary files."""
        folder = self._scratch.folder / "dataset"
        run_build(self.recipe, folder, workers=self._workers, resume=True, base=self._base)
        return Dataset(folder, scratch=self._scratch, records=self._records_file)

    def stats(self) -> DatasetStats:
        """The numbers of the whole dataset, for which everything is compiled once."""
        return self.compile().stats()

    def export(self, to: str, out: str | os.PathLike[str], **options: Any) -> ExportResult:
        """Compile everything, and write it in the format of a trainer."""
        return self.compile().export(to, out, **options)

    def save(self, out: str | os.PathLike[str]) -> Path | Elsewhere:
        """Compile everything into a new folder, as `chatmill build` does; one that was stopped resumes."""
        return run_build(self.recipe, out, workers=self._workers, resume=True, base=self._base).directory


def hf_rows(chunks: list[int], work: ChunkWork, split: str) -> Iterator[dict[str, list[int]]]:
    """The episodes of some chunks as rows of Hugging Face's trainers; a chunk is a shard for them."""
    from chatmill.core.shift import IGNORE_INDEX

    told = False
    for folder, _ in work.folders(chunks):
        for episode in open_split(folder, split) or ():
            ids, weights = episode.ids.astype(np.int64), episode.weights
            labels = ids if weights is None else np.where(weights > 0, ids, IGNORE_INDEX)
            if weights is not None and not told and ((weights != 0) & (weights != 1)).any():
                warnings.warn(LOST_WEIGHTS, UserWarning, stacklevel=2)
                told = True
            yield {"input_ids": ids.tolist(), "labels": labels.tolist()}
