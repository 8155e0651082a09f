"""Texts to blocks with explicit document starts, checked against the specification written out as loops."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from chatmill.systems.document_boundaries import block_tokenize_fn
from chatmill.tokenizer.byte_level import byte_tokenizer
from chatmill.tokenizer.tokenizer import Tokenizer

BOTH = byte_tokenizer()
NEITHER = byte_tokenizer([])
EOS_ONLY = byte_tokenizer(["<|eos|>"])
BOS_ONLY = byte_tokenizer(["<|bos|>"])
Block = list[list[int]]
"""The pieces of one block, each a list of ids."""


def reference(
    texts: list[str],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    overflow: bool,
    packed: bool,
    packing_strategy: str,
    shuffle_output: bool,
    seed: int,
    stride: int,
    min_len: int,
    max_len: int | None,
    add_bos: bool,
    add_eos: bool,
) -> dict[str, list[list[int]]]:
    """The page, sentence by sentence, one token list at a time."""
    bos = [tokenizer.bos_id] if add_bos and tokenizer.bos_id is not None else []
    eos = [tokenizer.eos_id] if add_eos and tokenizer.eos_id is not None else []
    documents = []
    for text in texts:
        ids = list(text.encode())
        if len(ids) >= min_len and (max_len is None or len(ids) <= max_len) and bos + ids + eos:
            documents.append(bos + ids + eos)

    def pieces_of(document: list[int], room: int) -> list[list[int]]:
        if not overflow:
            return [document[:max_length]]
        pieces, end = [document[:room]], min(room, len(document))
        while end < len(document):
            start = max(end - stride, len(bos))  # the document's own BOS is not repeated after the piece's
            end = min(start + max_length - len(bos), len(document))
            pieces.append(bos + document[start:end])
        return pieces

    blocks: list[Block] = []
    if not packed:
        blocks = [[piece] for document in documents for piece in pieces_of(document, max_length)]
    elif packing_strategy == "greedy":
        for document in documents:
            room = max_length - sum(map(len, blocks[-1])) if blocks else 0
            if room == 0 or (not overflow and len(document[:max_length]) > room):
                blocks.append([])
                room = max_length
            first, *later = pieces_of(document, room)
            blocks[-1].append(first)
            blocks += [[piece] for piece in later]
    else:
        numbered = [
            (d, p, piece)
            for d, document in enumerate(documents)
            for p, piece in enumerate(pieces_of(document, max_length))
        ]
        for _, _, piece in sorted(numbered, key=lambda n: (-len(n[2]), n[0], n[1])):
            rooms = [max_length - sum(map(len, block)) for block in blocks]
            fitting = [b for b, room in enumerate(rooms) if room >= len(piece)]
            if not fitting:
                blocks.append([piece])
            elif packing_strategy == "best_fit":
                blocks[min(fitting, key=lambda b: (rooms[b], b))].append(piece)
            else:
                blocks[fitting[0]].append(piece)

    blocks = [block for block in blocks if sum(map(len, block)) >= min_len]
    if shuffle_output:
        blocks = [blocks[i] for i in np.random.RandomState(seed).permutation(len(blocks))]
    return {
        "input_ids": [[i for piece in block for i in piece] for block in blocks],
        "document_starts": [[sum(map(len, block[:number])) for number in range(len(block))] for block in blocks],
    }


def page_options(**changed: Any) -> dict[str, Any]:
    options = {
        "max_length": 8,
        "overflow": True,
        "packed": True,
        "packing_strategy": "greedy",
        "shuffle_output": False,
        "seed": 42,
        "stride": 0,
        "min_len": 1,
        "max_len": None,
        "add_bos": True,
        "add_eos": True,
    }
    assert set(changed) <= set(options)
    return options | changed


@settings(max_examples=600)
@given(
    lengths=st.lists(st.integers(0, 25), max_size=14),
    tokenizer=st.sampled_from([BOTH, NEITHER, EOS_ONLY, BOS_ONLY]),
    options=st.fixed_dictionaries(
        {
            "max_length": st.integers(1, 12),
            "overflow": st.booleans(),
            "packed": st.sampled_from([True, True, False]),
            "packing_strategy": st.sampled_from(["greedy", "best_fit", "first_fit"]),
            "shuffle_output": st.booleans(),
            "seed": st.integers(0, 3),
            "stride": st.integers(0, 11),
            "min_len": st.integers(0, 4),
            "max_len": st.sampled_from([None, 5, 20]),
            "add_bos": st.booleans(),
            "add_eos": st.booleans(),
        }
    ),
)
@example(lengths=[3, 12, 2, 9], tokenizer=BOTH, options=page_options(max_length=6, stride=4))
@example(lengths=[4, 12], tokenizer=BOTH, options=page_options(max_length=7))
@example(lengths=[5, 12], tokenizer=NEITHER, options=page_options(max_length=6, stride=5))
def test_blocks_equal_the_page_written_out(lengths: list[int], tokenizer: Tokenizer, options: dict[str, Any]) -> None:
    with_bos = options["add_bos"] and tokenizer.bos_id is not None
    assume(options["stride"] < options["max_length"] - with_bos)
    # Every token names its document and place, so that no two pieces can be mistaken for each other.
    texts = ["".join(chr(1 + (17 * d + t) % 120) for t in range(n)) for d, n in enumerate(lengths)]
    expected = reference(texts, tokenizer, **options)
    assert block_tokenize_fn({"text": texts}, tokenizer, "text", **options) == expected


def run(texts: list[str], tokenizer: Any = NEITHER, **options: Any) -> dict[str, list[list[int]]]:
    return block_tokenize_fn({"text": texts}, tokenizer, "text", **options)


def as_text(made: dict[str, list[list[int]]], tokenizer: Tokenizer = BOTH) -> list[list[str]]:
    """Each block as the texts between its starts, BOS as ^ and EOS as $."""
    shown = []
    for block, starts in zip(made["input_ids"], made["document_starts"], strict=True):
        ends = [*starts[1:], len(block)]
        pieces = [tokenizer.decode(block[a:b]) for a, b in zip(starts, ends, strict=True)]
        shown.append([piece.replace("<|bos|>", "^").replace("<|eos|>", "$") for piece in pieces])
    return shown


def test_the_example_of_the_page() -> None:
    made = run(["abc", "de", "fgh"], max_length=10, packed=True, packing_strategy="best_fit")
    assert made == {"input_ids": [list(b"abcfghde")], "document_starts": [[0, 3, 6]]}


def test_one_document_per_block_is_the_default() -> None:
    made = run(["abc", "defghijklmn"], BOTH, max_length=6)
    assert as_text(made) == [["^abc$"], ["^defgh"], ["^ijklm"], ["^n$"]]
    assert made["document_starts"] == [[0]] * 4


def test_greedy_splits_at_the_end_of_the_block() -> None:
    made = run(["abc", "defghijk", "l"], BOTH, max_length=8, packed=True)
    assert as_text(made) == [["^abc$", "^de"], ["^fghijk$"], ["^l$"]]
    assert made["document_starts"] == [[0, 5], [0], [0]]


def test_stride_repeats_the_end_of_the_piece_before() -> None:
    assert as_text(run(["abcdefghij"], max_length=4, stride=1), NEITHER) == [["abcd"], ["defg"], ["ghij"]]
    assert as_text(run(["abcdefgh"], BOTH, max_length=5, stride=2)) == [
        ["^abcd"],
        ["^cdef"],
        ["^efgh"],
        ["^gh$"],
    ]


def test_control_tokens_in_the_text_are_recognised() -> None:
    assert run(["a<|eos|>b"], BOTH, add_bos=False, add_eos=False)["input_ids"] == [[97, BOTH.eos_id, 98]]


@pytest.mark.parametrize("pattern", [r"\n+END", re.compile(r"\n+END")])
def test_truncate_at_cuts_the_text_at_the_first_match(pattern: Any) -> None:
    made = run(["ab\n\nEND c\nEND d", "no match"], truncate_at=pattern)
    assert as_text(made, NEITHER) == [["ab"], ["no match"]]


@pytest.mark.parametrize("max_length", [5, 6])
def test_a_stride_that_never_advances_is_an_error(max_length: int) -> None:
    with pytest.raises(ValueError, match="stride is 5"):
        run(["abc"], BOTH, max_length=max_length, stride=5)
    with pytest.raises(ValueError, match="stride is -1"):
        run(["abc"], BOTH, max_length=max_length, stride=-1)


def test_wrong_options_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="greedy, best_fit, first_fit"):
        run(["a"], packed=True, packing_strategy="in_order")
    with pytest.raises(ValueError, match=r"unknown feature 'txt'.*Known: id, text"):
        block_tokenize_fn({"text": ["a"], "id": ["1"]}, NEITHER, "txt")
    with pytest.raises(ValueError, match="max_length is 0"):
        run(["a"], max_length=0)
    with pytest.raises(ValueError, match="truncate_at"):
        run(["a"], truncate_at="(")
    with pytest.raises(ValueError, match="row 1: a text is wanted, not NoneType"):
        run(["a", None])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="batched=True"):
        run("abc")  # type: ignore[arg-type]


def test_no_token_is_touched_by_python() -> None:
    """Guards the shape of the work: far fewer lines are executed than there are tokens."""
    import sys

    from chatmill.core.tokens import offsets_of

    lengths = np.random.RandomState(0).lognormal(4.0, 1.0, 100_000).astype(np.int64) + 1

    class Ready:
        eos_id, bos_id, pad_id = 1, 2, None

        def encode_documents(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
            return np.full(int(lengths.sum()), 7, dtype=np.int32), offsets_of(lengths)

    lines = 0

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        made = block_tokenize_fn({"t": [""] * len(lengths)}, Ready(), "t", max_length=2048, packed=True)
    finally:
        sys.settrace(before)
    assert lines < lengths.sum() / 5
    assert sum(i == 7 for i in made["input_ids"][0]) > 1900
