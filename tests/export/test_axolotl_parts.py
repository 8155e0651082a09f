"""Parts with weights in Axolotl's tokens and in ours: every difference has a reason in docs/differences.md."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.core.conversation import Role
from chatmill.label.presets import find_policy
from chatmill.read.conversations import ConversationFile
from chatmill.read.record_shape import conversation_of
from chatmill.read.shapes import find_shape
from chatmill.render.registry import bind
from chatmill.render.render import render
from tests.compiler.builds import write_jsonl
from tests.conftest import CONVERSATION_FILES
from tests.data.tokenizer_files import loaded, unpacked
from tests.export.test_own_readers import read_by

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PLAIN += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def with_parts(rng: random.Random, text: str) -> list[dict[str, Any]]:
    """A text in parts, of which some are not trained, cut anywhere or before a space."""
    cuts = sorted({0, len(text), *rng.sample(range(len(text) + 1), min(4, len(text)))})
    if rng.random() < 0.5:
        cuts = sorted({0, len(text), *(text.find(" ", cut) for cut in cuts)} - {-1})
    parts = [{"type": "text", "text": text[a:b]} for a, b in itertools.pairwise(cuts)]
    for number, part in enumerate(parts):
        if number % 2:
            part["train"] = False
    return parts


def with_detail(rng: random.Random, text: str) -> list[dict[str, Any]]:
    """Spans of a text, with gaps between them."""
    edges = sorted(rng.sample(range(len(text)), min(6, len(text) // 2 * 2)))
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [{"begin_offset": a, "end_offset": b, "train": rng.random() < 0.7} for a, b in pairs]


def records(rng: random.Random) -> list[dict[str, Any]]:
    """Real conversations whose answers have parts or spans."""
    found = []
    for path in CONVERSATION_FILES:
        for conversation in itertools.islice(ConversationFile(path), 12):
            messages = []
            for message in conversation.messages:
                if message.role not in (Role.USER, Role.ASSISTANT, Role.SYSTEM) or not message.content.strip():
                    break
                entry: dict[str, Any] = {"role": message.role.value, "content": message.content}
                if message.role is Role.ASSISTANT and len(message.content) > 12:
                    if rng.random() < 0.5:
                        entry["content"] = with_parts(rng, message.content)
                    else:
                        entry["train_detail"] = with_detail(rng, message.content)
                messages.append(entry)
            if len(messages) > 1:
                found.append({"messages": messages})
    return found


@pytest.mark.trainers
def test_parts_are_trained_as_by_axolotl_but_for_tokens_of_two_parts(tmp_path: Path) -> None:
    """The ids are equal; what differs are tokens on the border of two parts, as docs/differences.md has it."""
    (tmp_path / "plain.jinja").write_text(f"{{#-\nchatmill: template\nstops: <|im_end|>\n-#}}{PLAIN}")
    lines = records(random.Random(1))
    write_jsonl(tmp_path / "rows.jsonl", lines)
    names = [str(tmp_path / "rows.jsonl"), str(unpacked("qwen3")), str(tmp_path / "plain.jinja")]
    theirs = read_by("axolotl", "axolotl_parts", tmp_path, *names)
    template = bind(str(tmp_path / "plain.jinja"), loaded("qwen3"))
    counts: Counter[str] = Counter()
    for line, (ids, is_trained) in zip(lines, theirs, strict=True):
        rendered = render([conversation_of(line, find_shape("openai"))], template)
        tokens = rendered.tokens
        weights = tokens.per_token(find_policy("assistant").run_weights(tokens))
        assert tokens.ids.tolist() == ids
        is_trained_here, is_trained_there = weights > 0, np.array(is_trained)
        counts["rows"] += 1
        counts["by both"] += int(np.count_nonzero(is_trained_here & is_trained_there))
        counts["by axolotl alone"] += int(np.count_nonzero(~is_trained_here & is_trained_there))
        counts["here alone"] += int(np.count_nonzero(is_trained_here & ~is_trained_there))
        counts["of several weights"] += int(rendered.mixed.sum())
    assert counts == {
        "rows": 207,
        "by both": 13822,
        "by axolotl alone": 539,
        "here alone": 2,
        "of several weights": 763,
    }
