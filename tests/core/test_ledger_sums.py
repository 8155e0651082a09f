"""What a ledger adds up to: by fate, by reason, and source by source."""

from __future__ import annotations

from chatmill.core.ledger import FATES, IN_ADDED_ROWS, LEFT_OUT, Ledger, stored_records_read


def test_fates_reasons_notes_and_sources_add_up() -> None:
    ledger = Ledger(padding=7)
    ledger.tokens.update({
        ("b", "user", "rendered"): 5, ("b", "user", "context"): 5,
        ("a", "assistant", "rendered"): 9, ("a", "assistant", "trained"): 6, ("a", "assistant", "cut_trained"): 2,
        ("a", "assistant", "dropped_context"): 1, ("a", "assistant", "injected"): 3,
    })  # fmt: skip
    ledger.records.update({("a", "read", ""): 4, ("a", "built", ""): 2, ("a", "quarantined", "bad"): 1})
    ledger.records.update({("a", "skipped", "bad"): 1, ("c", "read", ""): 2, ("c", "skipped", "weight"): 2})
    ledger.notes.update({("a", "episodes"): 2, ("b", "episodes"): 1})
    fates = ledger.fates()
    assert fates == {"trained": 6, "context": 5, "cut": 2, "dropped": 1, "injected": 3, "padding": 7}
    assert list(fates) == [fate for fate in FATES if fate != "shared"], "nothing is shared here"
    assert sum(fates.values()) - fates["injected"] - fates["padding"] == ledger.total("rendered")
    assert ledger.reasons(*LEFT_OUT) == {"bad": 2, "weight": 2}
    assert ledger.reasons("built").total() == ledger.total_records("built") == 2
    assert ledger.all_notes() == {"episodes": 3}
    assert ledger.total_notes("nothing") == 0
    assert stored_records_read(ledger.as_json()) == ledger.total_records("read") == 6
    assert stored_records_read(Ledger().as_json()) == 0
    found = ledger.by_source()
    assert list(found) == ["a", "b", "c"]
    assert [one.fates()["trained"] for one in found.values()] == [6, 0, 0]
    assert [one.total_records("read") for one in found.values()] == [4, 0, 2]


def test_all_choices_are_named_from_half_as_many_tokens_again_on() -> None:
    for rows, is_named in ((29, False), (30, True)):
        ledger = Ledger()
        ledger.tokens["a", "user", "context"] = rows
        ledger.notes["a", IN_ADDED_ROWS] = rows - 20
        assert ("--expand last" in ledger.cost_of_turns()) == is_named
