"""Clean sets of token data, and faults to put into them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import cache
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
CLEAN = {
    "chatml": "chatml",
    "llama3": "llama3",
    "qwen2_5": "qwen2_5",
    "qwen3": "qwen3",
    "qwen3_2507": "qwen3_2507",
    "glm4_5": "glm4_5",
    "phi4": "phi4",
    "granite": "granite",
    "mistral_nemo": "mistral_nemo",
    "gpt_oss": "gpt_oss",
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


def conversations() -> list[Conversation]:
    """Small conversations of several kinds; no two are alike."""
    made = []
    for n in range(12):
        turns = [Message(Role.USER, f"Question {n}, please?"), Message(Role.ASSISTANT, f"Answer number {n}, and why.")]
        if n % 3 == 0:
            turns.insert(0, Message(Role.SYSTEM, f"Be brief, {n}."))
        if n % 2:
            turns += [
                Message(Role.USER, f"And then, {n} times?\n"),
                Message(
                    Role.ASSISTANT,
                    f"Second answer {n}: \u00fc\u4e2d.",
                    reasoning=f"Thought {n}." if n % 4 == 1 else None,
                ),
            ]
        if n == 10:
            turns[-1] = Message(Role.ASSISTANT, "\nThe tenth answer begins with a newline.")
        if n == 4:
            call = ToolCall("get_weather", '{"city": "Oslo"}', "callid001")
            turns[-1] = Message(Role.ASSISTANT, "", tool_calls=(call,))
            turns += [
                Message(Role.TOOL, "4 degrees", tool_call_id="callid001", name="get_weather"),
                Message(Role.ASSISTANT, "It is 4 degrees."),
            ]
        made.append(Conversation(tuple(turns)))
    return made


def clean_rows(bound: ModelTemplate, chats: Sequence[Conversation] | None = None) -> list[Row]:
    """What Chatmill makes of conversations, as a trainer reads it."""
    rendered = render(conversations() if chats is None else chats, bound, collect_failures=True)
    tokens = rendered.tokens
    trained = tokens.per_token(find_policy("assistant").run_weights(tokens)) > 0
    rows = []
    for first, last in zip(tokens.offsets[:-1].tolist(), tokens.offsets[1:].tolist(), strict=True):
        ids = tokens.ids[first:last]
        labels = np.where(trained[first:last], ids, -100)
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, and the code it must be found by."""

    name: str
    code: str
    put: Callable[[list[Row], ModelTemplate], list[Row]]
    template: str = "chatml"
    others: frozenset[str] = frozenset()
    """Codes that may be found next to it, because they are true as well."""
    needs_source: bool = False
    """Without the source nobody can know."""
    alone: str = ""
    """The code without the source, where it is another one."""


def control(bound: ModelTemplate, name: str) -> int:
    return bound.tokenizer.control(name)


def relabel(row: Row, trained: Sequence[bool] | np.ndarray[Any, Any]) -> Row:
    """A row with another mask."""
    return row | {"labels": [i if t else -100 for i, t in zip(row["input_ids"], trained, strict=True)]}


def trained_of(row: Row) -> np.ndarray[Any, Any]:
    return np.array(row["labels"]) != -100


def spans(row: Row) -> list[tuple[int, int]]:
    """First and last + 1 of each trained stretch."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], trained_of(row).astype(int), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def moved(by: int) -> Callable[[list[Row], ModelTemplate], list[Row]]:
    """The mask of every row, moved."""

    def put(rows: list[Row], bound: ModelTemplate) -> list[Row]:
        changed = []
        for row in rows:
            mask = np.roll(trained_of(row), by)
            mask[: max(by, 0)] = False
            changed.append(relabel(row, mask))
        return changed

    return put


def edit_spans(
    edit: Callable[[np.ndarray[Any, Any], int, int], None], *, which: Callable[[int], bool] = lambda number: True
) -> Callable[[list[Row], ModelTemplate], list[Row]]:
    """Change the mask at every trained stretch of some rows."""

    def put(rows: list[Row], bound: ModelTemplate) -> list[Row]:
        changed = []
        for number, row in enumerate(rows):
            mask = trained_of(row)
            for first, last in spans(row) if which(number) else ():
                edit(mask, first, last)
            changed.append(relabel(row, mask))
        return changed

    return put


def without(row: Row, places: Sequence[int]) -> Row:
    """A row without some tokens."""
    kept = [n for n in range(len(row["input_ids"])) if n not in set(places)]
    return {name: [values[n] for n in kept] for name, values in row.items()}


def with_tokens(row: Row, at: int, ids: Sequence[int], *, trained: bool = False) -> Row:
    """A row with more tokens at a place."""
    labels = list(ids) if trained else [-100] * len(ids)
    return {
        "input_ids": [*row["input_ids"][:at], *ids, *row["input_ids"][at:]],
        "labels": [*row["labels"][:at], *labels, *row["labels"][at:]],
    }


def joined(rows: Sequence[Row], size: int, *, boundaries: str = "") -> list[Row]:
    """Rows packed by so many, with or without boundaries."""
    packed = []
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        row = {name: [value for one in part for value in one[name]] for name in ("input_ids", "labels")}
        lengths = [len(one["input_ids"]) for one in part]
        if boundaries == "seq_lengths":
            row["seq_lengths"] = lengths
        elif boundaries == "position_ids":
            row["position_ids"] = [n for length in lengths for n in range(length)]
        elif boundaries == "seq_start_id":
            row["seq_start_id"] = np.cumsum([0, *lengths[:-1]]).tolist()
        packed.append(row)
    return packed
