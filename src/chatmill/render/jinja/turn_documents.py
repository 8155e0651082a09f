"""The documents of a conversation: which turns share a document, as lists of labelled segments.

A turn that later messages change cannot be trained in the rendering of the whole conversation. It gets a document of
its own: its real prompt and its answer. Documents of which one begins with the other are one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from chatmill.core.kinds import RoleCode
from chatmill.errors import RecordError
from chatmill.render.jinja.answers import PLAIN, Answers
from chatmill.render.jinja.expressions import evaluate
from chatmill.render.jinja.labels import NOBODY, Mark, Said, Segment, Span, TokenTexts, spans_of
from chatmill.render.jinja.options import Expand, TemplateOptions, Unproved
from chatmill.render.jinja.questions import shifted
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import Refusal
from chatmill.render.jinja.rules import Answer, Generation
from chatmill.render.jinja.segments import Cursor, Segments
from chatmill.render.jinja.stops import StopTokens
from chatmill.render.jinja.tries import Output, SegmentFacts
from chatmill.render.jinja.turn import ROOT

REASONS = {
    "no_prompt": "the template cannot write the prompt of this answer",
    "template_refused": "the template refuses the conversation up to this message",
    "prompt_not_in_history": "what a model would be given is not what the template writes as history",
    "no_reasoning": "the prompt opens reasoning, and the message has none",
    "ambiguous_thinking": "what ends the reasoning is in the answer more than once",
    "reasoning_not_closed": "the prompt opens reasoning that the answer never closes",
    "goes_on_after_stop": "a stop comes before the end of the message, and what is after it has no prompt of its own",
    "no_stop": "no stop token ends this answer",
    "not_shown": "the template leaves something out",
    "content_after_result": "the answer goes on after another message's text",
}
"""Why the mask of an answer cannot be proved, by code."""
HINTS = {
    "no_reasoning": "`no_reasoning: close` in the recipe trains it with its reasoning closed at once",
    "ambiguous_thinking": "Take it out of the reasoning or the answer",
    "no_stop": "A copy of the template that writes `{{ eos_token }}` after what an assistant says has one",
}
"""What makes such an answer provable, where that is known."""
AFTER_ANSWER = "It follows another answer: one message that says both has a prompt of its own"
WAYS_OUT = dict.fromkeys(REASONS, "; `unproved: untrained` keeps the record and trains nothing of such a turn") | {
    "not_shown": "; `not_shown: drop` takes it out of the record and counts it",
}
"""What a recipe can do about it."""
Entry = tuple[int, int]
"""A labelled segment, and the position that its paths and messages count from."""


class LabelledDocument(NamedTuple):
    """One document."""

    entries: tuple[Entry, ...]
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


def refusal(answer: Answer[Any], *, follows_answer: bool = False) -> RecordError:
    """Return the error of a record that has an answer without a proof, which may follow another answer directly."""
    hint = HINTS.get(answer.reason, "Another template or option may prove it")
    if follows_answer and answer.reason in ("prompt_not_in_history", "no_prompt"):
        hint = AFTER_ANSWER
    return RecordError(
        f"{REASONS[answer.reason]}: {answer.detail}. {hint}{WAYS_OUT[answer.reason]}",
        code=answer.reason,
        path=answer.detail if answer.reason == "not_shown" else f"messages[{answer.message}]",
    )


class Labels:
    """All labelled segments of one template: segments by what they are and what is trained of them."""

    def __init__(self, tokens: TokenTexts) -> None:
        """`tokens` are those that labels look for."""
        self._tokens = tokens
        self._numbers: dict[tuple[Any, ...], int] = {}
        self.spans: list[tuple[Span, ...]] = []

    def number(self, facts: SegmentFacts, key: tuple[Any, ...]) -> int:
        """Return the number of a labelled segment; `key` is its number and what `Segment` holds besides its parts."""
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.spans)
            self.spans.append(spans_of(Segment(facts.parts, *key[1:]), self._tokens))
        return number

    def text(self, document: LabelledDocument, view: RecordView) -> TextDocument:
        """Return a document as text."""
        spans = [span for entry in document.entries for span in self.spans_at(entry, view) if span.text]
        return TextDocument(tuple(spans), *document[1:])

    def spans_at(self, entry: Entry, view: RecordView) -> Iterator[Span]:
        """Yield the spans of an entry, with their texts and messages; -1 for no message."""
        label, base = entry
        for span in self.spans[label]:
            expression = None if span.expression is None else shifted(span.expression, base)
            text = span.text
            if expression is not None and expression[0] != "const":
                text = evaluate(expression, view.field)
            message = -1 if span.message == NOBODY else span.message + base
            yield Span(text, expression, span.kind, message, span.breaks)


class DocumentWriter:
    """Writes the documents of one conversation."""

    def __init__(self, answers: Answers, labels: Labels, given: TemplateOptions) -> None:
        """`given` are the options of the recipe."""
        self._answers, self._labels, self._given = answers, labels, given
        self._roles = answers.view.roles
        self._segments = answers.renderer.segments

    def documents(self) -> tuple[list[LabelledDocument], Counts]:
        """Return the documents; a `RecordError` where an answer cannot be proved."""
        answers, given = self._answers, self._given
        whole, last = answers.whole(), len(self._roles) - 1
        indices = answers.view.trained
        if given.last_turn_only:
            user = max((k for k, role in enumerate(self._roles) if role is RoleCode.USER), default=-1)
            indices = [i for i in indices if i > user]
        if given.expand is Expand.LAST:
            indices = indices[-1:]
        answers_found: list[Answer[Cursor]] = []
        for i in indices:
            answer = answers.answer(i, whole)
            is_refused = given.unproved is Unproved.REFUSE
            if given.expand is Expand.NONE and not answer.is_there and answers.is_apart(i):
                answer = answers.why_apart(i) if is_refused else Answer(i, "prompt_not_in_history")
            if answer.reason and is_refused:
                hidden = answers.hidden_in(whole, last)
                before = self._roles[i - 1] if i else None
                if hidden:
                    answer = Answer(last, "not_shown", hidden)
                raise refusal(answer, follows_answer=before is RoleCode.ASSISTANT)
            answers_found.append(answer)
        proved = [answer for answer in answers_found if not answer.reason]
        changed = [answer for answer in proved if not answer.is_there]
        shared = [answer for answer in proved if answer.is_there]
        has_whole = bool(given.expand is Expand.NONE or shared or given.whole_document or not changed)
        is_whole = has_whole or len(proved) < len(answers_found)
        written = whole if is_whole else answers.trained(changed[-1].message)
        hidden = answers.hidden_in(written, last if written is whole else changed[-1].message)
        if hidden:
            raise refusal(Answer(last, "not_shown", hidden))
        documents = [] if given.expand is Expand.NONE else self._alone(changed)
        if has_whole:
            documents.append(self._whole(whole, shared, changed if given.expand is Expand.NONE else []))
        appended = sum(document.appended for document in documents)
        as_sampled = sum(answers.is_as_sampled(answer.message) for answer in proved)
        return documents, Counts(len(proved), len(changed), len(answers_found) - len(proved), appended, as_sampled)

    def prompt(self) -> LabelledDocument:
        """Return all messages and the generation prompt, nothing of which is trained."""
        outputs = self._answers.prompt(len(self._roles))
        if isinstance(outputs, Refusal):
            raise RecordError(f"the template cannot write a prompt here: {outputs.message}", code="no_prompt")
        return LabelledDocument(tuple(self._entries(outputs, {}, frozenset(), is_prompt=True)), ())

    def _alone(self, changed: list[Answer[Cursor]]) -> list[LabelledDocument]:
        """Return as few documents as train every answer after its own prompt: one for each that no other extends."""
        documents: list[LabelledDocument] = []
        left = list(changed)
        while left:
            last = left.pop()
            ended = self._answers.trained(last.message)
            inside = [self._answers.answer(answer.message, ended) for answer in left]
            left = [answer for answer in inside if not answer.is_there]
            trained = [*(answer for answer in inside if answer.is_there), self._answers.answer(last.message)]
            documents.append(self._document(ended, trained, frozenset(), is_cut=True))
        documents.reverse()
        return documents

    def _whole(
        self, whole: list[Output], shared: list[Answer[Cursor]], changed: list[Answer[Cursor]]
    ) -> LabelledDocument:
        """Return F, with the answers that it has, and with those that it has in another form."""
        messages = frozenset(answer.message for answer in changed)
        document = self._document(whole, shared, messages, is_cut=False)
        shown = {base + owner for number, base in whole for owner in self._segments.facts[number].owners}
        return document._replace(trained=tuple(sorted((*document.trained, *(messages & shown)))))

    def _document(
        self, outputs: list[Output], trained: Sequence[Answer[Cursor]], changed: frozenset[int], *, is_cut: bool
    ) -> LabelledDocument:
        """Label outputs; the last answer's stop is appended if the template leaves it to the next message."""
        marks: dict[int, tuple[Mark, ...]] = {}
        appended, last = 0, len(self._roles) - 1
        for number, answer in enumerate(trained, 1):
            is_last = number == len(trained)
            if answer.is_appended and is_last and (is_cut or answer.message == last):
                appended, (answer, outputs) = 1, with_stop(answer, outputs, self._segments)
            for at, new in marks_of(answer, outputs, is_cut=is_cut and is_last).items():
                marks[at] = (*marks.get(at, ()), *new)
            if is_cut and is_last:
                outputs = outputs[: answer.first + answer.end.entry + 1]
        entries = self._entries(outputs, marks, changed)
        return LabelledDocument(tuple(entries), tuple(answer.message for answer in trained), appended)

    def _entries(
        self,
        outputs: Sequence[Output],
        marks: Mapping[int, tuple[Mark, ...]],
        changed: frozenset[int],
        *,
        is_prompt: bool = False,
    ) -> Iterator[Entry]:
        """Yield outputs with their labels."""
        seen, roles, answers = ROOT, self._roles, self._answers
        ending: tuple[Mark, ...] = ()
        speaking: set[int] = set()
        silent: set[int] = set()  # messages that have spoken: after a text of another one, they have no prompt
        for number, (segment, base) in enumerate(outputs):
            facts, marks_here = self._segments.facts[segment], (*ending, *marks.get(number, ()))
            ending, is_root, at = (), base == ROOT, base
            codes = {owner: roles[base + owner] for owner in facts.owners}
            if not is_root:
                codes.setdefault(0, roles[base])
            elif not codes and is_prompt and number == len(outputs) - 1 and seen >= 0:
                at, codes, is_root = len(roles), {0: RoleCode.ASSISTANT}, False
            elif not codes:
                at = max(seen, 0)
                codes = {0: roles[at]} if roles else {}
            unmarked = {owner for owner in facts.owners if codes[owner] is RoleCode.ASSISTANT}
            unmarked -= {mark.message for mark in marks_here}
            end = 0
            if unmarked and number + 1 < len(outputs):
                end = end_at_begin(self._segments.facts[outputs[number + 1][0]], answers.stops)
            if end and 0 in unmarked and base in changed and not ends_in(facts, answers.stops):
                ending = (Mark(base - outputs[number + 1][1], None, (0, 0), (0, end)),)
            key = (
                segment,
                is_root,
                seen == ROOT,
                tuple(codes.items()),
                marks_here,
                tuple(
                    [
                        (message, answers.header(base + message), answers.opening(base + message))
                        for message in sorted(unmarked)
                    ]
                ),
                frozenset(message - at for message in changed - silent if message - at in unmarked),
                end > 0,
                tuple((owner, said) for owner, said in self._said(codes, at) if said is not PLAIN),
            )
            if facts.owners:
                shown = {base + owner for owner in facts.owners}
                silent |= speaking - (shown if len(shown) == 1 else set())
                speaking = shown if base == ROOT else shown & {base}
                seen = max(shown)
            elif base >= 0:
                seen = base
            yield self._labels.number(facts, key), at

    def _said(self, codes: Mapping[int, RoleCode], base: int) -> Iterator[tuple[int, Said]]:
        """Yield what assistant messages say."""
        for owner, code in codes.items():
            if code is RoleCode.ASSISTANT and base + owner < len(self._roles):
                yield owner, self._answers.said(base + owner)


