"""Trials: small templates that use everything Jinja has on random conversations, compared with transformers.

The text of a whole conversation is that of transformers, and what is trained is A(i) without P(i) up to its stop. Named
mutants of what tracing notes must be killed: each would write a wrong text or a wrong mask without an error.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pytest

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import ChatmillError, ConfigError
from chatmill.label.presets import find_policy
from chatmill.render.jinja import kept_values, positions, turn, turn_run, views
from chatmill.render.jinja.options import Expand
from chatmill.render.jinja.positions import added
from chatmill.render.model_template import ModelTemplate
from chatmill.render.render import Rendered, render
from tests.render.jinja.at_hand import of_text
from tests.render.reference import on
from tools.template_survey import TODAY

TEMPLATES: dict[str, str] = json.loads(Path(__file__).with_name("trial_templates.json").read_text())
TEXTS = [
    *("a", "hi", "ok", "Alpha", "beta gamma", " lead", "trail ", "x\ny", "\n\n", "", "é́ü", "<b>&", "'q\"", "</think>"),
    *("<think>r</think>z", "0", "None", "日本", "a,b,c", "A", "ß", "İ", "ﬁ", "1", "%s", "{x}", "NAME"),
]
ARGUMENTS = [{}, {"x": 1}, {"x": "s", "y": [1, None]}, {"é": 2.5}]
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer", "description": "é"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "d", "parameters": PARAMETERS}}


def random_messages(rng: random.Random) -> list[Message]:
    messages: list[Message] = []
    if rng.random() < 0.4:
        messages.append(Message(Role.SYSTEM, rng.choice(TEXTS)))
    for _ in range(rng.randint(1, 4)):
        messages.append(Message(Role.USER, rng.choice(TEXTS)))
        while rng.random() < 0.4:
            calls: list[ToolCall] = []
            for _ in range(rng.randint(1, 2)):
                name = rng.choice(["add", "sub", "get"])
                calls.append(ToolCall(name, json.dumps(rng.choice(ARGUMENTS)), f"c{rng.randint(0, 9)}"))
            reasoning = rng.choice([None, "because"])
            content = rng.choice(["", "w"])
            messages.append(Message(Role.ASSISTANT, content, tool_calls=tuple(calls), reasoning=reasoning))
            for call in calls:
                messages.append(Message(Role.TOOL, rng.choice(TEXTS), tool_call_id=call.id, name=call.name))
        reasoning = rng.choice([None, None, "thought", ""])
        messages.append(
            Message(Role.ASSISTANT, rng.choice(TEXTS), reasoning=reasoning, name=rng.choice([None, None, "bob"]))
        )
    return messages


@cache
def records(count: int, *, with_tools: bool) -> tuple[Conversation, ...]:
    rng = random.Random(5)
    found: list[Conversation] = []
    for number in range(count):
        messages = tuple(random_messages(rng))
        tools = (TOOL,) if with_tools and rng.random() < 0.5 else ()
        found.append(Conversation(messages, id=f"r{number}", tools=tools))
    return tuple(found)


class Trained(NamedTuple):
    """A document, and what is trained in it with all that comes before."""

    text: str
    spans: list[tuple[str, str]]


def find_trained(rendered: Rendered, template: ModelTemplate) -> dict[int, list[Trained]]:
    """Return the documents of each record."""
    policy = find_policy("assistant")
    weights = rendered.tokens.per_token(policy.document_weights(rendered.tokens, rendered.kept))
    decode = template.tokenizer.decode
    found: dict[int, list[Trained]] = {}
    for row, index in enumerate(rendered.kept.tolist()):
        ids = rendered.tokens.conversation(row).ids
        is_trained = (weights[rendered.tokens.offsets[row] : rendered.tokens.offsets[row + 1]] > 0).tolist()
        spans: list[tuple[str, str]] = []
        start = 0
        while start < len(ids):
            stop = start
            while stop < len(ids) and is_trained[stop]:
                stop += 1
            if stop > start:
                spans.append((decode(ids[:start]), decode(ids[start:stop])))
            start = max(stop, start + 1)
        found.setdefault(index, []).append(Trained(decode(ids), spans))
    return found


class Wanted(NamedTuple):
    """What transformers writes for a record."""

    whole: str
    spans: list[tuple[str, str]]
    """Prompts and answers."""
    changed: list[tuple[str, str]]
    """Prompts, and histories that do not begin with them."""


def find_wanted(record: Conversation, template: ModelTemplate, compiled: Any) -> Wanted:
    """Return the rows that plain Jinja gives."""
    view = template.view(record)
    tools = list(record.tools) or None
    values = {**template.named_tokens, **template.given.options, "tools": tools, "documents": None}

    def write(count: int, *, prompt: bool) -> str:
        messages = view.values(count, None)[0]
        text: str = compiled.render(messages=messages, add_generation_prompt=prompt, **values)
        return text

    spans: list[tuple[str, str]] = []
    changed: list[tuple[str, str]] = []
    for index, message in enumerate(record.messages):
        if message.role is not Role.ASSISTANT:
            continue
        prompt, until = write(index, prompt=True), write(index + 1, prompt=False)
        if not until.startswith(prompt):
            changed.append((prompt, until))
            continue
        answer = until[len(prompt) :]
        ends = [answer.find(stop) + len(stop) for stop in template.stops.names if stop in answer]
        spans.append((prompt, answer[: min(ends, default=len(answer))]))
    return Wanted(write(len(record.messages), prompt=False), sorted(spans), changed)


def differences(text: str, count: int, expand: Expand) -> list[object]:
    """Return the records of a template whose text or mask is wrong."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        template = of_text(text, expand=expand)
    except ConfigError:
        return []
    batch = records(count, with_tools="tools" in text)
    rendered = render(batch, template, collect_failures=True)
    compiled = _compile_jinja_template(text)
    found: list[object] = []
    with on(TODAY):
        for index, documents in find_trained(rendered, template).items():
            try:
                wanted = find_wanted(batch[index], template, compiled)
            except jinja2.TemplateError:
                found.append((index, "transformers refuses it"))
                continue
            if expand is Expand.NONE:
                if [document.text for document in documents] != [wanted.whole]:
                    found.append((index, "text", wanted.whole, documents))
                continue
            spans = sorted(span for document in documents for span in document.spans)
            own = [span for span in spans if not is_own_turn(span, wanted.changed)]
            if own != wanted.spans:
                found.append((index, "mask", wanted.spans, own))
    return found


