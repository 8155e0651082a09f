"""Plain texts to packed rows to training: options from YAML and command line, and counts of what is left out."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chatmill.cli import app
from chatmill.cli.train_data import make_model, open_data
from chatmill.cli.train_recipe import read_recipe
from chatmill.errors import ChatmillError, ConfigError, DataError
from chatmill.load.packed_row_loader import PackedRowLoader
from chatmill.systems.document_boundaries import block_tokenize_fn, tokenize_blocks
from chatmill.tokenizer.byte_level import byte_tokenizer
from chatmill.train.batch import TrainBatch
from tests.train.test_resume_counts_data import targets_of

TEXTS = ["one", "", "a longer text of words", "two", "three and four", "x" * 50, "fin"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_what_is_left_out_is_counted() -> None:
    options: dict[str, Any] = {"max_length": 16, "add_bos": False, "min_len": 4, "max_len": 40, "overflow": False}
    made = tokenize_blocks({"text": TEXTS}, byte_tokenizer(), "text", truncate_at=" of", **options)
    report = made.report
    assert (report.documents, report.truncated, report.tokens) == (7, 1, 3 + 0 + 13 + 3 + 14 + 50 + 3)
    assert (report.too_short, report.too_short_tokens) == (4, 9)
    assert (report.too_long, report.too_long_tokens) == (1, 50)
    assert (report.cut, report.cut_tokens, report.blocks) == (0, 0, 2)
    cut = tokenize_blocks({"text": TEXTS}, byte_tokenizer(), "text", max_length=16, overflow=False).report
    assert (cut.cut, cut.cut_tokens) == (2, (22 + 2 - 16) + (50 + 2 - 16))
    whole = tokenize_blocks({"text": TEXTS}, byte_tokenizer(), "text", max_length=16).report
    assert (whole.cut, whole.too_short, whole.blocks_too_short) == (0, 1, 0)
    rest = tokenize_blocks({"text": TEXTS[2:3]}, byte_tokenizer(), "text", max_length=16, min_len=10).report
    assert (rest.blocks_too_short, rest.blocks_too_short_tokens) == (1, 9)


@pytest.mark.parametrize(
    ("starts", "says"),
    [([[1]], "the first entry must be 0"), ([[0, 3]], "must lie inside the row"), ([[0], [0]], "has 2 rows")],
)
def test_starts_that_cannot_be_right_are_refused_at_once(starts: list[list[int]], says: str) -> None:
    with pytest.raises(DataError, match=says):
        PackedRowLoader([[5, 6, 7]], starts, batch_size=1, pad_id=0)


def test_options_come_from_the_command_line_and_from_yaml(texts: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_length": 20, "packed": True, "packing_strategy": "best_fit", "stride": 2}
    options |= {"min_len": 2, "max_len": 45, "add_eos": False, "shuffle_output": True, "seed": 7}
    (tmp_path / "pack.yaml").write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items()))
    wanted = block_tokenize_fn({"text": TEXTS}, byte_tokenizer(), "text", **options)
    flags = [word for name, value in options.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    for name, given in (("flags", flags), ("yaml", ["--config", tmp_path / "pack.yaml"])):
        out = tmp_path / f"{name}.parquet"
        done = run("pack", texts, "-t", "bytes", "--out", out, "--json", *given)
        assert done.exit_code == 0, (done.output, done.exception)
        said = json.loads(done.stdout)
        assert (said["documents"], said["too_short"], said["too_long"]) == (7, 1, 1)
        shown = run("inspect", out, "--json", "-n", 99, "--tokenizer", "bytes")
        documents = [json.loads(line)["documents"] for line in shown.stdout.splitlines()]
        assert [[part["start"] for part in row] for row in documents] == wanted["document_starts"]
    plain = run(
        "pack",
        texts,
        "-t",
        "bytes",
        "--out",
        tmp_path / "p.parquet",
        "--set",
        "max_length=16",
        "--set",
        "overflow=false",
    )
    assert "left out: 1 documents under min_len (0 tokens), 2 documents cut (44 tokens)" in plain.stdout


@pytest.mark.parametrize("source", ["texts", "rows"])
def test_texts_train_to_the_last_token(source: str, texts: Path, tmp_path: Path, trained: list[TrainBatch]) -> None:
    rows = tmp_path / "rows.parquet"
    assert (
        run("pack", texts, "-t", "bytes", "--out", rows, "--set", "max_length=24", "--set", "packed=true").exit_code
        == 0
    )
    data = f"texts: {texts}, packing: {{max_length: 24}}, val_texts: {texts}" if source == "texts" else f"rows: {rows}"
    (tmp_path / "r.yaml").write_text(
        f"out: {tmp_path / 'run'}\ntokenizer: bytes\nmodel: {{layers: 1, hidden: 16, heads: 2}}\n"
        f"data: {{{data}, batch_size: 2}}\ntrain: {{epochs: 2, log_every: 1}}\n"
    )
    recipe = read_recipe(tmp_path / "r.yaml", {})
    loader, val, vocabulary = open_data(recipe)
    result = make_model(recipe, vocabulary).fit(loader, val_loader=val, config=recipe.train, out=recipe.out)
    made = tokenize_blocks({"text": TEXTS}, byte_tokenizer(), "text", max_length=24, packed=True)
    wanted: Counter[tuple[int, int]] = Counter()
    for ids, starts in zip(made.input_ids, made.document_starts, strict=True):
        wanted.update(pair for place, pair in enumerate(itertools.pairwise(ids), 1) if place not in starts)
    assert targets_of(trained) == wanted + wanted
    assert (result.data["documents"], result.data["too_short"]) == (7, 1)
    assert ("val_loss" in result.history[-1]) == (source == "texts")
    again = make_model(recipe, vocabulary).fit(open_data(recipe)[0], config=recipe.train, out=recipe.out)
    assert str(again.outcome) == "already_finished"


def test_the_loader_goes_on_with_other_ranks() -> None:
    made = block_tokenize_fn({"text": [f"text {n}" for n in range(21)]}, byte_tokenizer(), "text", max_length=12)
    rows = (made["input_ids"], made["document_starts"])

    def loaders(size: int, ranks: int) -> list[PackedRowLoader]:
        return [PackedRowLoader(*rows, batch_size=size, pad_id=0, rank=r, world_size=ranks) for r in range(ranks)]

    def seen(given: list[PackedRowLoader], steps: int) -> Counter[tuple[int, ...]]:
        batches = [loader.get_batch() for _ in range(steps) for loader in given]
        return Counter(tuple(row) for b in batches for row, own in zip(b.x.tolist(), b.mask, strict=True) if own.any())

    (alone,) = loaders(4, 1)
    whole = seen([alone], len(alone))
    assert (len(alone), alone.next_epoch(), alone.batches_left(epochs=1)) == (6, 1, 0)
    first = loaders(2, 2)
    part = seen(first, 2)
    second = loaders(1, 3)
    for loader in second:
        loader.load_state_dict(json.loads(json.dumps(first[0].state_dict())))
    assert part + seen(second, second[0].batches_left()) == whole
    with pytest.raises(ConfigError, match="epoch_seed = 1337, this loader has 5"):
        PackedRowLoader(*rows, batch_size=2, pad_id=0, seed=5).load_state_dict(first[0].state_dict())


def test_mistakes_are_told(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "o.yaml").write_text("max_lenght: 3\n")
    (tmp_path / "f.yaml").write_text("packed: maybe\n")
    for arguments, says in (
        ([tmp_path / "bad.jsonl"], "bad.jsonl:1"),
        ([texts, "--field", "body"], "'body'"),
        ([texts, "--config", tmp_path / "o.yaml"], "max_length"),
        ([texts, "--config", tmp_path / "f.yaml"], "packed is 'maybe'"),
        ([texts, "--set", "packing_strategy=worst"], "best_fit"),
        ([texts, "--set", "min_len=10000"], "no row to write: "),
    ):
        failed = run("pack", *arguments, "-t", "bytes", "--out", tmp_path / "x.parquet")
        assert isinstance(failed.exception, ChatmillError), failed.output
        assert says in str(failed.exception)
        assert not (tmp_path / "x.parquet").exists()
    for text, says in (
        (f"data: {{texts: {texts}}}", "need a tokenizer"),
        (f"tokenizer: bytes\ndata: {{texts: {texts}, dataset: x}}", "give one of"),
        (f"tokenizer: bytes\ndata: {{texts: {texts}}}\ntrain: {{post_training: true}}", "assistant tokens"),
        (f"tokenizer: bytes\ndata: {{texts: {texts}, packing: {{stride: a}}}}", "stride is 'a'"),
    ):
        (tmp_path / "r.yaml").write_text(f"out: a\n{text}\n")
        with pytest.raises(ConfigError, match=says):
            open_data(read_recipe(tmp_path / "r.yaml", {}))
