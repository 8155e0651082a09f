"""The round trip of answers: what `Renderer.parse` makes of what templates write.

    python -m tools.renderer_table TEMPLATES [--conversations FOLDER] [--per-source N] [--json FILE]

For every template and conversation that ends with an assistant: the answer that the template writes is parsed, and the
parsed message is held against the one that the conversation has. A template has no vocabulary next to it, so bytes
and the special tokens that it spells are used.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.kinds import Part, parts_of
from chatmill.errors import ChatmillError, RecordError
from chatmill.look.template_probes import byte_vocabulary
from chatmill.read.conversations import ConversationFile
from chatmill.render.jinja.options import Expand, TemplateOptions, Thinking
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind, find_template
from chatmill.render.render import render
from chatmill.rollouts.renderer import Renderer
from chatmill.rollouts.template import RolloutTemplate
from chatmill.rollouts.types import Answer, Proof
from tools.template_survey import STOPS

ROOT = Path(__file__).parents[1]
CONVERSATIONS = ROOT / "tests" / "data" / "conversations"
DAY = datetime.date(2026, 11, 19)


def bound_file(path: Path, options: Mapping[str, Any] | None = None) -> ModelTemplate:
    """Bind a template file to bytes, the special tokens that it spells, and the stops of its family."""
    text = path.read_text(encoding="utf-8")
    source = find_template(path)
    stops = next((stops for mark, stops in STOPS if mark in text), ())
    if not source.stop_tokens:  # which a model's generation config would name
        source = replace(source, stop_tokens=stops)
    thinking = Thinking.AUTO if options is None else Thinking.AS_GIVEN
    given = TemplateOptions(options=dict(options or {}), today=DAY, expand=Expand.LAST, thinking=thinking)
    return bind(source, byte_vocabulary(text, "<|bos|>", "<|eos|>", *stops), given)


def answer_places(folder: Path, per_source: int) -> Iterator[tuple[Conversation, int]]:
    """Yield conversations with the index of an answer: their last answers, and those that call tools."""
    for path in sorted(folder.glob("*.jsonl.gz")):
        count = 0
        for conversation in ConversationFile(path):
            answers = [k for k, message in enumerate(conversation.messages) if message.role is Role.ASSISTANT]
            calling = [k for k in answers if conversation.messages[k].tool_calls]
            chosen = sorted({*answers[-1:], *calling[:1], *calling[-1:]})
            for index in chosen:
                yield conversation, index
            count += bool(chosen)
            if count == per_source:
                break


def answer_conversations(folder: Path, per_source: int) -> Iterator[Conversation]:
    """Yield the beginnings of conversations up to an answer."""
    for conversation, index in answer_places(folder, per_source):
        yield conversation._replace(messages=conversation.messages[: index + 1])


def answer_ids(bound: ModelTemplate, conversation: Conversation, prompt: int) -> list[int]:
    """Return the ids of the last answer with its stop, after a prompt of some ids."""
    tokens = render([conversation], bound).tokens
    document = tokens.conversation(len(tokens) - 1)
    is_stop = (parts_of(document.kinds) == Part.TERMINATOR) & (document.messages == len(conversation.messages) - 1)
    end = int(np.flatnonzero(is_stop)[-1]) + 1
    ids: list[int] = document.ids[prompt:end].tolist()
    return ids


@dataclass
class TripCounts:
    """The round trips of one template."""

    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    """Outcomes by form of the answer."""
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, form: str, outcome: str, example: str) -> None:
        """Count one answer."""
        self.accepted += 1
        self.outcomes.setdefault(form, Counter())[outcome] += 1
        self.examples.setdefault(f"{form}: {outcome}", example)


def form_of(message: Message) -> str:
    """Return what an answer is made of."""
    parts = [
        "reasoning" * bool((message.reasoning or "").strip()),
        "text" * bool(message.content.strip()),
        "call" if len(message.tool_calls) == 1 else "calls" * bool(message.tool_calls),
    ]
    return " + ".join(filter(None, parts)) or "empty"


def said(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a user can see of a message."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return (
        (message.get("content") or "").strip(),
        (message.get("reasoning_content") or "").strip(),
        [(call["name"], _value(call["arguments"])) for call in calls],
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def outcome_of(answer: Answer, message: Message, text: str) -> str:
    """Return how a parsed answer compares with what its text shows of the message."""
    reasoning = (message.reasoning or "").strip()
    wanted = (
        message.content.strip(),
        reasoning if reasoning in text else "",
        [(call.name, _value(call.arguments)) for call in message.tool_calls],
    )
    if answer.proof is Proof.NOT_WRITTEN:
        return f"unproved ({answer.reason})"
    found = [answer.message] if answer.proof is Proof.WRITTEN else answer.readings
    if not any(said(one) == wanted for one in found):
        return "another message"
    return "same" if answer.proof is Proof.WRITTEN else "ambiguous"


def round_trips(path: Path, conversations: list[Conversation]) -> TripCounts:
    """Parse the answers that a template writes."""
    counts = TripCounts()
    chooser = bound_file(path)
    renderers: dict[str, Renderer] = {}
    for conversation in conversations:
        try:
            options = dict(chooser.text_documents(conversation).options)
        except RecordError as error:
            counts.refused[error.code] += 1
            continue
        key = json.dumps(options, sort_keys=True)
        if key not in renderers:
            renderers[key] = Renderer(RolloutTemplate(bound_file(path, options)))
        renderer = renderers[key]
        before = conversation._replace(messages=conversation.messages[:-1])
        prompt = renderer.prompt_of(before)
        ids = answer_ids(renderer.bound, conversation, len(prompt.ids))
        message = conversation.messages[-1]
        text = renderer.tokenizer.decode(ids)
        answer = renderer.parse(prompt, ids)
        counts.add(form_of(message), outcome_of(answer, message, text), f"{text} {answer.readings[:2]}")
    return counts


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("templates", type=Path, nargs="+")
    parser.add_argument("--conversations", type=Path, default=CONVERSATIONS)
    parser.add_argument("--per-source", type=int, default=6)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    paths = [path for one in given.templates for path in (sorted(one.rglob("*.jinja")) if one.is_dir() else [one])]
    conversations = list(answer_conversations(given.conversations, given.per_source))
    results: dict[str, Any] = {}
    for path in paths:
        name = f"{path.parent.name}/{path.name}"
        try:
            counts = round_trips(path, conversations)
        except ChatmillError as error:
            print(f"{name}: not loaded: {error}", flush=True)
            continue
        results[name] = {"accepted": counts.accepted, "refused": counts.refused, "outcomes": counts.outcomes}
        unlike = {form: dict(one) for form, one in counts.outcomes.items() if set(one) != {"same"}}
        print(f"{name}: {counts.accepted} accepted, {unlike or 'all the same'}", flush=True)
        for key, text in counts.examples.items():
            if not key.endswith(": same"):
                print(f"    {key}: {text[-900:]!r}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(results, indent=1))
    print_total(results)


def print_total(results: Mapping[str, Any]) -> None:
    """Print outcomes by form, over all templates."""
    total: dict[str, Counter[str]] = {}
    for one in results.values():
        for form, outcomes in one["outcomes"].items():
            total.setdefault(form, Counter()).update(outcomes)
    for form, outcomes in sorted(total.items()):
        count = sum(outcomes.values())
        print(f"| {form} | {count:,} | {outcomes['same'] / count:.1%} | {dict(outcomes)} |")
    count = sum(sum(outcomes.values()) for outcomes in total.values())
    same = sum(outcomes["same"] for outcomes in total.values())
    print(f"| all | {count:,} | {same / max(count, 1):.1%} | |")


if __name__ == "__main__":
    main()
