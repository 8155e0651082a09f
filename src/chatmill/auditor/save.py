"""Writes the audited set, and what Chatmill makes of its source, as two datasets that `chatmill view` compares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chatmill.auditor.layout import ranges_of
from chatmill.auditor.matching import SourceComparison
from chatmill.auditor.source import SourceRows
from chatmill.auditor.tokenized import TokenizedSet
from chatmill.core.tokens import offsets_of
from chatmill.errors import ConfigError
from chatmill.label.presets import find_policy
from chatmill.store.episode_writer import EpisodeWriter

Ints = NDArray[np.int64]
THEIRS, OURS, SPLIT = "set", "ours", "train"


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds something, before anything is computed."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: there is something already; name a new folder")


def save_both(folder: Path, data: TokenizedSet, source: SourceRows | None, compared: SourceComparison | None) -> None:
    """Write `set` and, with a source, `ours`. Documents have the ids of the records they were matched with."""
    begins, ends = data.bounds
    filled = np.flatnonzero(data.filled)
    sizes = (ends - begins)[filled]
    places = ranges_of(begins[filled], ends[filled])
    rows = np.full(len(begins), -1) if compared is None else compared.rows
    names = [] if source is None else _row_names(source)
    theirs = [
        names[row] if row >= 0 else f"document {number + 1}"
        for number, row in zip(filled.tolist(), rows[filled].tolist(), strict=True)
    ]
    weights = None if data.trained is None else data.trained[places].astype(np.uint8)
    with EpisodeWriter(folder / THEIRS, SPLIT) as writer:
        writer.append_batch(
            data.ids[places].astype(np.uint32), offsets_of(sizes), weights, record_ids=_told_apart(theirs)
        )
    if source is None or not len(source):
        return
    with EpisodeWriter(folder / OURS, SPLIT) as writer:
        writer.append_batch(
            source.ids.astype(np.uint32), source.offsets, _weights(source), source.kinds, record_ids=names
        )


def _weights(source: SourceRows) -> NDArray[np.uint8]:
    """What Chatmill trains of the source."""
    trained = find_policy("assistant").table()[source.kinds] > 0
    weights: NDArray[np.uint8] = (trained & (source.token_weights != 0)).astype(np.uint8)
    return weights


def _row_names(source: SourceRows) -> list[str]:
    """The name of each row: its record, and which of its rows where it has several."""
    counts = Counter(source.records.tolist())
    seen: Counter[int] = Counter()
    names = []
    for record in source.records.tolist():
        seen[record] += 1
        names.append(f"record {record + 1}" + (f", row {seen[record]}" if counts[record] > 1 else ""))
    return names


def _told_apart(names: Iterable[str]) -> list[str]:
    """Names with a number behind those that were there before."""
    seen: Counter[str] = Counter()
    told = []
    for name in names:
        seen[name] += 1
        told.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return told
