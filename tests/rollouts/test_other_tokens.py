"""Ids that no tokenizer would give for their text: they are read as their text, and never encoded again."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

import chatmill
from chatmill.rollouts.renderer import Renderer
from chatmill.rollouts.types import Proof
from tests.rollouts.helpers import ASKED, TEMPLATES, WEATHER, assistant, call, written
from tools.hf_vocabularies import make_tokenizer

VOCABULARY = TEMPLATES.parent / "tokenizers" / "qwen3"
PARIS = '{"city": "Saint-\u00c9tienne \u4e16\U0001f600", "days": 3}'
TURNS = 20


@functools.cache
def made(name: str) -> tuple[Any, Renderer]:
    """Load Qwen3's vocabulary with the tokens of a template; return a renderer on it, too."""
    tokenizer = make_tokenizer(VOCABULARY, (TEMPLATES / name).read_text(encoding="utf-8"))
    return tokenizer, chatmill.Renderer(tokenizer)


def canonical(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def split_again(tokenizer: Any, ids: list[int], chance: random.Random) -> list[int]:
    """Return other ids of the same text: ordinary tokens in pieces, down to single bytes."""
    table = tokenizer.get_vocab()
    added = set(tokenizer.get_added_vocab().values())
    found: list[int] = []
    for token in ids:
        name = tokenizer.convert_ids_to_tokens(token)
        if token in added or chance.random() < 0.3:
            found.append(token)
            continue
        pieces = [name]
        while len(pieces[-1]) > 1 and chance.random() < 0.8:
            last = pieces.pop()
            place = chance.randrange(1, len(last))
            pieces += [last[:place], last[place:]]
        if all(piece in table for piece in pieces):
            found += [table[piece] for piece in pieces]
        else:
            found += [table[character] for character in name]
    return found


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["trl/qwen3.jinja", "trl/glm4moe.jinja"])
def test_the_next_prompt_begins_with_whatever_was_sampled_and_nothing_drifts(name: str, seed: int) -> None:
    tokenizer, renderer = made(name)
    chance = random.Random(f"{name} {seed}")
    prompt = renderer.prompt(ASKED, tools=[WEATHER])
    # What the same conversation is if every answer has the tokenizer's own ids.
    usual = prompt
    changed = 0
    for turn in range(TURNS):
        message = assistant(f"Answer {turn}: \u00e9\u4e16, and so on.")
        if turn % 2:
            message = assistant(calls=[call("get_weather", PARIS, f"call{turn // 2:05d}")])
        ids = canonical(tokenizer, written(renderer, prompt, message))
        sampled = split_again(tokenizer, ids, chance)
        changed += sampled != ids
        answer, usual_answer = renderer.parse(prompt, sampled), renderer.parse(usual, ids)
        assert answer.proof is usual_answer.proof is Proof.WRITTEN
        assert answer.message == usual_answer.message
        for found in answer.calls:
            assert tokenizer.decode(sampled[found.start : found.end]).strip() == found.raw

        new: list[dict[str, Any]] = [{"role": "user", "content": f"Question {turn}?"}]
        if answer.calls:
            call_id = answer.message["tool_calls"][0]["id"]
            new = [{"role": "tool", "content": "Sunny.", "name": "get_weather", "tool_call_id": call_id}]
        following = renderer.extend(prompt, sampled, new, answer=answer)
        assert following.ids[: len(prompt.ids) + len(sampled)] == [*prompt.ids, *sampled]
        prompt, usual = following, renderer.extend(usual, ids, new, answer=usual_answer)
        assert tokenizer.decode(prompt.ids) == tokenizer.decode(usual.ids)
        assert prompt.agrees_with_template == usual.agrees_with_template
    assert changed == TURNS
