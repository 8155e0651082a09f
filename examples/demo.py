"""The main job on bundled real conversations: read, render, label, pack, store, load, and look at it.

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

from chatmill import (
    EpisodeDataset,
    EpisodeWriter,
    GPTEpisodeDataLoader,
    find_policy,
    load_tokenizer,
    plan,
    read_conversations,
    render_conversations,
)
from chatmill.core.conversation import Role
from chatmill.look.preview import ConversationView, role_counts, runs_of, summary_table

DATA = Path(__file__).parent / "data" / "conversations.jsonl"
OUT = Path("demo_out")
ROW = 2048

console = Console(highlight=False)


def main() -> None:
    """Run the steps in order, printing what each gives."""
    console.print(Rule("1. read and render", align="left"))
    tokenizer = load_tokenizer("o200k")
    conversations = list(read_conversations(DATA))
    rendered = render_conversations(conversations, "harmony", tokenizer)
    tokens = rendered.tokens
    policy = find_policy("assistant")
    run_weights = policy.run_weights(tokens)
    weights = tokens.per_token(run_weights)
    console.print(
        f"{len(conversations)} conversations from {DATA.name}: {len(tokens.ids):,} tokens, "
        f"{int((weights > 0).sum()):,} of them trained by the policy {policy.name!r}"
    )
    console.print(summary_table(role_counts(tokens.kinds, weights), ""))

    console.print(Rule("2. one of them, as the model will see it", align="left"))
    index = next(i for i, c in enumerate(conversations) if c.source == "gsm8k")
    first, last = tokens.conversation_runs[index : index + 2]
    console.print(ConversationView(runs_of(tokens.conversation(index), run_weights[first:last], tokenizer), tokenizer))
    console.print("\u258c marks trained lines, \u00ab\u00bb control tokens, \u23ce a newline.", style="dim")

    console.print(Rule("3. lengths, and how they pack", align="left"))
    print_histogram(tokens.lengths)
    fitting = tokens.lengths[tokens.lengths <= ROW]
    table = Table("strategy", "rows", "lower bound", "fill", box=None, pad_edge=False)
    for strategy in ("greedy", "best_fit"):
        packed = plan(fitting, ROW, strategy)
        table.add_row(strategy, str(packed.bins), str(packed.lower_bound), f"{packed.fill:.1%}")
    console.print(f"{len(fitting)} of {len(tokens)} conversations fit rows of {ROW:,} tokens:")
    console.print(table)

    console.print(Rule("4. store, open, and take a batch", align="left"))
    shutil.rmtree(OUT, ignore_errors=True)
    with EpisodeWriter(OUT, "train") as writer:
        writer.append_batch(
            tokens.ids,
            tokens.offsets,
            weights,
            tokens.kinds,
            source=[c.source for c in conversations],
            turns=[sum(m.role is Role.ASSISTANT for m in c.messages) for c in conversations],
            record_ids=[c.id for c in conversations],
        )
    dataset = EpisodeDataset(OUT)
    assert all(np.array_equal(dataset[i].ids, tokens.conversation(i).ids) for i in range(len(dataset)))
    loader = GPTEpisodeDataLoader(
        {"batch_size": 8, "block_size": 1024}, tokenizer, OUT, use_loss_mask=True, episode_min_tokens=2
    )
    x, y, mask = loader.get_batch("train")
    console.print(f"{OUT}/train: {len(dataset)} episodes, read back equal; every file is memory-mapped")
    console.print(f"a batch: x {tuple(x.shape)} {x.dtype}, y {tuple(y.shape)}, mask {tuple(mask.shape)}")
    console.print(
        f"trained targets in it: {int(mask.sum()):,}; the first: {tokenizer.decode(y[0][mask[0] > 0][:12])!r}"
    )
    console.print("\nYour own file: chatmill preview FILE   (in .venv/bin)", style="bold")


def print_histogram(lengths: np.ndarray) -> None:
    """Conversations by length, one bar per doubling."""
    edges = 2 ** np.arange(4, 15)
    counts, _ = np.histogram(lengths, edges)
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        if count:
            console.print(f"  {low:>6,} - {high - 1:>6,} tokens {count:>4} " + "\u2588" * count, style="cyan")


if __name__ == "__main__":
    main()
