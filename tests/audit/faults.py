"""The seeded faults: each is put into a clean set, and must be found under its own name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from chatmill import Conversation, Message, Role
from chatmill.render.model_template import ModelTemplate
from tests.audit.sets import (
    Fault,
    Row,
    bound_template,
    clean_rows,
    control,
    edit_spans,
    joined,
    moved,
    relabel,
    spans,
    trained_of,
    with_tokens,
    without,
)

Put = Callable[[list[Row], ModelTemplate], list[Row]]


def _each(change: Callable[[Row, ModelTemplate], Row]) -> Put:
    return lambda rows, bound: [change(row, bound) for row in rows]


def _some(change: Callable[[Row, ModelTemplate], Row]) -> Put:
    return lambda rows, bound: [change(row, bound) if number % 3 == 1 else row for number, row in enumerate(rows)]


def _clear(mask: np.ndarray[Any, Any], first: int, last: int) -> None:
    mask[first:last] = False


def _train(before: int, behind: int) -> Callable[[np.ndarray[Any, Any], int, int], None]:
    def edit(mask: np.ndarray[Any, Any], first: int, last: int) -> None:
        mask[first - before : first] = True
        mask[last : last + behind] = True

    return edit


def _spelled(row: Row, bound: ModelTemplate) -> Row:
    """The second byte of the first question becomes the token that ends turns."""
    at = row["input_ids"].index(control(bound, "<|im_start|>")) + len("user\n") + 4
    return with_tokens(row, at, [control(bound, "<|im_end|>")])


def _answer_spells(row: Row, bound: ModelTemplate) -> Row:
    first, _ = spans(row)[-1]
    return with_tokens(row, first + 4, [control(bound, "<|im_end|>")], trained=True)


def _strange(row: Row, bound: ModelTemplate) -> Row:
    first, _ = spans(row)[-1]
    return with_tokens(row, first + 3, [control(bound, "<|bos|>")], trained=True)


def _padded(rows: list[Row], bound: ModelTemplate) -> list[Row]:
    size = max(len(row["input_ids"]) for row in rows)
    made = []
    for row in rows:
        left = size - len(row["input_ids"])
        pad = [control(bound, "<|im_end|>")] * left
        made.append(
            {
                "input_ids": row["input_ids"] + pad,
                "labels": row["labels"] + pad,
                "attention_mask": [1] * len(row["input_ids"]) + [0] * left,
            }
        )
    return made


def _cut(rows: list[Row], bound: ModelTemplate) -> list[Row]:
    size = sorted(len(row["input_ids"]) for row in rows)[len(rows) // 2] - 6
    return [{name: values[:size] for name, values in row.items()} for row in rows]


def _no_stop(row: Row, bound: ModelTemplate) -> Row:
    return without(row, [last - 1 for _, last in spans(row)])


def _eos_behind(row: Row, bound: ModelTemplate) -> Row:
    _, last = spans(row)[-1]
    return with_tokens(row, last, [row["input_ids"][last - 1]], trained=True)


def _other_template(rows: list[Row], bound: ModelTemplate) -> list[Row]:
    """The same conversations by a template that writes its headers in another way."""
    return [_reworded(row, bound) for row in rows]


def _reworded(row: Row, bound: ModelTemplate) -> Row:
    """`assistant` without the newline after it, but for answers that begin with one themselves."""
    ids, header = row["input_ids"], bound.tokenizer.encode("assistant\n")
    behind = [n + len(header) for n in range(len(ids)) if ids[n : n + len(header)] == header]
    return without(row, [n - 1 for n in behind if ids[n] != header[-1]])


def _plain_text(rows: list[Row], bound: ModelTemplate) -> list[Row]:
    specials = set(bound.tokenizer.control_ids.values())
    return [without(row, [n for n, one in enumerate(row["input_ids"]) if one in specials]) for row in rows]


def _shifted_labels(by: int) -> Put:
    def change(row: Row, bound: ModelTemplate) -> Row:
        labels = row["labels"][by:] + [-100] * by if by > 0 else [-100] * -by + row["labels"][:by]
        return row | {"labels": labels}

    return _each(change)


def _wrong_labels(row: Row, bound: ModelTemplate) -> Row:
    labels = list(row["labels"])
    labels[spans(row)[0][0]] += 1
    return row | {"labels": labels}


def _role_trained(row: Row, bound: ModelTemplate) -> Row:
    mask = trained_of(row)
    mask[6:12] = True
    return relabel(row, mask)


def _other_text(row: Row, bound: ModelTemplate) -> Row:
    first, _ = spans(row)[-1]
    ids, labels = list(row["input_ids"]), list(row["labels"])
    ids[first + 2] = labels[first + 2] = ids[first + 2] ^ 1
    return {"input_ids": ids, "labels": labels}


def _bos(change: Callable[[Row, int], Row]) -> Put:
    return _each(lambda row, bound: change(row, control(bound, "<|begin_of_text|>")))


def _packed_inside(rows: list[Row], bound: ModelTemplate) -> list[Row]:
    packed = joined(rows, 3, boundaries="seq_lengths")
    for row in packed:
        row["seq_lengths"][0] -= 5
        row["seq_lengths"][1] += 5
    return packed


def _too_long(rows: list[Row], bound: ModelTemplate) -> list[Row]:
    packed = joined(rows, 3, boundaries="seq_lengths")
    packed[0]["seq_lengths"][-1] += 7
    return packed


def _changed_trained(rows: list[Row], bound: ModelTemplate) -> list[Row]:
    """Every answer of the whole conversation is trained, also those that it shows without their reasoning."""
    from dataclasses import replace

    from chatmill.render.jinja.options import Expand
    from chatmill.render.registry import bind, find_template, given_options

    given = replace(given_options(None, "2026-01-01"), expand=Expand.NONE)
    return clean_rows(bind(find_template("qwen3"), bound.tokenizer, given))


def _without_reasoning(row: Row, bound: ModelTemplate) -> Row:
    """Everything is trained but the reasoning of the last answer and the newlines after it."""
    mask, ids = trained_of(row), row["input_ids"]
    first, last = spans(row)[-1]
    closing = control(bound, "</think>")
    if closing in ids[first:last]:
        mask[first : ids.index(closing, first) + 3] = False
    return relabel(row, mask)


def _in_pieces(row: Row, bound: ModelTemplate) -> Row:
    """The text of the first answer, each letter by itself."""
    first, last = spans(row)[0]
    text = bound.tokenizer.decode(row["input_ids"][first : last - 1])
    pieces = [one for letter in text for one in bound.tokenizer.encode(letter)]
    return _replaced(row, first, last - 1, pieces)


def _replaced(row: Row, first: int, last: int, ids: list[int]) -> Row:
    return {
        "input_ids": [*row["input_ids"][:first], *ids, *row["input_ids"][last:]],
        "labels": [*row["labels"][:first], *ids, *row["labels"][last:]],
    }


def _merged(row: Row, bound: ModelTemplate) -> Row:
    """The newline of the prompt and the one that begins the answer as one token."""
    first, _ = spans(row)[0]
    newline, two = bound.tokenizer.encode("\n"), bound.tokenizer.encode("\n\n")
    return _replaced(row, first - 1, first + 1, two) if row["input_ids"][first : first + 1] == newline else row


def _of_nobody(rows: list[Row], bound: ModelTemplate) -> list[Row]:
    """A document that no record of the source gives."""
    told = (Message(Role.USER, "Who won?"), Message(Role.ASSISTANT, "Nobody did, after extra time."))
    return [*rows, *clean_rows(bound, [Conversation(told)])]


TEXT = frozenset({"text_differs"})
"""A token that was put into a text makes it another text."""
CUT = frozenset({"stop_missing", "truncated", "template_differs", "text_differs"})
FAULTS = (
    Fault("mask one early", "mask_shifted", moved(-1)),
    Fault("mask one late", "mask_shifted", moved(1)),
    Fault("mask three early", "mask_shifted", moved(-3), "llama3"),
    Fault("labels shifted for the trainer", "labels_shifted", _shifted_labels(1)),
    Fault("labels shifted the wrong way", "labels_shifted", _shifted_labels(-1)),
    Fault("labels that are other ids", "labels_differ", _each(_wrong_labels)),
    Fault("all-ones mask", "mask_full", _each(lambda row, bound: relabel(row, [True] * len(row["input_ids"])))),
    Fault("all-zeros mask", "mask_empty", _some(lambda row, bound: relabel(row, [False] * len(row["input_ids"])))),
    Fault("no mask", "mask_full", _each(lambda row, bound: {"input_ids": row["input_ids"]})),
    Fault("newline of the prompt trained", "prompt_trained", edit_spans(_train(1, 0))),
    Fault("header trained", "prompt_trained", edit_spans(_train(2, 0)), "llama3"),
    Fault("user text trained", "context_trained", _each(_role_trained)),
    Fault("newline after the stop trained", "behind_stop_trained", edit_spans(_train(0, 1))),
    Fault("stop not trained", "stop_untrained", edit_spans(lambda mask, first, last: _clear(mask, last - 1, last))),
    Fault("stop dropped", "stop_missing", _each(_no_stop)),
    Fault("stop of the last answers dropped", "stop_missing", _some(_no_stop)),
    Fault("stop twice", "stop_twice", _each(_eos_behind)),
    Fault(
        "answers not trained",
        "answer_untrained",
        _some(lambda row, bound: relabel(row, _only_first(row))),
        alone="last_untrained",
    ),
    Fault(
        "beginnings of answers not trained",
        "answer_partly_trained",
        edit_spans(lambda mask, first, last: _clear(mask, first, first + 2)),
    ),
    Fault(
        "middles of answers not trained",
        "answer_partly_trained",
        edit_spans(lambda mask, first, last: _clear(mask, first + 3, first + 5)),
        "glm4_5",
    ),
    Fault("padding trained", "padding_trained", _padded),
    Fault("bos trained", "bos_trained", _bos(lambda row, bos: relabel(row, [True, *trained_of(row)[1:]])), "llama3"),
    Fault("two bos", "bos_twice", _bos(lambda row, bos: with_tokens(row, 0, [bos])), "llama3"),
    Fault("bos dropped", "bos_missing", _bos(lambda row, bos: without(row, [0])), "llama3"),
    Fault("user text spells the stop", "special_from_text", _each(_spelled), others=TEXT),
    Fault("answers spell the stop", "special_from_text", _each(_answer_spells), others=TEXT),
    Fault("text spells another special token", "special_from_text", _some(_strange), "axolotl chatml", TEXT),
    Fault("answers cut", "truncated", _cut),
    Fault("packed without boundaries", "unbounded", lambda rows, bound: joined(rows, 3), "llama3"),
    Fault("boundaries inside conversations", "boundary_inside", _packed_inside, others=CUT),
    Fault("boundaries longer than the row", "wrong_boundaries", _too_long, others=frozenset({"unbounded"})),
    Fault("rows twice", "duplicates", lambda rows, bound: [*rows, *rows[:3]]),
    Fault("other header", "template_differs", _other_template),
    Fault("no template", "template_differs", _plain_text, others=CUT),
    Fault(
        "ids of another vocabulary",
        "outside_vocabulary",
        _some(lambda row, bound: with_tokens(row, 8, [9_999])),
        others=TEXT,
    ),
    Fault("other text", "text_differs", _some(_other_text), needs_source=True),
    Fault("changed turns trained", "changed_trained", _changed_trained, "qwen3", needs_source=True),
    Fault("reasoning not trained", "reasoning_untrained", _each(_without_reasoning), "qwen3"),
    Fault("ids of letters", "other_ids", _each(_in_pieces), "chatml, real"),
    Fault("newlines merged", "merged_at_border", _each(_merged), "chatml, real"),
    Fault("a document of nobody", "no_record", _of_nobody, needs_source=True),
    Fault("packed without boundaries or bos", "unbounded", lambda rows, bound: joined(rows, 3), needs_source=True),
)


def _only_first(row: Row) -> np.ndarray[Any, Any]:
    """The mask with its last stretch taken away, or all of it but one answer."""
    mask = trained_of(row)
    first, last = spans(row)[-1]
    if len(spans(row)) > 1:
        mask[first:last] = False
    return mask


__all__ = ["FAULTS", "bound_template"]
