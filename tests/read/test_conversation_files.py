"""Files of conversations: the shape they have, and records that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatmill.errors import DataError, RecordError, UnknownNameError
from chatmill.read.conversations import ConversationFile, read_conversations
from tests.compiler.builds import write_jsonl
from tests.read.shape_examples import EXAMPLES, OPENAI, PAIR, SHAREGPT, A, Q

# --- files of conversations ----------------------------------------------------------------------------------------


def test_a_file_states_its_shape_and_gives_its_conversations(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "talks.en.jsonl", [SHAREGPT, {**SHAREGPT, "source": "own", "id": "x"}])
    file = ConversationFile(path)
    assert file.shape.name == "sharegpt"
    first, second = file
    assert (first.messages, first.where, first.source) == ((Q, A), f"{path}:1", "talks")
    assert (second.where, second.source, second.id) == (f"{path}:2", "own", "x")
    assert list(file) == [first, second], "a file can be read again"
    assert next(iter(ConversationFile(path, source="given"))).source == "given"


def test_a_named_shape_wins_over_what_the_records_look_like(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{**OPENAI, **PAIR}])
    assert next(read_conversations(path)).metadata == PAIR
    assert next(read_conversations(path, shape="prompt_completion")).metadata == OPENAI
    with pytest.raises(UnknownNameError):
        next(read_conversations(path, shape="chat"))


def test_several_files_in_order(tmp_path: Path) -> None:
    paths = [write_jsonl(tmp_path / f"{n}.jsonl", [{**EXAMPLES[name], "id": name}]) for n, name in enumerate(EXAMPLES)]
    assert [c.id for c in read_conversations(paths)] == list(EXAMPLES)
    assert [c.id for c in read_conversations(str(paths[0]))] == ["openai"]
    with pytest.raises(DataError, match="no input files"):
        next(read_conversations([]))


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


def test_a_shape_that_cannot_be_told_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}, {"text": "y"}])
    errors: list[RecordError] = []
    with pytest.raises(RecordError, match="cannot tell the shape") as caught:
        list(read_conversations(path, on_error=errors.append))
    assert caught.value.where == str(path)
    assert errors == []
