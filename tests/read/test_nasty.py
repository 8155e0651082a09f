"""The nasty records, case by case: each one is read and rendered, or fails with the code that the docs describe."""

from __future__ import annotations

import datetime
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.core.conversation import Conversation, Role
from chatmill.core.kinds import REPEATED, Part, RoleCode, kind
from chatmill.core.tokens import Tokens
from chatmill.errors import RecordError
from chatmill.label.presets import find_policy
from chatmill.read.conversations import ConversationFile, read_conversations
from chatmill.read.files import read_records
from chatmill.read.shapes import conversation_of, find_shape
from chatmill.render.jinja.options import Expand, TemplateOptions
from chatmill.render.jinja.rows import REASONS
from chatmill.render.registry import PYTHON_TEMPLATES, bind, bundled_names, find_template
from chatmill.render.render import Rendered, render
from chatmill.tokenizer.byte_level import ByteTokenizer
from tests.conftest import DATA

NASTY = DATA / "nasty.jsonl.gz"
DAY = datetime.date(2026, 1, 2)

READ_ERRORS = {
    "empty_messages": ("no_messages", "messages"),
    "null_content_user": ("null_content", "messages[0].content"),
    "missing_role_key": ("missing_role", "messages[0].role"),
    "unknown_role": ("unknown_role", "messages[0].role"),
    "sharegpt_keys": ("missing_role", "messages[0].role"),
    "role_not_string": ("role_type", "messages[0].role"),
    "content_number": ("content_type", "messages[0].content"),
    "content_bool_dict": ("content_type", "messages[0].content"),
    "messages_is_string": ("messages_type", "messages"),
    "messages_has_nonobject": ("message_type", "messages[0]"),
    "lone_surrogate_high": ("lone_surrogate", "messages[0].content"),
    "lone_surrogate_low": ("lone_surrogate", "messages[0].content"),
    "content_parts_image": ("non_text_part", "messages[0].content[0].type"),
    "content_parts_mixed_types": ("bad_part", "messages[0].content[0]"),
}
"""Cases that no shape can give a conversation for."""

CHANNELS = {"harmony_channels": "channel_not_in_template", "harmony_unknown_channel": "channel_not_in_template"}
TOOL_CALLS = dict.fromkeys(
    (
        "null_content_tool_call",
        "missing_content_key",
        "tool_call_args_object",
        "tool_call_args_bad_json",
        "tool_calls_parallel",
        "tool_content_parts",
        "function_role_legacy",
    ),
    "tool_calls_not_in_template",
)
NOT_SHOWN = dict.fromkeys(TOOL_CALLS, "not_shown")
THREE_ROLES = {"tool_result_orphan": "role_not_in_template", "harmony_developer_role": "role_not_in_template"}
LATE_SYSTEM = {"system_in_the_middle": "late_system", "two_systems": "late_system"}

NULL_CONTENT = dict.fromkeys([case for case in TOOL_CALLS if case != "tool_calls_parallel"], "template_refused") | {
    "tool_calls_parallel": "not_shown"
}
"""A template that knows no calls fails on a content of null; the one case with a content loses its calls."""
DEVELOPER = {"harmony_developer_role": "not_shown"}
ORPHAN = {"tool_result_orphan": "not_shown"}
LATE_NOT_SHOWN = dict.fromkeys(LATE_SYSTEM, "not_shown")
BAD_JSON = {"tool_call_args_bad_json": "arguments_not_an_object"}
SPEAKS_FIRST = {"assistant_first": "no_prompt"}
ALTERNATE = dict.fromkeys(
    (
        *("lookalike_ngpt_eot_split", "assistant_first", "two_users_in_a_row", "two_assistants_in_a_row"),
        *("system_in_the_middle", "two_systems", "tool_result_orphan", "harmony_developer_role"),
        *(case for case in TOOL_CALLS if case != "tool_call_args_bad_json"),
    ),
    "template_refused",
)
"""Mistral's roles alternate, and its call ids have nine characters."""

