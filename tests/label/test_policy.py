"""Policies: presets, scopes, weights of messages and files, against a reference that looks at one token at a time."""

from __future__ import annotations

import datetime
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.kinds import KINDS, MARK, REPEATED, Part, RoleCode, kind, kind_name, part_of, role_of
from chatmill.core.tokens import Tokens, offsets_of
from chatmill.errors import ConfigError, UnknownNameError
from chatmill.label.policy import Policy, Scope
from chatmill.label.presets import PRESETS, find_policy
from chatmill.prove.rows import PlainRow, token_weights
from chatmill.render.jinja.options import Expand, TemplateOptions
from chatmill.render.registry import bind, bundled_names, find_template
from chatmill.render.render import render
from chatmill.tokenizer.byte_level import byte_tokenizer

OWN = {Part.REASONING, Part.CONTENT, Part.TOOL_CALL, Part.TERMINATOR}
TALK = Conversation(
    (
        Message(Role.SYSTEM, "s"),
        Message(Role.USER, "q1"),
        Message(Role.ASSISTANT, "a1", reasoning="r1"),
        Message(Role.USER, "q2"),
        Message(Role.ASSISTANT, "", tool_calls=(ToolCall("f", "{}"),)),
        Message(Role.TOOL, "t"),
        Message(Role.ASSISTANT, "a2", reasoning="r2"),
    )
)


DAY = datetime.date(2026, 1, 2)


def rendered(*conversations: Conversation, template: str = "qwen3_training", expand: Expand = Expand.TURNS) -> Tokens:
    tokenizer = byte_tokenizer(find_template(template).control_tokens)
    return render(conversations, bind(template, tokenizer, TemplateOptions(today=DAY, expand=expand))).tokens


def trained(policy: str | Policy, tokens: Tokens) -> set[tuple[int, str]]:
    """(message, kind) of everything that has a weight."""
    weights = tokens.per_token(find_policy(policy).run_weights(tokens))
    return {
        (int(message), kind_name(int(code)))
        for message, code, weight in zip(tokens.messages, tokens.kinds, weights, strict=True)
        if weight
    }


# --- presets -------------------------------------------------------------------------------------------------------

ASSISTANTS = {2, 4, 6}


def expected(parts: set[Part], messages: set[int] = ASSISTANTS) -> set[tuple[int, str]]:
    tokens = rendered(TALK)
    present = {(int(m), int(k)) for m, k in zip(tokens.messages, tokens.kinds, strict=True)}
    return {
        (message, kind_name(code))
        for message, code in present
        if message in messages and role_of(code) is RoleCode.ASSISTANT and part_of(code) in parts
    }


def test_presets_of_one_talk() -> None:
    tokens = rendered(TALK)
    assert trained("assistant", tokens) == expected(OWN)
    assert trained("post_training", tokens) == expected(OWN | {Part.HEADER})
    assert trained("synth_kd", tokens) == expected(OWN | {Part.HEADER})
    assert trained("trl", tokens) == expected(OWN | {Part.SEPARATOR})
    assert trained("last_turn", tokens) == expected(OWN, {4, 6})
    assert trained("final_only", tokens) == expected({Part.CONTENT, Part.TERMINATOR})
    assert trained("per_message", tokens) == set()
    weights = tokens.per_token(find_policy("all").run_weights(tokens))
    assert (weights == 1).all()
    assert {kind_name(kind(RoleCode.ASSISTANT, part)) for part in OWN} <= {name for _, name in expected(OWN)}


def test_each_templates_default_policy_is_a_preset_and_trains_the_terminator() -> None:
    plain = Conversation((Message(Role.USER, "q"), Message(Role.ASSISTANT, "a")))
    for name in bundled_names():
        policy = find_policy(find_template(name).default_policy)
        assert policy.table()[kind(RoleCode.ASSISTANT, Part.TERMINATOR)] == 1
        assert policy.table()[kind(RoleCode.USER, Part.CONTENT)] == 0
        if name != "harmony":  # needs its own vocabulary
            assert (1, "assistant.terminator") in trained(policy, rendered(plain, template=name))


def test_an_answer_that_is_context_in_its_row_is_never_trained() -> None:
    """Qwen3 strips earlier reasoning: the first answer has a document of its own, and is context in the last one."""
    tokens = rendered(TALK, template="qwen3")
    assert len(tokens) > 1
    for name in PRESETS:
        assert not any("+repeated" in kind_of for _, kind_of in trained(name, tokens))
    assert any("+repeated" in kind_name(code) for code in tokens.run_kinds.tolist())
    assert trained("assistant", tokens) == {
        (message, kind_name(code))
        for message, code in zip(tokens.messages.tolist(), tokens.kinds.tolist(), strict=True)
        if message in ASSISTANTS and part_of(code) in OWN and not code & REPEATED
    }


