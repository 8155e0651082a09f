"""Expressions that choose records, and builds that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.recipe import recipe_of
from chatmill.compiler.run import run_build
from chatmill.core.ledger import Ledger
from chatmill.errors import ConfigError
from chatmill.prove.verify import verify
from chatmill.read.where import parse_where
from chatmill.store.episodes import EpisodeDataset
from tests.chats import chat_record
from tests.compiler.builds import write_jsonl

RECORD = {
    "reward": 0.5,
    "resolved": True,
    "n": 1,
    "name": "a b",
    "info": {"error": None, "deep": {"x": 2}},
    "none": None,
}


TRUE = """reward >= 0.5; resolved == true; resolved; n == 1.0; 0 < reward < 1; name == 'a b'; name < 'b'; none != 1;
info.error == null; info.deep.x == 2; missing == null; not missing > 0; reward > -1; reward.x == null;
resolved and (reward > 1 or n == 1)"""
FALSE = "reward > 0.5; n; n == true; missing > 0; name > 0; n != 1; resolved and reward > 1; not resolved; null; 'true'"
NONE = """reward >=; f(x); __import__('os'); a[0]; a + 1; lambda: 1; x if y else z; a in b; a is b; [1]; b'x' == a;
f'{a}'; (a := 1); 1j == a; ...; -a; ~1; ("""


def parts(text: str) -> list[str]:
    return [one.strip() for one in text.split(";")]


@pytest.mark.parametrize("text", [*parts(TRUE), *parts(FALSE)])
def test_expressions(text: str) -> None:
    assert parse_where(text).accepts(RECORD) is (text in parts(TRUE))
    assert not parse_where(text).accepts([])


@pytest.mark.parametrize("text", [*parts(NONE), "(" * 400 + "a" + ")" * 400, "not " * 400 + "a", ""])
def test_nothing_else_is_an_expression(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_where(text)
    with pytest.raises(ConfigError, match=r"sources\[0\]"):
        recipe_of({"sources": [{"path": "x", "where": text or "("}], "tokenizer": "bytes", "template": "chatml"})


def test_a_build_uses_the_records_for_which_it_is_true(tmp_path: Path) -> None:
    records: list[Any] = [
        chat_record(("user", "q"), ("assistant", "a"), id=f"r{number}", reward=number / 10, n=[1])
        for number in range(10)
    ]
    records[2]["messages"] = []  # which nobody asks for
    records[8]["messages"] = []
    path = write_jsonl(tmp_path / "chats.jsonl", records)
    source = {"path": str(path), "where": "reward >= 0.5"}
    recipe = {"sources": [source], "tokenizer": "bytes", "template": "chatml", "add_control_tokens": True}
    gates = {"records_left_out": None}
    built = run_build({**recipe, "on_error": "quarantine", "gates": gates}, tmp_path / "built", workers=0)
    assert verify(tmp_path / "built", deep=True, workers=0).passed
    assert [episode.record_id for episode in EpisodeDataset(tmp_path / "built")] == ["r5", "r6", "r7", "r9"]
    ledger = Ledger.from_json(built.manifest["ledger"])
    assert ledger.reasons("skipped", "quarantined") == {"where": 5, "no_messages": 1}
    assert {note for _, note in ledger.notes if "unused" in note} == {"unused_field n"}
