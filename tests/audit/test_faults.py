"""Every seeded fault is found and named right; clean sets give no finding."""

from __future__ import annotations

import pytest

from chatmill import Conversation, Message, Role, audit
from chatmill.auditor.findings import RULES
from tests.audit.faults import FAULTS
from tests.audit.sets import CLEAN, Fault, bound_template, clean_rows, conversations, joined

ELSEWHERE = {"earlier_untrained", "unwanted_trained", "padding_left", "keys_missing",
             "keys_needed"}  # fmt: skip
"""Codes that are tested in `test_choices`, `test_open` and `test_hybrid`."""


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