def test_the_document_end_is_trained_by_all_alone() -> None:
    tokens = rendered(Conversation((Message(Role.USER, "q"), Message(Role.ASSISTANT, "a"))), template="markers")
    assert kind_name(int(tokens.kinds[-1])) == "none.document"
    for name in PRESETS:
        assert ((-1, "none.document") in trained(name, tokens)) == (name == "all")


# --- weights of messages -------------------------------------------------------------------------------------------


def test_per_message_trains_what_carries_a_weight_whatever_its_role() -> None:
    talk = Conversation(
        (
            Message(Role.SYSTEM, "s"),
            Message(Role.USER, "q", weight=1.0),
            Message(Role.ASSISTANT, "a"),
            Message(Role.ASSISTANT, "b", weight=2.0),
            Message(Role.ASSISTANT, "c", weight=0.0),
        )
    )
    assert trained("per_message", rendered(talk, template="chatml")) == {
        (1, "user.content"),
        (1, "user.terminator"),
        (3, "assistant.content"),
        (3, "assistant.terminator"),
    }


def test_a_generation_prompt_belongs_to_no_weighted_message() -> None:
    template = find_template("chatml")
    tokenizer = byte_tokenizer(template.control_tokens)
    talks = [Conversation((Message(Role.USER, "q", weight=7.0),)), Conversation((Message(Role.USER, "q"),))]
    tokens = render(talks, "chatml", tokenizer, add_generation_prompt=True).tokens
    weights = tokens.per_token(find_policy("post_training").run_weights(tokens))
    assert set(weights[tokens.messages == 1].tolist()) == {1.0}


# --- from stored kinds ---------------------------------------------------------------------------------------------


def test_kinds_alone_cannot_say_what_messages_weigh() -> None:
    with pytest.raises(ConfigError, match="per_message"):
        find_policy("per_message").token_weights(np.zeros(3, dtype=np.uint8))


def test_kinds_without_offsets_are_one_conversation() -> None:
    user, own = kind(RoleCode.USER, Part.CONTENT), kind(RoleCode.ASSISTANT, Part.CONTENT)
    kinds = np.array([own, user, own, own, user, own], dtype=np.uint8)
    assert find_policy("last_turn").token_weights(kinds).tolist() == [0, 0, 0, 0, 0, 1]
    cut = find_policy("last_turn").token_weights(kinds, np.array([0, 1, 4, 4, 6]))
    assert cut.tolist() == [1, 0, 1, 1, 0, 1]
    assert find_policy("last_turn").token_weights(kinds[:4]).tolist() == [0, 0, 1, 1], "one question, the first of all"
    assert find_policy("last_turn").run_weights(rendered(template="chatml")).tolist() == [], "an empty batch"


# --- properties ----------------------------------------------------------------------------------------------------

CODES = st.builds(lambda code, flags: code | flags, st.integers(0, KINDS - 1), st.sampled_from([0, 0, MARK, REPEATED]))


Run = tuple[int, int, int]
"""Kind, message and tokens."""


def tokens_of(documents: Sequence[Sequence[Run]], counts: Sequence[int], weights: Sequence[float | None]) -> Tokens:
    """Documents of runs, with so many messages each."""
    runs = [run for document in documents for run in document]
    run_offsets = offsets_of(np.array([run[2] for run in runs], dtype=np.int64))
    by_conversation = offsets_of(np.array([len(document) for document in documents], dtype=np.int64))
    return Tokens(
        ids=np.zeros(run_offsets[-1], dtype=np.int32),
        offsets=run_offsets[by_conversation],
        run_offsets=run_offsets,
        run_kinds=np.array([run[0] for run in runs], dtype=np.uint8),
        run_messages=np.array([run[1] for run in runs], dtype=np.int32),
        document_runs=by_conversation,
        message_offsets=offsets_of(np.array(counts, dtype=np.int64)),
        message_weights=np.array(weights, dtype=np.float32),
    )


@st.composite
def batches(draw: st.DrawFn) -> Tokens:
    """Any runs of any kinds; a run that belongs to a user has at least one token, as every template writes them."""
    counts = draw(st.lists(st.integers(0, 3), max_size=4))
    documents: list[list[Run]] = []
    for count in counts:
        own = draw(st.lists(st.tuples(CODES, st.integers(-1, count - 1), st.integers(0, 3)), max_size=5))
        documents.append([(code, m, max(length, role_of(code) is RoleCode.USER)) for code, m, length in own])
    weight = st.none() | st.sampled_from([0.0, 1.0, 0.5, 2.0])
    return tokens_of(documents, counts, draw(st.lists(weight, min_size=sum(counts), max_size=sum(counts))))


