"""Write conversations as marker transcripts, cut to the pairs that fit a context.

Each line of the output is {"text": "<|USER|>...<|END|><|ASSISTANT|>...<|END|>"},
with a system span in front where the conversation has one. A pair is a user
message and the assistant message right after it. The first pair must fit the
context together with the system span, each later pair on its own. The first
pair that does not fit, or a message that makes no pair, ends the conversation
there. What is skipped, cut or cannot be written is counted in the report.

Examples:
    chatmill transcripts chats.jsonl -t o200k --context-length 2048 -o t.jsonl
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from chatmill.cli import options
from chatmill.cli.options import argument, flag, option
from chatmill.console import shown_count
from chatmill.core.conversation import Conversation
from chatmill.errors import ConfigError, DataError, RecordError

BATCH = 1024
"""Conversations encoded in one call."""
EXAMPLES = 5
"""Messages about conversations that could not be used, in the report."""
COUNTED = ("bad_records", "messages", "messages_left_out", "reasoning_left_out", "weights_left_out", "tools_left_out",
           "tokens")  # fmt: skip


def command(
    inputs: Annotated[list[str], argument("FILES", "Files, folders or URLs of conversations.")],
    tokenizer: Annotated[str, options.TOKENIZER],
    context_length: Annotated[int, option("--context-length", "N", "Tokens a pair may have, markers included.", min=1)],
    out: Annotated[Path, option("--out -o", "FILE", "File to write, one JSON object a line.")],
    shape: Annotated[list[str] | None, options.SHAPE] = None,
    skip_bad: Annotated[bool, flag("--skip-bad", "Leave out and count records that are not conversations.")] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Read, transcribe, write, report."""
    from chatmill.core.publish import storing, whole_file
    from chatmill.read.conversations import read_conversations
    from chatmill.tokenizer.load import load_tokenizer

    if out.exists() and any(out.samefile(path) for path in inputs if Path(path).exists()):
        raise ConfigError(f"--out {out} is also an input; write to another file")
    if out.exists() and not out.is_file():
        raise ConfigError(f"--out {out} exists and is not a regular file; write to another one")
    if not out.parent.is_dir():
        raise ConfigError(f"the folder of --out does not exist: {out.parent}")
    from chatmill.systems.post_training import TranscriptOutcome

    counts = Counter(dict.fromkeys(("conversations", "written", *map(str, TranscriptOutcome), *COUNTED), 0))
    examples: list[str] = []

    def bad_record(error: RecordError) -> None:
        counts["bad_records"] += 1
        examples.append(str(error))

    named = options.shape_of(shape)
    conversations = read_conversations(inputs, shape=named, on_error=bad_record if skip_bad else None)
    loaded = load_tokenizer(tokenizer)
    with storing(out), whole_file(out) as temporary, temporary.open("wb") as file, shown_count(as_json) as show:
        while batch := list(islice(conversations, BATCH)):
            file.write(_lines(batch, loaded, context_length, counts, examples))
            del examples[EXAMPLES:]
            if show is not None:
                show("conversations", counts["conversations"], 0)
        if not counts["written"]:
            raise DataError(f"no transcript could be written, {out} is left as it was\n{_text(counts, examples)}")
    report = {**counts, "examples": examples}
    typer.echo(json.dumps(report, ensure_ascii=False) if as_json else f"{_text(counts, examples)}\n-> {out}")


def _lines(batch: list[Conversation], tokenizer: Any, length: int, counts: Counter[str], examples: list[str]) -> bytes:
    """Yield the lines of conversations, and count what became of them."""
    import msgspec

    from chatmill.systems.post_training import transcribe

    lines = []
    for conversation, result in zip(batch, transcribe(batch, tokenizer=tokenizer, context_length=length), strict=True):
        used = conversation.messages[: result.messages]
        counts.update({"conversations": 1, str(result.outcome): 1, "messages": len(used), "tokens": result.tokens})
        counts["messages_left_out"] += len(conversation.messages) - len(used)
        counts["reasoning_left_out"] += sum(message.reasoning is not None for message in used)
        counts["weights_left_out"] += sum(message.weight is not None for message in used)
        if result.text is not None:
            counts["written"] += 1
            counts["tools_left_out"] += bool(conversation.tools)
            lines.append(msgspec.json.encode({"text": result.text}) + b"\n")
        if result.error is not None:
            examples.append(str(result.error))
    return b"".join(lines)


def _text(counts: Counter[str], examples: list[str]) -> str:
    """List every count that is not 0, and the first conversations that could not be used."""
    width = max(map(len, counts))
    rows = [
        f"{name.replace('_', ' '):<{width}}  {count:>12,}"
        for name, count in counts.items()
        if count or name in ("conversations", "written")
    ]
    return "\n".join(rows + [f"  {example}" for example in examples])
