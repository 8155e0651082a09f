"""What all templates are once they are bound to a tokenizer: a program that writes one conversation as items.

The bulk way is derived from it: see `render.plan_cache`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

from chatmill.core.conversation import Conversation
from chatmill.render.fragments import Fragment
from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.record_view import InputForm
from chatmill.render.jinja.turn_sequences import Counts
from chatmill.render.sequence_items import Ids, TextPart
from chatmill.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from chatmill.render.plan_cache import PlanCache

Items = list[Ids | TextPart]


class WrittenRecord(NamedTuple):
    """A conversation as items."""

    fragments: tuple[tuple[Fragment, ...], ...]
    """The fragments of each sequence."""
    counts: Counts
    options: tuple[tuple[str, object], ...] = ()
    """Options of the template that were chosen for this record."""

    @property
    def sequences(self) -> list[Items]:
        """The items of each sequence; shared fragments have the texts of the record they were made for."""
        return [[item for fragment in sequence for item in fragment.items] for sequence in self.fragments]


class BoundTemplate(ABC):
    """A template with its tokenizer."""

    name: str
    tokenizer: Tokenizer
    control_tokens: tuple[str, ...] = ()
    """Tokens that it writes and a vocabulary may lack."""
    default_policy: str
    """The policy that fits this format when none is chosen."""
    declares: str
    """What it trims, strips or adds, in words."""
    form: InputForm = InputForm()
    """How it takes its input."""
    knows_by_value: bool = True
    """Whether it sees names, channels and the like as plain values, so that these are part of a record's shape."""

    @abstractmethod
    def write(
        self, conversation: Conversation, notes: Notes | None = None, *, by_messages: bool = False
    ) -> WrittenRecord:
        """Write one conversation; a `RecordError` where the template cannot.

        `notes` take what the outcome depends on beside the record's shape, also that of an error. With `by_messages` a
        template may put the conversation together from messages of others.
        """

    @abstractmethod
    def write_prompt(self, conversation: Conversation) -> Items:
        """Write a conversation up to where an assistant's answer begins."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """sha256 of everything about the template that decides its output."""

    @property
    def plan_cache(self) -> PlanCache:
        """The plans that were made of this template so far."""
        from chatmill.render.plan_cache import PlanCache

        process, found = os.getpid(), self.__dict__.get("plan_cache")
        if found is None:
            found = self.__dict__.setdefault("plan_cache", PlanCache(self))
        elif found.process != process:  # forked: a thread that is not here may have left its work half done
            found = self.__dict__["plan_cache"] = PlanCache(self) if found.lock.locked() else found
            found.process = process
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Another process makes its own plans."""
        return {name: value for name, value in self.__dict__.items() if name != "plan_cache"}
