"""Datasets for the exports to trainers, what their documents must be when a trainer has read them, and its findings."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.compiler.run import run_build
from chatmill.store.documents import open_dataset

DATA = Path(__file__).parents[1] / "data" / "conversations"
CAPACITY = 6000
END = 260
"""`<|im_end|>` of the byte tokenizer with the template chatml."""

Document = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids, and the places of trained tokens but that of the first, which nothing predicts."""


def built(out: Path, **options: Any) -> Path:
    """Real conversations as bytes, train and val."""
    recipe = {
        "sources": [{"path": str(DATA / f"{name}.jsonl.gz")} for name in ("mt_bench_ref", "oasst_realistic")],
        "tokenizer": "bytes",
        "template": "chatml",
        "add_control_tokens": True,
        "split": {"val_fraction": 0.2},
        **options,
    }
    run_build(recipe, out, workers=0)
    return out


def documents_of(folder: Path, split: str = "train") -> list[Document]:
    """Straight from the store, one document after another."""
    documents = open_dataset(folder).splits[split]
    found = []
    for number in range(len(documents)):
        one = documents.gather(np.array([number]))
        found.append((tuple(one.ids.tolist()), tuple((np.flatnonzero(one.trained[1:]) + 1).tolist())))
    return found


def cut(ids: list[int], labels: list[int], starts: list[int]) -> Iterator[Document]:
    """Documents of a row from token-aligned labels (-100: not trained) and where each begins."""
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        places = [place for place in range(1, end - start) if labels[start + place] != -100]
        assert all(labels[start + place] == ids[start + place] for place in places)
        assert labels[start] == -100
        yield tuple(ids[start:end]), tuple(places)


def aligned(shifted: list[int]) -> list[int]:
    """Token-aligned labels from those that a model is given next to its inputs."""
    assert shifted[-1] == -100
    return [-100, *shifted[:-1]]


def report(read: Callable[[Path, int], tuple[list[Document], dict[str, float]]]) -> None:
    """Run a reader on the exports of a command line, and leave what it found in the file that comes first there.

    An export is given as LENGTH=FOLDER; `read` returns its documents, and what isolation checks have measured.
    """
    found = {}
    for given in sys.argv[2:]:
        length, _, folder = given.partition("=")
        documents, measured = read(Path(folder), int(length))
        plain = [([int(i) for i in ids], [int(place) for place in places]) for ids, places in documents]
        found[length] = {"documents": plain, "measured": measured}
    Path(sys.argv[1]).write_text(json.dumps(found))
