"""Policies: presets, scopes, weights of messages, failed calls and files, against loops over tokens and messages."""

from __future__ import annotations

import datetime
import itertools
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chatmill.compiler.run import run_build
from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.conversations import Conversations
from chatmill.core.kinds import KINDS, MARK, REPEATED, Part, RoleCode, kind, kind_name, part_of, role_of
from chatmill.core.ledger import Ledger
from chatmill.core.tokens import Tokens, offsets_of
from chatmill.errors import ConfigError, UnknownNameError
from chatmill.label.errors import ErrorRule
from chatmill.label.policy import Policy, Scope
from chatmill.label.presets import PRESETS, find_policy
from chatmill.prove.conversations import without_failed
from chatmill.prove.rows import PlainRow, token_weights
from chatmill.prove.verify import verify
from chatmill.render.jinja.options import Expand, TemplateOptions
from chatmill.render.registry import bind, bundled_names, find_template
from chatmill.render.render import render
from chatmill.store.episodes import EpisodeDataset
from chatmill.tokenizer.byte_level import byte_tokenizer
from chatmill.tokenizer.load import load_tokenizer
from tests.chats import chat
from tests.compiler.builds import OPEN_GATES, write_jsonl

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
PAIR = chat(("user", "q"), ("assistant", "a"))


def rendered(*conversations: Conversation, template: str = "qwen3_training", **options: Any) -> Tokens:
    tokenizer = byte_tokenizer(find_template(template).control_tokens)
    given = TemplateOptions(today=datetime.date(2026, 1, 2), expand=Expand.TURNS)
    return render(conversations, bind(template, tokenizer, given), **options).tokens


def trained(policy: str | Policy, tokens: Tokens) -> set[tuple[int, str]]:
    """(message, kind) of everything that has a weight."""
    weights = tokens.per_token(find_policy(policy).run_weights(tokens))
    columns = zip(tokens.messages.tolist(), tokens.kinds.tolist(), weights.tolist(), strict=True)
    return {(message, kind_name(code)) for message, code, weight in columns if weight}


def answers(tokens: Tokens, parts: set[Part], messages: Sequence[int] = (2, 4, 6)) -> set[tuple[int, str]]:
    """(message, kind) of such parts of answers that are not repeated."""
    return {
        (message, kind_name(code))
        for message, code in zip(tokens.messages.tolist(), tokens.kinds.tolist(), strict=True)
        if message in messages and role_of(code) is RoleCode.ASSISTANT and part_of(code) in parts
        if not code & REPEATED
    }


def test_presets_of_one_talk() -> None:
    tokens = rendered(TALK)
    assert {kind_name(kind(RoleCode.ASSISTANT, part)) for part in OWN} <= {name for _, name in answers(tokens, OWN)}
    parts = {"assistant": OWN, "trl": OWN | {Part.SEPARATOR}, "final_only": {Part.CONTENT, Part.TERMINATOR}}
    parts |= {"post_training": OWN | {Part.HEADER}, "synth_kd": OWN | {Part.HEADER}, "per_message": set()}
    for name, some in parts.items():
        assert trained(name, tokens) == answers(tokens, some)
    assert trained("last_turn", tokens) == answers(tokens, OWN, (4, 6))
    assert (find_policy("all").run_weights(tokens) == 1).all()


def test_what_presets_say_of_themselves() -> None:
    assert {name for name, one in PRESETS.items() if not one.trains_assistant_only} == {"all", "per_message"}
    others = {"post_training", "synth_kd", "trl"}
    assert {name for name, one in PRESETS.items() if not one.trains_answers_only} == {"all", "per_message", *others}
    assert {name for name, one in PRESETS.items() if one.is_local} == {"assistant", "no_errors", "final_only"}
    assert {name for name, one in PRESETS.items() if one.needs_messages} == {"per_message", "no_errors"}


def test_each_templates_default_policy_is_a_preset_and_trains_the_terminator() -> None:
    for name in bundled_names():
        policy = find_policy(find_template(name).default_policy)
        assert policy.table()[kind(RoleCode.ASSISTANT, Part.TERMINATOR)] == 1
        assert policy.table()[kind(RoleCode.USER, Part.CONTENT)] == 0
        if name != "harmony":  # needs its own vocabulary
            assert (1, "assistant.terminator") in trained(policy, rendered(PAIR, template=name))


def test_an_answer_that_is_context_in_its_row_is_never_trained() -> None:
    """Qwen3 strips earlier reasoning: the first answer has a document of its own, and is context in the last one."""
    tokens = rendered(TALK, template="qwen3")
    assert len(tokens) > 1
    assert any("+repeated" in kind_name(code) for code in tokens.run_kinds.tolist())
    for name in PRESETS:
        assert not any("+repeated" in kind_of for _, kind_of in trained(name, tokens))
    assert trained("assistant", tokens) == answers(tokens, OWN)


def test_the_document_end_is_trained_by_all_alone() -> None:
    tokens = rendered(PAIR, template="markers")
    assert kind_name(int(tokens.kinds[-1])) == "none.document"
    for name in PRESETS:
        assert ((-1, "none.document") in trained(name, tokens)) == (name == "all")


