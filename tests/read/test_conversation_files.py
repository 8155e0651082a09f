"""Files of conversations: the shape they have, and records that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from chatmill.core.conversation import Message, Role, ToolCall
from chatmill.errors import DataError, RecordError, UnknownNameError
from chatmill.read.conversations import DETECT_RECORDS, ConversationFile, read_conversations
from tests.conftest import CONVERSATION_FILES, DATA
from tests.read.shape_examples import ALPACA, EXAMPLES, OPENAI, PAIR, SHAREGPT, A, Q


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


# --- files of conversations ----------------------------------------------------------------------------------------


def test_a_file_states_its_shape_and_gives_its_conversations(tmp_path: Path) -> None:
    path = write(tmp_path / "talks.en.jsonl", SHAREGPT, {**SHAREGPT, "source": "own", "id": "x"})
    file = ConversationFile(path)
    assert file.shape.name == "sharegpt"
    first, second = file
    assert (first.messages, first.where, first.source) == ((Q, A), f"{path}:1", "talks")
    assert (second.where, second.source, second.id) == (f"{path}:2", "own", "x")
    assert list(file) == [first, second], "a file can be read again"
    assert next(iter(ConversationFile(path, source="given"))).source == "given"


def test_a_named_shape_wins_over_what_the_records_look_like(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {**OPENAI, **PAIR})
    assert next(read_conversations(path)).metadata == PAIR
    assert next(read_conversations(path, shape="prompt_completion")).metadata == OPENAI
    with pytest.raises(UnknownNameError):
        next(read_conversations(path, shape="chat"))


def test_parquet_files_of_nested_messages(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": "{}"}]}
    rows = [{"id": "1", **OPENAI, "lang": None}, {"id": "2", "messages": [OPENAI["messages"][0], call], "lang": "en"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    first, second = read_conversations(path)
    assert (first.messages, first.metadata, first.where) == ((Q, A), {}, f"{path}:row 1")
    assert second.messages == (Q, Message(Role.ASSISTANT, "", tool_calls=(ToolCall("f", "{}"),), has_content=False))
    assert second.metadata == {"lang": "en"}


def test_several_files_in_order(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{n}.jsonl", {**EXAMPLES[name], "id": name}) for n, name in enumerate(EXAMPLES)]
    assert [c.id for c in read_conversations(paths)] == list(EXAMPLES)
    assert [c.id for c in read_conversations(str(paths[0]))] == ["openai"]
    with pytest.raises(DataError, match="no input files"):
        next(read_conversations([]))


def test_the_first_bad_record_is_raised_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", OPENAI, {"id": "r2", "messages": []}, OPENAI)
    conversations = read_conversations(path)
    next(conversations)
    with pytest.raises(RecordError, match="no messages") as caught:
        next(conversations)
    assert (caught.value.where, caught.value.record_id) == (f"{path}:2", "r2")


def test_bad_records_can_be_collected_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        b"{",
        json.dumps(OPENAI).encode(),
        b"",
        b'{"messages": []}',
        b"3",
        json.dumps({**OPENAI, "id": "z"}).encode(),
    ]
    path.write_bytes(b"\n".join(lines))
    errors: list[RecordError] = []
    assert [c.where for c in read_conversations(path, on_error=errors.append)] == [f"{path}:2", f"{path}:6"]
    assert [(error.where, error.code) for error in errors] == [
        (f"{path}:1", "invalid_json"),
        (f"{path}:4", "no_messages"),
        (f"{path}:5", "record_type"),
    ]


def test_a_file_with_no_readable_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{\n{\n")
    with pytest.raises(RecordError, match="not JSON") as caught:
        list(read_conversations(path))
    assert caught.value.where == f"{path}:1"
    errors: list[RecordError] = []
    assert list(read_conversations(path, on_error=errors.append)) == []
    assert len(errors) == 2
    path.write_bytes(b"")
    assert list(read_conversations(path)) == []


def test_bad_lines_at_the_beginning_do_not_hide_the_shape(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{\n" * (DETECT_RECORDS + 5) + json.dumps(ALPACA).encode())
    errors: list[RecordError] = []
    assert [c.messages for c in read_conversations(path, on_error=errors.append)] == [(Q, A)]
    assert len(errors) == DETECT_RECORDS + 5


def test_a_shape_that_cannot_be_told_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "x"}, {"text": "y"})
    errors: list[RecordError] = []
    with pytest.raises(RecordError, match="cannot tell the shape") as caught:
        list(read_conversations(path, on_error=errors.append))
    assert caught.value.where == str(path)
    assert errors == []


@pytest.mark.parametrize("path", CONVERSATION_FILES, ids=lambda path: path.name.split(".")[0])
def test_every_record_of_the_real_sources_is_read(path: Path) -> None:
    file = ConversationFile(path)
    count = sum(len(conversation.messages) > 0 for conversation in file)
    assert file.shape.name == "openai"
    assert count >= 10


@pytest.mark.parametrize("path", sorted((DATA / "synth_harmony").glob("*.parquet")), ids=lambda path: path.name)
def test_every_row_of_the_real_harmony_shards_is_read(path: Path) -> None:
    file = ConversationFile(path)
    assert file.shape.name == "harmony"
    conversations = list(file)
    assert len(conversations) >= 100
    assert all(conversation.messages[-1].role is Role.ASSISTANT for conversation in conversations)
