"""Files whose records have different formats: each is read in its own one, whatever is around it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.compiler.run import run_build
from chatmill.core.conversation import Conversation
from chatmill.core.conversations import unused_by_source
from chatmill.errors import RecordError
from chatmill.prove.verify import verify
from chatmill.read.columns import FileLines, line_groups, read_files
from chatmill.read.conversations import ConversationFile
from chatmill.read.files import decode_line
from chatmill.read.record_shape import conversation_of, conversation_or_error
from chatmill.read.rows import read_rows
from chatmill.read.shapes import EACH, SHAPES, find_shape, record_format
from tests.compiler.builds import CHATML, OPEN_GATES, chats, digest, write_jsonl
from tests.read.three_ways import bare, batch_of

INPUTS = Path(__file__).parents[1] / "data" / "inputs"
SHAREGPT = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
RECORDS: list[Any] = [
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    SHAREGPT,
    {"instruction": "q", "output": "a"},
    {"prompt": "q", "completion": "a"},
]


@cache
def pool() -> list[bytes]:
    """Lines of every kind that is bundled, good and bad, of all formats."""
    found = [line for path in sorted(INPUTS.glob("*.jsonl")) for line in path.read_bytes().split(b"\n")]
    return [line for line in found if len(line) < 20_000]


def one_by_one(lines: list[bytes], preferences: str | None) -> tuple[list[Conversation], list[RecordError], Any]:
    """Read every line by itself: the slow reference."""
    shape = find_shape(EACH if preferences is None else f"{EACH}+{preferences}")
    found: list[Conversation] = []
    errors: list[RecordError] = []
    for number, line in enumerate(lines, 1):
        if not line or line.isspace():
            continue
        for raw in shape.embedded(decode_line(line, f"f:{number}")):
            read = conversation_or_error(raw, shape, "s")
            if isinstance(read, RecordError):
                errors.append(read)
            else:
                found.append(read)
    return [side for one in found for side in one.sides], errors, unused_by_source(found)


def read_in_groups(lines: list[bytes], preferences: str | None, sizes: Iterator[int]) -> Any:
    """Read lines as a chunk does, in groups of these sizes and as two files."""
    shape = find_shape(EACH if preferences is None else f"{EACH}+{preferences}")
    data = b"".join(line + b"\n" for line in lines)
    half = len(lines) // 2
    files = [FileLines(1, 1, "f:", "s"), FileLines(half + 1, half + 1, "f:", "s")]
    found: list[Conversation] = []
    errors: list[RecordError] = []
    unused: Any = unused_by_source([])
    for group in line_groups(data, sizes):
        batch, refused = read_files(data, group, files, shape)
        found += list(batch)
        errors += refused
        unused.update(batch.unused)
    return found, errors, unused


@settings(max_examples=60)
@given(
    indexes=st.lists(st.integers(0, 10**6), min_size=1, max_size=40),
    sizes=st.lists(st.integers(1, 4000), min_size=1, max_size=4),
    preferences=st.sampled_from([None, "chosen", "pairs"]),
)
def test_lines_read_in_any_groups_equal_lines_read_one_by_one(
    indexes: list[int], sizes: list[int], preferences: str | None
) -> None:
    lines = [pool()[index % len(pool())] for index in indexes]
    slow, slow_errors, slow_unused = one_by_one(lines, preferences)
    fast, errors, unused = read_in_groups(lines, preferences, itertools.cycle(sizes))
    assert [bare(item) for item in fast] == [bare(item)._replace(rejected=()) for item in slow]
    assert [(error.where, error.code, str(error)) for error in errors] == [
        (error.where, error.code, str(error)) for error in slow_errors
    ]
    assert unused == slow_unused


def test_every_record_is_read_as_in_a_file_of_its_own_format() -> None:
    seen = set()
    for line in pool():
        raw = decode_line(line, "f:1")
        name = record_format(raw.value)
        if raw.error is None and name in SHAPES:
            seen.add(name)
            alone = conversation_or_error(raw, find_shape(name), "s")
            mixed = conversation_or_error(raw, find_shape(EACH), "s")
            assert (str(alone) if isinstance(alone, RecordError) else alone) == (
                str(mixed) if isinstance(mixed, RecordError) else mixed
            )
    assert seen >= set(SHAPES) - {"atif", "calls"}


def test_rows_of_a_table_are_read_by_the_columns_that_are_filled() -> None:
    batch, errors = read_rows(batch_of(RECORDS), first=1, path="f", source="s", shape=find_shape(EACH))
    assert not errors
    assert [[message.content for message in one.messages] for one in batch] == [["q", "a"]] * 4
    assert [one.where for one in batch] == [f"f:row {number}" for number in range(1, 5)]


def test_a_record_that_no_format_fits_is_one_error_with_its_fields() -> None:
    with pytest.raises(RecordError, match=r"no known format fits the record; it has: text, lang") as caught:
        conversation_of({"text": "q", "lang": "en"}, find_shape(EACH), where="f:1")
    assert caught.value.code == "unknown_shape"


@pytest.mark.parametrize("preferences", [None, "pairs"])
def test_a_mixed_file_builds_the_same_bytes_for_any_workers_and_is_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preferences: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    records: list[Any] = []
    for number, chat in enumerate(chats(120, seed=5)):
        question, answer = f"q{number}", chat["messages"][-1]["content"] or "a"
        pair = {"prompt": question, "chosen": answer, "rejected": "no"}
        known = [chat, {"prompt": question, "completion": answer}, SHAREGPT, {"question": question, "answer": answer}]
        record = known[number % 4]
        if preferences == "pairs":
            record = pair if number % 2 else {**record, "label": number % 3 == 0}
        records.append(record)
    records[17] = {"text": "no format"}
    write_jsonl(Path("mixed.jsonl"), records)
    recipe = {
        "sources": [{"path": "mixed.jsonl", "shape": EACH}],
        **CHATML,
        "on_error": "quarantine",
        "gates": OPEN_GATES,
        "preferences": preferences,
        "shard_bytes": 2000,
    }
    first = run_build(recipe, "one", workers=0)
    run_build(recipe, "two", workers=2)
    assert digest(Path("one")) == digest(Path("two"))
    rejected = [json.loads(line) for line in Path("one/rejected.jsonl").read_text().splitlines()]
    assert [(one["where"], one["reason"]) for one in rejected] == [("mixed.jsonl:18", "unknown_shape")]
    assert first.manifest["inputs"][0]["shape"] == (EACH if preferences is None else f"{EACH}+pairs")
    report = verify("one", deep=True)
    assert report.passed


def test_a_record_of_another_format_says_which_one(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "f.jsonl", [RECORDS[0], RECORDS[3], RECORDS[1]])
    errors: list[RecordError] = []
    file = ConversationFile(tmp_path / "f.jsonl", shape="openai", on_error=errors.append)
    assert len(list(file)) == 1
    assert "looks like prompt_completion: --shape prompt_completion reads such files, --shape each" in str(errors[0])
    assert "looks like ShareGPT: --shape sharegpt reads such files, --shape each" in str(errors[1])