def end_at_begin(facts: SegmentFacts, stops: StopTokens) -> int:
    """Return the size of what ends an answer at the beginning of a segment; 0 where nothing does."""
    literal, expression = facts.parts[0]
    match = None if expression is not None else stops.any_end().match(literal or "")
    return match.end() if match else 0


def ends_in(facts: SegmentFacts, stops: StopTokens) -> bool:
    """Return whether a segment ends with template text that ends an answer."""
    literal, expression = facts.parts[-1]
    return expression is None and stops.any_end().search(literal or "") is not None


def with_stop(
    found: Answer[Cursor], outputs: Sequence[Output], segments: Segments
) -> tuple[Answer[Cursor], list[Output]]:
    """Return an answer that ends with its stop, and the outputs up to there: the template leaves the stop to others."""
    at, written = len(outputs) - found.first, found.before_stop + found.stop
    stop = Generation(found.begin, Cursor(at, 0, len(found.before_stop)), Cursor(at, 0, len(written)))
    added = (segments.number(((written, None),)), found.message)
    return found._replace(generations=(stop,)), [*outputs, added]


def marks_of(answer: Answer[Cursor], outputs: Sequence[Output], *, is_cut: bool) -> dict[int, tuple[Mark, ...]]:
    """Return an answer as marks of the outputs that it is in; `is_cut` if a document ends with it."""
    marks: dict[int, tuple[Mark, ...]] = {}
    for generation in answer.generations:
        for entry in range(generation.begin.entry, generation.end.entry + 1):
            begin, stop, end = (place[1:] if place.entry == entry else None for place in generation)
            if entry > generation.stop.entry:
                stop = (0, 0)
            at = answer.first + entry
            cuts = is_cut and generation is answer.generations[-1]
            mark = Mark(answer.message - outputs[at][1], begin, stop, end, is_cut=cuts)
            marks[at] = (*marks.get(at, ()), mark)
    return marks