RENDER_ERRORS: dict[str, dict[str, str]] = {
    "token_native": CHANNELS | TOOL_CALLS | THREE_ROLES | LATE_SYSTEM,
    "markers": CHANNELS | TOOL_CALLS | THREE_ROLES,
    "harmony": {"tool_result_orphan": "tool_without_name", "harmony_unknown_channel": "unknown_channel"},
    "chatml": CHANNELS | NULL_CONTENT,
    "llama3": CHANNELS | NOT_SHOWN,
    "qwen3": CHANNELS | DEVELOPER | SPEAKS_FIRST | {"two_assistants_in_a_row": "prompt_not_in_history"},
    "qwen3_training": CHANNELS | DEVELOPER | SPEAKS_FIRST,
    "qwen3_2507": CHANNELS | DEVELOPER | SPEAKS_FIRST,
    "qwen2_5": CHANNELS | DEVELOPER | SPEAKS_FIRST | BAD_JSON,
    "glm4_5": CHANNELS | DEVELOPER | BAD_JSON | {"reasoning_only": "no_stop"},
    "gpt_oss": CHANNELS
    | DEVELOPER
    | SPEAKS_FIRST
    | BAD_JSON
    | LATE_NOT_SHOWN
    | {"tool_calls_parallel": "not_shown", "tool_result_orphan": "template_refused"},
    "granite": CHANNELS | DEVELOPER | BAD_JSON | {"tool_calls_parallel": "not_shown"},
    "mistral_nemo": CHANNELS
    | ALTERNATE
    | BAD_JSON
    | {"only_system": "not_shown", "uppercase_roles": "prompt_not_in_history"},
    "phi3": CHANNELS | NULL_CONTENT | DEVELOPER | ORPHAN,
    "phi4": CHANNELS | NULL_CONTENT | DEVELOPER | ORPHAN | LATE_NOT_SHOWN,
}
"""Cases that are conversations, but that a template has no form for."""


def cases() -> dict[str, Any]:
    records = list(read_records(NASTY))
    assert [raw.error for raw in records] == [None] * 92
    return {raw.value["case"]: raw for raw in records}


CASES = cases()


def outcome_of(case: str) -> Conversation | RecordError:
    raw = CASES[case]
    try:
        return conversation_of(raw.value, find_shape("openai"), where=raw.where)
    except RecordError as error:
        return error


def readable() -> dict[str, Conversation]:
    found = {case: outcome_of(case) for case in CASES}
    return {case: value for case, value in found.items() if isinstance(value, Conversation)}


CONVERSATIONS = readable()
QUICK = (*PYTHON_TEMPLATES, "chatml", "llama3")
"""Templates that get the thousand turns of one case whole; the others get the first of them."""
LONG = 60
"""Messages of the longest case that Jinja templates are given: they render every beginning of a new shape."""


def test_the_table_speaks_of_every_case() -> None:
    assert len(CASES) == 92
    assert set(READ_ERRORS) <= set(CASES)
    assert set(CONVERSATIONS) == set(CASES) - set(READ_ERRORS)
    assert set(RENDER_ERRORS) == set(bundled_names())
    for expected in RENDER_ERRORS.values():
        assert set(expected) <= set(CONVERSATIONS)


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


def rendered_cases(template: str, tokenizer: Any) -> tuple[list[str], Rendered]:
    """Names of all readable cases, and their rendering with failures collected."""
    names = list(CONVERSATIONS)
    talks = [CONVERSATIONS[name] for name in names]
    if template not in QUICK:
        talks = [talk._replace(messages=talk.messages[:LONG]) for talk in talks]
    return names, render(talks, bound(template, tokenizer), collect_failures=True)


def bound(template: str, tokenizer: Any) -> Any:
    """In place: each case is one row."""
    in_place = TemplateOptions(today=DAY, expand=Expand.NONE)
    return bind(template, tokenizer, None if template in PYTHON_TEMPLATES else in_place)


def bytes_tokenizer(template: str) -> ByteTokenizer:
    return ByteTokenizer(find_template(template).control_tokens)


def check_outcomes(template: str, names: list[str], rendered: Rendered) -> None:
    failed = {names[index]: error for index, error in rendered.failed}
    assert {name: error.code for name, error in failed.items()} == RENDER_ERRORS[template]
    assert [names[index] for index in rendered.kept] == [name for name in names if name not in failed]
    for name, error in failed.items():
        assert error.where == CASES[name].where
        assert error.path.startswith("messages[") or error.code == "template_refused"
    assert (rendered.tokens.lengths > 0).all()
    assert len(rendered.tokens.kinds) == len(rendered.tokens.ids)
    assert (rendered.tokens.kinds > 0).all(), "every token has a kind, and none is padding"


BY_BYTES = [name for name in bundled_names() if name != "harmony"]


@pytest.mark.parametrize("template", BY_BYTES)
def test_each_case_renders_or_is_refused_with_its_code(template: str) -> None:
    names, rendered = rendered_cases(template, bytes_tokenizer(template))
    check_outcomes(template, names, rendered)


def test_each_case_renders_with_harmony_or_is_refused_with_its_code(o200k: Any) -> None:
    names, rendered = rendered_cases("harmony", o200k)
    check_outcomes("harmony", names, rendered)


