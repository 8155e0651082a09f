"""300 agents' trajectories under three models' own templates, against `apply_chat_template`: CPU seconds and memory.

    python -m benchmarks.agents [--count N] [--models NAME ...]

Every side is a process of its own. Chatmill's is a build in one process, from the file to a published dataset: loading
the tokenizer and learning the template are part of its time. The peer has transformers' tokenizer loaded and the
records decoded, and makes ids alone (`apply_chat_template(tokenize=True)`, as TRL calls it), without a mask. With
`expand: none` it is counted how many rows are the peer's, to the id, and how many have the stop that ends the last
answer besides, which some templates write only before the next message. Imports are not counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.inputs import plain_records, work_folder
from benchmarks.trajectories import cpu_seconds, trajectories
from tests.data.tokenizer_files import HERE
from tools.template_verification import Model, model_folder

MODELS = (
    Model("Qwen3", "qwen3", "qwen3"),
    Model("GLM-4.5", "qwen3", "glm4moe", adds_tokens=True),
    Model("gpt-oss", "qwen3", "gptoss", adds_tokens=True),
)
"""With the vocabulary of Qwen3, and the tokens of their templates added."""
SIDES = ("apply_chat_template", "none", "tree")
DATE = "2026-01-01"


def measured(side: str, folder: str, path: str, work: str) -> dict[str, Any]:
    """One side, in this process."""
    made = their_ids(folder, path) if side == SIDES[0] else our_ids(side, folder, path, work)
    return made | {"megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def their_ids(folder: str, path: str) -> dict[str, Any]:
    """The ids of all records that the template can write."""
    import jinja2
    import transformers

    from benchmarks.peers import prepared
    from chatmill.read.conversations import ConversationFile

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.chat_template.replace("strftime_now(", f"'{DATE}'.replace('%', ")
    records = prepared(list(ConversationFile(path)))
    if "arguments is string" not in text:  # the template takes arguments as objects alone
        for call in (call for messages, _ in records for one in messages for call in one.get("tool_calls") or ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    made, start = [], cpu_seconds()
    for messages, tools in records:
        try:
            made.append(
                tokenizer.apply_chat_template(
                    messages, tools=tools, chat_template=text, tokenize=True, return_dict=False
                )
            )
        except jinja2.TemplateError:  # it refuses the record
            continue
    seconds = cpu_seconds() - start
    hashes = [_hash(list(ids)) for ids in made]
    return {"seconds": seconds, "rows": len(made), "tokens": sum(map(len, made)), "hashes": hashes}


def our_ids(expand: str, folder: str, path: str, work: str) -> dict[str, Any]:
    """A build in this process."""
    from chatmill.compiler.run import run_build
    from chatmill.store.episodes import EpisodeDataset

    gates = dict.fromkeys(("records_left_out", "max_lost_reasoning", "records_without_trained_tokens"))
    recipe = {
        "sources": [{"path": path}], "tokenizer": folder, "expand": expand, "date": DATE, "on_error": "quarantine",
        "gates": gates, "unproved": "untrained" if expand == "none" else "refuse",
    }  # fmt: skip
    start = cpu_seconds()
    result = run_build(recipe, work, workers=0)
    seconds = cpu_seconds() - start
    hashes, shorter = list[str](), list[str]()
    if expand == "none":
        rows = EpisodeDataset(Path(work))
        ids = [rows[number].ids.tolist() for number in range(len(rows))]
        hashes = list(map(_hash, ids))
        shorter = [_hash(one[:-1]) for one in ids]
    split = result.manifest["splits"]["train"]
    counts = {"seconds": seconds, "rows": split["episodes"], "tokens": split["tokens"]}
    return counts | {"hashes": hashes, "without_last": shorter}


def _hash(ids: list[int]) -> str:
    return hashlib.sha256(repr(ids).encode()).hexdigest()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--models", nargs="*", default=[model.name for model in MODELS])
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        print(json.dumps(measured(*given.side)))
        return
    with work_folder() as work:
        path = work / "trajectories.jsonl"
        made = list(trajectories(plain_records(), given.count, seed=1))
        for message in (message for record in made for message in record["messages"]):
            message |= {"content": ""} if message.get("tool_calls") else {}  # gpt-oss takes no text next to a call
        path.write_text("".join(json.dumps(record) + "\n" for record in made))
        print(f"{given.count:,} trajectories, {path.stat().st_size / 1e6:.1f} MB")
        for model in MODELS:
            if model.name in given.models:
                _compare(model, path, work)


def _compare(model: Model, path: Path, work: Path) -> None:
    folder = model_folder(model, HERE, None, work)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    theirs: set[str] = set()
    for side in SIDES:
        command = [
            sys.executable,
            "-m",
            "benchmarks.agents",
            "--side",
            side,
            folder,
            path,
            work / f"{model.name}-{side}",
        ]
        done = subprocess.run(list(map(str, command)), env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        theirs |= set(found["hashes"]) if side == SIDES[0] else set()
        same, longer = (sum(one in theirs for one in found.get(key, ())) for key in ("hashes", "without_last"))
        words = f", {same} as the peer's, {longer} with one token more (the stop)" if side == "none" else ""
        print(
            f"{model.name:8} {side:20} {found['seconds']:6.1f} s  {found['megabytes']:6.0f} MB  {found['rows']:6,} "
            f"rows {found['tokens']:12,} tokens{words}",
            flush=True,
        )


if __name__ == "__main__":
    main()
