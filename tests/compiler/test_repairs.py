"""Records before they are rendered: repairs of what a template refuses, and histories that a model is served with."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from chatmill.compiler.histories import History
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.recipe import NotShown, Repair, recipe_of
from chatmill.compiler.repairs import REPAIRS, derived_repaired, render_repaired, useful_repairs
from chatmill.compiler.run import run_build
from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.conversations import Conversations
from chatmill.core.messages import CODES
from chatmill.core.trees import Branches, rows_of_tree
from chatmill.errors import RecordError
from chatmill.prove.conversations import plain_history
from chatmill.read.conversations import ConversationFile
from chatmill.render.render import render
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import OPEN_GATES, plain_recipe, proved, write_jsonl
from tests.render.reference import as_dicts, jinja

U, A, T = Role.USER, Role.ASSISTANT, Role.TOOL
TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {}}},)
ONE = ToolCall("f", '{"a": 1}', "call_abcdefghij")
TWO = ToolCall("g", '{"b": 2}', "call_2")
Q, ANSWER, HELLO, DONE = Message(U, "q"), Message(A, "a"), Message(A, "Hello!"), Message(A, "done")
SYSTEM = Message(Role.SYSTEM, "Be kind.")
RESULTS = Message(T, "r2", tool_call_id="call_2"), Message(T, "r1", tool_call_id=ONE.id)
BESIDE = Message(A, "I look.", reasoning="Hm.", tool_calls=(ONE,))
NINE = Message(A, "I look.", tool_calls=(ONE._replace(id="abcdefghi"),))
SINGLE = """{#-
chatmill: template
tokens: <|im_start|> <|im_end|>
stops: <|im_end|>
-#}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.tool_calls %}{% if message.tool_calls|length > 1 %}{{ raise_exception('one call at once') }}{% endif %}
{{- message.tool_calls[0].function.name }} {{ message.tool_calls[0].function.arguments|tojson }}
{%- else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}
"""
"""Takes one call, shows no text next to it, and no tools."""
HIDES = SINGLE.replace("in messages %}", "in messages if message.role != 'system' %}")
ENDLESS = SINGLE.replace("<|im_end|>\n{% endfor", "{% if not message.tool_calls %}<|im_end|>{% endif %}\n{% endfor")


def talk(*messages: Message, tools: Any = ()) -> Conversation:
    return Conversation(tuple(messages), id="r", source="s", tools=tools)


def silent(message: Message, **changes: Any) -> Message:
    return message._replace(content="", has_content=False, **changes)


CALLING = talk(Q, silent(Message(A, "", tool_calls=(ONE, TWO))), *RESULTS, DONE)


def bound(template: str, home: Path) -> Any:
    """A template of a name, or of a text."""
    if "\n" in template:
        (home / "own.jinja").write_text(template)
        template = str(home / "own.jinja")
    date = {"date": "2026-01-01"} if template == "gpt_oss" else {}
    return Pipeline(recipe_of(plain_recipe(Path("none.jsonl"), template=template, **date))).template


def mended(
    template: Any, talks: list[Conversation], repairs: list[Repair], not_shown: NotShown = NotShown.REFUSE
) -> list[tuple[Conversation | str, dict[str, int]]]:
    """Each record as it is rendered, or the code of its error, with its notes; by itself it is as in the batch."""
    batch, rendered, notes = render_repaired(Conversations.of(talks), template, repairs, not_shown)
    failed, found = dict(rendered.failed), list[tuple[Any, Any]]()
    for index, one in enumerate(talks):
        by_itself = partial(derived_repaired, one, useful_repairs(repairs, template), not_shown)
        counts = notes.get(index, {})
        if index in failed:
            with pytest.raises(RecordError, match=re.escape(failed[index].message)):
                by_itself(lambda record: render([record], template))
            found.append((failed[index].code, counts))
            continue
        alone, _, counts_alone = by_itself(lambda record: render([record], template))
        assert (alone.messages, alone.tools, counts_alone) == (batch[index].messages, batch[index].tools, counts)
        found.append((batch[index], counts))
    return found


def test_call_ids_have_nine_letters_and_results_those_of_their_calls() -> None:
    found = REPAIRS[Repair.CALL_IDS](CALLING)
    assert found is not None
    ids = [call.id or "" for call in found[0].messages[1].tool_calls]
    assert all(re.fullmatch("[A-Za-z0-9]{9}", one) for one in ids)
    assert len(set(ids)) == 2
    assert [message.tool_call_id for message in found[0].messages[2:4]] == [ids[1], ids[0]]
    assert REPAIRS[Repair.CALL_IDS](found[0]) is None, "ids that fit are left alone"
    other = REPAIRS[Repair.CALL_IDS](CALLING._replace(id="another"))
    assert other is not None
    assert other[0].messages[1].tool_calls[0].id != ids[0], "no two records share an id"
    calls = CALLING.messages[1]._replace(tool_calls=(ONE._replace(id=None), TWO._replace(id=None)))
    results = [message._replace(tool_call_id=None) for message in RESULTS]
    bare = REPAIRS[Repair.CALL_IDS](talk(Q, calls, *results, DONE))
    assert bare is not None
    assert [message.tool_call_id for message in bare[0].messages[2:4]] == ids, "in the order of the calls"


@pytest.mark.parametrize(
    ("repair", "before", "after", "lost"),
    [
        (
            Repair.PARALLEL_CALLS,
            [Q, BESIDE._replace(tool_calls=(ONE, TWO)), *RESULTS, DONE],
            [Q, BESIDE, RESULTS[1], silent(BESIDE, reasoning=None, tool_calls=(TWO,)), RESULTS[0], DONE],
            {},
        ),
        (Repair.LEADING_ANSWER, [SYSTEM, HELLO, Q, ANSWER], [SYSTEM, Q, ANSWER], {"lost_content": 6}),
        (Repair.TEXT_WITH_CALL, [Q, BESIDE], [Q, silent(BESIDE, reasoning="Hm.\n\nI look.")], {}),
    ],
)
def test_what_a_repair_makes_of_a_record(repair: Repair, before: Any, after: Any, lost: dict[str, int]) -> None:
    assert REPAIRS[repair](talk(*before)) == (talk(*after), lost)
    assert REPAIRS[repair](talk(*after)) is None


@given(st.text("uat", max_size=7))
def test_a_record_ends_with_an_earlier_answer(letters: str) -> None:
    conversation = Conversation(tuple(Message({"u": U, "a": A, "t": T}[letter], letter) for letter in letters))
    ends = [end for end in range(1, len(letters)) if letters[end - 1] == "a"]
    found = REPAIRS[Repair.END_EARLIER](conversation)
    assert (found and found[0].messages) == (conversation.messages[: ends[-1]] if ends else None)


CALLED = [Message(U, "one"), silent(NINE)]
AFTER_CALL = [Message(T, "r", tool_call_id=ONE.id), ANSWER, Message(U, "q2"), Message(A, "b")]
HELPED: list[Any] = [
    # users must take turns with answers: two answers are given up
    (
        *("mistral_nemo", [*CALLED * 3, Message(U, "four")], [Repair.END_EARLIER], NotShown.REFUSE, CALLED),
        {"repaired_end_earlier": 1, "lost_content": len("oneonefour"), "lost_calls": 2 * len("f" + ONE.arguments)},
    ),
    # an empty system message would still be written
    (HIDES, [SYSTEM, Q, ANSWER], [], NotShown.DROP, [Q, ANSWER], {"lost_content": len("Be kind.")}),
    # gpt-oss writes both as analysis, and takes the contents of calls away once a final answer follows
    (
        *("gpt_oss", [Q, BESIDE._replace(reasoning=None), *AFTER_CALL], [Repair.TEXT_WITH_CALL], NotShown.REFUSE),
        [Q, silent(BESIDE, reasoning="I look."), *AFTER_CALL],
        {"repaired_text_with_call": 1},
    ),
    # as reasoning it would be lost where a template shows none
    ("mistral_nemo", [Q, NINE], [Repair.TEXT_WITH_CALL], NotShown.REFUSE, "not_shown", {}),
    # a record that stays refused has the error that nothing helped against: no tools are shown, and no call ends
    (ENDLESS, [Q, silent(NINE)], [], NotShown.REFUSE, "not_shown", {}),
    (ENDLESS, [Q, silent(NINE)], [], NotShown.DROP, "no_stop", {}),
]


@pytest.mark.parametrize(("template", "given", "repairs", "not_shown", "after", "notes"), HELPED)
def test_what_helps_against_the_refusal_of_a_template(
    tmp_path: Path, template: str, given: Any, repairs: Any, not_shown: NotShown, after: Any, notes: Any
) -> None:
    tools = TOOLS if template == ENDLESS else ()
    [(found, counted)] = mended(bound(template, tmp_path), [talk(*given, tools=tools)], repairs, not_shown)
    assert (found if isinstance(found, str) else list(found.messages)) == after
    assert counted == notes


def test_only_repairs_that_help_are_kept(tmp_path: Path) -> None:
    """Nemo wants ids of nine characters and takes parallel calls; gpt-oss wants descriptions of tools."""
    nemo = bound("mistral_nemo", tmp_path)
    [(found, notes), unchanged] = mended(nemo, [CALLING, talk(Q, ANSWER)], list(Repair))
    assert notes == {"repaired_call_ids": 1}
    assert [len(message.tool_calls) for message in found.messages] == [0, 2, 0, 0, 0]  # type: ignore[union-attr]
    assert unchanged == (talk(Q, ANSWER), {})
    assert isinstance(mended(nemo, [CALLING], [Repair.PARALLEL_CALLS])[0][0], str)
    bare = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    [(found, notes)] = mended(bound("gpt_oss", tmp_path), [talk(Q, ANSWER, tools=(bare,))], list(Repair))
    described = {**bare, "function": {**bare["function"], "description": ""}}  # type: ignore[dict-item]
    assert (found, notes) == (talk(Q, ANSWER, tools=(described,)), {"repaired_tool_descriptions": 1})


@pytest.mark.parametrize("not_shown", list(NotShown))
@pytest.mark.parametrize("repairs", [[], list(Repair)], ids=["none", "all"])
def test_one_by_one_is_as_in_a_batch(tmp_path: Path, repairs: list[Repair], not_shown: NotShown) -> None:
    talks = [
        CALLING,
        talk(HELLO, *CALLING.messages, tools=TOOLS),
        talk(Q, ANSWER),
        talk(Q, BESIDE._replace(reasoning=None), RESULTS[1], ANSWER, tools=TOOLS),
    ]
    found = mended(bound(SINGLE, tmp_path), talks, repairs, not_shown)
    failed = sum(isinstance(one, str) for one, _ in found)
    assert failed == {"refuse": (3, 2), "drop": (2, 0)}[not_shown][bool(repairs)]


def test_a_build_counts_what_it_repairs_and_verify_derives_it_again(tmp_path: Path) -> None:
    (tmp_path / "single.jinja").write_text(SINGLE)
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked, done = {"role": "user", "content": "q"}, {"role": "assistant", "content": "done"}
    results = [{"role": "tool", "content": str(k), "tool_call_id": f"c{k}"} for k in (1, 2)]
    calls = [{**call, "id": f"c{k}"} for k in (1, 2)]
    two = {"role": "assistant", "content": None, "tool_calls": calls}
    beside = {"role": "assistant", "content": "I look.", "tool_calls": calls[:1]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    records = [
        {"id": "plain", "messages": [asked, done]},
        {"id": "two", "messages": [asked, two, *results, done]},
        {"id": "beside", "messages": [asked, beside, results[0], done]},
        {"id": "tools", "messages": [asked, done], "tools": tools},
    ]
    path = write_jsonl(tmp_path / "chats.jsonl", records)
    recipe = plain_recipe(path, template=str(tmp_path / "single.jinja"))
    with pytest.raises(RecordError, match=r"one call at once"):
        run_build(recipe, tmp_path / "out", workers=0)
    quarantined = run_build({**recipe, "on_error": "quarantine"}, tmp_path / "quarantined", workers=0)
    rejected = [json.loads(line) for line in (tmp_path / "quarantined" / "rejected.jsonl").read_text().splitlines()]
    assert [one["id"] for one in rejected] == ["two", "beside", "tools"]
    assert all("`not_shown: drop` takes it out of the record" in one["message"] for one in rejected[1:])
    assert all("unproved" not in one["message"] for one in rejected[1:]), "which would change nothing"
    assert quarantined.manifest["splits"]["train"]["episodes"] == 1
    chosen = {**recipe, "repairs": ["parallel_calls"], "not_shown": "drop"}
    ledger = proved(chosen, tmp_path / "kept")
    assert ledger.total_records("built") == 4
    notes = ledger.all_notes()
    assert notes["repaired_parallel_calls"] == 1
    assert notes["lost_content"] == len("I look.")
    assert notes["lost_tools"] > 20
    assert len(EpisodeDataset(tmp_path / "kept")) == 4


# Histories: every answer is trained after what the rule leaves of the conversation.

RULES: list[dict[str, Any]] = [
    {"observations": 2},
    {"observations": 1, "elided": "(gone)", "roles": ["tool", "user"]},
    {"exchanges": 2},
    {"exchanges": 3, "observations": 1},
]
NAMED: dict[str, Any] = {"tokenizer": "bytes", "template": "qwen3", "add_control_tokens": True, "thinking": "as_given"}


def agent(rng: random.Random, name: str) -> dict[str, Any]:
    """A trajectory: a task, calls with their results, words of the user in between; some answers are not trained."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "act"}] if rng.random() < 0.5 else []
    messages.append({"role": "user", "content": f"task {name}"})
    for step in range(rng.randint(0, 7)):
        call = {"type": "function", "function": {"name": "look", "arguments": {"at": step}}}
        answer: dict[str, Any] = {"role": "assistant", "content": rng.choice(["", "let me see"]), "tool_calls": [call]}
        if rng.random() < 0.6:
            answer["reasoning_content"] = f"think {step}"
        if rng.random() < 0.15:
            answer["train"] = False
        messages.append(answer)
        messages.append({"role": "tool", "content": "\n".join(f"line {k} of {step}" for k in range(rng.randint(1, 3)))})
        if rng.random() < 0.2:
            messages += [{"role": "assistant", "content": f"done {step}"}, {"role": "user", "content": f"more {step}"}]
    if rng.random() < 0.9:
        messages.append({"role": "assistant", "content": "done", "reasoning_content": "all seen"})
    return {"id": name, "messages": messages}


def agents(path: Path, seed: int, count: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    records = [agent(rng, f"r{number}") for number in range(count)]
    write_jsonl(path, records)
    return records


def by_hand(messages: list[dict[str, Any]], rule: dict[str, Any]) -> list[dict[str, Any]]:
    """What is left of messages, as the documentation says it."""
    answers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    first = answers[0] if answers else len(messages)
    kept = list(range(len(messages)))
    if "exchanges" in rule and len(answers) > rule["exchanges"]:
        kept = [*range(first), *range(answers[-rule["exchanges"]], len(messages))]
    observed = [k for k in range(first, len(messages)) if messages[k]["role"] in rule.get("roles", ["tool"])]
    old = observed[: -rule["observations"]] if "observations" in rule else []
    text = rule.get("elided", "Old environment output: ({lines} lines omitted)")
    lines = {k: str(len(messages[k]["content"].splitlines())) for k in old}
    return [{**messages[k], "content": text.replace("{lines}", lines[k])} if k in old else messages[k] for k in kept]


def wanted(conversation: Conversation, rule: dict[str, Any]) -> Counter[tuple[str, str]]:
    """Each trained answer with its prompt, by transformers' own rendering."""
    found: Counter[tuple[str, str]] = Counter()
    messages = as_dicts(conversation)
    for k, message in enumerate(conversation.messages):
        if message.role is Role.ASSISTANT and message.weight != 0:
            prefix = by_hand(messages[:k], rule)
            prompt, whole = (
                render_jinja_template([chat], chat_template=jinja("qwen3"), add_generation_prompt=is_prompt)[0][0]
                for chat, is_prompt in ((prefix, True), ([*prefix, messages[k]], False))
            )
            assert whole.startswith(prompt)
            found[prompt, whole[len(prompt) :].removesuffix("\n")] += 1
    return found


def trained(pipeline: Pipeline, conversation: Conversation, rule: dict[str, Any]) -> Counter[tuple[str, str]]:
    """Each answer that a build trains, with all that comes before it."""
    compiled = pipeline.compile([conversation], history=History(**rule))
    assert not compiled.failed
    found: Counter[tuple[str, str]] = Counter()
    decode = pipeline.template.tokenizer.decode
    rows: list[tuple[Any, Any, int]] = []
    for number, (start, end) in enumerate(pairwise(compiled.tokens.offsets.tolist())):
        ids, weights = compiled.tokens.ids[start:end], compiled.weights[start:end]
        branches = (compiled.branches or Branches.none(number + 1)).take(np.array([number]))
        _, ends = branches.positions_and_ends(np.array([end - start]))
        rows += [(ids[path], weights[path], older) for path, older in rows_of_tree(ends, branches.starts)]
    for ids, weights, older in rows:
        edges = np.flatnonzero(np.diff(weights > 0, prepend=False, append=False)).reshape(-1, 2)
        for begin, end in edges.tolist():
            if begin >= older:
                found[decode(ids[:begin]), decode(ids[begin:end])] += 1
    return found


@pytest.fixture(scope="module", params=["turns", "tree"])
def pipeline(request: pytest.FixtureRequest) -> Pipeline:
    return Pipeline(recipe_of({"sources": [{"path": "x"}], "expand": request.param, **NAMED}))


@pytest.mark.parametrize("rule", RULES)
def test_every_answer_is_trained_after_its_own_history(
    pipeline: Pipeline, rule: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "runs.jsonl"
    agents(path, 5, 6)
    real = Path(__file__).parents[1] / "data" / "conversations"
    chats = [*ConversationFile(path), *list(ConversationFile(real / "tau_airline.jsonl.gz"))[:1]]
    compared = 0
    for conversation in chats:
        conversation = conversation._replace(tools=())
        expected = wanted(conversation, rule)
        assert trained(pipeline, conversation, rule) == expected
        compared += expected.total()
    assert compared > 30


LIMITS = st.sampled_from([(a, b) for a in (None, 1, 2, 3, 4) for b in (None, 1, 2, 3, 4) if a or b])
OBSERVERS = st.sampled_from([("tool",), ("user",), ("tool", "user")])


@given(st.lists(st.sampled_from([Role.USER, Role.ASSISTANT, Role.TOOL]), max_size=14), LIMITS, OBSERVERS)
@settings(max_examples=300)
def test_the_fast_rule_is_the_slow_one(roles: list[Role], limits: Any, observers: Any) -> None:
    rule = History(observations=limits[0], exchanges=limits[1], roles=observers)
    messages = [Message(role, "one\ntwo") for role in roles]
    slow = [k if message is messages[k] else ~k for k, message in plain_history(messages, rule)]
    assert rule.before([CODES[role] for role in roles], len(roles)) == slow


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({}, RULES[3]),
        ({"expand": "tree", "policy": "post_training"}, RULES[0]),
        ({"policy": "all", "packing": {"max_length": 400, "overflow": "turns"}}, RULES[1]),
        ({"template": "chatml", "policy": "last_turn", "not_shown": "drop"}, RULES[2]),
    ],
)
def test_verify_derives_histories_again(tmp_path: Path, more: dict[str, Any], rule: dict[str, Any]) -> None:
    agents(tmp_path / "runs.jsonl", 9, 12)
    sources = [{"path": str(tmp_path / "runs.jsonl"), "history": rule}]
    named = NAMED | {"thinking": "auto", "gates": OPEN_GATES, "on_error": "quarantine"}
    notes = proved({"sources": sources, **named, **more}, tmp_path / "built").all_notes()
    assert notes["history_changed"] > 4
    assert notes["history_rows"] > 0 or more.get("policy") == "last_turn"


def test_prompts_that_were_sent_say_whether_the_rule_is_that_of_the_harness(tmp_path: Path) -> None:
    rule = {"observations": 1, "elided": "(gone)"}
    pipeline = Pipeline(recipe_of({"sources": [{"path": "x"}], **NAMED}))
    path = tmp_path / "runs.jsonl"
    records = agents(path, 2, 8)
    for record, conversation in zip(records, list(ConversationFile(path)), strict=True):
        spoken = [k for k, one in enumerate(conversation.messages) if one.role is Role.ASSISTANT and one.weight != 0]
        for k, pair in zip(spoken, wanted(conversation, rule), strict=True):
            prompt, sampled = (_ids(pipeline, text) for text in pair)
            record["messages"][k] |= {"prompt_token_ids": prompt, "token_ids": sampled}
    write_jsonl(path, records)
    differ = {}
    for name, history in (("with", rule), ("without", None)):
        sources = [{"path": str(path), "history": history}]
        recipe = {"sources": sources, "drift": "report", "gates": OPEN_GATES, **NAMED}
        notes = proved(recipe, tmp_path / name).all_notes()
        assert notes["prompts_compared"] == notes["sampled_messages"] > 20
        differ[name] = notes["prompts_differ"]
    assert differ["with"] == 0
    assert differ["without"] > 5


def _ids(pipeline: Pipeline, text: str) -> list[int]:
    """The ids of a text with control tokens."""
    tokenizer = pipeline.template.tokenizer
    found: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, tokenizer.control_ids))})", text):
        found += [tokenizer.control_ids[part]] if part in tokenizer.control_ids else tokenizer.encode(part)
    return found
