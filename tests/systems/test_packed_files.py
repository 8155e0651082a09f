"""`chatmill pack`: plain texts to packed rows, options from YAML and command line, counts of what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chatmill.errors import ChatmillError
from chatmill.systems.document_boundaries import PackOptions, block_tokenize_fn, tokenize_blocks
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.cli.run import invoke as run

TEXTS = ["one", "", "a longer text of words", "two", "three and four", "x" * 50, "fin"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def test_what_is_left_out_is_counted() -> None:
    options: dict[str, Any] = {"max_length": 16, "add_bos": False, "min_len": 4, "max_len": 40, "overflow": False}
    made = tokenize_blocks({"text": TEXTS}, byte_tokenizer(), "text", PackOptions(truncate_at=" of", **options))
    report = made.report
    assert (report.documents, report.truncated, report.tokens) == (7, 1, 3 + 0 + 13 + 3 + 14 + 50 + 3)
    assert (report.too_short, report.too_short_tokens) == (4, 9)
    assert (report.too_long, report.too_long_tokens) == (1, 50)
    assert (report.cut, report.cut_tokens, report.blocks) == (0, 0, 2)
    cut = tokenize_blocks({"text": TEXTS}, byte_tokenizer(), "text", PackOptions(max_length=16, overflow=False)).report
    assert (cut.cut, cut.cut_tokens) == (2, (22 + 2 - 16) + (50 + 2 - 16))
    whole = tokenize_blocks({"text": TEXTS}, byte_tokenizer(), "text", PackOptions(max_length=16)).report
    assert (whole.cut, whole.too_short, whole.blocks_too_short) == (0, 1, 0)
    rest = tokenize_blocks(
        {"text": TEXTS[2:3]}, byte_tokenizer(), "text", PackOptions(max_length=16, min_len=10)
    ).report
    assert (rest.blocks_too_short, rest.blocks_too_short_tokens) == (1, 9)


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
    more = ("--set", "max_length=16", "--set", "overflow=false")
    plain = run("pack", texts, "-t", "bytes", "--out", tmp_path / "p.parquet", *more)
    assert "left out: 1 documents under min_len (0 tokens), 2 documents cut (44 tokens)" in plain.stdout


def test_mistakes_are_told(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "o.yaml").write_text("max_lenght: 3\n")
    (tmp_path / "f.yaml").write_text("packed: maybe\n")
    for arguments, says in (
        ([tmp_path / "bad.jsonl"], "bad.jsonl:1"),
        ([texts, "--field", "body"], "'body'"),
        ([texts, "--config", tmp_path / "o.yaml"], "max_length"),
        ([texts, "--config", tmp_path / "f.yaml"], "packed: should be true or false"),
        ([texts, "--set", "packing_strategy=worst"], "best_fit"),
        ([texts, "--set", "min_len=10000"], "no rows to write: "),
    ):
        failed = run("pack", *arguments, "-t", "bytes", "--out", tmp_path / "x.parquet")
        assert isinstance(failed.exception, ChatmillError), failed.output
        assert says in str(failed.exception)
        assert not (tmp_path / "x.parquet").exists()
