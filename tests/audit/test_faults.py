"""Every seeded fault is found and named right; clean sets, and what their makers may have wanted, give no finding."""

from __future__ import annotations

import pytest

from chatmill import Conversation, Message, Role, audit
from chatmill.auditor.findings import RULES
from tests.audit.faults import FAULTS
from tests.audit.sets import (
    CLEAN,
    Fault,
    Row,
    bound_template,
    clean_rows,
    conversations,
    joined,
    relabel,
    spans,
    trained_of,
)

ELSEWHERE = {"earlier_untrained", "unwanted_trained", "padding_left", "keys_missing",
             "keys_needed"}  # fmt: skip
"""Codes that are tested below, in `test_open` and in `test_hybrid`."""


@pytest.mark.parametrize("with_source", [False, True], ids=["without source", "with source"])
@pytest.mark.parametrize("name", CLEAN)
def test_clean_sets_give_no_finding(name: str, with_source: bool) -> None:
    bound = bound_template(name)
    rows = clean_rows(bound)
    assert len(rows) >= 6
    report = audit(rows, bound, source=conversations() if with_source else None)
    assert report.findings == ()
    assert report.passed
    if with_source:
        assert report.source is not None
        assert report.source["equal"] == len(rows)
        assert report.source["missing"] == 0


@pytest.mark.parametrize("boundaries", ["seq_lengths", "position_ids", "seq_start_id"])
@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_packed_rows_with_boundaries_give_no_finding(name: str, boundaries: str) -> None:
    bound = bound_template(name)
    rows = clean_rows(bound)
    report = audit(joined(rows, 3, boundaries=boundaries), bound)
    assert report.findings == ()
    assert report.documents == len(rows)
    assert report.boundaries == boundaries


def test_every_kind_of_finding_has_a_fault() -> None:
    """Packed notes and answers that records leave out have tests of their own."""
    assert len(FAULTS) >= 30
    assert set(RULES) - {fault.code for fault in FAULTS} - {fault.alone for fault in FAULTS} == ELSEWHERE


@pytest.mark.parametrize("with_source", [False, True], ids=["without source", "with source"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_seeded_fault_is_found_and_named_right(fault: Fault, with_source: bool) -> None:
    bound = bound_template(fault.template)
    rows = fault.put(clean_rows(bound), bound)
    report = audit(rows, bound, source=conversations() if with_source else None)
    codes = {finding.code for finding in (*report.findings, *report.notes)}
    if fault.needs_source and not with_source:
        assert report.findings == ()  # nor anything else
        return
    code = fault.code if with_source else fault.alone or fault.code
    assert code in codes
    assert codes - {code} <= fault.others
    found = next(one for one in (*report.findings, *report.notes) if one.code == code)
    assert found.count
    assert found.examples
    assert report.passed == found.rule.is_note


def test_short_answers_that_later_rows_show_as_context_are_no_fault() -> None:
    """Qwen3 gives each turn a document of its own, and shows earlier answers without their thinking."""
    bound = bound_template("qwen3")
    turns = [Message(Role.USER, "Can you?"), Message(Role.ASSISTANT, "No."), Message(Role.USER, "Why not?")]
    chats = [Conversation((*turns, Message(Role.ASSISTANT, "There are many reasons.")))]
    calls, result, says = conversations()[4].messages[-3:]
    loop = (turns[0], calls._replace(reasoning="Look."), result, says._replace(reasoning="Seen."))
    chats.append(Conversation(loop))  # two answers of one row are trained: last answers are not all there is
    rows = clean_rows(bound, chats)
    assert len(rows) == 3
    report = audit(rows, bound)
    assert report.findings == ()
    assert [note.code for note in report.notes] == ["earlier_untrained"]


# ---- what the maker of a set may have wanted

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
