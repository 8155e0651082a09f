"""What `renderers` (PrimeIntellect) writes by hand, next to what is derived: prompts, stops, answers and next prompts.

    pip install renderers
    python -m tools.renderer_peers TEMPLATES TOKENIZERS [--per-source N] [--families NAME ...]

TEMPLATES has published templates, TOKENIZERS the folders `qwen3`, `deepseek_v3` and `gptoss`. A family whose vocabulary
is not there gets Qwen3's with the family's own special tokens added: both sides have the same one.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from renderers.base import create_renderer
from renderers.configs import _CONFIG_BY_NAME

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.errors import ChatmillError, RecordError
from chatmill.rollouts.adapters.prime_intellect import ChatmillRenderer, ChatmillRendererConfig
from chatmill.rollouts.messages import openai_message
from chatmill.tokenizer.assets import bundled_o200k
from tools.hf_vocabularies import make_tokenizer
from tools.renderer_table import CONVERSATIONS, DAY, answer_places, said

MISSING = re.compile(r"[Tt]oken (?:for )?'([^']+)'")


class Family(NamedTuple):
    """A family of `renderers` and what to compare it on."""

    template: str
    vocabulary: str = "qwen3"
    options: Mapping[str, Any] = {}
    theirs: Mapping[str, Any] = {}


FAMILIES: Mapping[str, Family] = {
    "qwen3": Family("trl/qwen3"),
    "qwen3.5": Family("llamacpp/Qwen3.5-4B"),
    "qwen3.6": Family("trl/qwen3_6"),
    "qwen3.8": Family("trl/qwen3_8"),
    "glm-4.5": Family("trl/glm4moe"),
    "deepseek-v3": Family("", "deepseek_v3"),
    "deepseek-r1": Family("trl/deepseek_r1_distill", "deepseek_v3"),
    "deepseek-v4": Family("llamacpp/deepseek-ai-DeepSeek-V4-Flash-0731", "deepseek_v3"),
    "gpt-oss": Family("llamacpp/openai-gpt-oss-120b", "gptoss"),
    "llama-3": Family("llamacpp/meta-llama-Llama-3.1-8B-Instruct"),
    "gemma4": Family("trl/gemma4_v5"),
    "nemotron-3": Family("llamacpp/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    "nemotron-3-ultra": Family("trl/nemotron_3_ultra"),
    "nemotron-3.5": Family("trl/nemotron_3_5_lightning"),
    "hy3": Family("llamacpp/tencent-Hy3"),
    "laguna-xs.2": Family("llamacpp/poolside-Laguna-XS.2"),
    "laguna-s-2.1": Family("llamacpp/poolside-Laguna-S-2.1"),
    "kimi-k2": Family("llamacpp/Kimi-K2-Thinking"),
}


@dataclass
class Compared:
    """Outcomes of one family, by question."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, question: str, outcome: str, example: str = "") -> None:
        """Count one outcome."""
        self.counts.setdefault(question, Counter())[outcome] += 1
        self.examples.setdefault(f"{question}: {outcome}", example)


def both_renderers(name: str, templates: Path, tokenizers: Path) -> tuple[Any, ChatmillRenderer]:
    """Make the class of a family and the derived renderer, on one vocabulary."""
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(bundled_o200k().parent)
    family = FAMILIES[name]
    text = (templates / f"{family.template}.jinja").read_text(encoding="utf-8") if family.template else ""
    more: list[str] = []
    while True:
        tokenizer = make_tokenizer(tokenizers / family.vocabulary, text, more)
        try:
            theirs = create_renderer(tokenizer, _CONFIG_BY_NAME[name](**family.theirs))
            break
        except (AssertionError, ValueError, TypeError) as error:
            found = MISSING.search(str(error))
            if found is None or found[1] in more:
                raise
            more.append(found[1])
    config = ChatmillRendererConfig(options=dict(family.options), date=str(DAY))
    return theirs, ChatmillRenderer(tokenizer, config)


def plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form, with reasoning and calls."""
    found: list[dict[str, Any]] = []
    for message in messages:
        one = openai_message(message)
        if message.name:
            one["name"] = message.name
        if message.tool_call_id:
            one["tool_call_id"] = message.tool_call_id
        found.append(one)
    return found


def compare_one(found: Compared, theirs: Any, ours: ChatmillRenderer, whole: Conversation, index: int) -> None:
    """Compare one answer of a conversation."""
    before, answer = plain(whole.messages[:index]), whole.messages[index]
    tools = list(map(dict, whole.tools)) or None
    try:
        prompt = ours.render_ids(before, tools=tools, add_generation_prompt=True)
    except ChatmillError as error:
        found.add("prompt", f"refused here ({getattr(error, 'code', error)})")
        return
    try:
        their_prompt = theirs.render_ids(before, tools=tools, add_generation_prompt=True)
    except Exception as error:
        found.add("prompt", f"their class raises {type(error).__name__}", str(error))
        return
    decode = ours.renderer.tokenizer.decode
    is_same = prompt == list(their_prompt)
    found.add(
        "prompt", "same" if is_same else "other", "" if is_same else _first_difference(decode, prompt, their_prompt)
    )

    conversation = whole._replace(messages=whole.messages[: index + 1])
    try:
        try:
            written = ours.renderer.template.answer(conversation)
        except RecordError as error:
            if error.code != "no_reasoning":
                raise
            answer = answer._replace(reasoning="Let me see.")
            conversation = conversation._replace(messages=(*conversation.messages[:-1], answer))
            written = ours.renderer.template.answer(conversation)
    except ChatmillError as error:
        found.add("answer", f"refused here ({getattr(error, 'code', error)})")
        return
    text = "".join(span.text for span in written.spans) + written.stop
    ids = ours.renderer.tokenizer.encode_documents([text])[0].tolist()
    if not ids or ids[-1] not in ours.renderer.stops:
        found.add("answer", "no stop")
        return
    own = ours.parse_response(ids, tools=tools, prompt_ids=prompt)
    other = theirs.parse_response(ids, tools=tools, prompt_ids=prompt)
    ours_said, theirs_said = _said(own), _said(other)
    wanted = said(openai_message(answer))
    if ours_said == theirs_said:
        outcome = "same"
    elif ours_said == wanted:
        outcome = "other, here as the record"
    elif theirs_said == wanted:
        outcome = "other, theirs as the record"
    else:
        outcome = "other"
    found.add("parse", outcome, f"{text[-600:]!r}\n      ours   {ours_said}\n      theirs {theirs_said}"[:2000])

    new = _following(whole, index)
    mine = ours.bridge_to_next_turn(prompt, ids, new, tools=tools)
    try:
        peer = theirs.bridge_to_next_turn(prompt, ids, new, tools=tools)
    except Exception as error:
        found.add("next prompt", f"their class raises {type(error).__name__}", str(error))
        return
    if mine is None or peer is None:
        who = "neither" if mine is None and peer is None else ("theirs alone" if mine is None else "here alone")
        found.add("next prompt", who, f"{new} {text[-200:]!r}"[:700])
        return
    is_same = mine.token_ids == list(peer.token_ids)
    shown = "" if is_same else _first_difference(decode, mine.token_ids, peer.token_ids)
    found.add("next prompt", "same" if is_same else "other", shown)


def _following(whole: Conversation, index: int) -> list[dict[str, Any]]:
    """Return the messages up to the next answer, or a question."""
    following: list[Message] = []
    for message in whole.messages[index + 1 :]:
        if message.role is Role.ASSISTANT:
            break
        following.append(message)
    return plain(following) or [{"role": "user", "content": "Go on."}]


def _said(response: Any) -> tuple[Any, ...]:
    calls = [(call.name, call.arguments) for call in response.tool_calls]
    return ((response.content or "").strip(), (response.reasoning_content or "").strip(), calls)


def _first_difference(decode: Any, one: Sequence[int], other: Sequence[int]) -> str:
    pairs = zip(one, other, strict=False)
    at = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    start = max(at - 12, 0)
    return f"ours {decode(list(one[start : at + 25]))!r} theirs {decode(list(other[start : at + 25]))!r}"


def compare_family(
    name: str, templates: Path, tokenizers: Path, conversations: Sequence[tuple[Conversation, int]]
) -> Compared:
    """Compare a family on conversations and places of answers."""
    theirs, ours = both_renderers(name, templates, tokenizers)
    found = Compared()
    mine, peer = set(ours.get_stop_token_ids()), set(theirs.get_stop_token_ids())
    names = [ours.renderer.tokenizer.decode([one]) for one in sorted(mine ^ peer)]
    found.add("stops", "same" if mine == peer else "other", f"here {sorted(mine)} theirs {sorted(peer)}: {names}")
    for whole, index in conversations:
        compare_one(found, theirs, ours, whole, index)
    return found


def main() -> None:
    """Print outcomes and examples by family."""
    parser = argparse.ArgumentParser()
    parser.add_argument("templates", type=Path)
    parser.add_argument("tokenizers", type=Path)
    parser.add_argument("--conversations", type=Path, default=CONVERSATIONS)
    parser.add_argument("--per-source", type=int, default=1)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    given = parser.parse_args()
    chosen = list(answer_places(given.conversations, given.per_source))
    for name in given.families:
        try:
            found = compare_family(name, given.templates, given.tokenizers, chosen)
        except Exception as error:
            print(f"{name}: not run: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        print(name, flush=True)
        for question, counts in found.counts.items():
            print(f"  {question}: {dict(counts)}", flush=True)
            for outcome in counts:
                if outcome != "same":
                    print(f"    {outcome}: {found.examples[f'{question}: {outcome}'][:2000]}", flush=True)


if __name__ == "__main__":
    main()
