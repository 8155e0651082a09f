"""The nasty records, case by case: each one is read, or fails with the code that the docs describe."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from chatmill.core.conversation import Conversation, Role
from chatmill.errors import RecordError
from chatmill.read.conversations import read_conversations
from chatmill.render.jinja.renderer import REFUSALS
from chatmill.render.jinja.turn_documents import REASONS
from tests.conftest import DATA
from tests.read.nasty import CASES, CONVERSATIONS, READ_ERRORS, outcome_of


@pytest.mark.parametrize("case", CASES)
def test_each_case_is_read_or_refused_with_its_code(case: str) -> None:
    outcome = outcome_of(case)
    assert outcome.where == CASES[case].where
    if case in READ_ERRORS:
        assert isinstance(outcome, RecordError)
        assert (outcome.code, outcome.path) == READ_ERRORS[case]
        assert str(outcome).startswith(f"{outcome.where}, ")
        assert f"field {outcome.path}: " in str(outcome)
    else:
        assert isinstance(outcome, Conversation)
        assert len(outcome.messages) == len(CASES[case].value["messages"])


def test_what_a_case_keeps() -> None:
    assert CONVERSATIONS["huge_numbers"].messages[1].extra["n"] == CASES["huge_numbers"].value["messages"][1]["n"]
    assert CONVERSATIONS["huge_numbers"].messages[1].extra["n"] > 10**398
    assert CONVERSATIONS["deep_nesting"].messages[1].extra["metadata"]
    assert CONVERSATIONS["uppercase_roles"].messages[0].role is Role.SYSTEM
    assert CONVERSATIONS["role_with_spaces"].messages[1].role is Role.ASSISTANT
    assert CONVERSATIONS["content_parts_text"].messages[0].content == "Hello world"
    assert CONVERSATIONS["content_parts_empty"].messages[0].content == ""
    assert CONVERSATIONS["duplicate_id_a"].id == CONVERSATIONS["duplicate_id_b"].id == "dup-1"
    assert CONVERSATIONS["extra_fields"].metadata["conversation_hash"] == "\x00"
    assert CONVERSATIONS["tool_call_args_bad_json"].messages[1].tool_calls[0].arguments == '{"city": "Paris"'


ROOT = Path(__file__).parents[2]
DOCUMENTED = ("core", "read", "render", "systems", "images", "compiler")
"""Rooms whose codes stand in the table of docs/errors.md."""


def documented_codes(page: str) -> list[str]:
    return re.findall(r"^\| `([a-z0-9_]+)` \|", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)


def refused_by_templates() -> set[str]:
    """The codes that bundled templates give their refusals, in `raise_exception`."""
    texts = [path.read_text() for path in (ROOT / "src" / "chatmill" / "render" / "templates").glob("*.jinja")]
    said = {code for text in texts for code in re.findall(r"""raise_exception\(["']([a-z0-9_]+_[a-z0-9_]+) """, text)}
    said.add("origin_lost")  # the sandbox gives it
    assert said == REFUSALS, "a code is one only if templates may give it, and one of them does"
    return said


def test_the_docs_describe_every_code() -> None:
    used = {
        code
        for room in DOCUMENTED
        for path in (ROOT / "src" / "chatmill" / room).rglob("*.py")
        for code in re.findall(r'code="([a-z0-9_]+)"', path.read_text())
    }
    used |= set(REASONS) | refused_by_templates()
    assert len(used) > 35
    assert used - set(documented_codes("errors.md")) == set(), "describe them in docs/errors.md"
    assert set(documented_codes("errors.md")) - used == set(), "these are gone from the code"
    assert len(documented_codes("errors.md")) == len(set(documented_codes("errors.md")))


# --- broken lines --------------------------------------------------------------------------------------------------

RAW_LINES: dict[int, str | None] = {
    1: None,  # begins with a byte order mark, ends in CRLF
    2: None,  # blank
    3: None,  # white space
    4: "invalid_json",  # cut off
    5: "not_utf8",
    6: "not_utf8",  # a surrogate as bytes
    7: "duplicate_key",
    8: "invalid_json",  # NaN
    9: "record_type",  # a list
    10: "record_type",  # a string
    11: "record_type",  # a number
    12: "record_type",  # null
    13: "invalid_json",  # a raw tab
    14: "invalid_json",  # two objects
    15: None,  # raw U+2028 and U+0085
    16: None,  # no newline at the end
}


def test_the_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    shutil.copyfile(DATA / "nasty_raw.jsonl.bin", path)
    assert len(path.read_bytes().split(b"\n")) == len(RAW_LINES) == 16
    errors: list[RecordError] = []
    conversations = list(read_conversations(path, on_error=errors.append))
    assert {error.where: error.code for error in errors} == {
        f"{path}:{line}": code for line, code in RAW_LINES.items() if code
    }
    assert [conversation.where for conversation in conversations] == [f"{path}:{line}" for line in (1, 15, 16)]
    assert conversations[1].messages[0].content == "raw U+2028 \u2028 and NEL \x85 inside"
    with pytest.raises(RecordError) as caught:
        list(read_conversations(path))
    assert caught.value.where == f"{path}:4"
