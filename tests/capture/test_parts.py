"""Edits of JSON, events and lines of calls keep every byte that they are not about."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatmill.capture.addresses import check_upstream
from chatmill.capture.call_record import Call, Dialect, events_json, exact_json, header_keys
from chatmill.capture.json_edits import Removal, add_member, apply_edits, members, remove_members
from chatmill.capture.server_events import EventSplitter, event_data
from chatmill.capture.token_ids import AnswerCleaner, Asking, TokenServer
from chatmill.errors import ConfigError, RecordError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from("abcd") | st.text(max_size=3), VALUES, max_size=5)


@given(OBJECTS, st.sampled_from([None, 0, 2]), st.booleans(), st.frozensets(st.sampled_from("abcd")))
def test_members_go_and_all_others_stay_as_they_are(
    value: dict[str, Any], indent: int | None, is_ascii: bool, keys: frozenset[str]
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    found = members(text, 0)
    assert [one.key for one in found] == list(value)
    assert [json.loads(text[one.value_start : one.stop]) for one in found] == list(value.values())
    gone = apply_edits(text, remove_members(text, found, keys, Removal.NOTHING))
    assert json.loads(gone) == {key: one for key, one in value.items() if key not in keys}
    if not keys & value.keys():
        assert gone == text
    emptied = apply_edits(text, remove_members(text, found, keys, Removal.NULL))
    assert json.loads(emptied) == {key: None if key in keys else one for key, one in value.items()}
    # What the text would have been without the values, with the same spelling.
    assert emptied == json.dumps(json.loads(emptied), indent=indent, ensure_ascii=is_ascii)


@given(OBJECTS, st.sampled_from([None, 2]))
def test_an_added_member_changes_nothing_else(value: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    added = add_member(text, "new", "true")
    assert json.loads(added) == {"new": True, **value}
    assert added.endswith(text[1:])


@pytest.mark.parametrize("text", ["", "3", '{"a"', '{"a":1', '{"a":1,}', '{"a" 1}', "[1", '{"a":[}', "{" * 5000])
def test_what_is_no_json_is_a_reason(text: str) -> None:
    with pytest.raises(RecordError):
        members(text, 0)


EVENTS = st.lists(
    st.sampled_from(
        [b'data: {"a":1}', b"data: [DONE]", b": ping", b"event: x\ndata: 1", b"data: 1\ndata: 2", b"id: 7"]
    ),
    max_size=6,
)


@given(EVENTS, st.sampled_from([b"\n", b"\r\n", b"\r"]), st.lists(st.integers(0, 200)))
def test_a_stream_may_be_cut_anywhere(events: list[bytes], end: bytes, cuts: list[int]) -> None:
    spelled = [event.replace(b"\n", end) + end + end for event in events]
    stream = b"".join(spelled)
    borders = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    splitter = EventSplitter()
    found: list[bytes] = []
    for start, stop in itertools.pairwise(borders):
        found += splitter.feed(stream[start:stop])
    assert b"".join(found) + splitter.rest == stream
    # CR LF CR, at the end of a chunk, is an end already: what comes then belongs to the next event.
    assert [event_data(event) for event in found if event.strip()] == [event_data(event) for event in spelled]


@given(st.binary(max_size=30) | st.builds(lambda value: json.dumps(value, indent=1).encode(), VALUES))
def test_a_body_is_on_one_line_and_the_same(body: bytes) -> None:
    line = exact_json(body)
    assert b"\n" not in line
    value = json.loads(line)
    try:
        assert value == msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        assert set(value) == {"base64"}


def test_events_that_are_no_json_and_torn_ones_are_kept_as_texts() -> None:
    stream = b'data: {"a": 1}\n\n: ping\n\ndata: oops\n\ndata: [DONE]\n\ndata: {"tor'
    assert json.loads(events_json(stream)) == [{"a": 1}, "oops", "[DONE]", 'data: {"tor']


def test_keys_of_headers_leave_every_body() -> None:
    keys = header_keys({"authorization": "Bearer sk-0123/456789", "x-api-key": "anything", "api-key": "tok-12345678"})
    assert keys == (b"sk-0123\\/456789", b"sk-0123/456789", b"tok-12345678")
    for body in (
        b'{"a":"sk-0123/456789 sk-0123\\/456789 anything"}',
        b"not json: tok-12345678",
    ):
        call = Call(dialect=Dialect.CHAT, path="/v1/chat/completions", run=None, request=body, keys=keys)
        call.answer += body
        line = call.line(is_complete=True)
        assert json.loads(line)["version"] == 1
        assert not any(key in line for key in keys)


def test_only_what_lacks_is_added() -> None:
    vllm = Asking(server=TokenServer.VLLM, logprobs=True)
    assert vllm.add_to(b'{"a":1}') == (
        b'{"return_token_ids":true,"logprobs":true,"a":1}',
        ("return_token_ids", "logprobs"),
    )
    assert vllm.add_to(b'{"logprobs":false}') == (b'{"return_token_ids":true,"logprobs":false}', ("return_token_ids",))
    for body in (b"[1]", b"{", b"\xff", b""):
        assert vllm.add_to(body) == (body, ())
    sglang = Asking(server=TokenServer.SGLANG)
    assert sglang.add_to(b'{"stream":true}') == (b'{"stream":true}', ())
    assert sglang.add_to(b"{}") == (b'{"return_token_ids":true}', ("return_token_ids",))
    assert Asking().add_to(b"{}") == (b"{}", ())


def test_sglang_writes_no_key_where_nobody_asked() -> None:
    cleaner = AnswerCleaner(server=TokenServer.SGLANG, added=("return_token_ids",))
    body = '{"choices": [{"index": 0, "prompt_token_ids": [1], "response_token_ids": [2]}, {"index": 1}]}'
    assert cleaner.clean_body(body.encode()) == b'{"choices": [{"index": 0}, {"index": 1}]}'


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://a", "http://", "http://a/v1", "http://a/v1/", "http://a?b", "http://u:p@a"]
)
def test_addresses_of_servers_that_cannot_be_meant(url: str) -> None:
    with pytest.raises(ConfigError):
        check_upstream(url)


def test_a_server_may_have_a_path() -> None:
    assert check_upstream("https://openrouter.ai/api/") == "https://openrouter.ai/api"