PLACES = [(role, part) for role in RoleCode if role is not RoleCode.IMAGE for part in Part if part is not Part.PAD]
POLICIES = st.builds(
    Policy,
    name=st.just("drawn"),
    weights=st.builds(
        lambda base, own: dict.fromkeys(PLACES, base) | own,
        st.sampled_from([0.0, 1.0]),
        st.dictionaries(st.sampled_from(PLACES), st.sampled_from([0.0, 0.5, 1.0, 3.0]), max_size=12),
    ),
    scope=st.sampled_from(Scope),
    only_weighted_messages=st.booleans(),
)


def slow_weights(
    policy: Policy, tokens: Tokens, *, own_weights: bool, records: Sequence[int] | None = None
) -> list[float]:
    """One token at a time, from the words of the docs; `records` if documents of one record share what they train."""
    out = []
    every = tokens.kinds.tolist(), tokens.messages.tolist()
    for number in range(len(tokens)):
        first, last = int(tokens.offsets[number]), int(tokens.offsets[number + 1])
        kinds, messages = (column[first:last] for column in every)
        users = [at for at, code in enumerate(kinds) if role_of(code) is RoleCode.USER]
        is_added = records is not None and number + 1 < len(tokens) and records[number] == records[number + 1]
        answers = [(code, m) for code, m in zip(kinds, messages, strict=True) if m >= 0 and is_answer(code)]
        for at, (code, message) in enumerate(zip(kinds, messages, strict=True)):
            weight = 0.0 if code & REPEATED else policy.weights.get((role_of(code), part_of(code)), 0.0)
            if policy.scope is Scope.LAST_TURN and users and at <= users[-1]:
                weight = 0.0
            if records is not None and role_of(code) is not RoleCode.ASSISTANT and is_added:
                weight = 0.0
            if records is not None and role_of(code) is RoleCode.ASSISTANT and message >= 0 and not is_answer(code):
                flags = [bool(answer & REPEATED) for answer, m in answers if m == message]
                weight = 0.0 if (all(flags) if flags else is_added) else weight
            if own_weights:
                brought = math.nan
                if message >= 0:
                    brought = float(tokens.message_weights[tokens.message_offsets[number] + message])
                if math.isnan(brought):
                    brought = 0.0 if policy.only_weighted_messages else 1.0
                weight *= brought
            out.append(weight)
    return out


def is_answer(code: int) -> bool:
    return role_of(code) is RoleCode.ASSISTANT and part_of(code) in OWN


