"""What the rules find in fragments of one conversation, kept for the next one.

The rules look at two branches: what P(i) and A(i) have from where they part. They ask a few things about the texts of
these branches, and the classes of messages say what the replies are (`RecordKeys`). So the fragments of the branches,
with the classes of the messages that they have texts of, decide what is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import TemplateRunner
from chatmill.render.jinja.tries import Output
from chatmill.render.jinja.turn import ROOT

Branch = Sequence[Output]
"""A few fragments of a rendering, one after the other."""
_MISSING = object()


class AnswerLookup:
    """The answer cache of a template as one conversation looks things up in it."""

    def __init__(self, renderer: TemplateRunner, view: RecordView) -> None:
        """Have the classes of the conversation's messages at hand, and those of its probes after them."""
        self._renderer = renderer
        self._view = view
        self._facts = renderer.segments.facts
        self.load_classes()

    def load_classes(self) -> None:
        """Take the classes that messages have now."""
        classes = self._renderer.classes_with_probes(self._view)
        self._classes: list[int] | None = None
        self.version = -1
        """Of the classes, by which all keys are made."""
        if classes is not None:
            self._classes = classes.numbers.tolist()
            self.version = classes.version
        self._found = self._renderer.answer_cache.found_by_key(self.version)

    def find(self, key: tuple[Any, ...]) -> Any:
        """Return what was kept for a key; None for nothing."""
        return self._found.get(key)

    def keep(self, key: tuple[Any, ...], result: Any) -> None:
        """Keep what was found for a key that decides it."""
        self._found[key] = result

    def remembered(
        self,
        what: Any,
        index: int,
        branches: Sequence[Branch],
        look: Callable[[Notes], Any],
        probes: Sequence[int] = (),
    ) -> Any:
        """Return what was found in branches like these before, or look at them now.

        Args:
            what: What is looked for, with all that it depends on besides the branches.
            index: The message that the branches are seen from.
            branches: The fragments that are looked at.
            look: Finds it, and notes what it asks of the texts of the branches.
            probes: For the last branches, the probe that stands in the place of message `index + 1`.
        """
        key = self._key(what, index, branches, probes)
        if key is not None:
            found = self._found.get(key, _MISSING)
            if found is not _MISSING:
                return found
        return self._learn(partial(self._key, what, index, branches, probes), look)

    def remembered_of_messages(self, what: Any, messages: Sequence[int], look: Callable[[Notes], Any]) -> Any:
        """Return what was found by the texts of some messages before, or look at them now; `TOOLS` is no message."""
        key = self._key_of_messages(what, messages)
        if key is not None:
            found = self._found.get(key, _MISSING)
            if found is not _MISSING:
                return found
        return self._learn(partial(self._key_of_messages, what, messages), look)

    def field_left_out(
        self,
        message: int,
        seen: bytes,
        look: Callable[[int, Callable[[int], list[Output]], Notes], str],
        outputs_of: Callable[[int], list[Output]],
    ) -> str:
        """Return the field of a message that fragments leave out, as it was found before, or look at them now.

        Args:
            message: The message.
            seen: The fragments, as they are seen from it.
            look: Finds the field.
            outputs_of: Returns the fragments.
        """
        if self._classes is not None:
            found: str | None = self._found.get((self._classes[message], seen))
            if found is not None:
                return found
        field: str = self._learn(lambda: (self._class_of(message), seen), partial(look, message, outputs_of))
        return field

    def _class_of(self, message: int) -> int:
        assert self._classes is not None
        return self._classes[message]

    def _learn(self, make_key: Callable[[], tuple[Any, ...] | None], look: Callable[[Notes], Any]) -> Any:
        """Look, and keep what is found where the classes of messages decide it."""
        notes = Notes()
        result = look(notes)
        is_quoting = getattr(result, "is_quoting", False)
        if self._classes is None or is_quoting or not self._renderer.is_keyed(list(notes.replies)):
            self._view.is_keyed = False
            return result

        # a question that is new makes other classes
        if self._renderer.keys_version != self.version:
            self.load_classes()
        key = None if self._classes is None else make_key()
        if key is None:
            self._view.is_keyed = False
        else:
            self._found[key] = result
        return result

    def _key_of_messages(self, what: Any, messages: Sequence[int]) -> tuple[Any, ...] | None:
        classes = self._classes
        if classes is None:
            return None
        key: list[Any] = [what]
        for message in messages:
            key.append(classes[message] if message >= 0 else self._renderer.record_key(self._view))
        return tuple(key)

    def _key(self, what: Any, index: int, branches: Sequence[Branch], probes: Sequence[int]) -> tuple[Any, ...] | None:
        """Make the key of some branches; None where the classes of messages are not known."""
        classes = self._classes
        if classes is None:
            return None
        key: list[Any] = [what]
        if 0 <= index < len(classes):
            key.append(classes[index])
        shows_record = False
        without_probe = len(branches) - len(probes)
        for number, branch in enumerate(branches):
            if number >= without_probe:
                # the probe stands behind the message, in the place of the one that is there
                classes_here = [*classes[: index + 1], classes[probes[number - without_probe]]]
            else:
                classes_here = classes
            if self._add_branch(key, branch, index, classes_here):
                shows_record = True
        if shows_record:
            key.append(self._renderer.record_key(self._view))
        return tuple(key)

    def _add_branch(self, key: list[Any], branch: Branch, index: int, classes: list[int]) -> bool:
        """Add a branch to a key, as it is seen from a message; return whether it shows tools or options."""
        facts = self._facts
        shows_record = False
        for segment, base in branch:
            fact = facts[segment]
            owners = fact.owners
            if len(owners) == 1:
                key += (segment, base - index, classes[base + owners[0]])
            elif owners:
                key += (segment, base - index, *[classes[base + owner] for owner in owners])
            else:
                key += (segment, None if base == ROOT else base - index)
            if fact.shows_record:
                shows_record = True
        key.append(-1)
        return shows_record
