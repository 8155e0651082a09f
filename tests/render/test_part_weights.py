"""Weights of parts of a message follow its characters, by three paths that share no code."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.run import run_build
from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.ledger import MIXED, Ledger
from chatmill.core.weight_spans import WeightSpan
from chatmill.label.presets import find_policy
from chatmill.look.dataset import open_for_looking
from chatmill.look.item_view import view_item
from chatmill.look.viewer.opened import open_splits
from chatmill.prove.verify import verify
from chatmill.render.render import render
from tests.cli.run import here
from tests.compiler.builds import OPEN_GATES, write_jsonl
from tests.data.tokenizer_files import HERE as TOKENIZERS
from tests.render.jinja.at_hand import FOLDER, of_text

ASKED = Message(Role.USER, "q")
LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = LOOP + "{{ m.content }}" + END
TEXTS = [
    "Let me",
    " think",
    ". ",
    "The answer",
    " is",
    " four",
    "\n",
    "  ",
    "löwe ",
    "水車",
    "🙂",
    "x",
    "e\u0301",
    "don't",
    "1234",
]


def answer(content: str, *weights: tuple[int, int, float], **more: Any) -> Message:
    spans = tuple(WeightSpan("content", 0, a, b, w) for a, b, w in weights)
    return Message(Role.ASSISTANT, content, **{"weight": 1.0, "spans": spans, **more})


def by_token(template: Any, conversation: Conversation, policy: str = "assistant") -> list[tuple[str, float]]:
    """The tokens of the last document, each with its weight."""
    rendered = render([conversation], template)
    tokens = rendered.tokens.conversation(len(rendered.tokens) - 1)
    weights = tokens.per_token(find_policy(policy).run_weights(tokens))
    return [(template.tokenizer.decode([i]), float(w)) for i, w in zip(tokens.ids, weights, strict=True)]


def trained(template: Any, conversation: Conversation, policy: str = "assistant") -> str:
    """The text of the last document that is trained."""
    return "".join(text for text, weight in by_token(template, conversation, policy) if weight)


def test_every_character_has_the_weight_of_its_part() -> None:
    conversation = Conversation((ASKED, answer("abcdef", (0, 2, 0.0), (4, 5, 0.5))))
    shown = by_token(of_text(CHATML), conversation)[-8:]
    assert shown == [("a", 0), ("b", 0), ("c", 1), ("d", 1), ("e", 0.5), ("f", 1), ("<|im_end|>", 1), ("\n", 0)]
    heavier = conversation._replace(messages=(ASKED, answer("ab", (0, 1, 0.5), weight=2.0)))
    assert by_token(of_text(CHATML), heavier)[-4:-1] == [("a", 0.5), ("b", 2), ("<|im_end|>", 2)]
    off = conversation._replace(messages=(ASKED, answer("ab", (0, 1, 0.5), weight=0.0)))
    assert trained(of_text(CHATML), off) == "", "a message of weight 0 has it for all its text"
    assert trained(of_text(CHATML), conversation, "per_message") == "cdef<|im_end|>"


def test_reasoning_and_arguments_have_parts_too() -> None:
    spans = (WeightSpan("reasoning", 0, 0, 1, 0.0), WeightSpan("arguments", 1, 1, 3, 0.0))
    calls = (ToolCall("f", "{}"), ToolCall("g", '{"a": 1}'))
    message = Message(Role.ASSISTANT, "c", reasoning="rs", tool_calls=calls, weight=1.0, spans=spans)
    shows = "{{ m.reasoning_content or '' }}{{ m.content }}{% for c in m.tool_calls or [] %}"
    shows += "{{ c.function.name + c.function.arguments }}{% endfor %}"
    template = of_text(LOOP + shows + END)
    assert trained(template, Conversation((ASKED, message))) == 'scf{}g{": 1}<|im_end|>'


def test_other_roles_have_parts_where_a_policy_trains_them() -> None:
    asked = Message(Role.USER, "abc", weight=1.0, spans=(WeightSpan("content", 0, 1, 2, 0.0),))
    conversation = Conversation((asked, Message(Role.ASSISTANT, "d")))
    assert trained(of_text(CHATML), conversation) == "d<|im_end|>"
    assert "ac<|im_end|>" in trained(of_text(CHATML), conversation, "all")


@pytest.mark.parametrize(
    ("shown", "content", "ok"),
    [
        ("{{ m.content | trim }}", " ab ", True),
        ("{{ m.content.split('|')[-1] }}", "x|ab", False),
        ("{{ m.content.split('|')[-1] }}", "|ab", False),
        ("{{ m.content | upper }}", "ab", False),
        ("{{ m.content | replace('a', 'a') }}", "ab", False),
        ("{{ m.content | replace('a', 'c') }}", "ab", False),
        ("{{ m.content[:1] }}", "ab", False),
        ("{{ m.content.split('|')[0] }}{{ m.content.split('|')[1] }}", "a|a", False),
    ],
)
def test_a_text_that_a_template_does_not_show_as_it_is_refuses_its_record(shown: str, content: str, ok: bool) -> None:
    """Whitespace apart, all that has a weight is shown, once; the slow path has the same reason."""
    conversation = Conversation((ASKED, answer(content, (0, len(content), 0.5))))
    text = LOOP + "{% if m.role == 'assistant' %}" + shown + "{% else %}{{ m.content }}{% endif %}" + END
    template = of_text(text)
    rendered = render([conversation], template, collect_failures=True)
    if ok:
        assert rendered.failed == ()
        return
    ((_, error),) = rendered.failed
    assert error.code in ("part_training", "not_shown", "origin_lost")
    if error.code == "part_training":
        assert error.path == "messages[1].content"


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(TEXTS) for _ in range(rng.randint(1, 8)))


def random_spans(rng: random.Random, text: str, field: str, call: int = 0) -> list[WeightSpan]:
    edges = sorted(rng.sample(range(len(text) + 1), min(len(text) + 1, rng.randint(2, 5))))
    pairs = pairwise(edges)
    return [WeightSpan(field, call, a, b, rng.choice([0.0, 0.25, 2.0])) for a, b in pairs if rng.random() < 0.7]


def random_answer(rng: random.Random, may_reason: bool) -> Message:
    content, reasoning = "A" + random_text(rng) + ".", "R" + random_text(rng) + "!"
    spans = random_spans(rng, content, "content")
    has_reasoning = may_reason and rng.random() < 0.5
    if has_reasoning:
        spans += random_spans(rng, reasoning, "reasoning")
    weight = rng.choice([1.0, 1.0, 1.0, 0.5, 0.0]) if spans else None
    given = reasoning if has_reasoning else None
    return Message(Role.ASSISTANT, content, reasoning=given, weight=weight, spans=tuple(spans))


def random_talk(rng: random.Random, number: int, may_reason: bool) -> Conversation:
    messages: list[Message] = []
    for _ in range(rng.randint(1, 3)):
        messages += [Message(Role.USER, random_text(rng) + "?"), random_answer(rng, may_reason)]
    return Conversation(tuple(messages), id=f"r{number}")


@pytest.mark.parametrize(
    ("name", "template", "expand"),
    [
        ("qwen3", "qwen3", "turns"),
        ("qwen3", "qwen3", "tree"),
        ("mistral_nemo", str(TOKENIZERS / "mistral_nemo"), "none"),
        ("gpt2", "chatml", "turns"),
        ("deepseek_v3", str(FOLDER / "llamacpp" / "llama-cpp-deepseek-r1.jinja"), "turns"),
    ],
    ids=["qwen3", "tree", "mistral", "gpt2", "as_sampled"],
)
def test_three_paths_give_every_token_the_same_weight(name: str, template: str, expand: str, tmp_path: Path) -> None:
    """Columns; single tokens by another tokenizer library; and letters in plain Jinja."""
    rng = random.Random(name)
    has_reasoning = name in ("qwen3", "deepseek_v3")
    write_jsonl(tmp_path / "a.jsonl", [as_record(random_talk(rng, n, has_reasoning)) for n in range(12)])
    recipe = {"sources": [{"path": str(tmp_path / "a.jsonl")}], "tokenizer": str(TOKENIZERS / name)}
    recipe |= {"template": template, "expand": expand, "gates": OPEN_GATES, "add_control_tokens": name == "gpt2"}
    recipe["no_reasoning"] = "close"
    run_build(recipe, tmp_path / "built")
    report = verify(tmp_path / "built", deep=True)
    assert report.findings == []
    assert (report.unchecked, report.blocked) == ([], "")
    assert report.counts["answers_proved"] == report.counts["trained_messages"] > 12
    ledger = Ledger.from_json(manifest_of(tmp_path / "built")["ledger"])
    assert ledger.total_notes(MIXED) > 0


def manifest_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return found


def as_record(conversation: Conversation) -> dict[str, Any]:
    """A conversation as parts, each with its weight; equal weights of neighbours stay apart."""
    messages = []
    for message in conversation.messages:
        record: dict[str, Any] = {"role": message.role.value}
        for key, field in (("content", "content"), ("reasoning_content", "reasoning")):
            text = message.content if field == "content" else message.reasoning
            if text is not None:
                record[key] = parts_of(text, [span for span in message.spans if span.field == field])
        if message.weight is not None:
            record["weight"] = message.weight
        messages.append(record)
    return {"id": conversation.id, "messages": messages}


def parts_of(text: str, spans: list[WeightSpan]) -> str | list[dict[str, Any]]:
    if not spans:
        return text
    parts, at = [], 0
    for span in spans:
        parts += [{"type": "text", "text": text[at : span.begin]}]
        parts += [{"type": "text", "text": text[span.begin : span.end], "weight": span.weight}]
        at = span.end
    return [*parts, {"type": "text", "text": text[at:]}]


def test_inspect_shows_which_part_of_an_answer_is_trained(tmp_path: Path) -> None:
    weights = [WeightSpan("content", 0, 0, 4, 0.0), WeightSpan("content", 0, 8, 12, 0.5)]
    conversation = Conversation((ASKED, answer("Hmm. It is four.", *(span[2:] for span in weights))))
    write_jsonl(tmp_path / "a.jsonl", [as_record(conversation)])
    shown = here("inspect", str(tmp_path / "a.jsonl"), "-t", str(TOKENIZERS / "qwen3"), "-T", "qwen2_5").stdout
    lines = [line.strip() for line in shown.splitlines()]
    assert "Hmm." in lines
    assert "▌  It" in lines
    assert any(line.endswith("×0.5") for line in lines)


def test_view_shows_which_part_of_an_answer_is_trained(tmp_path: Path) -> None:
    weights = [WeightSpan("content", 0, 0, 4, 0.0), WeightSpan("content", 0, 8, 12, 0.5)]
    conversation = Conversation((ASKED, answer("Hmm. It is four.", *(span[2:] for span in weights))))
    write_jsonl(tmp_path / "a.jsonl", [as_record(conversation)])
    recipe = {"template": "qwen2_5", "tokenizer": str(TOKENIZERS / "qwen3"), "gates": OPEN_GATES}
    run_build({"sources": [{"path": str(tmp_path / "a.jsonl")}], **recipe}, tmp_path / "out", workers=0)
    look = open_for_looking(tmp_path / "out")
    runs = view_item(open_splits(look)["train"].item(0), look.decoder, "episode").runs
    shown = [(run.weight, look.decoder.tokenizer.decode(run.ids)) for run in runs]
    assert (0, "Hmm.") in shown
    assert (1, " It") in shown
    assert any(weight == 0.5 and text.startswith(" is") for weight, text in shown)
