"""The seeded faults: each is put into a clean set, and must be found under its own name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from chatmill.render.jinja.options import Expand
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind, find_template, given_options
from tests.audit.sets import DAY, Row, clean_rows, joined, relabel, said, spans, spliced, trained_of

Change = Callable[[Row, ModelTemplate], Row]
Put = Callable[[list[Row], ModelTemplate], list[Row]]


@dataclass(frozen=True)
class Fault:
    """A fault, and the code it must be found by."""

    name: str
    code: str
    put: Put
    template: str = "chatml"
    others: frozenset[str] = frozenset()
    """Codes that may be found next to it, because they are true as well."""
    needs_source: bool = False
    """Without the source nobody can know."""
    alone: str = ""
    """The code without the source, where it is another one."""


def _each(change: Change) -> Put:
    return lambda rows, bound: [change(row, bound) for row in rows]


def _some(change: Change) -> Put:
    return lambda rows, bound: [change(row, bound) if number % 3 == 1 else row for number, row in enumerate(rows)]


def masked(edge: int, first: int, last: int, trained: bool) -> Change:
    """The mask of some tokens changed, counted from the begin (edge 0) or the end (edge 1) of each trained stretch."""

    def change(row: Row, bound: ModelTemplate) -> Row:
        mask = trained_of(row)
        for span in spans(row):
            mask[span[edge] + first : span[edge] + last] = trained
        return relabel(row, mask)

    return change


def _moved(by: int) -> Put:
    """The mask of every row, moved."""

    def change(row: Row, bound: ModelTemplate) -> Row:
        mask = np.roll(trained_of(row), by)
        mask[: max(by, 0)] = False
        return relabel(row, mask)

    return _each(change)


def _all(trained: bool) -> Change:
    return lambda row, bound: relabel(row, [trained] * len(row["input_ids"]))


def _without(row: Row, places: list[int]) -> Row:
    kept = sorted(set(range(len(row["input_ids"]))) - set(places))
    return {name: [values[n] for n in kept] for name, values in row.items()}


def _control(name: str, behind: str = "", after: int = 0) -> Change:
    """A control token in a text: some tokens after the first `behind`, or after the begin of the last answer."""

    def change(row: Row, bound: ModelTemplate) -> Row:
        token = bound.tokenizer.control(name)
        at = (row["input_ids"].index(bound.tokenizer.control(behind)) if behind else spans(row)[-1][0]) + after
        return spliced(row, at, at, [token], trained=not behind)

    return change


def _padded(rows: list[Row], bound: ModelTemplate) -> list[Row]:
    size = max(len(row["input_ids"]) for row in rows)
    made = []
    for row in rows:
        used, pad = len(row["input_ids"]), [bound.tokenizer.control("<|im_end|>")] * (size - len(row["input_ids"]))
        seen = [1] * used + [0] * len(pad)
        made.append(spliced(row, used, used, pad, trained=True) | {"attention_mask": seen})
    return made


def _hidden(name: str) -> Change:
    """A mask made as `ids != pad`, where the pad token is also the stop."""

    def change(row: Row, bound: ModelTemplate) -> Row:
        stop = bound.tokenizer.control(name)
        return row | {"attention_mask": [int(one != stop) for one in row["input_ids"]]}

    return change


def _padded_by_eos(rows: list[Row], bound: ModelTemplate) -> list[Row]:
    """Rows padded with their stop, whose mask hides the last stop as well."""
    made = []
    for row in rows:
        used = len(row["input_ids"])
        padded = spliced(row, used, used, row["input_ids"][-1:] * 4, trained=False)
        made.append(padded | {"attention_mask": [1] * (used - 1) + [0] * 5})
    return made


def _cut(rows: list[Row], bound: ModelTemplate) -> list[Row]:
    size = sorted(len(row["input_ids"]) for row in rows)[len(rows) // 2] - 6
    return [{name: values[:size] for name, values in row.items()} for row in rows]


def _no_stop(row: Row, bound: ModelTemplate) -> Row:
    return _without(row, [last - 1 for _, last in spans(row)])


def _stop_twice(row: Row, bound: ModelTemplate) -> Row:
    _, last = spans(row)[-1]
    return spliced(row, last, last, [row["input_ids"][last - 1]], trained=True)


def _other_header(row: Row, bound: ModelTemplate) -> Row:
    """`assistant` without the newline after it, but for answers that begin with one themselves."""
    ids, header = row["input_ids"], bound.tokenizer.encode("assistant\n")
    behind = [n + len(header) for n in range(len(ids)) if ids[n : n + len(header)] == header]
    return _without(row, [n - 1 for n in behind if ids[n] != header[-1]])


def _plain_text(row: Row, bound: ModelTemplate) -> Row:
    specials = set(bound.tokenizer.control_ids.values())
    return _without(row, [n for n, one in enumerate(row["input_ids"]) if one in specials])


def _last_untrained(row: Row, bound: ModelTemplate) -> Row:
    """The mask with its last stretch taken away, if there is another."""
    mask, (first, last) = trained_of(row), spans(row)[-1]
    mask[first:last] &= len(spans(row)) == 1
    return relabel(row, mask)


def _shifted_labels(by: int) -> Put:
    def change(row: Row, bound: ModelTemplate) -> Row:
        labels = row["labels"][by:] + [-100] * by if by > 0 else [-100] * -by + row["labels"][:by]
        return row | {"labels": labels}

    return _each(change)


def _wrong_labels(row: Row, bound: ModelTemplate) -> Row:
    first, _ = spans(row)[0]
    return row | {"labels": [label + (n == first) for n, label in enumerate(row["labels"])]}


def _role_trained(row: Row, bound: ModelTemplate) -> Row:
    mask = trained_of(row)
    mask[6:12] = True
    return relabel(row, mask)


def _other_text(row: Row, bound: ModelTemplate) -> Row:
    at = spans(row)[-1][0] + 2
    return spliced(row, at, at + 1, [row["input_ids"][at] ^ 1], trained=True)


def _lengths(changes: dict[int, int], rows_changed: slice) -> Put:
    """Rows packed by three, with other lengths of documents in some."""

    def put(rows: list[Row], bound: ModelTemplate) -> list[Row]:
        packed = joined(rows, 3, boundaries="seq_lengths")
        for row in packed[rows_changed]:
            for place, change in changes.items():
                row["seq_lengths"][place] += change
        return packed

    return put


def _changed_trained(rows: list[Row], bound: ModelTemplate) -> list[Row]:
    """Every answer of the whole conversation is trained, also those that it shows without their reasoning."""
    given = replace(given_options(None, DAY), expand=Expand.NONE)
    return clean_rows(bind(find_template("qwen3"), bound.tokenizer, given))


def _without_reasoning(row: Row, bound: ModelTemplate) -> Row:
    """Everything is trained but the reasoning of the last answer and the newlines after it."""
    mask, ids, (first, last) = trained_of(row), row["input_ids"], spans(row)[-1]
    closing = bound.tokenizer.control("</think>")
    if closing in ids[first:last]:
        mask[first : ids.index(closing, first) + 3] = False
    return relabel(row, mask)


def _in_pieces(row: Row, bound: ModelTemplate) -> Row:
    """The text of the first answer, each letter by itself."""
    first, last = spans(row)[0]
    text = bound.tokenizer.decode(row["input_ids"][first : last - 1])
    return spliced(row, first, last - 1, [i for letter in text for i in bound.tokenizer.encode(letter)], trained=True)


def _merged(row: Row, bound: ModelTemplate) -> Row:
    """The newline of the prompt and the one that begins the answer as one token."""
    first, _ = spans(row)[0]
    begins = row["input_ids"][first : first + 1] == bound.tokenizer.encode("\n")
    return spliced(row, first - 1, first + 1, bound.tokenizer.encode("\n\n"), trained=True) if begins else row


def _of_nobody(rows: list[Row], bound: ModelTemplate) -> list[Row]:
    """A document that no record of the source gives."""
    return [*rows, *clean_rows(bound, [said("user: Who won?", "assistant: Nobody did, after extra time.")])]


TEXT = frozenset({"record_differs"})
"""A token that was put into a text makes it another text."""
CUT = frozenset({"stop_missing", "truncated", "template_differs", "record_differs"})
FAULTS = (
    Fault("mask one early", "mask_shifted", _moved(-1)),
    Fault("mask one late", "mask_shifted", _moved(1)),
    Fault("mask three early", "mask_shifted", _moved(-3), "llama3"),
    Fault("labels shifted for the trainer", "labels_shifted", _shifted_labels(1)),
    Fault("labels shifted the wrong way", "labels_shifted", _shifted_labels(-1)),
    Fault("labels that are other ids", "labels_differ", _each(_wrong_labels)),
    Fault("all-ones mask", "mask_full", _each(_all(True))),
    Fault("all-zeros mask", "mask_empty", _some(_all(False))),
    Fault("no mask", "mask_full", _each(lambda row, bound: {"input_ids": row["input_ids"]})),
    Fault("newline of the prompt trained", "prompt_trained", _each(masked(0, -1, 0, True))),
    Fault("header trained", "prompt_trained", _each(masked(0, -2, 0, True)), "llama3"),
    Fault("user text trained", "context_trained", _each(_role_trained)),
    Fault("newline after the stop trained", "after_stop_trained", _each(masked(1, 0, 1, True))),
    Fault("stop not trained", "stop_untrained", _each(masked(1, -1, 0, False))),
    Fault("stop dropped", "stop_missing", _each(_no_stop)),
    Fault("stop of the last answers dropped", "stop_missing", _some(_no_stop)),
    Fault("stop twice", "stop_twice", _each(_stop_twice)),
    Fault("answers not trained", "answer_untrained", _some(_last_untrained), alone="some_untrained"),
    Fault("beginnings of answers not trained", "answer_partly_trained", _each(masked(0, 0, 2, False))),
    Fault("middles of answers not trained", "answer_partly_trained", _each(masked(0, 3, 5, False)), "glm4_5"),
    Fault("stops hidden by the mask", "hidden_tokens", _each(_hidden("<|im_end|>"))),
    Fault("last stops hidden by the mask", "hidden_tokens", _padded_by_eos, "llama3"),
    Fault("padding trained", "padding_trained", _padded),
    Fault("bos trained", "bos_wrong", _each(lambda row, _: relabel(row, [True, *trained_of(row)[1:]])), "llama3"),
    Fault("two bos", "bos_wrong", _each(lambda row, bound: spliced(row, 0, 0, row["input_ids"][:1])), "llama3"),
    Fault("bos dropped", "bos_wrong", _each(lambda row, bound: _without(row, [0])), "llama3"),
    Fault(
        "user text spells the stop", "special_from_text", _each(_control("<|im_end|>", "<|im_start|>", 9)), others=TEXT
    ),
    Fault("answers spell the stop", "special_from_text", _each(_control("<|im_end|>", after=4)), others=TEXT),
    Fault("text spells another", "special_from_text", _some(_control("<|bos|>", after=3)), "axolotl chatml", TEXT),
    Fault("answers cut", "truncated", _cut),
    Fault("packed without boundaries", "unbounded", lambda rows, bound: joined(rows, 3), "llama3"),
    Fault("boundaries inside conversations", "wrong_boundaries", _lengths({0: -5, 1: 5}, slice(None)), others=CUT),
    Fault("too long", "wrong_boundaries", _lengths({-1: 7}, slice(1)), others=frozenset({"unbounded"})),
    Fault("other header", "template_differs", _each(_other_header)),
    Fault("no template", "template_differs", _each(_plain_text), others=CUT),
    Fault("other ids", "outside_vocabulary", _some(lambda row, _: spliced(row, 8, 8, [9_999])), others=TEXT),
    Fault("other text", "record_differs", _some(_other_text), needs_source=True),
    Fault("changed turns trained", "changed_trained", _changed_trained, "qwen3", needs_source=True),
    Fault("reasoning not trained", "some_untrained", _each(_without_reasoning), "qwen3"),
    Fault("ids of letters", "other_ids", _each(_in_pieces), "chatml, real"),
    Fault("newlines merged", "other_ids", _each(_merged), "chatml, real"),
    Fault("a document of nobody", "record_differs", _of_nobody, needs_source=True),
    Fault("packed without boundaries or bos", "unbounded", lambda rows, bound: joined(rows, 3), needs_source=True),
)
