"""Texts to blocks with explicit document starts, checked against the specification written out as loops."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from chatmill.core.tokens import offsets_of
from chatmill.errors import ChatmillError
from chatmill.systems.document_boundaries import PackOptions, block_tokenize_fn, tokenize_blocks
from chatmill.tokenizer.byte_level import byte_tokenizer
from chatmill.tokenizer.tokenizer import Tokenizer
from tests.cli.run import invoke

BOTH = byte_tokenizer()
NEITHER = byte_tokenizer([])
EOS_ONLY = byte_tokenizer(["<|eos|>"])
BOS_ONLY = byte_tokenizer(["<|bos|>"])
Made = dict[str, list[list[int]]]
Block = list[list[int]]
"""The pieces of one block, each a list of ids."""


def reference(texts: list[str], tokenizer: Tokenizer, o: PackOptions) -> tuple[Made, dict[str, int]]:
    """The page, sentence by sentence, one token list at a time; and the counts of what is left out."""
    bos = [tokenizer.bos_id] if o.add_bos and tokenizer.bos_id is not None else []
    eos = [tokenizer.eos_id] if o.add_eos and tokenizer.eos_id is not None else []
    short = [len(text) for text in texts if len(text) < o.min_len]
    long = [len(text) for text in texts if o.max_len is not None and len(text) > o.max_len]
    fitting = [list(text.encode()) for text in texts if o.min_len <= len(text) <= (o.max_len or len(text))]
    documents = [bos + ids + eos for ids in fitting if bos + ids + eos]
    cut = [len(document) - o.max_length for document in documents if len(document) > o.max_length and not o.overflow]

    def pieces_of(document: list[int], room: int) -> list[list[int]]:
        if not o.overflow:
            return [document[: o.max_length]]
        pieces, end = [document[:room]], min(room, len(document))
        while end < len(document):
            start = max(end - o.stride, len(bos))  # the document's own BOS is not repeated after the piece's
            end = min(start + o.max_length - len(bos), len(document))
            pieces.append(bos + document[start:end])
        return pieces

    blocks: list[Block] = []
    if not o.packed:
        blocks = [[piece] for document in documents for piece in pieces_of(document, o.max_length)]
    elif o.packing_strategy == "greedy":
        for document in documents:
            room = o.max_length - sum(map(len, blocks[-1])) if blocks else 0
            if room == 0 or (not o.overflow and len(document[: o.max_length]) > room):
                blocks.append([])
                room = o.max_length
            first, *later = pieces_of(document, room)
            blocks[-1].append(first)
            blocks += [[piece] for piece in later]
    else:
        pieces = [piece for document in documents for piece in pieces_of(document, o.max_length)]
        for piece in sorted(pieces, key=len, reverse=True):  # which keeps the order of those that are equal
            rooms = [o.max_length - sum(map(len, block)) for block in blocks]
            fits = [b for b, room in enumerate(rooms) if room >= len(piece)]
            if not fits:
                blocks.append([piece])
            elif o.packing_strategy == "best_fit":
                blocks[min(fits, key=lambda b: (rooms[b], b))].append(piece)
            else:
                blocks[fits[0]].append(piece)

    kept = [block for block in blocks if sum(map(len, block)) >= o.min_len]
    gone = [sum(map(len, block)) for block in blocks if sum(map(len, block)) < o.min_len]
    if o.shuffle_output:
        kept = [kept[i] for i in np.random.RandomState(o.seed).permutation(len(kept))]
    report = {"documents": len(texts), "tokens": sum(map(len, texts)), "truncated": 0, "blocks": len(kept)}
    for name, lost in (("too_short", short), ("too_long", long), ("cut", cut), ("blocks_too_short", gone)):
        report |= {name: len(lost), f"{name}_tokens": sum(lost)}
    made = {
        "input_ids": [[i for piece in block for i in piece] for block in kept],
        "document_starts": [offsets_of(list(map(len, block)))[:-1].tolist() for block in kept],
    }
    return made, report


@settings(max_examples=600)
@given(
    lengths=st.lists(st.integers(0, 25), max_size=14),
    tokenizer=st.sampled_from([BOTH, NEITHER, EOS_ONLY, BOS_ONLY]),
    options=st.builds(
        PackOptions,
        max_length=st.integers(1, 12),
        overflow=st.booleans(),
        packed=st.sampled_from([True, True, False]),
        packing_strategy=st.sampled_from(["greedy", "best_fit", "first_fit"]),
        shuffle_output=st.booleans(),
        seed=st.integers(0, 3),
        stride=st.integers(0, 11),
        min_len=st.integers(0, 4),
        max_len=st.sampled_from([None, 5, 20]),
        add_bos=st.booleans(),
        add_eos=st.booleans(),
    ),
)
@example([3, 12, 2, 9], BOTH, PackOptions(max_length=6, stride=4, packed=True))
@example([4, 12], BOTH, PackOptions(max_length=7, packed=True))
@example([5, 12], NEITHER, PackOptions(max_length=6, stride=5, packed=True))
def test_blocks_equal_the_page_written_out(lengths: list[int], tokenizer: Tokenizer, options: PackOptions) -> None:
    with_bos = options.add_bos and tokenizer.bos_id is not None
    assume(options.stride < options.max_length - with_bos)
    # Every token names its document and place, so that no two pieces can be mistaken for each other.
    texts = ["".join(chr(1 + (17 * d + t) % 120) for t in range(n)) for d, n in enumerate(lengths)]
    expected, report = reference(texts, tokenizer, options)
    assert block_tokenize_fn({"text": texts}, tokenizer, "text", **msgspec.structs.asdict(options)) == expected
    assert asdict(tokenize_blocks({"text": texts}, tokenizer, "text", options).report) == report


def run(texts: list[str], tokenizer: Any = NEITHER, **options: Any) -> Made:
    return block_tokenize_fn({"text": texts}, tokenizer, "text", **options)


@pytest.mark.parametrize(
    ("texts", "tokenizer", "options", "blocks"),
    [
        (["abc", "de", "fgh"], NEITHER, {"max_length": 10, "packed": True, "packing_strategy": "best_fit"},
         ["abc|fgh|de"]),
        (["abc", "defghijklmn"], BOTH, {"max_length": 6}, ["^abc$", "^defgh", "^ijklm", "^n$"]),
        (["abc", "defghijk", "l"], BOTH, {"max_length": 8, "packed": True}, ["^abc$|^de", "^fghijk$", "^l$"]),
        (["abcdefgh"], BOTH, {"max_length": 5, "stride": 2}, ["^abcd", "^cdef", "^efgh", "^gh$"]),
        (["a<|eos|>b"], BOTH, {"add_bos": False, "add_eos": False}, ["a$b"]),
        (["ab\n\nEND c\nEND d", "no match"], NEITHER, {"truncate_at": r"\n+END"}, ["ab", "no match"]),
        (["ab\n\nEND c\nEND d"], NEITHER, {"truncate_at": re.compile(r"\n+END")}, ["ab"]),
    ],
)  # fmt: skip
def test_examples(texts: list[str], tokenizer: Tokenizer, options: dict[str, Any], blocks: list[str]) -> None:
    """A block as the texts between its starts, BOS as ^ and EOS as $."""
    made = run(texts, tokenizer, **options)
    shown = []
    for block, starts in zip(made["input_ids"], made["document_starts"], strict=True):
        assert starts[0] == 0
        pieces = [BOTH.decode(block[a:b]) for a, b in zip(starts, [*starts[1:], len(block)], strict=True)]
        shown.append("|".join(pieces).replace("<|bos|>", "^").replace("<|eos|>", "$"))
    assert shown == blocks


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: run(["abc"], BOTH, max_length=6, stride=5), "stride is 5"),
        (lambda: run(["abc"], max_length=5, stride=5), "stride is 5"),
        (lambda: run(["abc"], max_length=5, stride=-1), "stride is -1"),
        (lambda: run(["a"], packed=True, packing_strategy="in_order"), "greedy, best_fit, first_fit"),
        (lambda: block_tokenize_fn({"text": ["a"], "id": ["1"]}, NEITHER, "txt"), "unknown feature 'txt'.*: id, text"),
        (lambda: run(["a"], max_length=0), "max_length is 0"),
        (lambda: run(["a"], truncate_at="("), "truncate_at"),
        (lambda: run(["a", None]), "row 1: a text is wanted, not NoneType"),  # type: ignore[list-item]
        (lambda: run("abc"), "batched=True"),  # type: ignore[arg-type]
    ],
)
def test_wrong_options_say_what_is_allowed(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


def test_no_token_is_touched_by_python() -> None:
    """Guards the shape of the work: far fewer lines are executed than there are tokens."""
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


# --- `chatmill pack` -----------------------------------------------------------------------------------------------

TEXTS = ["one", "", "a longer text of words", "two", "three and four", "x" * 50, "fin"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def test_options_come_from_the_command_line_and_from_yaml(texts: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_length": 20, "packed": True, "packing_strategy": "best_fit", "stride": 2}
    options |= {"min_len": 2, "max_len": 45, "add_eos": False, "shuffle_output": True, "seed": 7, "truncate_at": " of"}
    (tmp_path / "pack.yaml").write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items()))
    wanted = run(TEXTS, byte_tokenizer(), **options)["document_starts"]
    flags = [word for name, value in options.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    for given_as in (flags, ["--config", tmp_path / "pack.yaml"]):
        out = tmp_path / "rows.parquet"
        done = invoke("pack", texts, "-t", "bytes", "--out", out, "--json", *given_as)
        assert done.exit_code == 0, (done.output, done.exception)
        said = json.loads(done.stdout)
        assert (said["documents"], said["too_short"], said["too_long"], said["truncated"]) == (7, 1, 1, 1)
        shown = invoke("inspect", out, "--json", "-n", 99, "--tokenizer", "bytes")
        documents = [json.loads(line)["documents"] for line in shown.stdout.splitlines()]
        assert [[part["start"] for part in row] for row in documents] == wanted
    more = ("--set", "max_length=16", "--set", "overflow=false")
    plain = invoke("pack", texts, "-t", "bytes", "--out", tmp_path / "p.parquet", *more)
    assert "left out: 1 documents under min_len (0 tokens), 2 documents cut (44 tokens)" in plain.stdout


def test_mistakes_are_told(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "o.yaml").write_text("max_lenght: 3\n")
    for more, says in (
        ([tmp_path / "bad.jsonl"], "bad.jsonl:1"),
        ([texts, "--config", tmp_path / "o.yaml"], "max_length"),
        ([texts, "--set", "packed=maybe"], "packed: should be true or false"),
        ([texts, "--set", "min_len=10000"], "no rows to write: "),
    ):
        failed = invoke("pack", *more, "-t", "bytes", "--out", tmp_path / "x.parquet")
        assert isinstance(failed.exception, ChatmillError), failed.output
        assert says in str(failed.exception)
        assert not (tmp_path / "x.parquet").exists()
