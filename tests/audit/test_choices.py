"""What the maker of a set may have wanted is no fault: answers that records leave out, and last answers alone."""

from __future__ import annotations

import pytest

from chatmill import Conversation, Message, Role, audit
from tests.audit.sets import Row, bound_template, clean_rows, relabel, spans, trained_of

CHATML = bound_template("chatml")


def chats(*weights: float | None) -> list[Conversation]:
    """Conversations of as many turns as there are weights."""
    made = []
    for n in range(4):
        turns: list[Message] = []
        for turn, weight in enumerate(weights):
            turns.append(Message(Role.USER, f"Question {turn} of {n}?"))
            turns.append(Message(Role.ASSISTANT, f"The answer to question {n} is number {turn}.", weight=weight))
        made.append(Conversation(tuple(turns)))
    return made


def codes(report: object) -> set[str]:
    return {one.code for one in (*report.findings, *report.notes)}  # type: ignore[attr-defined]


def test_last_answers_that_the_record_leaves_out_are_no_finding() -> None:
    source = chats(None, 0.0)
    report = audit(clean_rows(CHATML, source), CHATML, source=source)
    assert codes(report) == set()
    assert report.unknown == ()


def test_without_the_source_they_are_unknown() -> None:
    report = audit(clean_rows(CHATML, chats(None, 0.0)), CHATML)
    assert report.passed
    assert codes(report) == {"last_untrained"}
    assert report.unknown == ("Whether 4 answers were left out of training on purpose: --source shows it",)


def test_a_document_without_wanted_answers_may_train_nothing() -> None:
    source = [*chats(None), Conversation((Message(Role.USER, "And?"), Message(Role.ASSISTANT, "No.", weight=0.0)))]
    rows = clean_rows(CHATML, source)
    assert not trained_of(rows[-1]).any()
    assert codes(audit(rows, CHATML, source=source)) == set()
    assert codes(audit(rows, CHATML)) == {"mask_empty"}


@pytest.mark.parametrize("weights", [(None, 0.0), (0.0, None)])
def test_answers_that_are_trained_against_the_record_are_a_fault(weights: tuple[float | None, ...]) -> None:
    rows = clean_rows(CHATML, chats(None, None))
    report = audit(rows, CHATML, source=chats(*weights))
    assert [one.code for one in report.findings] == ["unwanted_trained"]
    assert report.findings[0].count == 4
    assert codes(audit(rows, CHATML)) == set()


def test_messages_of_others_that_the_record_wants_trained_are_no_fault() -> None:
    def wanted(conversation: Conversation) -> Conversation:
        first, *rest = conversation.messages
        return Conversation((first._replace(weight=1.0), *rest))

    source = [wanted(one) for one in chats(None)]
    size = len("Question 0 of 0?")
    rows = []
    for row in clean_rows(CHATML, source):
        mask = trained_of(row)
        mask[6 : 6 + size] = True
        rows.append(relabel(row, mask))
    assert codes(audit(rows, CHATML, source=source)) == set()
    assert codes(audit(rows, CHATML)) == {"context_trained"}


def test_last_answers_alone_are_a_note() -> None:
    def last(row: Row) -> Row:
        mask = trained_of(row)
        first, end = spans(row)[0]
        mask[first:end] = False
        return relabel(row, mask)

    source = chats(None, None)
    rows = [last(row) for row in clean_rows(CHATML, source)]
    for report in (audit(rows, CHATML), audit(rows, CHATML, source=source)):
        assert report.passed
        assert codes(report) == {"earlier_untrained"}
