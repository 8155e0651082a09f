"""One pass over the columns of a built split: counts, and values that no build writes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from chatmill.prove.report import Finding, VerifyReport
from chatmill.store.episode_layout import INDEX, MASK, TOKENS
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.split import Documents

Bools = NDArray[np.bool_]
FILES = {"ids": TOKENS, "length": INDEX, "weights": MASK}


def file_of(split: EpisodeDataset, number: int, column: str) -> str:
    """Return the file, below the dataset's folder, that has a column of an episode."""
    shard = split.shards[int(np.searchsorted(split.episode_offsets, number, side="right")) - 1]
    spec = split.columns.get(column)
    name = FILES.get(column) or (spec.offsets_file or spec.file if spec else "")
    return (shard.folder / name).relative_to(split.directory).as_posix()


def check_columns(split: EpisodeDataset, book: VerifyReport, *, vocab_size: int, bos_id: int | None) -> None:
    """Count a split; ids without a token, and a BOS that follows another, are findings: the first of each batch."""
    book.counts["episodes"] += len(split)
    for numbers in split.batches():
        documents = split.gather(numbers)
        lengths = np.diff(documents.offsets)
        starts = np.union1d(documents.offsets[:-1], split.branches(numbers).flat_starts(lengths))
        starts = starts[starts < len(documents.ids)]
        strange = documents.ids >= vocab_size
        doubled = np.zeros(len(strange), dtype=np.bool_)
        if bos_id is not None:
            doubled[1:] = (documents.ids[1:] == bos_id) & (documents.ids[:-1] == bos_id)
            doubled[starts] = False  # the second one opens another episode or branch
        book.counts["tokens"] += len(documents.ids)
        book.counts["double_bos"] += int(doubled.sum())
        for wrong, sentence in (
            (strange, f"no id of the vocabulary, which has {vocab_size:,}"),
            (doubled, "one BOS token follows another"),
        ):
            for finding in _first(split, numbers, documents, wrong, sentence):
                book.found(finding)
        if documents.weights is not None:
            book.counts["trained_tokens"] += int(np.count_nonzero(documents.trained))


def _first(
    split: EpisodeDataset, numbers: NDArray[np.int64], documents: Documents, wrong: Bools, sentence: str
) -> Iterator[Finding]:
    """Yield the first token that is wrong, if one is."""
    for at in np.flatnonzero(wrong)[:1].tolist():
        row = int(np.searchsorted(documents.offsets, at, side="right")) - 1
        yield Finding(
            file=file_of(split, int(numbers[row]), "ids"),
            split=split.split,
            episode=int(numbers[row]),
            token=at - int(documents.offsets[row]),
            message=f"{documents.ids[at]}: {sentence}",
        )
