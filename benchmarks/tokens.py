"""Records that carry tokens and pairs of answers, per stored token, against plain records of the same tokens.

    python -m benchmarks.tokens [--quick] [--json]

The bundled chats, tiled with changed words, are compiled as they are. The same chats are then written as answers with
`token_ids`, as whole calls (one at the top of a record, the response of a server with `choices`, a list of `calls`), as
trajectories in ATIF with and without tokens and subagents, and as pairs in the forms that datasets have. All have the
ids that the plain records have, but for the newline after the last answer, which no call has; for pairs, whose second
answer is a part of the first; and for `calls`, which hold the history again with every call and are therefore compared
by the ids that are read. Pairs of texts have one question each, as have the plain records they are compared with; rows
of Parquet are compared with plain rows of Parquet.
Rounds take turns; the time is that of the processor, in one process, and the least of all rounds: other work on the
machine only adds to it.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import structs

from benchmarks.builds import Bench, recipe_for
from benchmarks.harness import Report, WorkDiffersError, run_one
from benchmarks.inputs import copies, plain_records, work_folder
from benchmarks.trajectories import cpu_seconds
from chatmill.compiler import chunk_job
from chatmill.core.kinds import RoleCode, parts_of, roles_of
from chatmill.read.record_shape import conversation_of
from chatmill.read.shapes import find_shape
from chatmill.render.render import render
from chatmill.render.sampled import ANSWER
from chatmill.tokenizer.backends import Engine

COUNT, QUICK_COUNT = 2_500, 60
ROUNDS = 7
Record = dict[str, Any]
Call = tuple[list[int], list[int]]
"""The ids that were sent, and those that were sampled."""


def chats(count: int) -> list[Record]:
    """Chats that end with an answer."""
    whole = (record for record in copies(plain_records()) if record["messages"][-1]["role"] == "assistant")
    return list(itertools.islice(({k: r[k] for k in ("id", "messages", "tools") if k in r} for r in whole), count))


def calls_of(records: list[Record], bench: Bench) -> Iterator[tuple[list[int], list[Call]]]:
    """The ids of every chat, and its calls: the place of every answer in them."""
    conversations = [conversation_of(record, find_shape("openai")) for record in records]
    tokens = render(conversations, bench.pipeline.template).tokens
    for number in range(len(tokens)):
        one = tokens.conversation(number)
        is_answer = (roles_of(one.kinds) == RoleCode.ASSISTANT) & np.isin(parts_of(one.kinds), ANSWER)
        ids, found = one.ids.tolist(), []
        for message in np.unique(one.messages[is_answer]).tolist():
            places = np.flatnonzero(is_answer & (one.messages == message))
            found.append((ids[: places[0]], ids[places[0] : places[-1] + 1]))
        yield ids, found


def sampled(record: Record, calls: list[Call]) -> Record:
    """A chat whose answers have their ids."""
    given = iter(calls)
    messages = [
        {**message, "token_ids": next(given)[1]} if message["role"] == "assistant" else message
        for message in record["messages"]
    ]
    return {**record, "messages": messages}


def single(record: Record, calls: list[Call]) -> Record:
    """The last call of a chat, whose prompt is all before it."""
    sent, own = calls[-1]
    return {"id": record["id"], "prompt_token_ids": sent, "token_ids": own, "finish_reason": "stop"}


def served(record: Record, calls: list[Call]) -> Record:
    """The same as vLLM answers it."""
    sent, own = calls[-1]
    choice = {"index": 0, "message": record["messages"][-1], "logprobs": None, "finish_reason": "stop"}
    return {
        "id": record["id"],
        "object": "chat.completion",
        "choices": [{**choice, "stop_reason": None, "token_ids": own}],
        "usage": {"prompt_tokens": len(sent), "completion_tokens": len(own)},
        "prompt_token_ids": sent,
    }


def listed(record: Record, calls: list[Call]) -> Record:
    """All calls of a chat, each with the whole history."""
    return {"id": record["id"], "calls": [{"prompt_token_ids": sent, "token_ids": own} for sent, own in calls]}


def trajectory(record: Record, calls: list[Call], *, whole: bool) -> Record:
    """The chat in ATIF; with `whole` its last answer has the tokens of its call, and the others are context."""
    steps: list[Record] = []
    for message in record["messages"]:
        if message["role"] == "tool":
            results = steps[-1].setdefault("observation", {"results": []})["results"]
            results.append({"content": message["content"], "source_call_id": message.get("tool_call_id")})
            continue
        agent = message["role"] == "assistant"
        source = "agent" if agent else message["role"]
        step = {"step_id": len(steps) + 1, "source": source, "message": message.get("content") or ""}
        if agent:
            step["reasoning_content"] = message.get("reasoning_content")
            step["tool_calls"] = [
                {
                    "tool_call_id": call.get("id"),
                    "function_name": call["function"]["name"],
                    "arguments": call["function"]["arguments"],
                }
                for call in message.get("tool_calls") or ()
            ] or None
            if whole:
                step["is_copied_context"] = True
        steps.append({key: value for key, value in step.items() if value is not None})
    if whole:
        sent, own = calls[-1]
        steps[-1] |= {"is_copied_context": False, "metrics": {"prompt_token_ids": sent, "completion_token_ids": own}}
    agent_of = {"name": "a", "version": "1", "tool_definitions": record.get("tools")}
    return {"schema_version": "ATIF-v1.7", "trajectory_id": record["id"], "agent": agent_of, "steps": steps}


def answers(record: Record) -> tuple[str, str]:
    """The last answer of a chat, and half of it."""
    text = record["messages"][-1].get("content") or "."
    return text, text[: len(text) // 2] + "?"


def pair(record: Record, calls: list[Call]) -> Record:
    """Two whole conversations that end in the two answers."""
    prompt = record["messages"][:-1]
    chosen, rejected = ([*prompt, {"role": "assistant", "content": one}] for one in answers(record))
    return {"id": record["id"], "chosen": chosen, "rejected": rejected}


def pair_after_prompt(record: Record, calls: list[Call]) -> Record:
    """Two lists of one answer each next to their prompt, as TRL has them."""
    chosen, rejected = ([{"role": "assistant", "content": one}] for one in answers(record))
    return {"id": record["id"], "prompt": record["messages"][:-1], "chosen": chosen, "rejected": rejected}


def question(record: Record) -> str:
    """The last question of a chat."""
    return str([message["content"] for message in record["messages"] if message["role"] == "user"][-1])


def pair_of_texts(record: Record, calls: list[Call]) -> Record:
    """The last question and the two answers."""
    chosen, rejected = answers(record)
    return {"id": record["id"], "prompt": question(record), "chosen": chosen, "rejected": rejected}


def one_question(record: Record, calls: list[Call]) -> Record:
    """The last question and its answer as a plain record."""
    asked, said = {"role": "user", "content": question(record)}, {"role": "assistant", "content": answers(record)[0]}
    return {"id": record["id"], "messages": [asked, said]}


def without_tools(record: Record, calls: list[Call]) -> Record:
    """The chat alone: lists of tools that differ are no column."""
    return {"id": record["id"], "messages": record["messages"]}


def with_subagent(record: Record, calls: list[Call]) -> Record:
    """A trajectory that holds one of the same steps."""
    whole = trajectory(record, calls, whole=False)
    return {**whole, "subagent_trajectories": [{**whole, "trajectory_id": "inner"}]}


def bench_of(path: Path, work: Path, **changes: Any) -> Bench:
    """A bench that compiles one file."""
    chunk_job.LOADED.clear()
    return Bench.of(structs.replace(recipe_for([path]), **changes), work)


def compiled(bench: Bench) -> float:
    """CPU seconds of compiling all chunks with what the bench has loaded and learned."""
    job = bench.jobs[0]
    chunk_job.LOADED.clear()
    chunk_job.LOADED[job.recipe, str(job.files), Engine.FAST] = bench.pipeline
    start = cpu_seconds()
    bench.compile_all()
    return cpu_seconds() - start


PLAIN, SHORT, PARQUET = "plain records", "plain records of one question", ", Parquet"
WRITERS: dict[str, Callable[[Record, list[Call]], Record]] = {
    PLAIN: lambda record, calls: record,
    SHORT: one_question,
    PLAIN + PARQUET: without_tools,
    SHORT + PARQUET: one_question,
    "messages with `token_ids`": sampled,
    "one call": single,
    "a response with `choices`": served,
    "`calls`, per id read": listed,
    "ATIF": lambda record, calls: trajectory(record, calls, whole=False),
    "ATIF with calls": lambda record, calls: trajectory(record, calls, whole=True),
    "ATIF with subagents": with_subagent,
    "pairs": pair,
    "pairs with a prompt": pair_after_prompt,
    "pairs of texts": pair_of_texts,
    f"pairs{PARQUET}": pair,
    f"pairs with a prompt{PARQUET}": pair_after_prompt,
    f"pairs of texts{PARQUET}": pair_of_texts,
}
OTHER_IDS = (one_question, without_tools, listed, with_subagent, pair, pair_after_prompt, pair_of_texts)
"""Writers of records whose ids are not those of the plain ones."""


def written(path: Path, records: list[Record]) -> Path:
    """A file of records: JSONL, or Parquet by its ending."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records))
    return path


