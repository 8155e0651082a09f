"""The bulk way gives what a fresh template gives for each conversation alone, for every bundled template."""

from __future__ import annotations

import datetime
import gzip
import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.conversations import Conversations
from chatmill.core.kinds import KINDS, REPEATED, Part, RoleCode, parts_of, role_of
from chatmill.core.kinds import PLAIN as PLAIN_KIND
from chatmill.errors import RecordError
from chatmill.label.presets import PRESETS
from chatmill.read.columns import Lines, read_lines
from chatmill.read.shapes import find_shape
from chatmill.render.documents import Counts
from chatmill.render.jinja.options import Expand, TemplateOptions, Unproved
from chatmill.render.model_template import ModelTemplate, TextDocuments
from chatmill.render.registry import bind, bundled_names, find_template
from chatmill.render.render import Rendered, render
from chatmill.tokenizer.byte_level import byte_tokenizer
from chatmill.tokenizer.load import with_control_tokens
from tests.conftest import CONVERSATION_FILES
from tests.data.tokenizer_files import loaded
from tests.oracles import in_each_way
from tests.render.jinja.at_hand import OneRow, items_alone, row_of

DAY = datetime.date(2026, 1, 2)
NAMES = bundled_names()


@cache
def tokenizer_of(name: str, vocabulary: str) -> Any:
    controls = find_template(name).control_tokens
    if name == "harmony":
        return loaded("o200k")
    if vocabulary == "bytes":
        return byte_tokenizer(controls)
    return with_control_tokens(loaded(vocabulary), controls)


def fresh(name: str, vocabulary: str = "bytes", **options: Any) -> ModelTemplate:
    return bind(name, tokenizer_of(name, vocabulary), TemplateOptions(today=DAY, **options))


def rendered_both_ways(make: Callable[[], list[Conversation] | Conversations], template: ModelTemplate) -> Rendered:
    """A batch rendered by compiled code and by its slow twins; both must be the same."""
    one, other = in_each_way(lambda: render(make(), template, collect_failures=True))
    assert_same(one, other)
    return one


def assert_same(one: Rendered, other: Rendered) -> None:
    for name in ("ids", "run_kinds", "run_messages", "run_offsets", "offsets", "message_weights"):
        np.testing.assert_array_equal(getattr(one.tokens, name), getattr(other.tokens, name))
    np.testing.assert_array_equal(one.stripped, other.stripped)
    np.testing.assert_array_equal(one.lost, other.lost)
    assert [(i, str(e)) for i, e in one.failed] == [(i, str(e)) for i, e in other.failed]


def with_unwanted(row: OneRow, conversation: Conversation) -> list[int]:
    """The kinds of a row; what belongs to an answer of weight 0 is never trained, whatever its part."""
    unwanted = {n for n, m in enumerate(conversation.messages) if m.role == "assistant" and m.weight == 0}
    pairs = zip(row.kinds, row.messages, strict=True)
    return [k | REPEATED if m in unwanted and role_of(k) == RoleCode.ASSISTANT else k for k, m in pairs]


def written_alone(conversation: Conversation, template: ModelTemplate) -> TextDocuments | RecordError:
    try:
        return template.text_documents(conversation)
    except RecordError as error:
        return error


def assert_bulk_is_one_by_one(
    rendered: Rendered, conversations: list[Conversation], name: str, vocabulary: str, **options: Any
) -> int:
    """Compare a rendering with every conversation written alone in a template of its own; the number of rows."""
    failed = dict(rendered.failed)
    place = 0
    template = fresh(name, vocabulary, **options)
    for index, conversation in enumerate(conversations):
        template.store.forget()  # what earlier conversations taught it, not what it found out about itself
        written = written_alone(conversation, template)
        if isinstance(written, RecordError):
            assert (failed[index].code, failed[index].path) == (written.code, written.path), conversation.where
            assert "values that are traced" not in str(written), "plain Jinja writes what the traced run could not"
            continue
        assert index not in failed, (conversation.where, failed[index])
        for number, items in enumerate(items_alone(written, template)):
            wanted, found = row_of(items, template.tokenizer), rendered.tokens.conversation(place)
            assert rendered.kept[place] == index
            assert found.ids.tolist() == wanted.ids, (name, conversation)
            assert found.kinds.tolist() == with_unwanted(wanted, conversation), (name, conversation)
            assert found.messages.tolist() == wanted.messages, (name, conversation)
            noted = [int(getattr(rendered, name)[place]) for name in Counts._fields]
            assert noted == (list(written.counts) if number == 0 else [0] * len(noted))
            weights = [np.nan if m.weight is None else m.weight for m in conversation.messages]
            np.testing.assert_array_equal(found.message_weights, np.array(weights, dtype=np.float32))
            place += 1
        single = render([conversation], template)
        first = place - len(written.documents)
        assert rendered.stripped[first:place].tolist() == single.stripped.tolist()
        assert rendered.lost[first:place].tolist() == single.lost.tolist()
    assert place == len(rendered.kept) == len(rendered.tokens)
    return place


