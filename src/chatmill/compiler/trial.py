"""A sample of the input, tried before a build: how the template differs from the model's own, and what it refuses."""

from __future__ import annotations

import datetime
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.paths import resolve_paths
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.recipe import Recipe
from chatmill.compiler.run import driver_pipeline
from chatmill.core.conversation import Conversation, Message
from chatmill.core.tokens import first_difference
from chatmill.errors import ChatmillError, DataError
from chatmill.read.conversations import ConversationFile
from chatmill.read.places import is_elsewhere
from chatmill.render.jinja.options import Expand, TemplateOptions, Unproved
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind, own_template
from chatmill.render.render import render

COMPARED = 64
"""Conversations that are written by both templates, at most."""
COMPARED_CHARACTERS = 1 << 20
"""Text after which no further conversation is taken: agents' are long, and nobody waits for a comparison."""
LONG_INPUT = 8 << 20
"""Bytes of input from which on a build takes long enough to try some of it before."""
SHOWN = 60
"""Characters of each side that are shown at the first difference."""


def compare_with_own(
    recipe: Recipe, conversations: Sequence[Conversation], pipeline: Pipeline | None = None
) -> list[str]:
    """Write conversations with the recipe's template and with that of the tokenizer's folder, and compare the ids.

    Return what was found, in sentences: none if the recipe takes the model's own, or the folder has none. Each is
    written once, whatever the recipe expands, so that the time grows with the text alone.
    """
    folder = other_own(recipe)
    if folder is None:
        return []
    head = f"The template {recipe.template} is not the model's own ({folder})"
    chosen = (pipeline or Pipeline(recipe)).template
    options = TemplateOptions(
        today=recipe.date or datetime.date.today(), expand=Expand.LAST, unproved=Unproved.UNTRAINED
    )
    once = bind(chosen.source, chosen.tokenizer, replace(chosen.given, expand=Expand.LAST))
    try:
        if not conversations:
            raise DataError("none of the first records can be read.")
        theirs = _written(conversations, bind(folder, chosen.tokenizer, options))
    except ChatmillError as error:
        return [f"{head}, and the two could not be compared: {error}"]
    ours = _written(conversations, once)
    both = sorted(ours.keys() & theirs.keys())
    different = [number for number in both if not np.array_equal(ours[number], theirs[number])]
    refused = len(ours.keys() ^ theirs.keys())
    if both and not different and not refused:
        return [f"{head}, and writes the same ids: {len(both)} sampled conversations compared."]
    said = [f"{head}: {len(different)} of {len(both)} sampled conversations get other ids than the model saw."]
    if refused:
        said.append(f"{refused} more can be written by one of the two only.")
    if different:
        number = different[0]
        at = first_difference(ours[number], theirs[number]) or 0
        left, right = (
            repr(chosen.tokenizer.decode(ids[number][at : at + 2 * SHOWN])[:SHOWN]) for ids in (ours, theirs)
        )
        place = conversations[number].where or conversations[number].id or f"conversation {number}"
        said.append(f"{place}, from token {at} on: this one writes {left}, the model's own {right}.")
    return [*said, f"To train what the model is served with, choose its own: --template {folder}"]


def _written(conversations: Sequence[Conversation], template: ModelTemplate) -> dict[int, NDArray[np.int32]]:
    """Return the ids of each conversation that a template can write: its last document."""
    rendered = render(conversations, template, collect_failures=True)
    tokens = rendered.tokens
    return {
        number: tokens.ids[tokens.offsets[document] : tokens.offsets[document + 1]]
        for document, number in enumerate(rendered.kept.tolist())
    }


def other_own(recipe: Recipe) -> str | None:
    """Find the folder of the model's own template, if the recipe has chosen another one."""
    folder = own_template(recipe.tokenizer)
    if folder is None or own_template(recipe.template.partition("#")[0]) == folder:
        return None
    return folder


def sampled(recipe: Recipe) -> list[Conversation]:
    """Read the first conversations of a recipe's files, up to a limit in number and in text.

    Skip records that cannot be read: the build reports them.
    """
    files = ((str(path), source.shape) for source in recipe.sources for path in resolve_paths(source.patterns))
    chosen: list[Conversation] = []
    text = 0
    for path, shape in files:
        try:
            file = ConversationFile(path, shape=shape, on_error=lambda error: None, preferences=recipe.preferences)
            for conversation in islice(file, COMPARED - len(chosen)):
                chosen.append(conversation)
                text += sum(map(size_of, conversation.messages))
                if text > COMPARED_CHARACTERS:
                    return chosen
        except (ChatmillError, OSError):
            continue
    return chosen


def size_of(message: Message) -> int:
    """Characters of a message."""
    calls = sum(len(call.arguments) for call in message.tool_calls)
    return len(message.content) + len(message.reasoning or "") + calls


def trial_lines(recipe: Recipe) -> list[str]:
    """Return what the first records say about all of them; nothing if there are few, or nothing is to be said."""
    paths = [path for source in recipe.sources for path in resolve_paths(source.patterns)]
    here = [str(path) for path in paths if not is_elsewhere(str(path))]
    if sum(os.path.getsize(path) for path in here) < LONG_INPUT:
        return []
    chats = sampled(recipe)
    compiled = driver_pipeline(recipe).compile(chats)
    lines = []
    if compiled.failed:
        codes = Counter(error.code for _, error in compiled.failed)
        reasons = ", ".join(f"{code} {count}" for code, count in codes.most_common())
        share = len(compiled.failed) / len(chats)
        first = compiled.failed[0][1]
        lines.append(
            f"The template refuses {len(compiled.failed)} of the first {len(chats)} records ({share:.0%}): {reasons}. "
            f"The first: {first}"
        )
    if cost := compiled.ledger.cost_of_turns():
        lines.append(f"In the first {len(chats)} records: {cost}")
    return lines


def sampled_example(recipe: Recipe) -> str:
    """Show the first answer that is trained as a model writes it; nothing if the first records have none."""
    template = driver_pipeline(recipe).template
    for conversation in sampled(recipe):
        try:
            written = template.text_documents(conversation)
        except ChatmillError:
            continue
        if not written.counts.as_sampled:
            continue
        spans = written.documents[0].spans
        begin = max(number for number, span in enumerate(spans) if span.breaks)
        prompt, answer = ("".join(span.text for span in part) for part in (spans[:begin], spans[begin:]))
        shown = answer if len(answer) <= 2 * SHOWN else f"{answer[:SHOWN]} ... {answer[-SHOWN:]}"
        place = conversation.where or conversation.id or "the first record"
        return f"{place}: after {prompt[-SHOWN // 2 :]!r} the answer is {shown!r}"
    return ""
