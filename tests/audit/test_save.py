"""The audited set and ours side by side, as `chatmill view` opens them."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatmill import audit
from chatmill.errors import ConfigError
from chatmill.prove.compare.diff import Change, diff_datasets
from tests.audit.sets import bound_template, clean_rows, conversations, edit_spans, joined


def test_a_clean_set_equals_ours(tmp_path: Path) -> None:
    bound = bound_template("qwen3")
    audit(clean_rows(bound), bound, source=conversations(), save=tmp_path / "both")
    found = diff_datasets(tmp_path / "both" / "set", tmp_path / "both" / "ours")
    assert found.equal
    assert found.counts[Change.EQUAL] == len(clean_rows(bound))


def test_differences_are_those_of_the_audit(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    from chatmill.look.viewer.opened import open_viewed

    bound = bound_template("chatml")
    stop_lost = edit_spans(lambda mask, first, last: mask.__setitem__(last - 1, False), which=lambda row: row == 2)
    rows = joined(stop_lost(clean_rows(bound), bound), 3, boundaries="seq_lengths")
    report = audit(rows, bound, source=conversations(), save=tmp_path)
    assert [one.code for one in report.findings] == ["stop_untrained"]
    folders = tmp_path / "set", tmp_path / "ours"
    found = diff_datasets(*folders)
    assert found.counts[Change.WEIGHTS] == 1
    assert found.counts[Change.EQUAL] == report.documents - 1
    assert [one.record_id for one in found.shown] == ["record 3"]
    theirs, ours = open_viewed(folders, tokenizer=bound.tokenizer)
    assert len(theirs.split("train").split) == len(ours.split("train").split) == report.documents


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="name a new folder"):
        audit([{"input_ids": [1]}], bound_template("chatml"), save=tmp_path)
