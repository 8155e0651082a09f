"""Receipts with a right seal in which something is missing or of another type; and files that lie in wrong places."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.chunk_shards import ChunkPlace
from chatmill.compiler.run import run_build
from chatmill.core.checksums import FileRecord
from chatmill.dataset.stored import Dataset
from chatmill.errors import ChatmillError
from chatmill.export.export import export_dataset
from chatmill.look.dataset import open_for_looking
from chatmill.look.viewer.opened import open_splits
from chatmill.look.viewer.overview import overview_values
from chatmill.prove.compare.diff import diff_datasets
from chatmill.prove.verify import verify
from chatmill.store.documents import open_dataset
from chatmill.store.receipts import chunk_receipt, receipt_bytes, sealed
from tests.cli.run import here
from tests.compiler.builds import chats, plain_recipe, write_jsonl

VALUES: tuple[Any, ...] = (None, True, 7, -1, 1.5, 1e300, 10**30, "x", "\ud800", [], {}, [1], {"a": 1}, {"a": {"b": 1}})
LOST = object()
"""In place of a value: the key is gone."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    bad = {"id": "bad", "messages": [{"role": "pope", "content": "x"}]}
    run_build(recipe_in(folder, [*chats(8), bad]), folder / "built", workers=0)
    return folder


def recipe_in(folder: Path, records: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    path = folder / "chats.jsonl" if records is None else write_jsonl(folder / "chats.jsonl", records)
    changes = {"split": {"val_fraction": 0.5}, "on_error": "quarantine", "pack": {"length": 1000}, "shard_bytes": 300}
    return plain_recipe(path, **changes)


def places(content: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all keys of a receipt, and to the first element of each list; of the files to the first one alone."""
    for number, (key, value) in enumerate(content.items() if isinstance(content, dict) else enumerate(content[:1])):
        if at[-1:] != ("files",) or number == 0:
            yield (*at, key)
            if isinstance(value, dict | list):
                yield from places(value, (*at, key))


def changed(content: Any, way: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(content)
    *before, key = way
    holder = reduce(getitem, before, made)
    if value is LOST:
        del holder[key]
    else:
        holder[key] = value
    return made


def changes(content: Any, count: int, seed: int) -> Iterator[tuple[str, Any]]:
    """So many changes, drawn from all there are: every key is gone, or has every value."""
    drawn = [(way, value) for way in places(content) for value in (LOST, LOST, *VALUES)]
    random.Random(seed).shuffle(drawn)
    for way, value in drawn[:count]:
        yield f"{way}: {'gone' if value is LOST else repr(value)}", changed(content, way, value)


def viewed(folder: Path) -> None:
    for split in open_splits(open_for_looking(folder)).values():
        overview_values(split)


def shown(folder: Path) -> None:
    dataset = Dataset(folder)
    assert dataset.recipe
    assert repr(dataset)


def counted(folder: Path) -> None:
    assert here("stats", folder).returncode != 70


def ends_well_or_in_our_error(look: Callable[[Path], object], folder: Path, what: str) -> bool:
    try:
        look(folder)
    except ChatmillError:
        return False
    except BaseException as error:
        raise AssertionError(f"{type(error).__name__} after {what}") from error
    return True


@pytest.mark.parametrize("count", [30, pytest.param(700, marks=pytest.mark.slow)])
def test_a_sealed_manifest_of_any_content_ends_in_no_traceback(home: Path, tmp_path: Path, count: int) -> None:
    folder = shutil.copytree(home / "built", tmp_path / "built")
    original = json.loads((folder / "manifest.json").read_bytes())

    def reused(folder: Path) -> None:
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
        run_build(recipe_in(home), tmp_path / "again", workers=0, reuse=folder)

    def exported(folder: Path) -> None:
        shutil.rmtree(tmp_path / "export", ignore_errors=True)
        export_dataset(folder, "hf", tmp_path / "export")

    looks = (
        open_dataset,
        shown,
        viewed,
        verify,
        open_for_looking,
        lambda folder: diff_datasets(folder, home / "built"),
    )
    rare = (reused, counted, exported)
    assert all(ends_well_or_in_our_error(look, folder, "nothing") for look in (*looks, *rare))
    for number, (what, content) in enumerate(changes(original, count, 3)):
        try:
            (folder / "manifest.json").write_bytes(receipt_bytes(sealed(content)))
        except ChatmillError:  # what has no canonical form has no seal
            continue
        for look in (*looks, rare[number % 3]):
            ends_well_or_in_our_error(look, folder, what)


def test_a_receipt_of_a_chunk_of_any_content_ends_in_no_traceback(home: Path, tmp_path: Path) -> None:
    """In a finished dataset, and in a build that goes on: there the chunk is made again."""
    folder = shutil.copytree(home / "built", tmp_path / "built")
    manifest = json.loads((folder / "manifest.json").read_bytes())
    first, *others = (folder / "chunks.jsonl").read_bytes().splitlines(keepends=True)
    receipt = json.loads(first)
    place = ChunkPlace(directory=tmp_path / "going on", number=0, is_only=False)
    place.receipt.parent.mkdir(parents=True)
    for name in ("train", "val"):
        shutil.copytree(folder / name / "shard_00000", place.shard(name))
    place.receipt.write_bytes(first)
    assert place.whole_receipt(receipt["fingerprint"]) == receipt, "a good one is taken"
    for number, (what, content) in enumerate(changes(receipt, 200, 4)):
        line = json.dumps(content).encode() + b"\n"
        place.receipt.write_bytes(line)
        ends_well_or_in_our_error(lambda _, place=place: place.whole_receipt(receipt["fingerprint"]), folder, what)
        ends_well_or_in_our_error(lambda _, line=line: chunk_receipt(line, "x"), folder, what)
        if number % 8:
            continue
        (folder / "chunks.jsonl").write_bytes(b"".join([line, *others]))
        manifest["files"]["chunks.jsonl"] = FileRecord.of_file(folder / "chunks.jsonl").to_json()
        (folder / "manifest.json").write_bytes(receipt_bytes(sealed(manifest)))
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
        ends_well_or_in_our_error(
            lambda folder: run_build(recipe_in(home), tmp_path / "again", workers=0, reuse=folder), folder, what
        )
        ends_well_or_in_our_error(lambda folder: verify(folder, deep=True, workers=0), folder, what)
    for raw in (b"", b"[]", b"[" * 100_000, b'{"number": 1e999}', b"\xff"):
        place.receipt.write_bytes(raw)
        assert place.whole_receipt(receipt["fingerprint"]) is None


def test_files_that_were_swapped_or_replaced_by_one_another_are_named(home: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(home / "built", tmp_path / "built")
    one, other, third = (f"train/shard_0000{number}/tokens.bin" for number in _longest(folder))
    os.replace(folder / one, tmp_path / "kept")
    os.replace(folder / other, folder / one)
    os.replace(tmp_path / "kept", folder / other)
    findings = {finding.file: finding.message for finding in verify(folder).findings}
    assert findings[one].startswith(f"was swapped with {other}: ")
    assert findings[other].startswith(f"was swapped with {one}: ")
    shutil.copy(home / "built" / one, folder / other)
    shutil.copy(folder / third, folder / one)
    findings = {finding.file: finding.message for finding in verify(folder).findings}
    assert findings[one].startswith(f"was replaced: it holds the bytes of {third}")
    assert findings[other].startswith(f"was replaced: it holds the bytes of {one}")
    (folder / one).write_bytes(b"\1" * 8)
    assert {finding.file: finding.message for finding in verify(folder).findings}[one].startswith("was changed: ")


def _longest(folder: Path) -> list[int]:
    """The numbers of three shards that hold tokens."""
    sizes = {path: path.stat().st_size for path in sorted(folder.glob("train/*/tokens.bin"))}
    found = [int(path.parent.name[-1]) for path, size in sizes.items() if size]
    assert len(found) >= 3
    return found[:3]
