"""Receipts protect themselves: every change of a manifest.json or export.json is refused or found; names are names."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.run import run_build
from chatmill.core.canonical import canonical_json
from chatmill.distill.check import verify_synth_kd
from chatmill.distill.run import build_synth_kd
from chatmill.errors import ChatmillError, FormatError
from chatmill.export.check import verify_export
from chatmill.export.export import export_dataset
from chatmill.look.dataset import open_for_looking
from chatmill.prove.compare.diff import diff_datasets
from chatmill.prove.verify import verify
from chatmill.store.documents import open_dataset
from chatmill.store.kd import find_kd_root
from chatmill.store.receipts import read_export, read_kd_manifest, read_manifest, receipt_bytes, sealed
from tests.compiler.builds import chats, plain_recipe, write_jsonl
from tests.compiler.verify_sets import command_says, edited
from tests.damage import flip
from tests.distill.inputs import chat, row, write_input

OUTSIDE = ["a/../../x", "/etc/x", "", "..", "a\\b", "a//b"]
"""No path of a file inside of a folder."""
Check = Callable[..., Any]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small dataset of each kind; tests copy what they change."""
    folder = tmp_path_factory.mktemp("sets")
    bad = {"id": "bad", "messages": [{"role": "pope", "content": "x"}]}
    source = write_jsonl(folder / "chats.jsonl", [*chats(8), bad])
    recipe = plain_recipe(source, split={"val_fraction": 0.5}, on_error="quarantine")
    run_build(recipe, folder / "episodes", workers=0)
    rows = [row(f"r{number}", chat(user=f"What is {number}?")) for number in range(6)]
    kd = write_input(folder / "in", [[*rows, row("bad", "not json")]])
    build_synth_kd(kd, folder / "kd", workers=0, audit=0, valid_fraction=0.3, on_error="quarantine")
    export_dataset(folder / "episodes", "parquet", folder / "export")
    return folder


KINDS: dict[str, tuple[str, Check, Check]] = {
    "episodes": ("manifest.json", verify, read_manifest),
    "kd": ("manifest.json", verify_synth_kd, read_kd_manifest),
    "export": ("export.json", verify_export, read_export),
}
"""The receipt of each, what verifies it, and what reads it."""


@pytest.fixture
def folder(home: Path, tmp_path: Path) -> Path:
    """The dataset of episodes, to be changed."""
    return Path(shutil.copytree(home / "episodes", tmp_path / "episodes"))


def is_noticed(check: Check, folder: Path) -> bool:
    """Refused with an error of ours, or found; anything else that is raised fails the test."""
    try:
        return not check(folder).passed
    except ChatmillError:
        return True


@pytest.mark.parametrize("kind", KINDS)
def test_every_changed_byte_is_refused_or_found(kind: str, home: Path, tmp_path: Path) -> None:
    name, check, _ = KINDS[kind]
    folder = shutil.copytree(home / kind, tmp_path / kind)
    data = (folder / name).read_bytes()
    rng, tried = random.Random(f"bytes of {kind}"), 0
    before = canonical_json(json.loads(data))
    for at in rng.sample(range(len(data)), 60):
        made = bytearray(data)
        made[at] = rng.choice([made[at] ^ 1, made[at] ^ 32, rng.randrange(256), ord("9")])
        try:
            if canonical_json(json.loads(bytes(made))) == before:
                continue  # white space, or another spelling of the same value
        except (ValueError, ChatmillError):
            pass
        tried += 1
        (folder / name).write_bytes(made)
        assert is_noticed(check, folder), (at, bytes(made)[max(0, at - 20) : at + 20])
    assert tried > 30


