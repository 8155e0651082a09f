"""Every seeded fault is found and named right; clean sets, and what their makers may have wanted, give no finding."""

from __future__ import annotations

import re
from typing import Any

import pytest

from chatmill import Conversation, audit
from chatmill.auditor.findings import RULES
from tests.audit.faults import FAULTS, Fault
from tests.audit.sets import (
    CLEAN,
    bound_template,
    clean_rows,
    conversations,
    joined,
    relabel,
    said,
    spans,
    trained_of,
)

ELSEWHERE = {"unwanted_trained"}
"""Codes that are tested below."""
CHATML = bound_template("chatml")


def codes(report: Any) -> set[str]:
    return {one.code for one in (*report.findings, *report.notes)}


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
        assert (report.source["equal"], report.source["missing"]) == (len(rows), 0)


@pytest.mark.parametrize("boundaries", ["seq_lengths", "position_ids", "seq_start_id"])
@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_packed_rows_with_boundaries_give_no_finding(name: str, boundaries: str) -> None:
    bound = bound_template(name)
    rows = clean_rows(bound)
    report = audit(joined(rows, 3, boundaries=boundaries), bound)
    assert (report.findings, report.documents, report.boundaries) == ((), len(rows), boundaries)


def test_every_kind_of_finding_has_a_fault() -> None:
    assert len(FAULTS) >= 30
    assert set(RULES) - {fault.code for fault in FAULTS} - {fault.alone for fault in FAULTS} == ELSEWHERE


@pytest.mark.parametrize("with_source", [False, True], ids=["without source", "with source"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_seeded_fault_is_found_and_named_right(fault: Fault, with_source: bool) -> None:
    bound = bound_template(fault.template)
    rows = fault.put(clean_rows(bound), bound)
    report = audit(rows, bound, source=conversations() if with_source else None)
    if fault.needs_source and not with_source:
        assert report.findings == ()  # nor anything else
        return
    code = fault.code if with_source else fault.alone or fault.code
    assert code in codes(report)
    assert codes(report) - {code} <= fault.others
    found = next(one for one in (*report.findings, *report.notes) if one.code == code)
    assert found.count
    assert found.examples
    assert report.passed == found.rule.is_note


def test_short_answers_that_later_rows_show_as_context_are_no_fault() -> None:
    """Qwen3 gives each turn a document of its own, and shows earlier answers without their thinking."""
    bound = bound_template("qwen3")
    turns = ("user: Can you?", "assistant: No.", "user: Why not?", "assistant: There are many reasons.")
    calls, result, says = conversations()[4].messages[-3:]
    asked = said(turns[0]).messages[0]
    loop = (asked, calls._replace(reasoning="Look."), result, says._replace(reasoning="Seen."))
    chats = [said(*turns), Conversation(loop)]  # two answers of one row are trained: last answers are not all there is
    rows = clean_rows(bound, chats)
    assert len(rows) == 3
    report = audit(rows, bound)
    assert report.findings == ()
    assert [note.code for note in report.notes] == ["some_untrained"]


# ---- what the maker of a set may have wanted


def chats(*weights: float | None) -> list[Conversation]:
    """Conversations of as many turns as there are weights."""
    texts = ("user: Question {turn} of {n}?", "assistant: The answer to question {n} is number {turn}.")
    made = []
    for n in range(4):
        turns = [said(*(one.format(n=n, turn=turn) for one in texts), weight=w) for turn, w in enumerate(weights)]
        made.append(Conversation(tuple(message for turn in turns for message in turn.messages)))
    return made


def test_last_answers_that_the_record_leaves_out_are_known_with_the_source() -> None:
    source = chats(None, 0.0)
    rows = clean_rows(CHATML, source)
    report = audit(rows, CHATML, source=source)
    assert (codes(report), report.unknown) == (set(), ())
    report = audit(rows, CHATML)
    assert report.passed
    assert codes(report) == {"some_untrained"}
    assert report.unknown == ("Whether 4 answers were left out of training on purpose: --source shows it",)


def test_a_document_without_wanted_answers_may_train_nothing() -> None:
    source = [*chats(None), said("user: And?", "assistant: No.", weight=0.0)]
    rows = clean_rows(CHATML, source)
    assert not trained_of(rows[-1]).any()
    assert codes(audit(rows, CHATML, source=source)) == set()
    assert codes(audit(rows, CHATML)) == {"mask_empty"}


@pytest.mark.parametrize("weights", [(None, 0.0), (0.0, None)])
def test_answers_that_are_trained_against_the_record_are_a_fault(weights: tuple[float | None, ...]) -> None:
    rows = clean_rows(CHATML, chats(None, None))
    report = audit(rows, CHATML, source=chats(*weights))
    assert [(one.code, one.count) for one in report.findings] == [("unwanted_trained", 4)]
    assert codes(audit(rows, CHATML)) == set()


def test_messages_of_others_that_the_record_wants_trained_are_no_fault() -> None:
    plain = [one.messages for one in chats(None)]
    source = [Conversation((first._replace(weight=1.0), *rest)) for first, *rest in plain]
    rows = []
    for row in clean_rows(CHATML, source):
        mask = trained_of(row)
        mask[6 : 6 + len("Question 0 of 0?")] = True
        rows.append(relabel(row, mask))
    assert codes(audit(rows, CHATML, source=source)) == set()
    assert codes(audit(rows, CHATML)) == {"context_trained"}


def test_last_answers_alone_are_a_note() -> None:
    source, rows = chats(None, None), []
    for row in clean_rows(CHATML, source):
        mask, (first, end) = trained_of(row), spans(row)[0]
        mask[first:end] = False
        rows.append(relabel(row, mask))
    for report in (audit(rows, CHATML), audit(rows, CHATML, source=source)):
        assert report.passed
        assert codes(report) == {"some_untrained"}


def test_a_clean_verdict_counts_the_answers_and_says_what_it_did_not_check() -> None:
    """Changed turns pass without a source: the report says how many there may be, and only where there may be some."""
    bound = bound_template("qwen3")
    (fault,) = (one for one in FAULTS if one.name == "changed turns trained")
    rows = fault.put(clean_rows(bound), bound)
    passed = audit(rows, bound)
    found = audit(rows, bound, source=conversations())
    assert passed.passed
    (changed,) = (one for one in found.findings if one.code == "changed_trained")
    (sentence,) = passed.unknown
    count = int(re.search(r"(\d+) of \d+ trained answers have messages after them", sentence)[1])
    assert changed.count <= count < passed.answers
    assert sentence.endswith("--source shows it")
    assert passed.verdict.startswith(f"No faults found in {passed.answers} answers in {passed.documents} documents")
    assert passed.verdict.endswith("1 thing was not checked.")
    assert passed.trained_answers == passed.trained_stops == passed.answers
    assert "masks are not compared with records" in str(passed)
    apart = audit(clean_rows(bound), bound)
    assert apart.passed, "a row for each turn trains no answer as later messages have changed it"
    assert not apart.unknown


def test_examples_of_a_finding_differ() -> None:
    """Rows with one beginning show the same fault again and again; others of the set are shown in their place."""
    rows = [relabel(row, [True] * len(row["input_ids"])) for row in clean_rows(CHATML)]
    report = audit([*[rows[0]] * 40, *rows[1:]], CHATML, examples=3)
    (finding,) = report.findings
    shown = [example.parts for example in finding.examples]
    assert len(set(shown)) == len(shown) == 3
    assert len({example.row for example in finding.examples}) == 3, "each is of another row"
    same = audit([rows[0]] * 5, CHATML, examples=3)
    assert len(same.findings[0].examples) == 1
