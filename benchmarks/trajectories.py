"""Agent trajectories of which no two share a shape, in one process, against TRL's path.

    python -m benchmarks.trajectories [--quick] [--json]

The trajectories are cut and recombined from the bundled chats with tools: 20 to 60 messages with calls, results and
reasoning, three sets with a seed each. A round takes one set, with a template of which nothing is known yet: learning
is part of the time, which is that of the processor. TRL's path (`datasets.map` with `apply_chat_template` and its
assistant mask) takes a part of the same set. `expand: none` is compared on the same template, token by token;
`expand: turns` stores a row for each turn that later messages change, and is compared by the tokens that it stores.
`expand: tree` is compared with `expand: none` on the same template.
"""

from __future__ import annotations

import json
import random
import resource
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from benchmarks.builds import Bench, recipe_for
from benchmarks.harness import Report, WorkDiffersError, missing, run_one
from benchmarks.inputs import plain_records, work_folder
from benchmarks.peers import prepared, trl_map, trl_table
from chatmill.compiler import chunk_job
from chatmill.read.record_shape import conversation_of
from chatmill.read.shapes import find_shape
from chatmill.render.jinja.options import Expand
from chatmill.render.render import render

SEEDS = (1, 2, 3)
COUNT, QUICK_COUNT = 2000, 40
TRL_COUNT, QUICK_TRL_COUNT = 200, 10
Record = dict[str, Any]


