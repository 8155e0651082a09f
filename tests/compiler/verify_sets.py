"""Real records in several shapes and containers, recipes to build and verify them, and ways to damage a dataset."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from chatmill.compiler.run import run_build
from chatmill.prove.report import VerifyReport
from chatmill.store.receipts import receipt_bytes, sealed
from tests.cli.run import here
from tests.compiler import builds
from tests.compiler.builds import plain_recipe, write_jsonl
from tests.conftest import CONVERSATION_FILES, DATA
from tests.hashes import file_entry

SHAREGPT = {"user": "human", "assistant": "gpt", "system": "system"}


def records(name: str, count: int) -> list[dict[str, Any]]:
    with gzip.open(DATA / "conversations" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line, _ in zip(file, range(count), strict=False)]


def write_inputs(folder: Path, count: int = 4, longest: int = 3_500) -> Path:
    """The first records of every bundled source, and the nasty ones, beside those of `builds`: in all shapes.

    Lines of more than `longest` bytes are left out of the bundled and nasty files: bytes are tokens in most tests.
    """
    builds.write_inputs(folder, 3 * count)
    for name in (path.name.removesuffix(".jsonl.gz") for path in CONVERSATION_FILES):
        write_jsonl(folder / f"{name}.jsonl.gz", [r for r in records(name, count) if len(json.dumps(r)) < longest])
    sharegpt = [
        {"id": r["id"], "conversations": [{"from": SHAREGPT[m["role"]], "value": m["content"]} for m in r["messages"]]}
        for r in records("oasst_en100", count)
    ]
    write_jsonl(folder / "sharegpt.jsonl.zst", sharegpt)
    korean = [[{k: m[k] for k in ("role", "content")} for m in r["messages"]] for r in records("korean_chatbot", count)]
    pq.write_table(pa.table({"messages": korean}), folder / "korean.parquet")
    synth = pq.read_table(DATA / "synth_harmony" / "synth_harmony_shard_00.parquet").slice(0, 2 * count)
    pq.write_table(synth, folder / "synth.parquet")
    nasty = gzip.decompress((DATA / "nasty.jsonl.gz").read_bytes()).splitlines(keepends=True)
    (folder / "nasty.jsonl").write_bytes(b"".join(line for line in nasty if len(line) < longest))
    shutil.copy(DATA / "nasty_raw.jsonl.bin", folder / "nasty_raw.jsonl")
    write_jsonl(folder / "weighted.jsonl", [weighted_chat(number) for number in range(count)])
    return folder


def weighted_chat(number: int) -> dict[str, Any]:
    """A record whose messages bring weights along, fractions among them."""
    messages: list[dict[str, Any]] = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"Question {turn}?", "weight": 0.5 * (number % 3)})
        messages.append({"role": "assistant", "content": f"Answer {turn}. " * number, "weight": 0.25 * turn})
    messages[-1] = {"role": "assistant", "content": "Done.", "train": number % 2 == 0}
    return {"id": f"weighted-{number}", "source": "weights", "messages": messages}


def recipe(inputs: Path, tokenizer: str, template: str, **more: Any) -> dict[str, Any]:
    """Sources with weights, caps and named shapes; a val split; what cannot be used is quarantined."""
    names: list[tuple[list[str], dict[str, Any]]] = [
        (["[a-o]*.jsonl.gz", "[q-z]*.jsonl.gz"], {}),
        (["sharegpt.jsonl.zst"], {"name": "oasst"}),
        (["korean.parquet"], {"max_records": 20}),
        (["weighted.jsonl"], {"weight": 2.5}),
        (["nasty.jsonl", "nasty_raw.jsonl"], {"shape": "openai"}),
        (["synth.parquet"], {}),
    ]
    sources = [{"path": [str(inputs / name) for name in some], **options} for some, options in names]
    rules = {"tokenizer": tokenizer, "template": template, "add_control_tokens": template != "harmony"}
    base = builds.mixed_recipe(inputs, packing={}, pack=None, split={"val_fraction": 0.2}, shard_bytes=40_000)
    return {**base, **rules, "sources": [*base["sources"], *sources], **more}


def small_recipe(source: Path, **more: Any) -> dict[str, Any]:
    """One file, bytes as tokens: quick to build and to verify."""
    return plain_recipe(source, **{"shard_bytes": 12_000, "on_error": "quarantine", "gates": {}, **more})


def build_into(folder: Path, description: dict[str, Any]) -> Path:
    run_build(description, folder, workers=0)
    return folder


def rehash(folder: Path) -> None:
    """Make the manifest agree with the files again, as an error in the build itself would have it."""
    for manifest in edited(folder):
        for name in manifest["files"]:
            manifest["files"][name] = file_entry((folder / name).read_bytes())


def edited(folder: Path, *, seal: bool = True, name: str = "manifest.json") -> Iterator[dict[str, Any]]:
    """A receipt, written back when the loop over it ends; `seal` makes its hash right again."""
    content = json.loads((folder / name).read_bytes())
    yield content
    (folder / name).write_bytes(receipt_bytes(sealed(content) if seal else content))


def files_named(report: VerifyReport) -> set[str]:
    assert report.exit_status == 1
    assert report.differences >= len(report.findings) > 0
    return {finding.file for finding in report.findings}


def command_says(status: int, folder: Path, *options: str) -> str:
    """What `chatmill verify` prints, and that it ends so."""
    done = here("verify", folder, *options)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr
