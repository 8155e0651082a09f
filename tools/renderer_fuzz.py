"""Fuzzed answers: no exception, and no proof that a second, independent rendering contradicts.

    python -m tools.renderer_fuzz TEMPLATES [--answers N] [--seed S] [--workers W]

For every template: answers that it writes for random messages, and what becomes of them when they are cut, mixed and
salted with marks, special tokens and bytes. Each proof is held against plain Jinja in a sandbox of its own
(`chatmill.prove`), which shares nothing with `chatmill.rollouts`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from chatmill.core.conversation import Conversation
from chatmill.errors import ChatmillError, RecordError
from chatmill.prove.answers import PlainAnswer, plain_answer
from chatmill.prove.plain import PlainRecord, PlainTemplate
from chatmill.rollouts.messages import conversation as parsed
from chatmill.rollouts.renderer import Renderer
from chatmill.rollouts.template import RolloutTemplate
from chatmill.rollouts.types import Prompt, Proof
from tools.renderer_table import bound_file

WORDS = (
    *("Yes.", "no", "", " ", "\n", "\n\n", "The answer is 7.", "{", "}", '"', "'", "\\", "[1, 2]", "null", "True"),
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '{"name": "f"',
        "f(x=1)",
        "\u00e9\u4e16",
        "\U0001f600",
        "<|im_end|>",
    ),
)
TYPES: tuple[Any, ...] = (
    "Paris",
    "7",
    "a\nb",
    "it's",
    'say "x"',
    "",
    7,
    -1.5,
    True,
    None,
    [1, "x"],
    {"k": {"z": "v"}},
    [],
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
    for name in ("get_weather", "f")
]
WRITTEN = 100
"""Answers that are written after each prompt; the others are made of them."""
BEFORE = (
    [{"role": "user", "content": "Question?"}],
    [
        {"role": "user", "content": "Question?"},
        {"role": "assistant", "content": "Before."},
        {"role": "user", "content": "And now?"},
    ],
)


class TemplateFuzzer:
    """Fuzzes one template."""

    def __init__(self, path: Path, seed: int) -> None:
        """Derive its grammar."""
        self._chance = random.Random(f"{path.name} {seed}")
        self.renderer = Renderer(RolloutTemplate(bound_file(path, {})))
        self._plain = PlainTemplate(self.renderer.bound)
        edges = [edge for edges in self.renderer.grammar.edges.values() for edge in edges]
        self._literals = [edge.literal for edge in edges if edge.literal] or [" "]
        self._specials = self.renderer.tokenizer.special_tokens
        self.prompts: list[Prompt] = []
        for before in BEFORE:
            for tools in ((), TOOLS):
                try:
                    self.prompts.append(self.renderer.prompt(before, tools))
                except RecordError:
                    continue
        self._pool: dict[int, list[str]] = {}
        """Answers that the template writes after each prompt."""
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    def run(self, count: int) -> None:
        """Parse so many answers."""
        if not self.prompts:
            return
        for _ in range(count):
            prompt = self._chance.choice(self.prompts)
            ids = self._answer_ids(prompt)
            try:
                answer = self.renderer.parse(prompt, ids)
            except Exception as error:
                self.faults.append(f"{type(error).__name__}: {error}: {ids[:400]}")
                continue
            self.counts[answer.proof] += 1
            if answer.proof is not Proof.NOT_WRITTEN:
                for message in answer.readings or (answer.message,):
                    if not self.is_confirmed(prompt, ids, message):
                        self.faults.append(f"false proof: {self.renderer.tokenizer.decode(ids)!r} {message}")

    # ---- answers

    def _message(self) -> dict[str, Any]:
        chance = self._chance
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(chance.choices(WORDS, k=chance.randrange(4))),
        }
        if chance.random() < 0.4:
            message["reasoning_content"] = "".join(chance.choices(WORDS, k=chance.randrange(3)))
        if chance.random() < 0.5:
            message["tool_calls"] = [self._call(index) for index in range(chance.choice((1, 1, 2, 3)))]
        return message

    def _call(self, index: int) -> dict[str, Any]:
        chance = self._chance
        keys = chance.sample(("city", "days", "x", "note"), chance.randrange(4))
        arguments = json.dumps({key: chance.choice(TYPES) for key in keys})
        function = {"name": chance.choice(("get_weather", "f", "g.h")), "arguments": arguments}
        return {"id": f"call{index:05d}", "type": "function", "function": function}

    def _answer_ids(self, prompt: Prompt) -> list[int]:
        """Return ids of an answer, mostly changed at some places."""
        chance, tokenizer = self._chance, self.renderer.tokenizer
        pool = self._pool.setdefault(id(prompt), [])
        if len(pool) < WRITTEN:
            pool.append(self._written(prompt))
        text = chance.choice(pool)
        for _ in range(chance.choice((0, 0, 1, 1, 2, 4))):
            text = self._changed(text)
        as_text = chance.random() < 0.1  # special tokens spelled by ordinary ones
        ids: list[int] = tokenizer.encode(text) if as_text else tokenizer.encode_documents([text])[0].tolist()
        if chance.random() < 0.1 and ids:
            ids[chance.randrange(len(ids))] = chance.choice((0x80, 0xE2, 255, 10**6, *self.renderer.stops))
        if chance.random() < 0.8 and ids and ids[-1] not in self.renderer.stops and self.renderer.stops:
            ids.append(chance.choice(self.renderer.stops))
        return ids

    def _written(self, prompt: Prompt) -> str:
        """Return what the template writes for a random message; pieces of its grammar if it refuses."""
        message = parsed([self._message()], None).messages[0]
        conversation = prompt.conversation._replace(messages=(*prompt.conversation.messages, message))
        try:
            answer = self.renderer.template.answer(conversation)
        except ChatmillError:
            return "".join(self._chance.choices([*WORDS, *self._literals], k=self._chance.randrange(6)))
        return "".join(span.text for span in answer.spans) + answer.stop

    def _changed(self, text: str) -> str:
        chance = self._chance
        at, to = sorted((chance.randrange(len(text) + 1), chance.randrange(len(text) + 1)))
        kind = chance.randrange(6)
        if kind == 0:
            return text[:at]
        if kind == 1:
            return text[:at] + text[to:] if to - at < 20 else text[:at] + text[at + 1 :]
        if kind == 2:
            return text[:at] + chance.choice(self._literals) + text[at:]
        if kind == 3:
            return text[:at] + chance.choice([*WORDS, *self._specials]) + text[at:]
        if kind == 4:
            return text + text[at:to]
        return text[:at] + chance.choice("{}[]<>\"'\\ \n,:") + text[at:]

    # ---- the second rendering

    def is_confirmed(self, prompt: Prompt, ids: Sequence[int], message: dict[str, Any]) -> bool:
        """Tell whether plain Jinja, in code of its own, writes prompt and answer from a message."""
        template = self.renderer.template
        said = parsed([message], None).messages[0]
        messages = (*prompt.conversation.messages, said)
        conversation: Conversation = prompt.conversation._replace(messages=messages)
        record = PlainRecord(self._plain, conversation, template.options)
        index = len(messages) - 1
        found = plain_answer(record, messages, index, template.bound.stops, template.bound.given)
        if found is None:
            return True  # plain Jinja cannot tell text from tokens here
        if not isinstance(found, PlainAnswer):
            return False
        body = list(ids[:-1]) if ids and ids[-1] in template.stops else list(ids)
        before = record.rendering(index, prompt=True)
        if isinstance(before, str):
            return False
        text = template.tokenizer.decode(body)
        begin = len(before.text)
        if not found.text.text.startswith(before.text + text):
            return False
        specials = [template.token_name(one) for one in body if one in set(template.special_ids.tolist())]
        end = begin + len(text)
        written = [token.name for token in found.text.tokens if token.start >= begin and token.stop <= end]
        return specials == written


def fuzz(path: Path, count: int, seed: int) -> tuple[str, Counter[str], list[str]]:
    """Fuzz one template."""
    try:
        fuzzer = TemplateFuzzer(path, seed)
    except ChatmillError:
        return path.name, Counter(), []
    fuzzer.run(count)
    return path.name, fuzzer.counts, fuzzer.faults


def main() -> None:
    """Fuzz templates, in processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("templates", type=Path, nargs="+")
    parser.add_argument("--answers", type=int, default=1000, help="answers for each template")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    paths = [path for one in given.templates for path in (sorted(one.rglob("*.jinja")) if one.is_dir() else [one])]
    total: Counter[str] = Counter()
    faults = 0
    with ProcessPoolExecutor(given.workers) as pool:
        jobs = [pool.submit(fuzz, path, given.answers, given.seed) for path in paths]
        for job in jobs:
            name, counts, found = job.result()
            total += counts
            faults += len(found)
            print(f"{name}: {dict(counts)}{f', {len(found)} FAULTS' if found else ''}", flush=True)
            for fault in found[:3]:
                print(f"    {fault[:1500]}", flush=True)
    print(f"{sum(total.values()):,} answers of {len(paths)} templates: {dict(total)}, {faults} faults")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