def trajectories(originals: Sequence[Record], count: int, seed: int) -> Iterator[Record]:
    """Records of 20 to 60 messages: questions, calls with their results, reasoning and answers of real chats."""
    rng = random.Random(seed)
    questions: list[Record] = []
    answers: list[Record] = []
    calls: list[list[Record]] = []
    for record in originals:
        for exchange in _exchanges(record["messages"]):
            first = exchange[0]
            if first["role"] == "user":
                questions.append(first)
            elif first.get("tool_calls") and len(exchange) == 1 + len(first["tool_calls"]):
                calls.append(exchange)
            elif first["role"] == "assistant" and first.get("content"):
                answers.append(first)
    tools = sorted(
        (record["tools"] for record in originals if record.get("tools")), key=lambda one: len(json.dumps(one))
    )
    tools = tools[: len(tools) // 2]
    for number in range(count):
        size = rng.randint(20, 60)
        messages: list[Record] = [{"role": "system", "content": f"You are an agent. Task {number}."}]
        while len(messages) < size:
            messages.append(rng.choice(questions))
            for _ in range(rng.randint(2, 10)):
                messages += _called(rng.choice(calls), len(messages), rng, answers)
            messages.append(rng.choice(answers))
        yield {"id": f"{seed}-{number}", "messages": messages, "tools": rng.choice(tools)}


def _exchanges(messages: Sequence[Record]) -> list[list[Record]]:
    """Messages, each with the results of the tools that it calls."""
    found: list[list[Record]] = []
    for message in messages:
        if message["role"] == "tool" and found:
            found[-1].append(message)
        elif message["role"] != "system":
            found.append([message])
    return found


def _called(exchange: Sequence[Record], number: int, rng: random.Random, answers: Sequence[Record]) -> list[Record]:
    """A call with its results, under ids of its own; every second one with reasoning."""
    made: list[Record] = json.loads(json.dumps(exchange))
    if rng.random() < 0.5:
        made[0]["reasoning_content"] = rng.choice(answers)["content"][:400]
    for place, call in enumerate(made[0]["tool_calls"]):
        call["id"] = f"call{number}_{place}"
        if "tool_call_id" in made[1 + place]:
            made[1 + place]["tool_call_id"] = call["id"]
    return made


def cpu_seconds() -> float:
    """Time of the processor so far, that of processes which have ended included: `datasets.map` starts some."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def fresh_bench(path: Path, work: Path, template: str, expand: str) -> Bench:
    """A bench whose template has seen nothing."""
    chunk_job.LOADED.clear()
    recipe = structs.replace(recipe_for([path], template), expand=Expand(expand))
    return Bench.of(recipe, work)


def measure(*, quick: bool) -> Report:
    """Rates of both sides, a set of trajectories a round."""
    report = Report()
    if missing("trl", "datasets", "transformers"):
        report.notes.append("trl, datasets or transformers is not installed: nothing to compare with")
        return report
    count, part = (QUICK_COUNT, QUICK_TRL_COUNT) if quick else (COUNT, TRL_COUNT)
    originals = plain_records()
    shape = find_shape("openai")
    rates: dict[str, list[float]] = {"none": [], "turns": []}
    ratios: dict[str, list[float]] = {"none": [], "turns": []}
    theirs: list[float] = []
    trees: list[float] = []
    with work_folder() as work:
        for seed in SEEDS[:1] if quick else SEEDS:
            made = list(trajectories(originals, count, seed))
            path = work / f"{seed}.jsonl"
            path.write_text("".join(json.dumps(record) + "\n" for record in made))
            conversations = [conversation_of(record, shape) for record in made[:part]]
            table = trl_table(prepared(conversations))
            trl_map(table.select(range(2)), 1)  # imports and loads what the rounds need
            start = cpu_seconds()
            mapped = trl_map(table, 1)
            seconds = cpu_seconds() - start
            ids = [np.array(one) for one in mapped["input_ids"]]
            theirs.append(sum(map(len, ids)) / seconds)
            for expand, template in (("none", "qwen3_training"), ("turns", "qwen3")):
                bench = fresh_bench(path, work / f"{seed}-{expand}", template, expand)
                start = cpu_seconds()
                tokens = bench.compile_all()
                rates[expand].append(tokens / (cpu_seconds() - start))
                ratios[expand].append(rates[expand][-1] / theirs[-1])
                if expand == "none":
                    ours = render(conversations, bench.pipeline.template).tokens
                    _require_same(ours, ids)
            trees.append(tree_cost(path, work / f"{seed}-trees"))
    for expand, detail in (
        ("none", "the same ids, one row a trajectory"),
        ("turns", "per stored token, a row for each turn that later messages change"),
    ):
        report.measured(
            f"trajectories, `expand: {expand}` / TRL", statistics.median(ratios[expand]), "x", target=">= 20",
            ours=f"{statistics.median(rates[expand]) / 1e6:.2f} M tokens/s",
            peer=f"{statistics.median(theirs) / 1e6:.3f} M tokens/s",
            detail=f"{detail}; {count:,} trajectories a seed, learning included; seeds: "
            + ", ".join(f"{one:.1f}x" for one in ratios[expand]),
        )  # fmt: skip
    report.measured(
        "trajectories, `expand: tree` / `none`", statistics.median(trees), "x", target="<= 1.3", ours="", peer="",
        detail="CPU time of the same trajectories under Qwen3's template; seeds: "
        + ", ".join(f"{one:.2f}x" for one in trees),
    )  # fmt: skip
    report.figures["tokens_per_second"] = {**rates, "trl": theirs}
    return report


def tree_cost(path: Path, work: Path) -> float:
    """CPU time of building trees, over that of building the whole conversations alone."""
    seconds = []
    for expand in ("tree", "none"):
        bench = fresh_bench(path, work / expand, "qwen3", expand)
        start = cpu_seconds()
        bench.compile_all()
        seconds.append(cpu_seconds() - start)
    return seconds[0] / seconds[1]


def _require_same(ours: Any, theirs: Sequence[Any]) -> None:
    """The ids of both must agree, or there is nothing to compare."""
    for number, ids in enumerate(theirs):
        own = ours.ids[ours.offsets[number] : ours.offsets[number + 1]]
        if len(own) != len(ids) or (own != ids).any():
            raise WorkDiffersError(f"trajectory {number}: {len(own):,} tokens, and {len(ids):,} by TRL")


if __name__ == "__main__":
    sys.exit(run_one("trajectories", str(__doc__), measure))
