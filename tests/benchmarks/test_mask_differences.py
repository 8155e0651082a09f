"""The script behind docs/differences.md sorts differences by what they mean."""

from __future__ import annotations

import datetime

from chatmill.core.kinds import MARK, REPEATED, Part, RoleCode, kind
from tools.mask_differences import PAGE, Fault, against_tags, conversations, fault_of, put, trl_templates


def test_a_fault_is_told_from_the_kind_of_a_token() -> None:
    def of(part: Part) -> int:
        return kind(RoleCode.ASSISTANT, part)

    assert fault_of(of(Part.HEADER), ours=False) is Fault.PROMPT
    assert fault_of(of(Part.SEPARATOR), ours=False) is Fault.BEHIND
    assert fault_of(of(Part.CONTENT) | REPEATED, ours=False) is Fault.CHANGED
    assert fault_of(kind(RoleCode.USER, Part.CONTENT), ours=False) is Fault.OTHER
    assert fault_of(of(Part.TERMINATOR), ours=True) is Fault.NO_STOP
    assert fault_of(of(Part.REASONING) | MARK, ours=True) is Fault.MISSED


def test_tags_that_train_the_prompt_are_counted_by_answer() -> None:
    path = next(path for path in trl_templates() if path.stem == "qwen2_5_training")
    tally = against_tags(path, conversations()[:2], datetime.date(2026, 1, 1))
    assert tally.records == 2
    assert tally.faults == {Fault.PROMPT: tally.answers, Fault.BEHIND: tally.answers}
    assert tally.examples[Fault.PROMPT] == "\n"


def test_the_page_has_a_place_for_each_table() -> None:
    page = PAGE.read_text()
    for section in ("trl", "renderers"):
        assert "| new |" in put(page, section, ["| new |"])
