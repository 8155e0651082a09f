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
from collections.abc import Iterable, Iterator
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
"""Messages about conversations that could not be used, kept for the report."""


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
    report = _Report()
    named = options.shape_of(shape)
    conversations = read_conversations(inputs, shape=named, on_error=report.bad_record if skip_bad else None)
    loaded = load_tokenizer(tokenizer)
    with storing(out), whole_file(out) as temporary, temporary.open("wb") as file, shown_count(as_json) as show:
        for lines in _lines(conversations, loaded, context_length, report):
            file.write(lines)
            if show is not None:
                show("conversations", report.counts["conversations"], 0)
        if not report.counts["written"]:
            raise DataError(f"no transcript could be written, {out} is left as it was\n{report.as_text()}")
    typer.echo(json.dumps(report.as_dict(), ensure_ascii=False) if as_json else f"{report.as_text()}\n-> {out}")


class _Report:
    """Counts what became of the conversations, in the order they are shown."""

    def __init__(self) -> None:
        from chatmill.systems.post_training import TranscriptOutcome

        names = ("conversations", "written", *(str(outcome) for outcome in TranscriptOutcome), "bad_records")
        more = (
            "messages",
            "messages_left_out",
            "reasoning_left_out",
            "weights_left_out",
            "tools_left_out",
            "tokens",
        )
        self.counts: Counter[str] = Counter(dict.fromkeys((*names, *more), 0))
        self.examples: list[str] = []

    def bad_record(self, error: RecordError) -> None:
        """Count a record that is not a conversation."""
        self.counts["bad_records"] += 1
        self._example(error)

    def add(self, conversation: Conversation, result: Any) -> None:
        """Count one conversation and its `Transcription`."""
        counts, used = self.counts, conversation.messages[: result.messages]
        counts["conversations"] += 1
        counts[str(result.outcome)] += 1
        counts["written"] += result.text is not None
        counts["messages"] += result.messages
        counts["messages_left_out"] += len(conversation.messages) - result.messages
        counts["reasoning_left_out"] += sum(message.reasoning is not None for message in used)
        counts["weights_left_out"] += sum(message.weight is not None for message in used)
        counts["tools_left_out"] += bool(conversation.tools) and result.text is not None
        counts["tokens"] += result.tokens
        if result.error is not None:
            self._example(result.error)

    def _example(self, error: RecordError) -> None:
        if len(self.examples) < EXAMPLES:
            self.examples.append(str(error))

    def as_dict(self) -> dict[str, Any]:
        """All counts, and the first messages about what could not be used."""
        return {**self.counts, "examples": self.examples}

    def as_text(self) -> str:
        """One line a count that is not 0, words instead of underscores."""
        width = max(map(len, self.counts))
        rows = [
            f"{name.replace('_', ' '):<{width}}  {count:>12,}"
            for name, count in self.counts.items()
            if count or name in ("conversations", "written")
        ]
        return "\n".join(rows + [f"  {example}" for example in self.examples])


def _lines(
    conversations: Iterable[Conversation], tokenizer: Any, context_length: int, report: _Report
) -> Iterator[bytes]:
    """The output in pieces, a batch of conversations each."""
    import msgspec

    from chatmill.systems.post_training import transcribe

    encode = msgspec.json.Encoder().encode
    waiting = iter(conversations)
    while batch := list(islice(waiting, BATCH)):
        results = transcribe(batch, tokenizer=tokenizer, context_length=context_length)
        for conversation, result in zip(batch, results, strict=True):
            report.add(conversation, result)
        yield b"".join(encode({"text": r.text}) + b"\n" for r in results if r.text is not None)
