"""JSON that came out of Arrow, with nulls for the keys of every other call, is read as what it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.compiler.run import run_build
from chatmill.core.ledger import Ledger
from chatmill.prove.verify import verify
from chatmill.read.arrow_nulls import has_arrow_nulls
from chatmill.read.conversations import DETECT_RECORDS, ConversationFile
from chatmill.read.files import read_records, without_nulls
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import CHATML, OPEN_GATES, write_jsonl
from tests.conftest import CONVERSATION_FILES, DATA


def with_objects(record: dict[str, Any]) -> dict[str, Any]:
    """A record whose calls have objects as arguments, keys in the order of the alphabet."""
    for message in record["messages"]:
        for call in message.get("tool_calls") or ():
            given = call["function"]["arguments"]
            parsed = json.loads(given) if isinstance(given, str) else given
            call["function"]["arguments"] = json.loads(json.dumps(parsed, sort_keys=True))
    return record


def called(name: str) -> list[dict[str, Any]]:
    """The records of a file that have calls."""
    read = [raw.value for raw in read_records(DATA / "conversations" / f"{name}.jsonl.gz")]
    return [record for record in read if any(message.get("tool_calls") for message in record["messages"])]


def test_a_round_trip_through_datasets_gives_the_same_rows(tmp_path: Path) -> None:
    records = [with_objects(record) for record in called("tau_airline")][:10]
    first = records[0]["messages"][0]  # Arrow has keys in the order in which it meets them
    calls = [call for one in records for message in one["messages"] for call in message.get("tool_calls") or ()]
    every = sorted({key for call in calls for key in call["function"]["arguments"]})
    empty = {"function": {"arguments": dict.fromkeys(every), "name": ""}, "id": None, "type": None}
    table = datasets.Dataset.from_list([{"messages": [{**first, "tool_calls": [empty]}]}, *records])
    damaged = tmp_path / "d.jsonl"
    table.select(range(1, len(table))).to_json(damaged, force_ascii=False)
    write_jsonl(tmp_path / "c.jsonl", records)
    assert ConversationFile(damaged).shape.name == "arrow openai"
    rows = []
    recipe: dict[str, Any] = {**CHATML, "template": "qwen3", "gates": OPEN_GATES, "expand": "tree"}
    for file, changed in (("c", 0), ("d", len(records))):
        sources = [{"path": str(tmp_path / f"{file}.jsonl"), "name": "x"}]
        made = run_build({**recipe, "sources": sources}, tmp_path / file, workers=0)
        assert Ledger.from_json(made.manifest["ledger"]).total_notes("records_without_arrow_nulls") == changed
        rows.append([(one.ids.tolist(), one.trained) for one in EpisodeDataset(tmp_path / file)])
    assert rows[0] == rows[1]
    shortest = sorted(damaged.read_text().splitlines(), key=len)[:2]  # the slow reference takes seconds for a long one
    recipe["sources"] = [{"path": str(write_jsonl(tmp_path / "few.jsonl", shortest)), "shape": "arrow openai"}]
    run_build(recipe, tmp_path / "few", workers=0)
    assert verify(tmp_path / "few", deep=True).passed


@pytest.mark.parametrize("name", ["bfcl_multi_turn", "glaive_toolcall_en"])
def test_tools_are_what_they_were(name: str, tmp_path: Path) -> None:
    records = called(name)[:60]
    datasets.Dataset.from_list(records).to_json(tmp_path / "d.jsonl", force_ascii=False)
    write_jsonl(tmp_path / "c.jsonl", records)
    clean, read = (list(ConversationFile(tmp_path / f"{file}.jsonl")) for file in "cd")
    assert [one.messages for one in clean] == [one.messages for one in read]
    tools = [[json.dumps(one.tools, sort_keys=True) for one in some] for some in (clean, read)]
    assert tools[0] == tools[1]
    assert all("null" in line for line in (tmp_path / "d.jsonl").read_text().splitlines())


def test_real_conversations_are_not_taken_for_damaged_ones() -> None:
    for path in CONVERSATION_FILES:
        assert not has_arrow_nulls([raw.value for raw in read_records(path)][:DETECT_RECORDS]), path


VALUES = st.integers(-5, 5) | st.none()
ARGUMENTS = st.fixed_dictionaries({}, optional=dict.fromkeys("abcd", VALUES))


@given(st.lists(st.tuples(st.sampled_from(["look", "go"]), ARGUMENTS), min_size=2, max_size=6))
@settings(max_examples=200)
def test_what_arrow_has_filled_is_emptied_and_nothing_else(calls: list[tuple[str, dict[str, Any]]]) -> None:
    answers = ({"role": "assistant", "tool_calls": [{"name": name, "arguments": given}]} for name, given in calls)
    record = {"messages": [{"role": "user", "content": "x"}, *answers]}
    assert has_arrow_nulls([record]) is False  # user and assistant have different keys
    (filled,) = pa.Table.from_pylist([record]).to_pylist()
    keys = {key for _, given in calls for key in given}
    is_full = all(set(given) == keys and None not in given.values() for _, given in calls)
    found = has_arrow_nulls([filled])
    assert found is (len({name for name, _ in calls}) > 1 and bool(keys) and not is_full)
    if found:
        assert without_nulls(filled) == without_nulls(record)


def test_nulls_of_one_function_may_be_its_arguments_and_stay(tmp_path: Path) -> None:
    call = {"name": "look", "arguments": {"at": None}}
    turns = ("user", None), ("assistant", [call])
    record = {"messages": [{"role": role, "content": "x", "tool_calls": calls} for role, calls in turns]}
    path = write_jsonl(tmp_path / "one.jsonl", [record])
    kept, emptied = (next(iter(ConversationFile(path, shape=shape))).messages[1] for shape in (None, "arrow openai"))
    assert [one.tool_calls[0].arguments for one in (kept, emptied)] == ['{"at": null}', "{}"]
