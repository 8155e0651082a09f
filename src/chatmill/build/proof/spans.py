"""What stands before and in each trained message: its generation prompt, the text it declares, and one end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from chatmill.build.proof.reference import Derived, Reference
from chatmill.build.proof.report import Notebook
from chatmill.build.proof.views import VIEWS, Shown, first_difference
from chatmill.core.conversation import Conversation, Role
from chatmill.core.kinds import PARTS, Part
from chatmill.render.registry import TEMPLATES


class Mismatch(NamedTuple):
    """A token of a record that does not stand where it must."""

    token: int
    """Its place in the whole rendering, before any overflow."""
    message: str


class SpanCheck:
    """Checks the trained messages of derived records, and counts what it could compare."""

    def __init__(self, reference: Reference, book: Notebook) -> None:
        """The templates that come with the package have a declared view; others have none."""
        self._reference, self._book = reference, book
        name = reference.recipe.template
        self._view = VIEWS.get(name) if name in TEMPLATES else None
        self._spells = getattr(reference.tokenizer, "bytes_add_up", True)

    def mismatches(self, conversation: Conversation, derived: Derived) -> Iterator[Mismatch]:
        """Everything that is wrong with the trained messages of a record."""
        for index, (first, last) in sorted(_spans(derived).items()):
            if not any(weight > 0 for weight in derived.weights[first:last]):
                continue
            self._book.counts["trained_messages"] += 1
            found = self._text(conversation, derived, index, first, last)
            if found is None and conversation.messages[index].role is Role.ASSISTANT:
                found = self._context(conversation, derived, index, first, last)
            if found is not None:
                yield found

    def _text(self, conversation: Conversation, derived: Derived, index: int, first: int, last: int) -> Mismatch | None:
        """The tokens of a message spell what the template declares, each with the label of its part."""
        shown = self._view(conversation, index) if self._view and self._spells else None
        if shown is None:
            self._book.counts["texts_not_compared"] += 1
            return None
        self._book.counts["texts_compared"] += 1
        ids, kinds = derived.ids[first:last], derived.kinds[first:last]
        found = first_difference(shown, ids, kinds, self._reference.tokenizer)
        if found is not None:
            return Mismatch(first + found[0], f"message {index}: {found[1]}")
        return self._ends(shown, derived, index, first, last)

    def _ends(self, shown: list[Shown], derived: Derived, index: int, first: int, last: int) -> Mismatch | None:
        """As many terminators as the view has, which is one; Harmony ends every call, and no analysis."""
        ends = [place for place in range(first, last) if derived.kinds[place] % PARTS == Part.TERMINATOR]
        expected = sum(one.part is Part.TERMINATOR for one in shown)
        self._book.counts["terminators"] += len(ends)
        if expected != len(ends) or (expected != 1 and self._reference.recipe.template != "harmony"):
            return Mismatch(first, f"message {index} has {len(ends)} terminators, not {expected}")
        return None

    def _context(
        self, conversation: Conversation, derived: Derived, index: int, first: int, last: int
    ) -> Mismatch | None:
        """Everything before an answer is its generation prompt; where a template cannot keep that, its opening is."""
        answer = first
        while answer < last and derived.kinds[answer] % PARTS == Part.HEADER:
            answer += 1
        if answer == first:
            self._book.counts["answers_that_go_on"] += 1  # the model itself opens this message
            return None
        if not derived.is_whole:
            self._book.counts["contexts_cut"] += 1
            return None
        opening = self._reference.opening(conversation, index)
        prompt = self._reference.prompt(conversation, index) if index else derived.ids[:first] + opening
        if derived.ids[:answer] == prompt:
            self._book.counts["contexts_equal"] += 1
            return None
        if self._reference.template.prefix_stable:
            pairs = zip(derived.ids[:answer], prompt, strict=False)
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(answer, len(prompt)))
            return Mismatch(place, f"the context of message {index} is not its generation prompt")
        if derived.ids[first : first + len(opening)] != opening:
            return Mismatch(first, f"message {index} does not open like its generation prompt")
        self._book.counts["openings_equal"] += 1
        return None


def _spans(derived: Derived) -> dict[int, tuple[int, int]]:
    """First token, and one past the last, of every message that has tokens."""
    spans: dict[int, tuple[int, int]] = {}
    for place, message in enumerate(derived.messages):
        if message >= 0:
            spans[message] = (spans.get(message, (place, 0))[0], place + 1)
    return spans
