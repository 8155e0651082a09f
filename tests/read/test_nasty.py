"""The nasty records: each is read, and rendered by every template, or fails with the code that the docs describe."""

from __future__ import annotations

import datetime
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest

from chatmill.core.conversation import Conversation, Role
from chatmill.core.kinds import REPEATED, Part, RoleCode, kind
from chatmill.errors import INTERNAL_ERROR, RecordError
from chatmill.read.conversations import read_conversations
from chatmill.read.files import read_records
from chatmill.read.record_shape import conversation_or_error
from chatmill.read.shapes import find_shape
from chatmill.render.jinja.options import Expand, TemplateOptions
from chatmill.render.jinja.renderer import REFUSALS, TemplateRunner
from chatmill.render.jinja.unproved import REASONS
from chatmill.render.registry import bind, bundled_names, find_template
from chatmill.render.render import Rendered, render
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.conftest import DATA
from tests.data.tokenizer_files import loaded
from tests.oracles import in_each_way
from tests.pages import ROOT
from tests.render.test_bulk import assert_same

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
    "extra_fields": ("part_training", "messages[1].loss_weight"),
}
"""Cases that no shape can give a conversation for."""

CHANNELS = {"harmony_channels": "channel_not_in_template", "harmony_unknown_channel": "channel_not_in_template"}
TOOL_CALLS = dict.fromkeys(
    (
        *("null_content_tool_call", "missing_content_key", "tool_call_args_object", "tool_call_args_bad_json"),
        *("tool_calls_parallel", "tool_content_parts", "function_role_legacy"),
    ),
    "tool_calls_not_in_template",
)
NOT_SHOWN = dict.fromkeys(TOOL_CALLS, "not_shown")
THREE_ROLES = {"tool_result_orphan": "role_not_in_template", "harmony_developer_role": "role_not_in_template"}
LATE_SYSTEM = {"system_in_the_middle": "late_system", "two_systems": "late_system"}

PARALLEL = {"tool_calls_parallel": "not_shown"}
NULL_CONTENT = dict.fromkeys(TOOL_CALLS, "template_refused") | PARALLEL
"""A template that knows no calls fails on a content of null; the one case with a content loses its calls."""
DEVELOPER = {"harmony_developer_role": "not_shown"}
ORPHAN = {"tool_result_orphan": "not_shown"}
ORPHAN_REFUSED = {"tool_result_orphan": "template_refused"}
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
    "gpt_oss": CHANNELS | DEVELOPER | SPEAKS_FIRST | BAD_JSON | LATE_NOT_SHOWN | PARALLEL | ORPHAN_REFUSED,
    "granite": CHANNELS | DEVELOPER | BAD_JSON | PARALLEL,
    "mistral_nemo": CHANNELS | ALTERNATE | BAD_JSON | {"only_system": "not_shown", "uppercase_roles": "not_shown"},
    "phi3": CHANNELS | NULL_CONTENT | DEVELOPER | ORPHAN,
    "phi4": CHANNELS | NULL_CONTENT | DEVELOPER | ORPHAN | LATE_NOT_SHOWN,
}
RENDER_ERRORS = {template: codes | PICTURES for template, codes in _RENDER_ERRORS.items()}
"""Cases that are conversations, but that a template has no form for."""


RECORDS = list(read_records(DATA / "nasty.jsonl.gz"))
CASES = {raw.value["case"]: raw for raw in RECORDS}
assert [raw.error for raw in RECORDS] == [None] * 92
OUTCOMES = {case: conversation_or_error(raw, find_shape("openai"), "") for case, raw in CASES.items()}
CONVERSATIONS = {case: value for case, value in OUTCOMES.items() if isinstance(value, Conversation)}
QUICK = ("token_native", "markers", "chatml")
"""Templates that get the thousand turns of one case whole; the others get the first of them."""
LONG = 24
"""Messages of the longest case that Jinja templates are given: they render every beginning of a new shape."""


@pytest.mark.parametrize("case", CASES)
def test_each_case_is_read_or_refused_with_its_code(case: str) -> None:
    outcome = OUTCOMES[case]
    assert outcome.where == CASES[case].where
    if case in READ_ERRORS:
        assert isinstance(outcome, RecordError)
        assert (outcome.code, outcome.path) == READ_ERRORS[case]
        assert re.match(rf"{re.escape(outcome.where)}, .*field {re.escape(outcome.path)}: ", str(outcome))
    else:
        assert isinstance(outcome, Conversation)
        assert len(outcome.messages) == len(CASES[case].value["messages"])