def places(content: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all keys of a receipt, and to the first element of each list."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content[:1]):
        yield (*at, key)
        if isinstance(value, dict | list) and key not in ("files", "recipe", "ledger", "about"):
            yield from places(value, (*at, key))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sealed_receipt_that_lacks_anything_ends_in_no_traceback(kind: str, home: Path, tmp_path: Path) -> None:
    name, check, read = KINDS[kind]
    folder = shutil.copytree(home / kind, tmp_path / kind)
    original = json.loads((folder / name).read_bytes())
    for *way, key in places(original):
        for is_lost in (True, False):
            content = copy.deepcopy(original)
            holder = reduce(getitem, way, content)
            if is_lost:
                del holder[key]
            else:
                holder[key] = None
            (folder / name).write_bytes(receipt_bytes(sealed(content)))
            for look in (read, check, open_for_looking, lambda folder: diff_datasets(folder, home / kind)):
                with contextlib.suppress(ChatmillError):
                    look(folder)
            if kind == "kd" and way and way[0] in ("input", "splits"):
                with contextlib.suppress(ChatmillError):
                    check(folder, deep=True)


@pytest.mark.parametrize("kind", KINDS)
def test_verify_goes_on_after_a_change_that_is_no_damage_to_json(kind: str, home: Path, tmp_path: Path) -> None:
    """The others refuse a receipt that was changed; this is the command that shows what else differs."""
    name, check, read = KINDS[kind]
    folder = shutil.copytree(home / kind, tmp_path / kind)
    text = (folder / name).read_text()
    (folder / name).write_text(json.dumps(json.loads(text), indent=4))
    assert read(folder)
    assert check(folder).passed
    for bad in (text[: len(text) // 2], "[]", "", "[" * 100_000):
        (folder / name).write_text(bad)
        with pytest.raises(FormatError):
            check(folder)
    (folder / name).write_text(json.dumps(json.loads(text) | {"package_version": "x"}))
    more = "train/more.bin" if kind == "episodes" else "more.bin"
    (folder / more).write_bytes(b"x")
    found = [(finding.file, finding.message) for finding in check(folder).findings]
    assert [file for file, _ in found] == [name, more]
    assert "was changed after it was written" in found[0][1]


def test_every_reader_refuses_a_changed_manifest(home: Path, folder: Path, tmp_path: Path) -> None:
    for content in edited(folder, seal=False):
        content["tokenizer"]["pad_id"] = 7
    for read in (
        open_for_looking,
        lambda place: diff_datasets(place, home / "episodes", show=0),
        lambda place: export_dataset(place, "parquet", tmp_path / "out"),
    ):
        with pytest.raises(FormatError, match="was changed after it was written"):
            read(folder)
    for content in edited(folder):
        content["format_version"] -= 1
    with pytest.raises(FormatError, match=r"format 4, written by .* reads format 5"):
        open_dataset(folder)


@pytest.mark.parametrize("what", ["template", "policy", "tokenizer"])
def test_a_changed_fingerprint_is_a_finding_also_where_the_hash_was_made_right(what: str, folder: Path) -> None:
    for content in edited(folder):
        content[what]["fingerprint"] = "0" * 64
    report = verify(folder)
    assert any(f"the {what} has changed since the build" in finding.message for finding in report.findings)


@pytest.mark.parametrize("name", ["../outside/x", "/abs"])
def test_a_split_of_a_manifest_never_leads_out_of_an_export(name: str, home: Path, tmp_path: Path) -> None:
    """As in the attack: the split lies where the name leads, and export would write outside of --out."""
    folder = shutil.copytree(home / "episodes", tmp_path / "data" / "set")
    shutil.copytree(folder / "train", tmp_path / "data" / "outside" / "x")
    shutil.copytree(folder / "train", tmp_path / "strange" / "a\\b")
    for content in edited(folder):
        content["splits"] = {name: content["splits"]["train"]}
    before = sorted(tmp_path.rglob("*"))
    for read in (lambda given: export_dataset(given, "parquet", tmp_path / "data" / "out"), verify, open_for_looking):
        with pytest.raises(FormatError, match="plain name of a split"):
            read(folder)
    with pytest.raises(FormatError, match="no name for a split"):
        export_dataset(tmp_path / "strange", "parquet", tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


def named(table: dict[str, Any], name: str) -> None:
    table[name] = next(iter(table.values()))


NAMES: list[tuple[str, Callable[[Any, str], None]]] = [
    ("episodes", lambda content, name: named(content["files"], name)),
    ("export", lambda content, name: named(content["files"], name)),
    ("export", lambda content, name: named(content["splits"], name)),
    ("kd", lambda content, name: content["splits"]["train"]["shards"][0]["files"][0].update(path=name)),
    ("kd", lambda content, name: content["splits"]["train"]["shards"][0].update(name=name)),
    ("kd", lambda content, name: content["failed"]["file"].update(path=name)),
]
"""Receipts, and the places in them that name a file, a folder or a split."""


@pytest.mark.parametrize(("kind", "change"), NAMES)
def test_names_in_a_receipt_never_lead_out_of_its_folder(
    kind: str, change: Callable[[Any, str], None], home: Path, tmp_path: Path
) -> None:
    receipt, check, read = KINDS[kind]
    folder = shutil.copytree(home / kind, tmp_path / kind)
    original = json.loads((folder / receipt).read_bytes())
    for name in OUTSIDE:
        content = copy.deepcopy(original)
        change(content, name)
        (folder / receipt).write_bytes(receipt_bytes(sealed(content)))
        for look in (check, read, *((find_kd_root, open_for_looking) if kind == "kd" else ())):
            with pytest.raises(FormatError, match=r"should be .*: the file was edited"):
                look(folder)


def test_splits_that_datasets_lists_are_names(tmp_path: Path) -> None:
    for splits in (["../x"], [3], None):
        (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
        with pytest.raises(FormatError, match=r"dataset_dict\.json"):
            open_for_looking(tmp_path)


def test_verify_checks_the_files_of_an_export(home: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(home / "export", tmp_path / "export")
    file = folder / "train" / "shard_00000.parquet"
    assert "2 files with the sizes and hashes of export.json" in command_says(0, folder)
    for words, damage in (
        ("was changed", lambda: flip(file, -9)),
        ("missing; export.json names it", file.unlink),
        ("not in export.json", lambda: file.with_name("more.parquet").write_bytes(b"more")),
    ):
        damage()
        said = command_says(1, folder)
        assert words in said
        assert "1 differences" in said
        shutil.copytree(home / "export", folder, dirs_exist_ok=True)
    assert "is an export" in command_says(2, folder, "--deep")
    with pytest.raises(FormatError, match=r"export\.json is not there"):
        verify_export(home / "episodes")
