"""The documents of a conversation: which answers share one, and which labels and token slots its fragments become.

An answer that later messages change cannot be trained in the rendering of the whole conversation. It gets a document of
its own: its real prompt and the answer. Documents of which one begins with the other are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import RoleCode
from chatmill.errors import RecordError
from chatmill.render.fragment_walk import FragmentWalk, StepTable
from chatmill.render.jinja.answers import Answers
from chatmill.render.jinja.labels import Span
from chatmill.render.jinja.options import Expand, TemplateOptions, Unproved
from chatmill.render.jinja.paths import Path
from chatmill.render.jinja.renderer import Refusal
from chatmill.render.jinja.rules import Answer, Generation
from chatmill.render.jinja.segments import Cursor
from chatmill.render.jinja.unproved import refuse

MAX_WRITTEN = 45_000_000
"""Messages in all documents of one conversation together: a few gigabytes."""


class WrittenDocument(NamedTuple):
    """One document."""

    steps: list[int]
    """Pairs of a step of the `StepTable` and the message that it counts from."""
    trained: tuple[int, ...]
    """Messages whose answers are trained here."""
    appended: int = 0
    """Stops that the template alone would not have written."""


class TextDocument(NamedTuple):
    """One document as text."""

    spans: tuple[Span, ...]
    trained: tuple[int, ...]
    appended: int = 0


class Counts(NamedTuple):
    """What the ledger says about one conversation."""

    turns: int
    """Answers that are trained."""
    unstable: int
    """Those that later messages change."""
    untrained: int
    """Answers that are context because their mask cannot be proved."""
    appended: int
    """Stops in the documents that the template alone would not have written."""
    as_sampled: int = 0
    """Answers that are trained as a model writes them, which history does not have."""


class RecordPlan(NamedTuple):
    """The documents of all conversations of the same message classes, without their texts."""

    sizes: tuple[int, ...]
    """How many token slots each document has."""
    entries: NDArray[np.int64]
    """These slots, with the messages that they count from."""
    counts: Counts


class DocumentWriter:
    """Writes the documents of one conversation."""

    def __init__(self, answers: Answers, table: StepTable, given: TemplateOptions) -> None:
        """`given` are the options of the recipe."""
        self.answers = answers
        self.table = table
        self._given = given
        self._is_whole_only = given.expand is Expand.NONE
        self._refuses = given.unproved is Unproved.REFUSE
        self._roles = answers.view.roles
        self._walk = FragmentWalk(answers, table)
        self.documents: list[WrittenDocument] = []
        self.counts = Counts(0, 0, 0, 0)

    def write(self) -> None:
        """Write all documents; a `RecordError` where an answer cannot be proved."""
        answers, given = self.answers, self._given
        whole = answers.whole()
        found = [self._answer(index, whole) for index in self._trained()]
        proved = [answer for answer in found if not answer.reason]
        changed = [answer for answer in proved if not answer.is_there]
        shared = [answer for answer in proved if answer.is_there]

        has_whole = bool(given.expand is Expand.NONE or shared or given.whole_document or not changed)
        is_whole_checked = has_whole or len(proved) < len(found)
        last = len(self._roles) - 1 if is_whole_checked else changed[-1].message
        checked = whole if is_whole_checked else answers.trained(last)
        hidden = answers.hidden_in(checked, last)
        if hidden:
            raise refuse(Answer(len(self._roles) - 1, "not_shown", hidden))

        self.documents = [] if given.expand is Expand.NONE else self._write_alone(changed)
        if has_whole:
            in_place = changed if given.expand is Expand.NONE else []
            self.documents.append(self._write_whole(whole, shared, in_place))
        appended = sum(document.appended for document in self.documents)
        as_sampled = sum(answers.is_as_sampled(answer.message) for answer in proved)
        self.counts = Counts(len(proved), len(changed), len(found) - len(proved), appended, as_sampled)

    def write_prompt(self) -> None:
        """Write all messages and the generation prompt, nothing of which is trained."""
        path = self.answers.prompt(len(self._roles))
        if isinstance(path, Refusal):
            raise RecordError(f"the template cannot write a prompt here: {path.message}", code="no_prompt")
        self.documents = [WrittenDocument(self._walk.prompt_steps(path), ())]

    def plan(self, *, by_texts: bool) -> RecordPlan:
        """Return the documents as token slots; `by_texts`: the record's own texts decide these."""
        if by_texts:
            answers, table = self.answers, self.table
            listed = [self._labels(document) for document in self.documents]
            rows = table.slots.by_texts(listed, table.labels, answers.view, answers.lookup)
            entries = np.array([entry for row in rows for entry in row], dtype=np.int64).reshape(-1, 2)
            return RecordPlan(tuple(map(len, rows)), entries, self.counts)
        steps: list[int] = []
        for document in self.documents:
            steps += document.steps
        entries = np.array(steps, dtype=np.int64).reshape(-1, 2)
        sizes = [len(document.steps) // 2 for document in self.documents]
        entries[:, 0] = self.table.slots_of_steps[entries[:, 0]]
        has_slots = entries[:, 0] >= 0
        if not has_slots.all():
            offsets = np.append(0, np.cumsum(has_slots))
            ends = np.cumsum(sizes)
            sizes = (offsets[ends] - offsets[ends - sizes]).tolist()
            entries = entries[has_slots]
        return RecordPlan(tuple(sizes), entries, self.counts)

    def texts(self) -> tuple[TextDocument, ...]:
        """Return the documents as text."""
        return tuple(map(self.text, self.documents))

    def text(self, document: WrittenDocument) -> TextDocument:
        """Return one document as text."""
        view, labels = self.answers.view, self.table.labels
        spans = [span for label, base in self._labels(document) for span in labels.spans_at(label, base, view)]
        return TextDocument(tuple(span for span in spans if span.text), document.trained, document.appended)

    def _labels(self, document: WrittenDocument) -> list[tuple[int, int]]:
        """List the labels of a document, with the messages that they count from."""
        steps = document.steps
        labels = [self.table.labels_of_steps[step] for step in steps[::2]]
        return [(label, base) for label, base in zip(labels, steps[1::2], strict=True) if label >= 0]

    # ---- which answers a document trains

    def _trained(self) -> list[int]:
        """List the messages whose answers the recipe trains."""
        given, indices = self._given, self.answers.view.trained
        if given.last_turn_only:
            user = max((k for k, role in enumerate(self._roles) if role is RoleCode.USER), default=-1)
            indices = [i for i in indices if i > user]
        return indices[-1:] if given.expand is Expand.LAST else indices

    def _answer(self, index: int, whole: Path) -> Answer[Cursor]:
        """Return an answer, and where F has it; a `RecordError` where it has no proof and the recipe refuses that."""
        answers = self.answers
        answer = answers.answer(index, whole)
        if self._is_whole_only and not answer.is_there and answers.is_apart(index):
            answer = answers.why_apart(index) if self._refuses else Answer(index, "prompt_not_in_history")
        if answer.reason and self._refuses:
            last = len(self._roles) - 1
            hidden = answers.hidden_in(whole, last)
            if hidden:
                answer = Answer(last, "not_shown", hidden)
            before = self._roles[index - 1] if index else None
            raise refuse(answer, follows_answer=before is RoleCode.ASSISTANT)
        return answer

    def _write_alone(self, changed: list[Answer[Cursor]]) -> list[WrittenDocument]:
        """Write as few documents as train every answer after its own prompt: one for each that no other extends."""
        answers = self.answers
        documents: list[WrittenDocument] = []
        left = [answer.message for answer in changed]
        written = 0
        while left:
            last = left.pop()
            written += last + 1
            if written > MAX_WRITTEN:
                raise RecordError(
                    f"the documents of its {len(changed):,} answers that later messages change have more than "
                    f"{MAX_WRITTEN:,} messages together: split the conversation, or use `expand: last`",
                    code="conversation_too_long",
                )
            trained = answers.inside(left, last)
            inside = {answer.message for answer in trained}
            left = [index for index in left if index not in inside]
            trained.append(answers.answer(last))
            documents.append(self._write_one(answers.trained(last), trained, frozenset(), is_cut=True))
        documents.reverse()
        return documents

    def _write_whole(self, whole: Path, shared: list[Answer[Cursor]], changed: list[Answer[Cursor]]) -> WrittenDocument:
        """Write F, with the answers that it has, and with those that it has in another form."""
        messages = frozenset(answer.message for answer in changed)
        document = self._write_one(whole, shared, messages, is_cut=False)
        if messages:
            shown = self.answers.messages_in(whole)
            document = document._replace(trained=tuple(sorted((*document.trained, *(messages & shown)))))
        return document

    def _write_one(
        self, path: Path, trained: Sequence[Answer[Cursor]], changed: frozenset[int], *, is_cut: bool
    ) -> WrittenDocument:
        """Write one document.

        Args:
            path: The rendering.
            trained: The answers that are trained in it, the last one last.
            changed: Messages that are trained in it in another form than after their prompts.
            is_cut: Whether it ends with the last answer, whose stop is appended if the template leaves it to others.
        """
        paths, table = self.answers.paths, self.table
        marks: dict[int, int] = {}
        appended = 0
        stop = paths.size(path)
        last_message = len(self._roles) - 1
        for number, answer in enumerate(trained, 1):
            is_last = number == len(trained)
            if answer.is_appended and is_last and (is_cut or answer.message == last_message):
                appended = 1
                answer, path = self._with_stop(answer, path)
                stop = paths.size(path)
            first, end = answer.first + answer.begin.entry, answer.first + answer.end.entry + 1
            bases = [base for _, base in paths.part(path, first, end)]
            for place, mark in table.marks(answer, bases, is_cut=is_cut and is_last):
                marks[place] = table.join_marks(marks[place], mark) if place in marks else mark
            if is_cut and is_last:
                stop = answer.first + answer.end.entry + 1
        steps = self._walk.steps(path, marks, stop, changed)
        return WrittenDocument(steps, tuple(answer.message for answer in trained), appended)

    def _with_stop(self, answer: Answer[Cursor], path: Path) -> tuple[Answer[Cursor], Path]:
        """Return an answer that ends with its stop, which the template leaves to others, and the path up to there."""
        paths = self.answers.paths
        size = paths.size(path)
        at, written = size - answer.first, answer.before_stop + answer.stop
        generation = Generation(answer.begin, Cursor(at, 0, len(answer.before_stop)), Cursor(at, 0, len(written)))
        added = (self.answers.renderer.segments.number(((written, None),)), answer.message)
        return answer._replace(generations=(generation,)), paths.joined(path, size, [added])