def test_what_a_case_keeps() -> None:
    huge = CONVERSATIONS["huge_numbers"].messages[1].extra["n"]
    assert huge == CASES["huge_numbers"].value["messages"][1]["n"] > 10**398
    assert CONVERSATIONS["deep_nesting"].messages[1].extra["metadata"]
    assert CONVERSATIONS["uppercase_roles"].messages[0].role is Role.SYSTEM
    assert CONVERSATIONS["role_with_spaces"].messages[1].role is Role.ASSISTANT
    assert CONVERSATIONS["content_parts_text"].messages[0].content == "Hello world"
    assert CONVERSATIONS["content_parts_empty"].messages[0].content == ""
    assert CONVERSATIONS["duplicate_id_a"].id == CONVERSATIONS["duplicate_id_b"].id == "dup-1"
    assert CONVERSATIONS["tool_call_args_bad_json"].messages[1].tool_calls[0].arguments == '{"city": "Paris"'


DOCUMENTED = ("json_values.py", "core", "read", "render", "systems", "images", "compiler")
"""A module, and rooms, whose codes stand in the table of docs/errors.md."""


def documented_codes(page: str) -> list[str]:
    return re.findall(r"^\| `([a-z0-9_]+)` \|", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)


def refused_by_templates() -> set[str]:
    """The codes that bundled templates give their refusals, in `raise_exception`."""
    texts = [path.read_text() for path in (ROOT / "src" / "chatmill" / "render" / "templates").glob("*.jinja")]
    said = {code for text in texts for code in re.findall(r"""raise_exception\(["']([a-z0-9_]+_[a-z0-9_]+) """, text)}
    said.add("origin_lost")  # the sandbox gives it
    assert said == REFUSALS, "a code is one only if templates may give it, and one of them does"
    return said


def modules_of(room: Path) -> list[Path]:
    return [room] if room.is_file() else sorted(room.rglob("*.py"))


def test_the_docs_describe_every_code() -> None:
    used = {
        code
        for room in DOCUMENTED
        for path in modules_of(ROOT / "src" / "chatmill" / room)
        for code in re.findall(r'code="([a-z0-9_]+)"', path.read_text())
    }
    used |= set(REASONS) | refused_by_templates() | {INTERNAL_ERROR}
    assert len(used) > 35
    assert used - set(documented_codes("errors.md")) == set(), "describe them in docs/errors.md"
    assert set(documented_codes("errors.md")) - used == set(), "these are gone from the code"
    assert len(documented_codes("errors.md")) == len(set(documented_codes("errors.md")))


BROKEN = {4: "invalid_json", 5: "not_utf8", 6: "not_utf8", 7: "duplicate_key", 8: "invalid_json"}
BROKEN |= dict.fromkeys((9, 10, 11, 12), "record_type") | dict.fromkeys((13, 14), "invalid_json")
"""Cut off, two kinds of bytes, a key twice, NaN; a list, a text, a number, null; a raw tab, two objects.

The first begins with a byte order mark and ends in CRLF, two are blank, and the last has no newline.
"""


def test_the_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    shutil.copyfile(DATA / "nasty_raw.jsonl.bin", path)
    errors: list[RecordError] = []
    conversations = list(read_conversations(path, on_error=errors.append))
    assert {error.where: error.code for error in errors} == {f"{path}:{line}": code for line, code in BROKEN.items()}
    assert [conversation.where for conversation in conversations] == [f"{path}:{line}" for line in (1, 15, 16)]
    assert conversations[1].messages[0].content == "raw U+2028 \u2028 and NEL \x85 inside"
    with pytest.raises(RecordError) as caught:
        list(read_conversations(path))
    assert caught.value.where == f"{path}:4"


IN_PLACE = TemplateOptions(today=datetime.date(2026, 1, 2), expand=Expand.NONE)
"""Each case is one row."""


class Nasty(NamedTuple):
    """All readable cases through one template, failures collected."""

    template: str
    tokenizer: Any
    names: list[str]
    talks: list[Conversation]
    rendered: Rendered


