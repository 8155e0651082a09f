"""The table of costs in docs/trees.md: tokens of conversations, of rows per turn, and of trees; and that these agree.

    python -m tools.tree_costs FOLDER [--each N] [--only NAME ...] [--page docs/trees.md]

Published templates that rewrite history, each on the conversations of every file in the folder, or on the first N of
each. For every record the targets of the trees, each with all that comes before it, are compared with those of rows per
turn, token by token. A template without its own vocabulary has Qwen3's, with the special tokens that it writes added.
FOLDER has `conversations`, `templates` and `tokenizers`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.batch_documents import Compiled
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.recipe import Recipe
from chatmill.core.conversation import Conversation
from chatmill.core.ledger import IN_ADDED_ROWS
from chatmill.core.trees import rows_of_tree
from chatmill.read.conversations import ConversationFile
from tools.template_verification import DATE, Model, model_folder

MODELS = (
    Model("Qwen3", "qwen3", "qwen3"),
    Model("Qwen3.5", "qwen3", "templates/llamacpp/Qwen3.5-4B"),
    Model("Qwen3.6", "qwen3", "templates/trl/qwen3_6"),
    Model("GLM-4.5", "qwen3", "glm4moe", adds_tokens=True),
    Model("GLM-4.6", "qwen3", "templates/llamacpp/GLM-4.6", adds_tokens=True),
    Model("gpt-oss", "gptoss", "gptoss"),
    Model("DeepSeek-V3.2", "deepseek_v3", "templates/llamacpp/deepseek-ai-DeepSeek-V3.2", adds_tokens=True),
    Model("LFM2.5", "qwen3", "templates/llamacpp/LFM2.5-8B-A1B", adds_tokens=True),
)
TOGETHER = 128
"""Records that are compiled at a time."""
BEGIN, END = "<!-- costs: made by tools/tree_costs.py -->", "<!-- /costs -->"
TARGET = np.dtype([("record", "i8"), ("before", "u8"), ("id", "i8"), ("weight", "f4")])
PRIMES = np.random.RandomState(7).randint(1, 2**62, size=1 << 18).astype(np.uint64) | np.uint64(1)


class Cost(NamedTuple):
    """One template."""

    name: str
    records: int
    refused: int
    conversations: int
    rows: int
    trees: int
    targets: int


def batches(folder: Path, each: int | None) -> Iterator[list[Conversation]]:
    """The first conversations of every file, or all."""
    for path in sorted(folder.glob("*.jsonl.gz")):
        chosen = itertools.islice(ConversationFile(path), each)
        while batch := list(itertools.islice(chosen, TOGETHER)):
            yield batch


def targets(compiled: Compiled) -> NDArray[np.void]:
    """Record, hash of a target with all before it, its id and its weight; of two that are alike the heavier one."""
    parts = [np.empty(0, dtype=TARGET)]
    tokens, weights = compiled.tokens, compiled.weights
    for number, record in enumerate(compiled.source_index.tolist()):
        span = slice(int(tokens.offsets[number]), int(tokens.offsets[number + 1]))
        ids, own = tokens.ids[span], weights[span]
        for path, older in _rows(compiled, number, len(ids)):
            hashes = np.cumsum(ids[path].astype(np.uint64) * PRIMES[: len(path)], dtype=np.uint64)
            at = np.flatnonzero(own[path][older:]) + older
            found = np.empty(len(at), dtype=TARGET)
            found["record"], found["before"], found["id"] = record, hashes[at], ids[path[at]]
            found["weight"] = own[path[at]]
            parts.append(found)
    found = np.sort(np.concatenate(parts))
    names = ["record", "before", "id"]
    last = np.append(found[names][1:] != found[names][:-1], True)[: len(found)]
    return found[last]


def _rows(compiled: Compiled, number: int, length: int) -> list[tuple[NDArray[np.int64], int]]:
    if compiled.branches is None:
        return [(np.arange(length), 0)]
    own = compiled.branches.take(np.array([number]))
    return list(rows_of_tree(own.positions_and_ends(np.array([length]))[1], own.starts))


def cost_of(name: str, folder: Path, chats: Iterable[list[Conversation]]) -> Cost:
    """Compile all chats both ways, and compare what is trained."""
    ways = {
        expand: Pipeline(
            Recipe(
                sources=[{"path": "none"}],  # type: ignore[list-item]
                tokenizer=str(folder),
                date=DATE,  # type: ignore[arg-type]
                expand=expand,  # type: ignore[arg-type]
                unproved="untrained",  # type: ignore[arg-type]
            )
        )
        for expand in ("turns", "tree")
    }
    total = np.zeros(6, dtype=np.int64)
    for batch in chats:
        rows, trees = (pipeline.compile(batch) for pipeline in ways.values())
        wanted = targets(rows)
        if not np.array_equal(targets(trees), wanted):
            raise SystemExit(f"{name}: trees do not train what rows per turn train ({batch[0].where} and after)")
        stored = len(rows.tokens.ids), len(trees.tokens.ids)
        whole = stored[0] - rows.ledger.total_notes(IN_ADDED_ROWS)
        total += (len(batch) - len(rows.failed), len(rows.failed), whole, *stored, len(wanted))
    return Cost(name, *total.tolist())


def table(costs: list[Cost]) -> str:
    """The lines of the page."""
    head = [
        "| template | records | conversations | rows per turn | trees | targets compared |",
        "|---|---|---|---|---|---|",
    ]
    lines = [
        f"| {one.name} | {one.records:,} | {one.conversations:,} "
        f"| {one.rows:,} ({one.rows / one.conversations:.2f}×) | "
        f"{one.trees:,} ({one.trees / one.conversations:.2f}×) | {one.targets:,} |"
        for one in costs
    ]
    return "\n".join([*head, *lines])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--each", type=int, default=None)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--only", nargs="*", metavar="NAME", default=[model.name for model in MODELS])
    given = parser.parse_args()
    costs = []
    with tempfile.TemporaryDirectory() as temporary:
        for model in (one for one in MODELS if one.name in given.only):
            began = time.process_time()
            folder = model_folder(model, given.data / "tokenizers", None, Path(temporary))
            costs.append(cost_of(model.name, folder, batches(given.data / "conversations", given.each)))
            print(costs[-1], f"{time.process_time() - began:.0f} s", file=sys.stderr, flush=True)
    made = table(costs)
    print(made)
    if given.page is not None:
        text = given.page.read_text(encoding="utf-8")
        first, last = text.index(BEGIN) + len(BEGIN), text.index(END)
        given.page.write_text(f"{text[:first]}\n{made}\n{text[last:]}", encoding="utf-8")


if __name__ == "__main__":
    main()