def measure(*, quick: bool) -> Report:
    """The cost of every form, in that of plain records."""
    report = Report()
    count = QUICK_COUNT if quick else COUNT
    with work_folder() as work:
        made = chats(count)
        plain = work / "plain.jsonl"
        plain.write_text("".join(json.dumps(one) + "\n" for one in made))
        tokens = list(calls_of(made, bench_of(plain, work / "ids")))
        kept = [(one, *found) for one, found in zip(made, tokens, strict=True) if _is_simple(one, *found)]
        if len(kept) < count // 3:
            raise WorkDiffersError(f"only {len(kept):,} of {count:,} chats can be written in all forms")
        benches: dict[str, Bench] = {}
        read: dict[str, int] = {}
        for number, (name, write) in enumerate(WRITERS.items()):
            records = [write(one, calls) for one, _, calls in kept]
            path = written(work / f"{number}.{'parquet' if name.endswith(PARQUET) else 'jsonl'}", records)
            changes = {"preferences": "pairs"} if "pairs" in name else {}
            benches[name] = bench_of(path, work / str(number), **changes)
            read[name] = benches[name].compile_all()  # and whatever is learned once
            if write is listed:
                read[name] = sum(len(sent) + len(own) for _, _, calls in kept for sent, own in calls)
            elif write not in OTHER_IDS and read[name] not in (read[PLAIN], read[PLAIN] - len(kept)):
                raise WorkDiffersError(f"{name}: {read[name]:,} tokens, and {read[PLAIN]:,} of plain records")
        seconds: dict[str, list[float]] = {name: [] for name in benches}
        for _ in range(1 if quick else ROUNDS):
            for name, bench in benches.items():
                seconds[name].append(compiled(bench))
    cost = {name: min(times) / read[name] for name, times in seconds.items()}
    for name in (name for name in benches if not name.startswith(PLAIN)):
        base = (SHORT if "texts" in name else PLAIN) + (PARQUET if name.endswith(PARQUET) else "")
        report.measured(
            f"{name} / {base}", cost[name] / cost[base], "x", target="<= 1.5",
            ours=f"{1e-6 / cost[name]:.1f} M tokens/s", peer=f"{1e-6 / cost[base]:.1f} M tokens/s",
            detail=f"{len(kept):,} chats, {read[name]:,} ids; CPU time",
        )  # fmt: skip
    report.figures["seconds"] = seconds
    report.figures["ids"] = read
    return report


def _is_simple(record: Record, ids: list[int], calls: list[Call]) -> bool:
    """Whether a chat has its ids in all forms: it ends with its last answer, and every answer is one."""
    answers = sum(message["role"] == "assistant" for message in record["messages"])
    roles = [message["role"] for message in record["messages"] if message["role"] != "system"]
    is_whole = bool(calls) and len(calls[-1][0]) + len(calls[-1][1]) == len(ids) - 1
    return answers == len(calls) and is_whole and roles[0] == "user"


if __name__ == "__main__":
    sys.exit(run_one("tokens", str(__doc__), measure))
