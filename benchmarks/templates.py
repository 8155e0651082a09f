"""A model folder with a template of its own against TRL's path, and formats of input against each other.

    python -m benchmarks.templates [--quick] [--json]

- *Gemma 3 / TRL*: a model folder with Gemma 3's own template (and Qwen3's vocabulary with Gemma's tokens added), a
  whole build with 2 workers, against `datasets.map` with `apply_chat_template` and TRL's training template for Gemma 3
  in 2 processes, on a part of the same chats. Ids are compared.
- *formats*: the work of chunks on ShareGPT JSONL and on OpenAI Parquet, against the same chats as OpenAI JSONL.
"""

from __future__ import annotations

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAYON_NUM_THREADS"] = "1"

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.builds import Bench, build, episodes, recipe_for, tokens_of
from benchmarks.harness import Comparison, Report, Timing, WorkDiffersError, compare, require_equal, run_one
from benchmarks.inputs import changed_pairs, exchanges, plain_records, work_folder
from benchmarks.peers import trl_map, trl_table
from chatmill.compiler.recipe import recipe_of
from tests.render.reference import TEMPLATES
from tools.template_verification import Model, model_folder


def model_folder_against_trl(
    report: Report, pairs: list[tuple[str, str]], work: Path, *, part: int, rounds: int
) -> None:
    """A build with a model's own template and 2 workers, against TRL's path in 2 processes."""
    folder = model_folder(Model("Gemma-3", "qwen3", "gemma3", adds_tokens=True), TEMPLATES.parent, None, work)
    chats = list(_chats(pairs))
    path = work / "gemma.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats), "utf-8")
    recipe = recipe_of({"sources": [{"path": str(path)}], "tokenizer": str(folder), "template": str(folder)})
    ours, theirs, tokens, part_tokens = [], [], 0, 0
    for number in range(rounds):
        taken = chats[number * part : (number + 1) * part]
        table = trl_table([(chat, None) for chat in taken], str(folder))
        start = time.perf_counter()
        mapped = trl_map(table, 2)
        theirs.append(time.perf_counter() - start)
        start = time.perf_counter()
        tokens = tokens_of(build(recipe, work / "gemma", 2))
        ours.append(time.perf_counter() - start)
        stored = episodes(work / "gemma", number * part, len(taken))
        values = mapped.with_format("arrow")[:]["input_ids"].combine_chunks()
        require_equal("ids", stored.ids, values.flatten().to_numpy())
        part_tokens += len(stored.ids)
    comparison = Comparison(
        ours=Timing(seconds=tuple(ours), work=tokens),
        peer=Timing(seconds=tuple(theirs), work=part_tokens / rounds),
        checked=f"ids equal on {rounds * part:,} records",
    )
    report.compared(
        "gemma3.jinja, 2 workers / TRL, 2 proc.", comparison, unit="tokens", target=">= 40", in_chart=False,
        note=f"{path.stat().st_size / 1e6:,.0f} MB, {tokens / 1e6:.1f} M tokens; every build learns the template anew",
    )  # fmt: skip


def _chats(pairs: list[tuple[str, str]]) -> Iterator[list[dict[str, str]]]:
    """Chats of three exchanges."""
    for n in range(0, len(pairs) - 2, 3):
        yield [
            {"role": role, "content": text}
            for pair in pairs[n : n + 3]
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]


def formats(report: Report, pairs: list[tuple[str, str]], work: Path, *, rounds: int) -> None:
    """The same chats as OpenAI JSONL, ShareGPT JSONL and OpenAI Parquet: the work of chunks."""
    import pyarrow
    import pyarrow.parquet

    chats = list(_chats(pairs))
    openai, sharegpt, parquet = work / "openai.jsonl", work / "sharegpt.jsonl", work / "openai.parquet"
    openai.write_text("".join(json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats), "utf-8")
    names = {"user": "human", "assistant": "gpt"}
    turned = ([{"from": names[turn["role"]], "value": turn["content"]} for turn in chat] for chat in chats)
    lines = (json.dumps({"conversations": chat}, ensure_ascii=False) + "\n" for chat in turned)
    sharegpt.write_text("".join(lines), "utf-8")
    pyarrow.parquet.write_table(pyarrow.table({"messages": chats}), parquet)
    files = {"OpenAI JSONL": openai, "ShareGPT JSONL": sharegpt, "OpenAI Parquet": parquet}
    benches = {name: Bench.of(recipe_for([path]), work / path.stem) for name, path in files.items()}
    tokens = {name: bench.compile_all() for name, bench in benches.items()}
    if len(set(tokens.values())) != 1:
        raise WorkDiffersError(f"the formats do not give the same number of tokens: {tokens}")
    for name in ("ShareGPT JSONL", "OpenAI Parquet"):
        contestants = {one: (benches[one].compile_all, float(tokens[one])) for one in (name, "OpenAI JSONL")}
        found = compare(
            contestants, ours=name, check=lambda: f"{tokens['OpenAI JSONL']:,} tokens from both", rounds=rounds
        )["OpenAI JSONL"]
        report.compared(f"{name} / OpenAI JSONL", found, unit="tokens", target="<= 1.3", as_cost=True)


def measure(*, quick: bool) -> Report:
    """All comparisons."""
    report = Report()
    pairs = exchanges(plain_records())
    rounds = 1 if quick else 3
    with work_folder() as work:
        many = changed_pairs(pairs, 600 if quick else 1_200_000)
        model_folder_against_trl(report, many, work, part=60 if quick else 4_000, rounds=rounds)
        formats(report, changed_pairs(pairs, 600 if quick else 60_000), work, rounds=rounds)
    return report


if __name__ == "__main__":
    sys.exit(run_one("templates", str(__doc__), measure))
