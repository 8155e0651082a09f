"""The main job on bundled real conversations: compile, verify, and look at the result.

    make demo          (or: python examples/demo.py)

Writes a small dataset to ./demo_out.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console
from rich.rule import Rule
from rich.table import Table

import chatmill
from chatmill import GPTEpisodeDataLoader, load_tokenizer, plan, verify_dataset
from chatmill.core.ledger import Ledger
from chatmill.look.dataset import open_for_looking
from chatmill.look.ledger import accounts_table
from chatmill.look.stats_view import stats_parts
from chatmill.look.terminal import screen, show
from chatmill.look.viewer.overview import saved_page

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
    console.print(accounts_table(Ledger.from_json(built.manifest["ledger"])))

    console.print(Rule("2. verify: every record once more, by the slow reference path", align="left"))
    report = verify_dataset(OUT, deep=True)
    for sentence in report.compared:
        console.print(f"  compared: {sentence}")
    console.print(f"{report.differences} differences in {report.counts['tokens']:,} tokens", style="bold")
    assert report.passed

    tokenizer = load_tokenizer("o200k")
    data = chatmill.Dataset(OUT)
    console.print(Rule("3. stats", align="left"))
    terminal = screen()
    show(terminal, stats_parts(data.stats().splits, None, width=terminal.width))
    table = Table("packed into rows of 2,048", "rows", "lower bound", "fill", box=None, pad_edge=False)
    for strategy in ("greedy", "best_fit"):
        packed = plan(data.episodes.lengths, ROW, strategy)
        table.add_row(strategy, str(packed.bins), str(packed.lower_bound), f"{packed.fill:.1%}")
    console.print(table)

    console.print(Rule("4. what a trainer reads", align="left"))
    loader = GPTEpisodeDataLoader({"batch_size": 8, "block_size": ROW}, tokenizer, OUT, use_loss_mask=True)
    x, y, mask = loader.get_batch("train")
    console.print(f"a batch: x {tuple(x.shape)} {x.dtype}, y {tuple(y.shape)}, mask {tuple(mask.shape)}")
    shown = tokenizer.decode(y[0][mask[0] > 0][:12])
    console.print(f"trained targets in it: {int(mask.sum()):,}; the first: {shown!r}")
    console.print(Rule("5. one conversation, as the model will see it", align="left"))
    print(next(episode for episode in data if episode.source == "gsm8k"))
    console.print("\u258c marks trained lines, \u00ab\u00bb control tokens, \u23ce a newline.", style="dim")

    console.print(Rule("6. a picture of it all", align="left"))
    page = OUT / "report.html"
    page.write_text(saved_page(open_for_looking(OUT)), encoding="utf-8")
    console.print(f"{page}: one page with what was lost, histograms and samples; open it in a browser.")
    console.print("The dataset token by token: chatmill view demo_out (in .venv/bin)")

    console.print("\nYour own file: chatmill inspect FILE, then chatmill init FILE   (in .venv/bin)", style="bold")


if __name__ == "__main__":
    main()