def test_documents_of_one_record_train_everything_once() -> None:
    """All that three runs of an answer and of what is around it can be, in two documents of one record or of two."""
    header, answer = (kind(RoleCode.ASSISTANT, part) for part in (Part.HEADER, Part.CONTENT))
    codes = (header, answer, answer | REPEATED, kind(RoleCode.USER, Part.CONTENT))
    runs = [run for run in itertools.product(codes, (-1, 0, 1), (0, 1)) if run[2] or run[0] in codes[1:3]]
    cases = [[[one, other], [last]] for one, other, last in itertools.product(runs, repeat=3) if last[1] <= 0]
    policy = find_policy("all")
    tokens = tokens_of([document for case in cases for document in case], [2, 1] * len(cases), [None] * 3 * len(cases))
    for records in (np.arange(2 * len(cases)) // 2, np.arange(2 * len(cases))):
        found = tokens.per_token(policy.document_weights(tokens, records))
        assert found.tolist() == slow_weights(policy, tokens, own_weights=True, records=records.tolist())


def test_what_presets_train() -> None:
    assert {name for name, one in PRESETS.items() if not one.trains_assistant_only} == {"all", "per_message"}
    others = {"post_training", "synth_kd", "trl"}
    assert {name for name, one in PRESETS.items() if not one.trains_answers_only} == {"all", "per_message", *others}
    assert {name for name, one in PRESETS.items() if one.is_local} == {"assistant", "no_errors", "final_only"}
    assert {name for name, one in PRESETS.items() if one.needs_messages} == {"per_message", "no_errors"}


@given(tokens=batches(), policy=POLICIES | st.sampled_from(sorted(PRESETS)).map(find_policy), data=st.data())
@settings(max_examples=600)
def test_weights_equal_the_slow_references(tokens: Tokens, policy: Policy, data: st.DataObject) -> None:
    """Of documents alone, of stored kinds, and of documents some of which are of one record."""
    found = tokens.per_token(policy.run_weights(tokens))
    assert found.dtype == np.float32
    assert found.tolist() == slow_weights(policy, tokens, own_weights=True)
    if not policy.needs_messages:
        from_kinds = policy.token_weights(tokens.kinds, tokens.offsets)
        assert from_kinds.tolist() == slow_weights(policy, tokens, own_weights=False)
    is_next = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    records = np.cumsum([not one for one in is_next]).astype(np.int64)
    found = tokens.per_token(policy.document_weights(tokens, records))
    assert found.tolist() == slow_weights(policy, tokens, own_weights=True, records=records.tolist())
    proved: list[float] = []
    for number in range(len(tokens)):
        row, is_last = tokens.conversation(number), records[number] not in records[number + 1 :]
        brought = [None if math.isnan(weight) else weight for weight in row.message_weights.tolist()]
        messages = [Message(Role.ASSISTANT, "", weight=weight) for weight in brought]
        plain = PlainRow(kinds=row.kinds.tolist(), messages=row.messages.tolist())
        proved += token_weights(policy, plain, messages, is_last=is_last)
    assert found.tolist() == proved


# --- look-up and files ---------------------------------------------------------------------------------------------


def test_look_up() -> None:
    assert find_policy("assistant") is PRESETS["assistant"]
    own = Policy(name="own", weights={})
    assert find_policy(own) is own
    with pytest.raises(UnknownNameError, match=r"Did you mean 'assistant'\?.*\.json file"):
        find_policy("asistant")
    with pytest.raises(ConfigError, match="no policy file"):
        find_policy("none.json")
    assert Policy(name="mine", weights={}, scope="last_turn").scope is Scope.LAST_TURN  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'first_turn' is not one of every_turn, last_turn"):
        Policy(name="mine", weights={}, scope="first_turn")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"policy 'bad': the weight of assistant\.content is"):
        Policy(name="bad", weights={(RoleCode.ASSISTANT, Part.CONTENT): math.inf}).table()


def write(path: Path, data: Any) -> Path:
    text = data if isinstance(data, str | bytes) else json.dumps(data)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_policy_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.json",
        {"weights": {"assistant.content": 1, "assistant.reasoning": 0.1, "Tool.Content": 0}, "scope": "last_turn"},
    )
    policy = find_policy(path)
    assert policy.name == "mine"
    assert policy.scope is Scope.LAST_TURN
    assert policy.only_weighted_messages is False
    assert policy.table()[kind(RoleCode.ASSISTANT, Part.REASONING)] == np.float32(0.1)
    assert np.count_nonzero(policy.table()) == 4, "two kinds, each with and without the flag of a mark"
    named = write(tmp_path / "b.json", {"name": "n", "weights": {}, "only_weighted_messages": True})
    assert (find_policy(str(named)).name, find_policy(str(named)).only_weighted_messages) == ("n", True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "not JSON"),
        (b'{"name": "\xff", "weights": {}}', "not JSON"),
        ("[" * 200_000, r"mine\.json is not JSON"),
        ("[]", "must hold an object"),
        ({"weights": []}, "weights: should be a mapping"),
        ({"scope": "every_turn"}, "'weights' is missing"),
        ({"weights": {}, "weigths": 1}, "unknown key .weigths., did you mean .weights."),
        ({"weights": {"assistant": 1}}, "'assistant' is not role.part"),
        ({"weights": {"assistant.words": 1}}, "parts: pad, header, content"),
        ({"weights": {"gpt.content": 1}}, "roles: none, system"),
        ({"weights": {"assistant.content": "1"}}, "weights.assistant.content: should be a number"),
        ({"weights": {"assistant.content": True}}, "should be a number"),
        ({"weights": {"assistant.content": -1}}, "numbers from 0"),
        ('{"weights": {"assistant.content": NaN}}', "numbers from 0"),
        ({"weights": {"assistant.content": 1e39}}, "numbers from 0"),
        ({"weights": {"none.pad": 1}}, "padding is never trained"),
        ({"weights": {}, "scope": "first_turn"}, "not one of every_turn, last_turn"),
        ({"weights": {}, "scope": ["last_turn"]}, "not one of every_turn, last_turn"),
        ({"weights": {}, "only_weighted_messages": "false"}, "should be true or false"),
    ],
)
def test_a_policy_file_that_is_wrong_is_an_error_with_its_name(tmp_path: Path, data: Any, message: str) -> None:
    path = write(tmp_path / "mine.json", data)
    with pytest.raises(ConfigError, match=message) as caught:
        find_policy(path)
    assert str(path) in str(caught.value)
