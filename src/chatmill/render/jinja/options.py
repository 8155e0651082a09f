"""What a recipe says about a chat template: options, date, and what happens to turns that are hard to train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from enum import StrEnum
from typing import Any

from chatmill.images.files import Pictures


class Expand(StrEnum):
    """What happens to turns that later messages change."""

    TURNS = "turns"
    """Each answer is trained once, after its real prompt, in as many documents as that takes."""
    TREE = "tree"
    """The same documents, stored as one tree: what they share at the beginning is there once."""
    LAST = "last"
    """Only the last answer is trained."""
    NONE = "none"
    """All answers are trained in the rendering of the whole conversation, changed or not."""


class Unproved(StrEnum):
    """What happens to a record with an answer whose mask cannot be proved."""

    REFUSE = "refuse"
    UNTRAINED = "untrained"
    """That answer is context; the others are trained."""


class Thinking(StrEnum):
    """Whether the switch for thinking is chosen per record."""

    AUTO = "auto"
    """The first of: as given, on, off, under which the prompt of every answer agrees with the history."""
    AS_GIVEN = "as_given"


class AnswerText(StrEnum):
    """Which text of an answer is trained, where the template's history does not have what a model writes."""

    AUTO = "auto"
    """What the template writes as history; as it is sampled where that does not follow the prompt."""
    SAMPLED = "sampled"
    """As it is sampled, also where history follows the prompt and leaves the reasoning out."""
    HISTORY = "history"
    """What the template writes as history."""


class NoReasoning(StrEnum):
    """What happens to an answer without reasoning after a prompt that opens it."""

    REFUSE = "refuse"
    CLOSE = "close"
    """The reasoning is closed at once, and the content follows."""


class Trust(StrEnum):
    """What counts where sampled tokens of a message are not those of its text."""

    TEXT = "text"
    """The text: a record whose tokens say something else is refused."""
    TOKENS = "tokens"
    """The tokens, which are trained as content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """What a recipe says about a template."""

    options: Mapping[str, Any] = field(default_factory=dict)
    today: date | None = None
    expand: Expand = Expand.TURNS
    unproved: Unproved = Unproved.REFUSE
    thinking: Thinking = Thinking.AUTO
    answers: AnswerText = AnswerText.AUTO
    no_reasoning: NoReasoning = NoReasoning.REFUSE
    thinking_close: str | None = None
    """What is between reasoning and content where the template does not say so; None: the mark on a line of its own."""
    last_turn_only: bool = False
    """Train only answers after the last user message: for policies that speak of the last turn alone."""
    trust: Trust = Trust.TEXT
    only_drift: bool = False
    """Compare sampled tokens with those that the tokenizer gives, and train the latter."""
    whole_document: bool = False
    """Have a document of the whole conversation, also where it trains no answer: for policies that train others."""
    pictures: Pictures | None = None
    """How pictures are written; None: as the template's own folder says."""