def test_per_message_trains_what_carries_a_weight_whatever_its_role() -> None:
    said = [("system", "s"), ("user", "q"), ("assistant", "a"), ("assistant", "b"), ("assistant", "c")]
    weights = (None, 1.0, None, 2.0, 0.0)
    messages = zip(chat(*said).messages, weights, strict=True)
    talk = Conversation(tuple(message._replace(weight=weight) for message, weight in messages))
    wanted = {(1, "user.content"), (1, "user.terminator"), (3, "assistant.content"), (3, "assistant.terminator")}
    assert trained("per_message", rendered(talk, template="chatml")) == wanted


def test_a_generation_prompt_belongs_to_no_weighted_message() -> None:
    talks = [Conversation((Message(Role.USER, "q", weight=weight),)) for weight in (7.0, None)]
    tokens = rendered(*talks, template="chatml", add_generation_prompt=True)
    weights = tokens.per_token(find_policy("post_training").run_weights(tokens))
    assert set(weights[tokens.messages == 1].tolist()) == {1.0}


def test_kinds_without_offsets_are_one_conversation() -> None:
    user, own = kind(RoleCode.USER, Part.CONTENT), kind(RoleCode.ASSISTANT, Part.CONTENT)
    kinds = np.array([own, user, own, own, user, own], dtype=np.uint8)
    policy = find_policy("last_turn")
    assert policy.token_weights(kinds).tolist() == [0, 0, 0, 0, 0, 1]
    assert policy.token_weights(kinds, np.array([0, 1, 4, 4, 6])).tolist() == [1, 0, 1, 1, 0, 1]
    assert policy.token_weights(kinds[:4]).tolist() == [0, 0, 1, 1], "one question, the first of all"
    assert policy.run_weights(rendered(template="chatml")).tolist() == [], "an empty batch"
    with pytest.raises(ConfigError, match="per_message"):
        find_policy("per_message").token_weights(kinds)


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


def slow_weights(policy: Policy, tokens: Tokens, *, own_weights: bool) -> list[float]:
    """Documents alone, one token at a time, from the words of the docs."""
    out = []
    for number in range(len(tokens)):
        row = tokens.conversation(number)
        users = [at for at, code in enumerate(row.kinds.tolist()) if role_of(code) is RoleCode.USER]
        for at, (code, message) in enumerate(zip(row.kinds.tolist(), row.messages.tolist(), strict=True)):
            weight = 0.0 if code & REPEATED else policy.weights.get((role_of(code), part_of(code)), 0.0)
            if policy.scope is Scope.LAST_TURN and users and at <= users[-1]:
                weight = 0.0
            if own_weights:
                brought = float(row.message_weights[message]) if message >= 0 else math.nan
                weight *= float(not policy.only_weighted_messages) if math.isnan(brought) else brought
            out.append(weight)
    return out


def proved_weights(policy: Policy, tokens: Tokens, records: Sequence[int]) -> list[float]:
    """Documents of records, by the loop over tokens that `prove` has."""
    out = []
    for number in range(len(tokens)):
        row, is_last = tokens.conversation(number), records[number] not in records[number + 1 : number + 2]
        brought = [None if math.isnan(weight) else weight for weight in row.message_weights.tolist()]
        messages = [Message(Role.ASSISTANT, "", weight=weight) for weight in brought]
        plain = PlainRow(kinds=row.kinds.tolist(), messages=row.messages.tolist())
        out += token_weights(policy, plain, messages, is_last=is_last)
    return out


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
    assert found.tolist() == proved_weights(policy, tokens, records.tolist())


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
        assert found.tolist() == proved_weights(policy, tokens, records.tolist())


# --- calls that failed ---------------------------------------------------------------------------------------------

RULE = ErrorRule(fields={"is_error": True, "code": 1}, begins=("Error:", "Traceback"))
IDS = st.sampled_from([None, "a", "b"])
ANSWERS = st.builds(
    lambda ids, weight: Message(
        Role.ASSISTANT, "x", tool_calls=tuple(ToolCall("look", "{}", one) for one in ids), weight=weight
    ),
    st.lists(IDS, max_size=2),
    st.sampled_from([None, 0.0, 0.5, 1.0]),
)
RESULTS = st.builds(
    lambda text, called, extra: Message(Role.TOOL, text, tool_call_id=called, extra=extra),
    st.sampled_from(["fine", "Error: no", "an Error:", "Err", ""]),
    IDS,
    st.sampled_from([{}, {"is_error": True}, {"is_error": 1}, {"code": 1}, {"code": True}, {"is_error": False}]),
)


@settings(max_examples=600)  # quick ones
@given(st.lists(st.lists(ANSWERS | RESULTS, max_size=7), min_size=1, max_size=4))
@example([[Message(Role.ASSISTANT, "", tool_calls=(ToolCall("look", "{}"),)), Message(Role.TOOL, "Error: no")]])
def test_failed_calls_of_columns_and_of_single_messages_agree(chats: list[list[Message]]) -> None:
    conversations = [Conversation(tuple(messages)) for messages in chats]
    found, counts = RULE.without_failed(Conversations.of(conversations))
    expected = [without_failed(one, RULE) for one in conversations]
    assert [one.messages for one in found[:]] == [one.messages for one in expected]
    pairs = zip(conversations, expected, strict=True)
    changed = [sum(map(lambda a, b: a.weight != b.weight, one.messages, other.messages)) for one, other in pairs]
    assert counts.tolist() == changed


