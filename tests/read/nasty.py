"""The nasty records by name, what reading gives for each, and which of them a template refuses."""

from __future__ import annotations

import datetime
from typing import Any

from chatmill.core.conversation import Conversation
from chatmill.errors import RecordError
from chatmill.read.files import read_records
from chatmill.read.record_shape import conversation_of
from chatmill.read.shapes import find_shape
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

PICTURES = {"content_parts_image": "non_text_part"}
"""No bundled template is one of a model that takes pictures."""
_RENDER_ERRORS: dict[str, dict[str, str]] = {
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
    "mistral_nemo": CHANNELS | ALTERNATE | BAD_JSON | {"only_system": "not_shown", "uppercase_roles": "not_shown"},
    "phi3": CHANNELS | NULL_CONTENT | DEVELOPER | ORPHAN,
    "phi4": CHANNELS | NULL_CONTENT | DEVELOPER | ORPHAN | LATE_NOT_SHOWN,
}
RENDER_ERRORS = {template: codes | PICTURES for template, codes in _RENDER_ERRORS.items()}
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
QUICK = ("token_native", "markers", "chatml")
"""Templates that get the thousand turns of one case whole; the others get the first of them."""
LONG = 24
"""Messages of the longest case that Jinja templates are given: they render every beginning of a new shape."""
