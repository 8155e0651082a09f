"""The speed of `chatmill audit` on one core, by CPU time: without the source, and with it.

    python -m tools.audit_speed

The set is what Chatmill makes of bundled conversations without tools, with the vocabulary and the template of Qwen3,
as a Parquet file. Reading both files counts; loading the model's files is timed by itself.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from chatmill.auditor.run import audit
from chatmill.core.conversation import Conversation
from chatmill.render.registry import bind
from chatmill.tokenizer.load import load_tokenizer
from tools.audit_clean import CONVERSATIONS, chats_of, made_here
from tools.mask_differences import ROOT

FILES = ("arena_hard", "crosswoz_zh", "gpteacher_codegen", "gpteacher_roleplay", "gsm8k", "korean_chatbot", "mgsm")
TIMES = 3
"""Tries; the fastest counts."""


def is_plain(chat: Conversation) -> bool:
    """Whether roles and contents are all there is."""
    return not chat.tools and all(
        not (one.tool_calls or one.reasoning or one.name) and one.weight is None for one in chat.messages
    )


def main() -> None:
    """Measure and print."""
    os.environ["RAYON_NUM_THREADS"] = "1"
    model = ROOT / "tests" / "data" / "tokenizers" / "qwen3"
    begin = time.process_time()
    bound = bind(model, load_tokenizer(model))
    print(f"loading the model's files: {time.process_time() - begin:.2f} s of CPU time")
    read = chats_of(CONVERSATIONS, 1_000_000)
    chats = [chat for name in FILES for chat in read[name] if is_plain(chat)]
    rows = made_here(bound, chats)
    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(pa.Table.from_pylist(rows), Path(folder) / "set.parquet")
        source = Path(folder) / "chats.jsonl"
        with source.open("w", encoding="utf-8") as file:
            for chat in chats:
                messages = [{"role": str(one.role.value), "content": one.content} for one in chat.messages]
                file.write(json.dumps({"messages": messages}) + "\n")
        for words, given in (("without the source", None), ("with the source", source)):
            times = []
            for _ in range(TIMES):
                begin = time.process_time()
                report = audit(Path(folder) / "set.parquet", bound, source=given)
                times.append(time.process_time() - begin)
            speed = report.tokens / min(times) / 1e6
            print(
                f"{words}: {report.tokens:,} tokens of {report.documents:,} documents in {min(times):.2f} s of CPU "
                f"time, {speed:.2f} M tokens/s. {report.verdict}",
                flush=True,
            )


if __name__ == "__main__":
    main()