@pytest.mark.parametrize("template", BY_BYTES)
def test_without_collecting_the_first_failure_is_raised(template: str) -> None:
    case = "harmony_channels"
    with pytest.raises(RecordError, match="channels") as caught:
        render([CONVERSATIONS["empty_user"], CONVERSATIONS[case]], bound(template, bytes_tokenizer(template)))
    assert caught.value.where == CASES[case].where


def content_of(tokens: Tokens, message: int, role: Role) -> bytes:
    """The bytes that stand as the content of one message."""
    code = kind(RoleCode[role.name], Part.CONTENT)
    return bytes(tokens.ids[(tokens.messages == message) & (tokens.kinds & ~np.uint8(REPEATED) == code)].tolist())


@pytest.mark.parametrize("template", ["token_native", "markers", "chatml", "llama3"])
def test_contents_stay_text_to_the_last_byte(template: str) -> None:
    """Control look-alikes, NULs, bidi marks, a megabyte: what is written is what the record says."""
    names, rendered = rendered_cases(template, bytes_tokenizer(template))
    checked = 0
    for number, index in enumerate(rendered.kept):
        tokens = rendered.tokens.conversation(number)
        for at, message in enumerate(CONVERSATIONS[names[index]].messages):
            expected = message.content.strip() if template == "llama3" else message.content
            assert content_of(tokens, at, message.role) == expected.encode(), names[index]
            checked += 1
    assert checked > 1100


@pytest.mark.parametrize("template", BY_BYTES)
def test_no_text_ever_becomes_a_control_token(template: str) -> None:
    tokenizer = bytes_tokenizer(template)
    names, rendered = rendered_cases(template, tokenizer)
    tokens, checked = rendered.tokens, 0
    for number, index in enumerate(rendered.kept):
        conversation = CONVERSATIONS[names[index]]
        if template not in QUICK:
            conversation = conversation._replace(messages=conversation.messages[:LONG])
        plain = Conversation(
            tuple(
                m._replace(
                    content="x" if m.content or not m.tool_calls else "", reasoning="x" if m.reasoning else m.reasoning
                )
                for m in conversation.messages
            )
        )
        if conversation.tools or "<think>" in "".join(m.content for m in conversation.messages):
            continue  # other control tokens by design: tool definitions, reasoning taken out of the content
        expected = render([plain], bound(template, tokenizer)).tokens.ids
        own = tokens.conversation(number).ids
        assert np.count_nonzero(own >= 256) == np.count_nonzero(expected >= 256), names[index]
        checked += 1
    assert checked > 55


def test_weights_of_messages_switch_training_off() -> None:
    tokenizer = bytes_tokenizer("chatml")
    for case, trains in (("weights_all_zero", False), ("extra_fields", False), ("two_assistants_in_a_row", True)):
        tokens = render([CONVERSATIONS[case]], "chatml", tokenizer).tokens
        assert bool(find_policy("assistant").run_weights(tokens).any()) is trains, case


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


def test_the_whole_file_is_read_with_its_bad_records_set_aside() -> None:
    errors: list[RecordError] = []
    file = ConversationFile(NASTY, on_error=errors.append)
    assert file.shape.name == "openai"
    assert len(list(file)) == 92 - len(READ_ERRORS)
    assert [error.code for error in errors] == [READ_ERRORS[case][0] for case in CASES if case in READ_ERRORS]


ROOT = Path(__file__).parents[2]
DOCUMENTED = ("core", "read", "render", "systems")
"""Rooms whose codes stand in the table of docs/errors.md."""


def documented_codes(page: str) -> list[str]:
    return re.findall(r"^\| `([a-z0-9_]+)` \|", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)


def test_the_docs_describe_every_code() -> None:
    used = {
        code
        for room in DOCUMENTED
        for path in (ROOT / "src" / "chatmill" / room).rglob("*.py")
        for code in re.findall(r'code="([a-z0-9_]+)"', path.read_text())
    }
    used |= set(REASONS)
    assert len(used) > 35
    assert used - set(documented_codes("errors.md")) == set(), "describe them in docs/errors.md"
    assert set(documented_codes("errors.md")) - used == set(), "these are gone from the code"
    assert len(documented_codes("errors.md")) == len(set(documented_codes("errors.md")))


def test_the_page_of_the_records_has_every_code_of_reading() -> None:
    rows = re.findall(r"^\| `([a-z0-9_]+)` \| read", (ROOT / "docs" / "errors.md").read_text(), flags=re.MULTILINE)
    assert set(rows) <= set(documented_codes("records.md"))
    assert {code for code, _ in READ_ERRORS.values()} <= set(rows)


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