@cache
def bundled(path: Any, count: int) -> tuple[bytes, ...]:
    return tuple(gzip.decompress(path.read_bytes()).splitlines()[:count])


def not_long(lines: Sequence[bytes]) -> list[bytes]:
    """Conversations of a few messages, and one that may have many."""
    return [line for number, line in enumerate(lines) if number == 0 or line.count(b'"role":') <= 12]


def batch_of(lines: Any) -> Conversations:
    data = b"".join(line + b"\n" for line in lines)
    whole = Lines(0, len(data), 1, len(lines))
    batch, errors = read_lines(data, whole, before="f:", source="s", shape=find_shape("openai"))
    assert not errors
    return batch


@pytest.mark.parametrize("count", [2, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_every_bundled_source(name: str, count: int) -> None:
    """One batch of many sources, so that shapes are learned from some of them and used by others."""
    files = CONVERSATION_FILES if count > 2 else CONVERSATION_FILES[NAMES.index(name) % 3 :: 3]
    lines = [line for path in files for line in not_long(bundled(path, 60))[:count]]
    template = fresh(name, "qwen3")
    rendered = render(batch_of(lines), template, collect_failures=True)
    rows = assert_bulk_is_one_by_one(rendered, list(batch_of(lines)), name, "qwen3")
    assert rows >= 6
    assert_same(rendered, rendered_both_ways(lambda: batch_of(lines), template))  # now every plan is known


# -- conversations that nobody has -----------------------------------------------------------------------------------

SPELLINGS = [
    *("<|im_end|>", "<think>", "</think>", "<tool_call>", "<tool_response>x</tool_response>", "<tool_response>"),
    *("</tool_response>", "</tool_call>", "<|im_start|>", "<|endoftext|>", "<|channel|>", "<|begin_of_text|>"),
    *("<|end|>", "<|user|>", "[INST]", "</s>", "<|eot_id|>", "<|EOS|>", "<|END|>", "<|return|>"),
]
PIECES = [*SPELLINGS, "\n", "\n\n", " ", "é́", "a", "<th", "ink>", "\u2003", "\u00a0", "None", "{{ 1 }}", "\x00"]
TEXT = st.sampled_from(["", "a", "\nx\n", "<think>r</think>\n\nok", "hello there\n\n"]) | st.lists(
    st.sampled_from(PIECES) | st.text(max_size=8), max_size=5
).map("".join)
WORDS = st.sampled_from(["f", "get_weather", "é", "<|im_end|>"])
ARGUMENTS = st.dictionaries(WORDS, TEXT | st.integers() | st.none() | st.lists(TEXT, max_size=2), max_size=2)
CALLS = st.builds(
    ToolCall,
    WORDS,
    ARGUMENTS.map(lambda a: json.dumps(a, ensure_ascii=False)) | TEXT,
    st.none() | st.just("call00001"),
    st.integers(0, 127),
)


def tool_of(name: str, text: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": text}}}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


def said(role: Role) -> st.SearchStrategy[Message]:
    more: dict[str, Any] = {"weight": st.none() | st.sampled_from([0.0, 0.5, 1.0])}
    if role is Role.ASSISTANT:
        more |= {"reasoning": st.none() | TEXT, "tool_calls": st.just(()) | st.lists(CALLS, max_size=3).map(tuple)}
    elif role is Role.TOOL:
        more = {"name": st.none() | WORDS, "tool_call_id": st.just("call00001")}
    else:
        more["name"] = st.none() | WORDS
    return st.tuples(TEXT, st.fixed_dictionaries(more)).map(lambda drawn: Message(role, drawn[0], **drawn[1]))


PLAIN_TALK = st.lists(st.tuples(said(Role.USER), said(Role.ASSISTANT)), min_size=1, max_size=3).map(
    lambda pairs: tuple(message for pair in pairs for message in pair)
)
ANY_TALK = st.lists(st.sampled_from(list(Role)).flatmap(said), min_size=1, max_size=5).map(tuple)
TALKS = st.tuples(
    PLAIN_TALK | st.tuples(said(Role.SYSTEM), PLAIN_TALK).map(lambda pair: (pair[0], *pair[1])) | ANY_TALK,
    st.just(()) | st.lists(st.builds(tool_of, WORDS, TEXT), max_size=2).map(tuple),
).map(lambda drawn: Conversation(drawn[0], tools=drawn[1]))
RULES = st.fixed_dictionaries({}, optional={"expand": st.sampled_from(Expand), "unproved": st.sampled_from(Unproved)})


def assert_sound(rendered: Rendered, count: int) -> None:
    """Every conversation is kept or refused, and every token has a kind that all policies can weigh."""
    tokens = rendered.tokens
    failed = {index for index, _ in rendered.failed}
    assert sorted([*set(rendered.kept.tolist()), *failed]) == list(range(count))
    assert tokens.offsets[-1] == len(tokens.ids) == len(tokens.kinds) == len(tokens.messages)
    assert (tokens.kinds & PLAIN_KIND < KINDS).all()
    assert (parts_of(tokens.kinds) != Part.PAD).all()
    assert (tokens.run_lengths >= 0).all()
    assert np.isin(tokens.offsets, tokens.run_offsets).all()
    for policy in PRESETS.values():
        weights = policy.run_weights(tokens)
        assert weights.shape == tokens.run_kinds.shape
        assert ((weights >= 0) & (weights <= 1)).all()


@settings(max_examples=120)
@given(talks=st.lists(TALKS, max_size=5), name=st.sampled_from(NAMES), rules=RULES)
def test_random_batches(talks: list[Conversation], name: str, rules: dict[str, Any]) -> None:
    twice = [*talks, *talks]  # the second half is written by plans alone
    rendered = rendered_both_ways(lambda: twice, fresh(name, **rules))
    assert_sound(rendered, len(twice))
    assert_bulk_is_one_by_one(rendered, twice, name, "bytes", **rules)


_USED: dict[str, ModelTemplate] = {}


@settings(max_examples=60)
@given(talks=st.lists(TALKS, max_size=4), name=st.sampled_from(NAMES))
def test_a_template_that_has_seen_much_writes_as_a_fresh_one(talks: list[Conversation], name: str) -> None:
    """Plans of all earlier examples are in the book: a key or a question that says too little shows here."""
    if name not in _USED:
        _USED[name] = fresh(name, unproved=Unproved.UNTRAINED)
    rendered = rendered_both_ways(lambda: talks, _USED[name])
    assert_bulk_is_one_by_one(rendered, talks, name, "bytes", unproved=Unproved.UNTRAINED)


@settings(max_examples=15)
@given(talks=st.lists(TALKS, max_size=4), chosen=st.lists(st.integers(0, 3), max_size=5))
def test_chosen_conversations(talks: list[Conversation], chosen: list[int]) -> None:
    places = [number for number in chosen if number < len(talks)]
    for name in ("qwen3", "markers"):
        taken = np.array(places, dtype=np.int64)
        rendered = rendered_both_ways(lambda taken=taken: Conversations.of(talks).take(taken), fresh(name))
        assert_bulk_is_one_by_one(rendered, [talks[number] for number in places], name, "bytes")


def with_texts(talk: Conversation, change: Callable[[str], str]) -> Conversation:
    """A conversation with every text of it changed."""

    def changed(message: Message) -> Message:
        calls = [call._replace(name=change(call.name), arguments=change(call.arguments)) for call in message.tool_calls]
        texts = {name: getattr(message, name) for name in ("content", "reasoning", "name")}
        texts = {name: text and change(text) for name, text in texts.items()}
        return message._replace(**texts, tool_calls=tuple(calls))

    tools = tuple(json.loads(change(json.dumps(tool))) for tool in talk.tools)
    return talk._replace(messages=tuple(map(changed, talk.messages)), tools=tools)


def without_spellings(text: str) -> str:
    for spelling in SPELLINGS:
        text = text.replace(spelling, f"({spelling[1:-1]})")
    return text


@settings(max_examples=80)
@given(talk=TALKS, name=st.sampled_from(NAMES))
def test_control_ids_stand_only_where_the_template_put_them(talk: Conversation, name: str) -> None:
    """Replacing every spelled control token in the texts changes no count of any control id."""
    # Templates ask for `</think>` and `<tool_response>` in a content and write another text then.
    talk = with_texts(talk, lambda text: text.replace("</think>", "").replace("<think>", ""))
    assume(not any(message.content.startswith("<tool_response>") for message in talk.messages))
    template = fresh(name, "o200k")
    rendered, other = (
        render([one], template, collect_failures=True) for one in (talk, with_texts(talk, without_spellings))
    )
    assert [error.code for _, error in rendered.failed] == [error.code for _, error in other.failed]
    control = np.array(sorted(set(template.tokenizer.control_ids.values())))
    found, wanted = (one.tokens.ids[np.isin(one.tokens.ids, control)].tolist() for one in (rendered, other))
    assert found == wanted


# -- what a plan's key must tell apart ---------------------------------------------------------------------------------


def calling(*ids: str | None, results: int | None = None) -> Conversation:
    """A conversation with calls, and a result for each or for some."""
    calls = tuple(ToolCall("f", '{"a": 1}', one) for one in ids)
    answered = ids if results is None else ids[:results]
    given = tuple(Message(Role.TOOL, "r", tool_call_id="call00001", name="f") for _ in answered)
    answer = Message(Role.ASSISTANT, "done")
    return Conversation((Message(Role.USER, "q"), Message(Role.ASSISTANT, "", tool_calls=calls), *given, answer))


@pytest.mark.parametrize("name", ["mistral_nemo", "qwen3", "glm4_5"])
def test_calls_of_which_some_have_ids(name: str) -> None:
    """Batch after batch through one template: which calls have ids is part of a shape."""
    template = fresh(name)
    for ids in (("call00001", None), (None, "call00001"), (None, None), ("call00001", "call00002")):
        talks = [calling(*ids)]
        assert_bulk_is_one_by_one(rendered_both_ways(lambda talks=talks: talks, template), talks, name, "bytes")


def test_more_calls_than_a_byte_can_count() -> None:
    template = fresh("qwen3")
    for count in (257, 1, 256):
        talks = [calling(*(["call00001"] * count), results=1)]  # every result would be a beginning to render
        assert_bulk_is_one_by_one(rendered_both_ways(lambda talks=talks: talks, template), talks, "qwen3", "bytes")


@pytest.mark.parametrize("name", ["qwen3", "chatml"])
def test_channels_are_refused_after_the_same_talk_without_them(name: str) -> None:
    plain = Conversation((Message(Role.USER, "q"), Message(Role.ASSISTANT, "a")))
    template = fresh(name)
    assert len(render([plain, plain], template).kept) == 2
    for fields in ({"channel": "final"}, {"recipient": "f"}, {"content_type": "json"}):
        other = plain._replace(messages=(plain.messages[0], plain.messages[1]._replace(**fields)))
        with pytest.raises(RecordError) as caught:
            render([other], template)
        assert (caught.value.code, caught.value.path) == ("channel_not_in_template", "messages[1]")


# -- what is counted ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [(), ({"type": "function", "function": {"name": "f"}},)], ids=["alone", "tools"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_training"])
def test_reasoning_that_has_no_place_is_counted(name: str, tools: Any) -> None:
    """A system message that tool definitions are written into loses its reasoning like one that is alone."""
    system = Message(Role.SYSTEM, "be", reasoning="hé!")
    talk = (Message(Role.USER, "q", reasoning="mmmm"), Message(Role.ASSISTANT, "a"))
    rendered = render([Conversation((system, *talk), tools=tools), Conversation(talk, tools=tools)], fresh(name))
    assert rendered.stripped.tolist() == [3 + 4, 4]
    assert rendered.lost.tolist() == [[0, 3 + 4, 0], [0, 4, 0]]


def test_lost_text_is_more_than_the_white_space_around_it() -> None:
    """A reasoning that no document shows is lost but for its white space; a content that is trimmed loses nothing."""
    talk = (Message(Role.USER, "q"), Message(Role.ASSISTANT, "a", reasoning="  hm.\n"))
    trimmed = (Message(Role.USER, " \n q "), Message(Role.ASSISTANT, "a"))
    rendered = render([Conversation(talk), Conversation(trimmed)], fresh("llama3"))
    assert rendered.stripped.tolist() == [len("  hm.\n"), len(" \n ") + 1]
    assert rendered.lost.tolist() == [[0, len("hm."), 0], [0, 0, 0]]


def test_most_conversations_are_written_by_plans() -> None:
    batch = batch_of([line for path in CONVERSATION_FILES for line in bundled(path, 30)])
    template = fresh("qwen3")
    render(batch, template, collect_failures=True)
    assert template.store.unknown < 0.25 * len(batch)
    runs = [renderer.runs for renderer in template.store.renderers.values()]
    assert sum(runs) < 0.25 * len(batch)
    rendered = render(batch, template, collect_failures=True)
    assert not rendered.failed
    assert [renderer.runs for renderer in template.store.renderers.values()] == runs, "all turns are known by now"
