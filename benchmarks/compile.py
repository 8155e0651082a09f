"""Building JSONL chats into episodes with `qwen3_training`, against TRL's path and against gigatoken alone.

    python -m benchmarks.compile [--quick] [--json] [--size BYTES]

- *floor*: every chunk's work (read, render, label, write, hash, publish) against gigatoken's
  `encode_batch(parallel=False)` on the same pieces, chunk by chunk in one process, after one warm-up chunk; loading the
  tokenizer is not counted.
- *TRL*: `datasets.map` with `apply_chat_template` and its assistant mask, 2 processes, against a whole build with
  2 workers (start of the workers, tokenizer and final join included).
- *workers*: the same build with 1 and with 2 workers.

Input: the bundled real conversations, tiled with changed words in every copy.
"""

from __future__ import annotations

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import dump, options
from benchmarks.inputs import write_tiled
from chatmill.build.chunk_job import ChunkJob, compile_chunk, pipeline_of
from chatmill.build.recipe import Recipe
from chatmill.build.run import run_build
from chatmill.build.sources import plan_sources
from chatmill.read.conversations import ConversationFile
from chatmill.render.emitter import Emitter
from tests.data.tokenizer_files import unpacked
from tests.render.reference import as_dicts, hf_tokenizer, trl_training_template

CHUNK = 16 << 20


def recipe_for(path: Path) -> Recipe:
    """The build that is measured."""
    return Recipe.model_validate(
        {
            "sources": [{"path": str(path)}],
            "tokenizer": str(unpacked("qwen3")),
            "template": "qwen3_training",
            "gates": {"records_without_trained_tokens": None},
        }
    )


def floor(path: Path, work: Path) -> dict[str, Any]:
    """Chunk work against encoding alone, on the same pieces."""
    recipe = recipe_for(path)
    started = time.perf_counter()
    text = json.dumps(recipe.as_json(), sort_keys=True)
    pipeline = pipeline_of(text)
    load = time.perf_counter() - started
    planned = plan_sources(recipe, work / "spool", chunk_bytes=CHUNK)
    ours = encode = 0.0
    tokens = 0
    for number, item in enumerate(planned.work):
        job = ChunkJob(
            number=number, chunk=item.chunk, weight=1.0, max_records=None, recipe=text, parts=str(work / "parts")
        )
        pieces = _pieces(path, job, pipeline)
        started = time.perf_counter()
        pipeline.template.tokenizer.backend.encode_batch(pieces)
        encoded = time.perf_counter() - started
        del pieces
        started = time.perf_counter()
        receipt = compile_chunk(job)
        compiled = time.perf_counter() - started
        shutil.rmtree(job.folder)
        if number:  # the first chunk warms both up
            encode, ours = encode + encoded, ours + compiled
            tokens += sum(split["tokens"] for split in receipt["splits"].values())
    return {"tokenizer_load_s": load, "compile_s": ours, "encode_s": encode, "ratio": ours / encode, "tokens": tokens}


def _pieces(path: Path, job: ChunkJob, pipeline: Any) -> list[str]:
    """The texts that a chunk's conversations are encoded as."""
    from chatmill.build.inputs import chunk_lines
    from chatmill.read.typed import typed_conversation

    out = Emitter(pipeline.template.table)
    lines, first = chunk_lines(job.chunk)
    for number, line in enumerate(lines, first):
        conversation = typed_conversation(line, f"{path}:{number}", "x")
        if conversation is not None:
            pipeline.template.emit(conversation, out)
            out.end_conversation([None] * len(conversation.messages))
    return out._pieces


def build_seconds(path: Path, out: Path, workers: int) -> tuple[float, int]:
    """Wall seconds and tokens of a whole build."""
    started = time.perf_counter()
    result = run_build(recipe_for(path), out, workers=workers, chunk_bytes=CHUNK)
    seconds = time.perf_counter() - started
    shutil.rmtree(out)
    return seconds, sum(split["tokens"] for split in result.manifest["splits"].values())


def trl_seconds(path: Path, records: int) -> tuple[float, int]:
    """Wall seconds and tokens of TRL's path over the first records, in 2 processes."""
    import datasets

    datasets.disable_progress_bars()
    rows = []
    for number, conversation in enumerate(ConversationFile(path)):
        if number == records:
            break
        rows.append({"messages": json.dumps(as_dicts(conversation)), "tools": json.dumps(list(conversation.tools))})
    table = datasets.Dataset.from_list(rows)
    tokenizer, template = hf_tokenizer("qwen3"), trl_training_template()

    def tokenize(row: dict[str, str]) -> dict[str, Any]:
        encoded = tokenizer.apply_chat_template(
            json.loads(row["messages"]), tools=json.loads(row["tools"]) or None, chat_template=template,
            tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
        )  # fmt: skip
        return {"input_ids": encoded["input_ids"], "assistant_masks": encoded["assistant_masks"]}

    started = time.perf_counter()
    done = table.map(tokenize, remove_columns=table.column_names, num_proc=2, load_from_cache_file=False)
    seconds = time.perf_counter() - started
    return seconds, sum(len(ids) for ids in done["input_ids"])


def main() -> None:
    """Measure and print."""
    parser = options(str(__doc__))
    parser.add_argument("--size", type=int, default=500_000_000, help="bytes of input")
    arguments = parser.parse_args()
    size = 40_000_000 if arguments.quick else arguments.size
    work = Path(tempfile.mkdtemp(prefix="chatmill-bench-"))
    try:
        path = write_tiled(work / "tiled.jsonl", size)
        figures: dict[str, Any] = {"input_bytes": path.stat().st_size, "floor": floor(path, work)}
        trl, trl_tokens = trl_seconds(path, 2_000 if arguments.quick else 10_000)
        two, tokens = build_seconds(path, work / "two", 2)
        one, _ = build_seconds(path, work / "one", 1)
        figures["trl"] = {"seconds": trl, "tokens": trl_tokens, "rate": trl_tokens / trl}
        figures["build"] = {"tokens": tokens, "1_worker_s": one, "2_workers_s": two, "rate_2_workers": tokens / two}
        figures["ratio_to_trl"] = (tokens / two) / (trl_tokens / trl)
        figures["speedup_2_workers"] = one / two
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if arguments.json:
        dump("compile", **figures)
        return
    found = figures["floor"]
    megabytes, load = figures["input_bytes"] / 1e6, found["tokenizer_load_s"]
    print(f"input {megabytes:,.0f} MB, {tokens:,} tokens; tokenizer load {load:.1f} s")
    print(f"chunk work {found['compile_s']:.1f} s, encoding alone {found['encode_s']:.1f} s: {found['ratio']:.2f}x")
    print(f"whole build: 1 worker {one:.1f} s, 2 workers {two:.1f} s ({one / two:.2f}x)")
    print(
        f"TRL path, 2 processes: {trl_tokens / trl / 1e6:.3f} M tokens/s; build, 2 workers: {tokens / two / 1e6:.2f} M"
    )
    print(f"build is {figures['ratio_to_trl']:.1f}x TRL's path")


if __name__ == "__main__":
    main()
