"""Clean sets of token data, and what changes their rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from chatmill import Conversation, Message, Role, load_tokenizer
from chatmill.core.conversation import ToolCall
from chatmill.label.presets import find_policy
from chatmill.look.template_probes import byte_vocabulary
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind, find_template, given_options
from chatmill.render.render import render
from tests.data.tokenizer_files import loaded

DATA = Path(__file__).parents[1] / "data"
TEMPLATES = DATA / "templates"
TAGGED = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}

{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501
Row = dict[str, list[int]]
DAY = "2026-01-01"
_NAMES = ("chatml", "llama3", "qwen2_5", "qwen3", "qwen3_2507", "glm4_5", "phi4", "granite", "mistral_nemo", "gpt_oss")
CLEAN = {
    **{name: name for name in _NAMES},
    "qwen3_5": str(TEMPLATES / "llamacpp" / "Qwen3.5-4B.jinja"),
    "axolotl chatml": str(TEMPLATES / "axolotl" / "chatml.jinja"),
}
"""Templates whose sets must give no finding; gpt_oss is one whose turns cannot be found by ids."""


def write_tokenizer(folder: Path, **config: Any) -> Path:
    """A model's folder without weights: a small vocabulary, a template with tags, and what `config.json` has."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((DATA / "tokenizers/tiny_torchtune/tokenizer.json").read_bytes())
    named = {"chat_template": TAGGED, "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    if config:
        (folder / "config.json").write_text(json.dumps({"vocab_size": 2003, **config}))
    return folder


@cache
def bound_template(name: str) -> ModelTemplate:
    """A template with a vocabulary of bytes; with Qwen3's for names that end in `, real`."""
    if name.endswith(", real"):
        return bind(CLEAN[name.removesuffix(", real")], loaded("qwen3"), given_options(None, DAY))
    found = find_template(CLEAN.get(name, name))
    if found.control_tokens:
        tokenizer: Any = load_tokenizer("bytes", control_tokens=found.control_tokens)
    else:
        tokenizer = byte_vocabulary(found.text, "<|bos|>", "<|eos|>")
    return bind(found, tokenizer, given_options(None, DAY))


def said(*texts: str, weight: float | None = None) -> Conversation:
    """A conversation of `user: text` and `assistant: text`; `weight` is that of the last message."""
    turns = [Message(Role(role), text) for role, _, text in (one.partition(": ") for one in texts)]
    return Conversation((*turns[:-1], turns[-1]._replace(weight=weight)))


def conversations() -> list[Conversation]:
    """Small conversations of several kinds; no two are alike."""
    made = []
    for n in range(12):
        turns = [Message(Role.USER, f"Question {n}, please?"), Message(Role.ASSISTANT, f"Answer number {n}, and why.")]
        if n % 3 == 0:
            turns.insert(0, Message(Role.SYSTEM, f"Be brief, {n}."))
        if n % 2:
            reasoning = f"Thought {n}." if n % 4 == 1 else None
            turns.append(Message(Role.USER, f"And then, {n} times?\n"))
            turns.append(Message(Role.ASSISTANT, f"Second answer {n}: \u00fc\u4e2d.", reasoning=reasoning))
        if n == 10:
            turns[-1] = Message(Role.ASSISTANT, "\nThe tenth answer begins with a newline.")
        if n == 4:
            call = ToolCall("get_weather", '{"city": "Oslo"}', "callid001")
            turns[-1] = Message(Role.ASSISTANT, "", tool_calls=(call,))
            turns.append(Message(Role.TOOL, "4 degrees", tool_call_id="callid001", name="get_weather"))
            turns.append(Message(Role.ASSISTANT, "It is 4 degrees."))
        made.append(Conversation(tuple(turns)))
    return made


def clean_rows(bound: ModelTemplate, chats: Sequence[Conversation] | None = None) -> list[Row]:
    """What Chatmill makes of conversations, as a trainer reads it."""
    rendered = render(conversations() if chats is None else chats, bound, collect_failures=True)
    tokens = rendered.tokens
    trained = tokens.per_token(find_policy("assistant").run_weights(tokens)) > 0
    borders = pairwise(tokens.offsets.tolist())
    return [relabel({"input_ids": tokens.ids[first:last].tolist()}, trained[first:last]) for first, last in borders]


def relabel(row: Row, trained: Sequence[bool] | np.ndarray[Any, Any]) -> Row:
    """A row with another mask."""
    return row | {"labels": [i if t else -100 for i, t in zip(row["input_ids"], trained, strict=True)]}


def trained_of(row: Row) -> np.ndarray[Any, Any]:
    return np.array(row["labels"]) != -100


def spans(row: Row) -> list[tuple[int, int]]:
    """First and last + 1 of each trained stretch."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], trained_of(row).astype(int), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def spliced(row: Row, first: int, last: int, ids: Sequence[int], *, trained: bool = False) -> Row:
    """A row with other tokens at a place."""
    labels = list(ids) if trained else [-100] * len(ids)
    values = {"input_ids": list(ids), "labels": labels}
    return {name: [*row[name][:first], *values[name], *row[name][last:]] for name in row}


def joined(rows: Sequence[Row], size: int, *, boundaries: str = "") -> list[Row]:
    """Rows packed by so many, with or without boundaries."""
    packed = []
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        row = {name: [value for one in part for value in one[name]] for name in ("input_ids", "labels")}
        lengths = [len(one["input_ids"]) for one in part]
        columns = {
            "seq_lengths": lengths,
            "position_ids": [n for length in lengths for n in range(length)],
            "seq_start_id": np.cumsum([0, *lengths[:-1]]).tolist(),
        }
        packed.append(row | ({boundaries: columns[boundaries]} if boundaries else {}))
    return packed


def padded(rows: Sequence[Row], fill: int, *, left: bool = False) -> dict[str, Any]:
    """A batch of one width, filled up with a token: only the attention mask says what is padding."""
    width = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in rows:
        pad = width - len(row["input_ids"])
        full = row | {"attention_mask": [1] * len(row["input_ids"])}
        for name, value in (("input_ids", fill), ("labels", -100), ("attention_mask", 0)):
            batch[name].append([value] * pad + full[name] if left else full[name] + [value] * pad)
    return {name: np.array(values) for name, values in batch.items()}
