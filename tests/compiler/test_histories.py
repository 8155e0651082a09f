"""Histories as a model is served with them: every answer is trained after what the rule leaves of the conversation."""

from __future__ import annotations

import random
import re
from collections import Counter
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
from chatmill.compiler.recipe import recipe_of
from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.messages import CODES
from chatmill.core.trees import Branches, rows_of_tree
from chatmill.prove.conversations import plain_history
from chatmill.read.conversations import ConversationFile
from tests.compiler.builds import OPEN_GATES, proved, write_jsonl
from tests.render.reference import as_dicts, jinja

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