def is_own_turn(span: tuple[str, str], changed: Sequence[tuple[str, str]]) -> bool:
    """Return whether an answer whose history differs is trained after its prompt, as docs/masks.md says."""
    before, answer = span
    return any(before == prompt and until.rstrip().endswith(answer.rstrip()) for prompt, until in changed)


QUICK = sorted(TEMPLATES)[::11]
TRIALS = [
    pytest.param(name, 12 if name in QUICK else 40, marks=() if name in QUICK else pytest.mark.slow)
    for name in sorted(TEMPLATES)
]


@pytest.mark.parametrize(("name", "count"), TRIALS)
@pytest.mark.parametrize("expand", [Expand.TURNS, Expand.NONE])
def test_no_text_and_no_mask_of_a_trial_is_wrong(name: str, count: int, expand: Expand) -> None:
    assert differences(TEMPLATES[name], count, expand) == []


# -- mutants ---------------------------------------------------------------------------------------------------------


def forget_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields of other messages are read without a guard."""
    monkeypatch.setattr(views.MessageView, "_whole", lambda self: self._values)


def forget_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """`loop.first` is read without a guard."""
    monkeypatch.setattr(views.LoopView, "first", property(lambda self: self._number == 0))


def forget_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """`loop.last` is read without a guard."""
    is_last = property(lambda self: self._number == len(self._positions) - 1)
    monkeypatch.setattr(views.LoopView, "last", is_last)


def forget_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message at a computed index is read without a guard on the index."""

    def at(self: views.MessagesView, key: int) -> Any:
        return views.MessageView.at(self.run, int.__int__(key + self.start))

    monkeypatch.setattr(views.MessagesView, "_at", at)


def shift_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symbolic integers are off by one when they are handed to another iteration."""

    def shifted(form: Any, own: int, count: int, registers: list[int]) -> int:
        return positions.value_of(form, own, count, registers) + 1

    monkeypatch.setattr(kept_values, "value_of", shifted)


def forget_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop goes on after `break`."""

    def leaf(self: turn_run.TurnRun, text: str, of: turn.Turn) -> Any:
        return original(self, text, of)._replace(breaks=False)

    original = turn_run.TurnRun.leaf
    monkeypatch.setattr(turn_run.TurnRun, "leaf", leaf)


def forget_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two messages are compared without a guard."""

    def equal(self: views.MessageView, other: object) -> bool:
        return isinstance(other, views.MessageView) and self.run.equal(self.address, other.address)

    monkeypatch.setattr(views.MessageView, "__eq__", equal)


def double_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of symbolic integers have the wrong constant."""

    def wrong(form: Any, other: Any, sign: int = 1) -> Any:
        terms, constant = added(form, other, sign)
        return terms, constant + (1 if other[0] else 0)

    monkeypatch.setattr(positions, "added", wrong)


MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    forget_shapes: "previtem",
    forget_first: "previtem",
    forget_last: "bang_len6",
    forget_offsets: "message_at_state",
    shift_forms: "s1_len_minus",
    forget_breaks: "s9b_back_break",
    forget_comparisons: "message_compared",
    double_sums: "s1_len_minus",
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_guard_that_is_dropped_is_noticed(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a wrong row of a trial, or by the comparison with plain Jinja, which stops following the template."""
    assert is_followed(TEMPLATES[MUTANTS[mutant]])
    mutant(monkeypatch)
    text = TEMPLATES[MUTANTS[mutant]]
    try:
        is_noticed = bool(differences(text, 16, Expand.TURNS)) or not is_followed(text)
    except ChatmillError:
        is_noticed = True
    assert is_noticed


def is_followed(text: str) -> bool:
    """Return whether nothing of a trial contradicts what was learned before."""
    template = of_text(text)
    render(records(16, with_tools="tools" in text), template, collect_failures=True)
    return all(renderer.is_followed for renderer in template.store.renderers.values())
