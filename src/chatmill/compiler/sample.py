"""Records from the beginning of files: read for a first recipe, and tried before a long build."""

from __future__ import annotations

import os
from collections import Counter
from typing import NamedTuple

from chatmill.compiler.paths import resolve_paths
from chatmill.compiler.recipe import Recipe
from chatmill.compiler.run import driver_pipeline
from chatmill.core.conversation import Conversation
from chatmill.core.sides import Side
from chatmill.core.tools import listed_tools
from chatmill.errors import ChatmillError, RecordError
from chatmill.read.conversations import ConversationFile
from chatmill.read.places import Place, is_elsewhere
from chatmill.render.registry import own_template

MOST_RECORDS = 64
"""Records that are tried before a build, of all files together."""
MOST_CHARACTERS = 1 << 20
"""Text after which no further record is tried: agents' are long, and nobody waits for a trial."""
LONG_INPUT = 8 << 20
"""Bytes of input from which on a build takes long enough to try some of it before."""
SHOWN = 60
"""Characters that are shown of each end of an answer."""


class FileSample(NamedTuple):
    """The first records of a file."""

    shape: str
    """The shape that was given or found."""
    records: list[list[Conversation] | RecordError]
    """The conversations of each record, two of a pair, or what is wrong with it."""
    sizes: list[int]
    """Characters of each record; 0 for those that cannot be read."""
    is_whole: bool
    """Whether the file has no more records."""

    @property
    def conversations(self) -> list[Conversation]:
        """The conversations of all records that can be read."""
        found: list[Conversation] = []
        for record in self.records:
            if not isinstance(record, RecordError):
                found += record
        return found


def sample_file(
    path: Place, *, shape: str | None, preferences: str | None, most_records: int, most_characters: int
) -> FileSample:
    """Read the first records of a file, one at least.

    Args:
        path: The file.
        shape: The shape of its records; found from them where it is None.
        preferences: What becomes of answers that people compared, as in a recipe.
        most_records: Records after which reading ends.
        most_characters: Text, tools included, after which reading ends.
    """
    records: list[list[Conversation] | RecordError] = []
    source = ConversationFile(path, shape=shape, on_error=records.append, preferences=preferences)
    sizes: list[int] = []
    characters = 0
    is_whole = True

    for conversation in source:
        if conversation.side is Side.REJECTED and isinstance(records[-1], list):
            # It follows the chosen one of its pair.
            records[-1].append(conversation)
            continue
        if sizes and (len(records) >= most_records or characters > most_characters):
            is_whole = False
            break
        # Records that cannot be read were appended in between.
        sizes += [0] * (len(records) - len(sizes))
        size = _characters(conversation)
        sizes.append(size)
        characters += size
        records.append([conversation])

    sizes += [0] * (len(records) - len(sizes))
    if shape is None:
        shape = source.shape.name if records else ""
    return FileSample(shape, records, sizes, is_whole)


def _characters(conversation: Conversation) -> int:
    """Count the characters of a record, reasoning, calls and tools included."""
    count = len(listed_tools(conversation.tools))
    for message in conversation.messages:
        count += len(message.content) + len(message.reasoning or "")
        count += sum(len(call.arguments) for call in message.tool_calls)
    return count


def first_conversations(recipe: Recipe) -> list[Conversation]:
    """Read the first conversations of a recipe's files; the build reports what cannot be read."""
    conversations: list[Conversation] = []
    characters = 0
    files = ((path, source.shape) for source in recipe.sources for path in resolve_paths(source.patterns))
    for path, shape in files:
        try:
            sample = sample_file(
                path,
                shape=shape,
                preferences=recipe.preferences,
                most_records=MOST_RECORDS - len(conversations),
                most_characters=MOST_CHARACTERS - characters,
            )
        except (ChatmillError, OSError):
            continue
        conversations += sample.conversations
        characters += sum(sample.sizes)
        if len(conversations) >= MOST_RECORDS or characters > MOST_CHARACTERS:
            break
    return conversations


def trial_lines(recipe: Recipe) -> list[str]:
    """Tell what the first records say about all of them; nothing where there are few, or nothing is to be said."""
    paths = [str(path) for source in recipe.sources for path in resolve_paths(source.patterns)]
    if sum(os.path.getsize(path) for path in paths if not is_elsewhere(path)) < LONG_INPUT:
        return []
    conversations = first_conversations(recipe)
    compiled = driver_pipeline(recipe).compile(conversations)
    lines = []
    if compiled.failed:
        codes = Counter(error.code for _, error in compiled.failed)
        reasons = ", ".join(f"{code} {count}" for code, count in codes.most_common())
        share = len(compiled.failed) / len(conversations)
        lines.append(
            f"The template refuses {len(compiled.failed)} of the first {len(conversations)} records ({share:.0%}): "
            f"{reasons}. The first: {compiled.failed[0][1]}"
        )
    if cost := compiled.ledger.cost_of_turns():
        lines.append(f"In the first {len(conversations)} records: {cost}")
    return lines


def other_template_line(recipe: Recipe) -> str:
    """Say that the recipe has chosen another template than the model's own; nothing if it has not."""
    folder = own_template(recipe.tokenizer)
    if folder is None or own_template(recipe.template.partition("#")[0]) == folder:
        return ""
    return (
        f"The template {recipe.template} is not the model's own ({folder}), which is what the model is served with: "
        f"to train that, choose --template {folder}. chatmill diff shows what differs between two builds."
    )


def sampled_example(recipe: Recipe) -> str:
    """Show the first answer that is trained as a model writes it; nothing if the first records have none."""
    template = driver_pipeline(recipe).template
    for conversation in first_conversations(recipe):
        try:
            written = template.text_documents(conversation)
        except ChatmillError:
            continue
        if not written.counts.as_sampled:
            continue
        spans = written.documents[0].spans
        begin = max(number for number, span in enumerate(spans) if span.breaks)
        prompt = "".join(span.text for span in spans[:begin])
        answer = "".join(span.text for span in spans[begin:])
        shown = answer if len(answer) <= 2 * SHOWN else f"{answer[:SHOWN]} ... {answer[-SHOWN:]}"
        place = conversation.where or conversation.id or "the first record"
        return f"{place}: after {prompt[-SHOWN // 2 :]!r} the answer is {shown!r}"
    return ""
