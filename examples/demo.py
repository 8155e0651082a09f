"""The main job on bundled real conversations: compile, verify, and look at the result.

    make demo          (or: python examples/demo.py)

Writes a small dataset to ./demo_out.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.table import Table

import chatmill
from chatmill import EpisodeDataset, GPTEpisodeDataLoader, load_tokenizer, plan, verify_dataset
from chatmill.look.dataset import open_for_looking
from chatmill.look.ledger import ledger_table
from chatmill.look.preview import ConversationView, Run, role_counts, summary_table
from chatmill.look.report.page import make_report
from chatmill.store.episodes import Episode
from chatmill.tokenizer.protocol import Tokenizer

DATA = Path(__file__).parent / "data" / "conversations.jsonl"
OUT = Path("demo_out")
ROW = 2048

console = Console(highlight=False)


def main() -> None:
    """Run the steps in order, printing what each gives."""
    console.print(Rule("1. compile: files of conversations become a dataset with a receipt", align="left"))
    shutil.rmtree(OUT, ignore_errors=True)
    recipe = {
        "sources": [{"path": str(DATA)}],
        "tokenizer": "o200k",
        "template": "harmony",
        "packing": {"max_length": ROW, "overflow": "windows"},
    }
    built = chatmill.build(recipe, OUT)
    console.print(ledger_table(built.manifest))

    console.print(Rule("2. verify: every record once more, by the slow reference path", align="left"))
    report = verify_dataset(OUT, deep=True)
    for sentence in report.compared:
        console.print(f"  compared: {sentence}")
    console.print(f"{report.differences} differences in {report.counts['tokens']:,} tokens", style="bold")
    assert report.passed

    tokenizer = load_tokenizer("o200k")
    dataset = EpisodeDataset(OUT)
    console.print(Rule("3. stats", align="left"))
    kinds = np.concatenate([e.kinds for e in dataset])
    weights = np.concatenate([e.weights for e in dataset]).astype(np.float32)
    console.print(summary_table(role_counts(kinds, weights), f"{len(dataset)} episodes"))
    print_histogram(dataset.lengths)
    table = Table("packed into rows of 2,048", "rows", "lower bound", "fill", box=None, pad_edge=False)
    for strategy in ("greedy", "best_fit"):
        packed = plan(dataset.lengths, ROW, strategy)
        table.add_row(strategy, str(packed.bins), str(packed.lower_bound), f"{packed.fill:.1%}")
    console.print(table)

    console.print(Rule("4. what a trainer reads", align="left"))
    loader = GPTEpisodeDataLoader({"batch_size": 8, "block_size": ROW}, tokenizer, OUT, use_loss_mask=True)
    x, y, mask = loader.get_batch("train")
    console.print(f"a batch: x {tuple(x.shape)} {x.dtype}, y {tuple(y.shape)}, mask {tuple(mask.shape)}")
    shown = tokenizer.decode(y[0][mask[0] > 0][:12])
    console.print(f"trained targets in it: {int(mask.sum()):,}; the first: {shown!r}")
    console.print(Rule("5. one conversation, as the model will see it", align="left"))
    episode = next(episode for episode in dataset if episode.source == "gsm8k")
    console.print(ConversationView(runs_of_episode(episode, tokenizer), tokenizer))
    console.print("\u258c marks trained lines, \u00ab\u00bb control tokens, \u23ce a newline.", style="dim")

    console.print(Rule("6. a picture of it all", align="left"))
    page = OUT / "report.html"
    page.write_text(make_report(open_for_looking(OUT)), encoding="utf-8")
    console.print(f"{page}: one page with the way of every token, histograms and samples; open it in a browser.")
    console.print("The dataset token by token: chatmill view demo_out (in .venv/bin)")

    console.print("\nYour own file: chatmill preview FILE, then chatmill init FILE   (in .venv/bin)", style="bold")


def runs_of_episode(episode: Episode, tokenizer: Tokenizer) -> list[Run]:
    """Neighbouring tokens of one kind and weight."""
    borders = np.flatnonzero((np.diff(episode.kinds) != 0) | (np.diff(episode.weights) != 0)) + 1
    return [
        Run(
            kind=int(episode.kinds[part[0]]),
            message=0,
            weight=float(episode.weights[part[0]]),
            ids=episode.ids[part].astype(np.int32),
            text=tokenizer.decode(episode.ids[part]),
        )
        for part in np.split(np.arange(len(episode)), borders)
    ]


def print_histogram(lengths: np.ndarray) -> None:
    """Episodes by length, one bar per doubling."""
    edges = 2 ** np.arange(4, 15)
    counts, _ = np.histogram(lengths, edges)
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        if count:
            console.print(f"  {low:>6,} - {high - 1:>6,} tokens {count:>4} " + "\u2588" * count, style="cyan")


if __name__ == "__main__":
    main()