@pytest.fixture(scope="module", params=bundled_names())
def nasty(request: pytest.FixtureRequest) -> Nasty:
    template = request.param
    tokenizer = loaded("o200k") if template == "harmony" else byte_tokenizer(find_template(template).control_tokens)
    names = list(CONVERSATIONS)
    talks = [CONVERSATIONS[name] for name in names]
    if template not in QUICK:
        talks = [talk._replace(messages=talk.messages[:LONG]) for talk in talks]
    bound = bind(template, tokenizer, IN_PLACE)
    if template in QUICK:
        taught_by_beginnings(bound)
    rendered, other = in_each_way(lambda: render(talks, bound, collect_failures=True))
    assert_same(rendered, other)
    return Nasty(template, tokenizer, names, talks, rendered)


def taught_by_beginnings(bound: Any) -> None:
    """Let a template see beginnings of the thousand turns, which it then puts together from what it has learned.

    Without them it would render every one of a thousand beginnings; the other templates do that for a shorter chat.
    """
    longest = max(CONVERSATIONS.values(), key=lambda talk: len(talk.messages))
    assert len(longest.messages) == 1000
    render([longest._replace(messages=longest.messages[:count]) for count in (8, 10, 12)], bound)
    with patch.object(TemplateRunner, "_run", side_effect=AssertionError("it is put together, message by message")):
        render([longest], bound)


PATHLESS = {("template_refused", ""), ("not_shown", "tools"), ("non_text_part", "")}
"""Refusals that no single message is the reason of."""


def test_each_case_renders_or_is_refused_with_its_code(nasty: Nasty) -> None:
    names, rendered = nasty.names, nasty.rendered
    failed = {names[index]: error for index, error in rendered.failed}
    assert {name: error.code for name, error in failed.items()} == RENDER_ERRORS[nasty.template]
    assert [names[index] for index in rendered.kept] == [name for name in names if name not in failed]
    for name, error in failed.items():
        assert error.where == CASES[name].where
        assert error.path.startswith("messages[") or (error.code, error.path) in PATHLESS
    assert (rendered.tokens.lengths > 0).all()
    assert len(rendered.tokens.kinds) == len(rendered.tokens.ids)
    assert (rendered.tokens.kinds > 0).all(), "every token has a kind, and none is padding"


@pytest.mark.parametrize("nasty", ["token_native", "markers", "chatml", "llama3"], indirect=True)
def test_contents_stay_text_to_the_last_byte(nasty: Nasty) -> None:
    """Control look-alikes, NULs, bidi marks, a megabyte: what is written is what the record says."""
    checked = 0
    for number, index in enumerate(nasty.rendered.kept):
        tokens = nasty.rendered.tokens.conversation(number)
        kinds = tokens.kinds & ~np.uint8(REPEATED)
        for at, message in enumerate(nasty.talks[index].messages):
            is_content = (tokens.messages == at) & (kinds == kind(RoleCode[message.role.name], Part.CONTENT))
            expected = message.content.strip() if nasty.template == "llama3" else message.content
            assert bytes(tokens.ids[is_content].tolist()) == expected.encode(), nasty.names[index]
            checked += 1
    assert checked > (1100 if nasty.template in QUICK else 170)


def without_texts(talk: Conversation) -> Conversation:
    """The same messages, with nothing in them that spells anything."""
    contents = ["x" if one.content or not one.tool_calls else "" for one in talk.messages]
    thoughts = [one.reasoning and "x" for one in talk.messages]
    given = zip(talk.messages, contents, thoughts, strict=True)
    return Conversation(tuple(one._replace(content=text, reasoning=thought) for one, text, thought in given))


def test_no_text_ever_becomes_a_control_token(nasty: Nasty) -> None:
    """There are as many as without the texts, which a template writes that has never seen any of them."""
    compared = [
        (number, nasty.talks[index])
        for number, index in enumerate(nasty.rendered.kept.tolist())
        # Other control tokens by design: tool definitions, reasoning taken out of the content.
        if not nasty.talks[index].tools and "<think>" not in "".join(m.content for m in nasty.talks[index].messages)
        # Its texts spell nothing: a thousand turns are for the quickest templates.
        if len(nasty.talks[index].messages) <= LONG
    ]
    plain = render([without_texts(talk) for _, talk in compared], bind(nasty.template, nasty.tokenizer, IN_PLACE))
    assert len(plain.tokens) == len(compared) > 55
    control = np.array(sorted(set(nasty.tokenizer.control_ids.values())))
    for place, (number, talk) in enumerate(compared):
        own, expected = (r.tokens.conversation(at).ids for r, at in ((nasty.rendered, number), (plain, place)))
        assert np.isin(own, control).sum() == np.isin(expected, control).sum(), talk.where
