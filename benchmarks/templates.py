"""Model templates: against the hand-written columns they replaced, against TRL, and on data that repeats no shape.

    python -m benchmarks.templates [--quick] [--json]

- *own template / columns*: the work of chunks with `qwen3.jinja` and `llama3.jinja` and `expand: none`, against the
  hand-written column templates of commit e32c018, each side in processes of its own, taking turns. The former tree is
  taken from git; without it the rows are left out, and a note says so. Both must make the same number of tokens.
- *no shape repeats*: random sequences of messages with random calls, no two records of one shape, against
  `apply_chat_template` with TRL's training template. Ids are compared.
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
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.builds import Bench, build, episodes, recipe_for, tokens_of
from benchmarks.harness import Comparison, Report, Timing, WorkDiffersError, compare, flat, require_equal, run_one
from benchmarks.inputs import changed_pairs, exchanges, plain_records, unrepeated, work_folder, write_tiled
from benchmarks.peers import conversations_of, prepared, trl_map, trl_table
from chatmill.compiler.recipe import recipe_of
from chatmill.render.jinja.options import Expand, TemplateOptions
from chatmill.render.registry import bind, find_template
from chatmill.render.render import render
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from tests.data.tokenizer_files import unpacked
from tests.render.reference import TEMPLATES, hf_tokenizer, trl_training_template
from tools.template_verification import Model, model_folder

FORMER = "e32c018"
"""The last commit with hand-written column templates."""
ROOT = Path(__file__).parents[1]
COLUMNS_TEMPLATES = ("qwen3", "llama3")
CHUNKS = """
import json, sys, time
from pathlib import Path
from benchmarks.builds import Bench
from tests.data.tokenizer_files import unpacked
try:
    from chatmill.compiler.recipe import recipe_of
    options = {"expand": "none"}
except ImportError:  # the former tree
    from chatmill.build.recipe import recipe_of
    options = {}
path, template, work = sys.argv[1:]
recipe = {"sources": [{"path": [path]}], "tokenizer": str(unpacked("qwen3")), "template": template,
          "add_control_tokens": True, "on_error": "quarantine", "gates": {"records_without_trained_tokens": None}}
bench = Bench.of(recipe_of(recipe | options), Path(work))
seconds, tokens = zip(*map(bench.compile, bench.jobs))
print(json.dumps({"seconds": sum(seconds), "tokens": sum(tokens)}))
"""
"""The work of chunks in a process of its own, in whichever tree it is started."""


def former_tree(folder: Path) -> Path | None:
    """The tree of the former commit, with its compiled part; None where git does not have it."""
    tree = folder / "former"
    tree.mkdir()
    archive = subprocess.run(["git", "archive", FORMER], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        return None
    subprocess.run(["tar", "-x"], cwd=tree, input=archive.stdout, check=True)
    subprocess.run([sys.executable, "hatch_build.py"], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    return tree


def chunks_in(tree: Path, path: Path, template: str, work: Path) -> dict[str, Any]:
    """Seconds and tokens of the chunks of a file, in a tree's own process."""
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    command = [sys.executable, "-c", CHUNKS, str(path), template, str(work)]
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    shutil.rmtree(work, ignore_errors=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def against_columns(report: Report, path: Path, work: Path, *, rounds: int) -> None:
    """Jinja templates against the hand-written columns they replaced."""
    tree = former_tree(work)
    if tree is None:
        report.notes.append(f"git has no commit {FORMER}: the former column templates are not compared")
        return
    for template in COLUMNS_TEMPLATES:
        ours, theirs = [], []
        for number in range(rounds):
            sides = [(ours, ROOT), (theirs, tree)]
            for taken, where in sides if number % 2 == 0 else reversed(sides):
                taken.append(chunks_in(where, path, template, work / "chunks"))
        if {one["tokens"] for one in ours} != {one["tokens"] for one in theirs}:
            raise WorkDiffersError(f"{template}: {ours[0]['tokens']:,} tokens, formerly {theirs[0]['tokens']:,}")
        tokens = ours[0]["tokens"]
        comparison = Comparison(
            ours=Timing(seconds=tuple(one["seconds"] for one in ours), work=tokens),
            peer=Timing(seconds=tuple(one["seconds"] for one in theirs), work=tokens),
            checked=f"{tokens:,} tokens on both sides",
        )
        report.compared(
            f"{template}.jinja / columns of {FORMER}", comparison, unit="tokens", target=">= 0.8", in_chart=False,
            note="one process each, read to publish; new processes in every round",
        )  # fmt: skip


def without_refused(originals: list[dict[str, Any]], work: Path) -> list[dict[str, Any]]:
    """The records that every template here writes, with a proved mask."""
    path = work / "originals.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in originals), encoding="utf-8")
    conversations, refused = conversations_of([path]), set()
    for name in COLUMNS_TEMPLATES:
        tokenizer = with_control_tokens(load_tokenizer(unpacked("qwen3")), find_template(name).control_tokens)
        bound = bind(name, tokenizer, TemplateOptions(expand=Expand.NONE))
        refused |= {index for index, _ in render(conversations, bound, collect_failures=True).failed}
    return [record for index, record in enumerate(originals) if index not in refused]


def without_repeats(report: Report, pairs: list[tuple[str, str]], work: Path, *, count: int, rounds: int) -> None:
    """Records of which no two share a shape, against `apply_chat_template`."""
    path = work / "unrepeated.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in unrepeated(count, pairs)), encoding="utf-8")
    conversations = conversations_of([path])
    given, template = prepared(conversations), trl_training_template()
    tokenizer = load_tokenizer(unpacked("qwen3"))
    theirs = hf_tokenizer("qwen3")

    def ours_run() -> Any:
        return render(conversations, bind("qwen3_training", tokenizer)).tokens  # bound anew: it knows no shape

    def theirs_run() -> list[Any]:
        return [
            theirs.apply_chat_template(
                messages, tools=tools, chat_template=template, tokenize=True, return_dict=True,
                return_assistant_tokens_mask=True,
            )["input_ids"]
            for messages, tools in given
        ]  # fmt: skip

    tokens = ours_run()

    def check() -> str:
        require_equal("ids", tokens.ids, flat(theirs_run(), np.int32))
        return f"ids equal on all {len(given):,} conversations"

    work_done = float(len(tokens.ids))
    contestants = {"chatmill": (ours_run, work_done), "TRL": (theirs_run, work_done)}
    found = compare(contestants, ours="chatmill", check=check, rounds=rounds)["TRL"]
    report.compared("no shape repeats / apply_chat_template", found, unit="tokens", target=">= 2", in_chart=False)


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
    originals = plain_records()
    pairs = exchanges(originals)
    rounds = 1 if quick else 3
    with work_folder() as work:
        proved = without_refused(originals, work)
        path = write_tiled(work / "chats.jsonl", 1_000_000 if quick else 60_000_000, originals=proved)
        report.notes.append(
            f"{len(originals) - len(proved)} of {len(originals):,} records are not in the input of the former columns: "
            f"one of the templates refuses them, and {FORMER} did not"
        )
        against_columns(report, path, work, rounds=rounds)
        without_repeats(report, pairs, work, count=20 if quick else 4_000, rounds=rounds)
        many = changed_pairs(pairs, 600 if quick else 1_200_000)
        model_folder_against_trl(report, many, work, part=60 if quick else 4_000, rounds=rounds)
        formats(report, changed_pairs(pairs, 600 if quick else 60_000), work, rounds=rounds)
    return report


if __name__ == "__main__":
    sys.exit(run_one("templates", str(__doc__), measure))