def agent(rng: random.Random, name: str) -> dict[str, Any]:
    """A record whose calls fail now and then; some results come after the next call."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    late: list[str] = []
    for step in range(rng.randint(1, 5)):
        ids = [f"c{step}", f"d{step}"][: rng.randint(1, 2)]
        function = {"name": "look", "arguments": {"at": step}}
        calls = [{"id": one, "type": "function", "function": function} for one in ids]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        for one in [*late, *ids[:1]]:
            stated = rng.choice([{"is_error": True}, {"is_error": False}, {}])
            messages.append({"role": "tool", "tool_call_id": one, "content": "said", **stated})
        late = ids[1:]
    return {"id": name, "messages": [*messages, {"role": "assistant", "content": "done"}]}


def test_calls_that_failed_are_context(tmp_path: Path) -> None:
    rng = random.Random(1)
    records = [agent(rng, f"r{number}") for number in range(20)]
    source = {"path": str(write_jsonl(tmp_path / "runs.jsonl", records))}
    recipe = {"sources": [source], "tokenizer": "bytes", "template": "qwen3", "gates": OPEN_GATES}
    made = run_build({**recipe, "add_control_tokens": True, "policy": "no_errors"}, tmp_path / "built", workers=0)
    said = [(one["id"], message) for one in records for message in one["messages"]]
    failed = len({(name, message["tool_call_id"][1:]) for name, message in said if message.get("is_error")})
    ledger = Ledger.from_json(made.manifest["ledger"])
    assert ledger.total_notes("answers_whose_calls_failed") == failed > 10
    assert not any("is_error" in note for note in ledger.all_notes())
    assert verify(tmp_path / "built", deep=True).passed
    stop = load_tokenizer("bytes", control_tokens=["<|im_start|>", "<|im_end|>"]).control("<|im_end|>")
    episodes = EpisodeDataset(tmp_path / "built")
    stops = sum(int(((one.ids == stop) & (np.asarray(one.weights) > 0)).sum()) for one in episodes)
    assert stops == sum(message["role"] == "assistant" for _, message in said) - failed


# --- look-up and files ---------------------------------------------------------------------------------------------


def test_look_up() -> None:
    assert find_policy("assistant") is PRESETS["assistant"]
    own = Policy(name="own", weights={}, scope="last_turn")  # type: ignore[arg-type]
    assert find_policy(own) is own
    assert own.scope is Scope.LAST_TURN
    with pytest.raises(UnknownNameError, match=r"Did you mean 'assistant'\?.*\.json file"):
        find_policy("asistant")
    with pytest.raises(ConfigError, match="no policy file"):
        find_policy("none.json")
    with pytest.raises(ConfigError, match=r"policy 'bad': the weight of assistant\.content is"):
        Policy(name="bad", weights={(RoleCode.ASSISTANT, Part.CONTENT): math.inf}).table()


def test_a_policy_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    weights = {"assistant.content": 1, "assistant.reasoning": 0.1, "Tool.Content": 0}
    path.write_text(json.dumps({"weights": weights, "scope": "last_turn", "errors": {"begins": ["Error:"]}}))
    policy = find_policy(path)
    assert (policy.name, policy.scope, policy.only_weighted_messages) == ("mine", Scope.LAST_TURN, False)
    assert policy.errors == ErrorRule(begins=("Error:",))
    assert policy.table()[kind(RoleCode.ASSISTANT, Part.REASONING)] == np.float32(0.1)
    assert np.count_nonzero(policy.table()) == 4, "two kinds, each with and without the flag of a mark"
    path.write_text(json.dumps({"name": "n", "weights": {}, "only_weighted_messages": True}))
    assert (find_policy(str(path)).name, find_policy(path).only_weighted_messages) == ("n", True)


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
        ({"weights": {"assistant.content": -1}}, "numbers from 0"),
        ('{"weights": {"assistant.content": NaN}}', "numbers from 0"),
        ({"weights": {"assistant.content": 1e39}}, "numbers from 0"),
        ({"weights": {"none.pad": 1}}, "padding is never trained"),
        ({"weights": {}, "scope": ["last_turn"]}, "not one of every_turn, last_turn"),
        ({"weights": {}, "only_weighted_messages": "false"}, "should be true or false"),
        ({"weights": {}, "errors": {"begin": []}}, "errors"),
        ({"weights": {}, "errors": {"begins": [""]}}, "errors"),
    ],
)
def test_a_policy_file_that_is_wrong_is_an_error_with_its_name(tmp_path: Path, data: Any, message: str) -> None:
    text = data if isinstance(data, str | bytes) else json.dumps(data)
    path = tmp_path / "mine.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError, match=message) as caught:
        find_policy(path)
    assert str(path) in str(caught.value)
