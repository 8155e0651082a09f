"""How a chosen template differs from the model's own: the same conversations, written by both."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.compiler.paths import resolve_paths
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.recipe import Recipe
from chatmill.core.conversation import Conversation, Message
from chatmill.core.tokens import first_difference
from chatmill.errors import ChatmillError
from chatmill.read.conversations import ConversationFile
from chatmill.render.jinja.options import Expand, TemplateOptions, Unproved
from chatmill.render.registry import bind, own_template
from chatmill.render.render import Rendered, render

COMPARED = 64
"""Conversations that are written by both templates, at most."""
COMPARED_CHARACTERS = 1 << 20
"""Text after which no further conversation is taken: agents' are long, and nobody waits for a comparison."""
SHOWN = 60
"""Characters of each side that are shown at the first difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTemplate:
    """What a comparison of a chosen template with the model's own found."""

    chosen: str
    own: str
    """The folder of the model's own template."""
    compared: int
    """Conversations that were written by both."""
    different: int
    """Those of them whose ids differ."""
    refused: int
    """Conversations that only one of the two can write."""
    first: str = ""
    """Where the first difference is, and what each writes there."""
    problem: str = ""
    """Why nothing could be compared."""

    @property
    def differs(self) -> bool:
        """Whether the two are not known to be the same here."""
        return bool(self.different or self.refused or self.problem or not self.compared)

    def sentences(self) -> list[str]:
        """What was found, in words."""
        head = f"The template {self.chosen} is not the model's own ({self.own})"
        if self.problem:
            return [f"{head}, and the two could not be compared: {self.problem}"]
        if not self.differs:
            return [f"{head}, and writes the same ids: {self.compared} sampled conversations compared."]
        said = [f"{head}: {self.different} of {self.compared} sampled conversations get other ids than the model saw."]
        if self.refused:
            said.append(f"{self.refused} more can be written by one of the two only.")
        if self.first:
            said.append(self.first)
        return [*said, f"To train what the model is served with, choose its own: --template {self.own}"]


def compare_with_own(
    recipe: Recipe, conversations: Sequence[Conversation], pipeline: Pipeline | None = None
) -> OwnTemplate | None:
    """Write conversations with the recipe's template and with that of the tokenizer's folder, and compare the ids.

    Each is written once, whatever the recipe expands, so that the time grows with the text alone. None where the
    recipe takes the model's own, or the folder has none.
    """
    own = other_own(recipe)
    if own is None:
        return None
    pipeline = Pipeline(recipe) if pipeline is None else pipeline
    blank = OwnTemplate(chosen=recipe.template, own=own, compared=0, different=0, refused=0)
    if not conversations:
        return replace(blank, problem="none of the first records can be read.")
    today = recipe.date or datetime.date.today()
    options = TemplateOptions(today=today, expand=Expand.LAST, unproved=Unproved.UNTRAINED)
    chosen = pipeline.template
    try:
        theirs = render(conversations, bind(own, chosen.tokenizer, options), collect_failures=True)
    except ChatmillError as error:
        return replace(blank, problem=str(error))
    once = bind(chosen.source, chosen.tokenizer, replace(chosen.given, expand=Expand.LAST))
    ours = render(conversations, once, collect_failures=True)
    left, right = _last_sequences(ours), _last_sequences(theirs)
    both = sorted(left.keys() & right.keys())
    different = [number for number in both if not np.array_equal(left[number], right[number])]
    first = ""
    if different:
        number = different[0]
        place = conversations[number].where or conversations[number].id or f"conversation {number}"
        first = _first_difference(place, left[number], right[number], pipeline.template.tokenizer)
    return replace(
        blank,
        compared=len(both),
        different=len(different),
        refused=len(left.keys() ^ right.keys()),
        first=first,
    )


def other_own(recipe: Recipe) -> str | None:
    """The folder of the model's own template, where the recipe has chosen another one."""
    own = own_template(recipe.tokenizer)
    if own is None or own_template(recipe.template.partition("#")[0]) == own:
        return None
    return own


def sampled(recipe: Recipe) -> list[Conversation]:
    """The first conversations of a recipe's files; records that cannot be read are left to the build."""
    files = [(path, source.shape) for source in recipe.sources for path in resolve_paths(source.patterns)]
    found = chain.from_iterable(_readable(str(path), shape, recipe.preferences) for path, shape in files)
    return _few(found)


def _few(found: Iterator[Conversation]) -> list[Conversation]:
    """The first conversations, up to a limit in number and in text."""
    chosen: list[Conversation] = []
    text = 0
    for one in islice(found, COMPARED):
        chosen.append(one)
        text += sum(map(size_of, one.messages))
        if text > COMPARED_CHARACTERS:
            break
    return chosen


def size_of(message: Message) -> int:
    """Characters of a message."""
    calls = sum(len(call.arguments) for call in message.tool_calls)
    return len(message.content) + len(message.reasoning or "") + calls


def sampled_inputs(inputs: Sequence[Mapping[str, Any]]) -> list[Conversation]:
    """The same for the inputs that a manifest names."""
    return _few(chain.from_iterable(_readable(str(file["path"]), file["shape"]) for file in inputs))


def _readable(path: str, shape: str | None, preferences: str | None = None) -> Iterator[Conversation]:
    try:
        yield from ConversationFile(path, shape=shape, on_error=lambda error: None, preferences=preferences)
    except (ChatmillError, OSError):
        return


def _last_sequences(rendered: Rendered) -> dict[int, NDArray[np.int32]]:
    """The ids of the whole conversation: its last sequence."""
    tokens = rendered.tokens
    return {
        number: tokens.ids[tokens.offsets[sequence] : tokens.offsets[sequence + 1]]
        for sequence, number in enumerate(rendered.kept.tolist())
    }


def _first_difference(place: str, left: NDArray[np.int32], right: NDArray[np.int32], tokenizer: Any) -> str:
    at = first_difference(left, right) or 0
    ours, theirs = (repr(tokenizer.decode(ids[at : at + 2 * SHOWN])[:SHOWN]) for ids in (left, right))
    return f"{place}, from token {at} on: this one writes {ours}, the model's own {theirs}."
