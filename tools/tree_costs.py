"""The table of costs in docs/trees.md: tokens of conversations, of rows per turn, and of trees; and that these agree.

    python -m tools.tree_costs [--data FOLDER] [--each 8] [--page docs/trees.md]

Published templates that rewrite history, each on the first conversations of every file in the folder. For every
record the targets of the trees, each with all that comes before it, are compared with those of rows per turn, token by
token. Templates are bound to Qwen3's vocabulary, with the special tokens that they write added.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.pipeline import Compiled, Pipeline
from chatmill.compiler.recipe import Recipe
from chatmill.core.conversation import Conversation
from chatmill.core.ledger import IN_ADDED_ROWS
from chatmill.core.trees import rows_of_tree
from chatmill.errors import ChatmillError
from chatmill.read.conversations import ConversationFile

DATA = Path(__file__).parents[1] / "tests" / "data"
TEMPLATES = {
    "Qwen3": "tokenizers/chat_templates/qwen3.jinja",
    "Qwen3.5": "templates/llamacpp/Qwen3.5-4B.jinja",
    "Qwen3.6": "templates/trl/qwen3_6.jinja",
}
BEGIN, END = "<!-- costs: made by tools/tree_costs.py -->", "<!-- /costs -->"
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


def conversations(folder: Path, each: int) -> list[Conversation]:
    """The first conversations of every file."""
    found: list[Conversation] = []
    for path in sorted(folder.glob("*.jsonl.gz")):
        opened = ConversationFile(path)
        found += [one for one, _ in zip(opened, range(each), strict=False)]
    return found


def targets(compiled: Compiled) -> dict[tuple[int, int, int], float]:
    """Record, hash of a target with all before it, and its id: its weight. Two that are alike have the higher one."""
    found: dict[tuple[int, int, int], float] = {}
    tokens, weights = compiled.tokens, compiled.weights
    for number, record in enumerate(compiled.source_index.tolist()):
        span = slice(int(tokens.offsets[number]), int(tokens.offsets[number + 1]))
        ids, own = tokens.ids[span], weights[span]
        for path, older in _rows(compiled, number, len(ids)):
            hashes = np.cumsum(ids[path].astype(np.uint64) * PRIMES[: len(path)], dtype=np.uint64)
            for at in (np.flatnonzero(own[path][older:]) + older).tolist():
                key = (record, int(hashes[at]), int(ids[path[at]]))
                found[key] = max(float(own[path[at]]), found.get(key, 0.0))
    return found


def _rows(compiled: Compiled, number: int, length: int) -> list[tuple[NDArray[np.int64], int]]:
    if compiled.branches is None:
        return [(np.arange(length), 0)]
    own = compiled.branches.take(np.array([number]))
    return list(rows_of_tree(own.positions_and_ends(np.array([length]))[1], own.starts))


def cost_of(name: str, template: Path, tokenizer: str, chats: list[Conversation]) -> Cost:
    """Compile all chats both ways, and compare what is trained."""
    made = {}
    for expand in ("turns", "tree"):
        recipe = Recipe(
            sources=[{"path": "none"}],  # type: ignore[list-item]
            tokenizer=tokenizer,
            template=str(template),
            add_control_tokens=True,
            expand=expand,  # type: ignore[arg-type]
            unproved="untrained",  # type: ignore[arg-type]
        )
        made[expand] = Pipeline(recipe).compile(chats)
    rows, trees = made["turns"], made["tree"]
    wanted = targets(rows)
    if targets(trees) != wanted:
        raise SystemExit(f"{name}: trees do not train what rows per turn train")
    added = rows.ledger.total_notes(IN_ADDED_ROWS)
    sizes = len(rows.tokens.ids) - added, len(rows.tokens.ids), len(trees.tokens.ids)
    return Cost(name, len(chats) - len(rows.failed), len(rows.failed), *sizes, len(wanted))


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
    from tests.data.tokenizer_files import unpacked

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA / "conversations")
    parser.add_argument("--each", type=int, default=8)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    chats = conversations(given.data, given.each)
    costs = []
    for name, path in TEMPLATES.items():
        if given.only not in name:
            continue
        try:
            costs.append(cost_of(name, DATA / path, str(unpacked("qwen3")), chats))
            print(costs[-1], file=sys.stderr, flush=True)
        except ChatmillError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    made = table(costs)
    print(made)
    if given.page is not None:
        text = given.page.read_text(encoding="utf-8")
        first, last = text.index(BEGIN) + len(BEGIN), text.index(END)
        given.page.write_text(f"{text[:first]}\n{made}\n{text[last:]}", encoding="utf-8")


if __name__ == "__main__":
    main()
