"""A work folder that is a link is used and never emptied: nothing is deleted through a link."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.run import Outcome, merge_build, run_build
from chatmill.compiler.work import MARK, claim_work, move_path, remove_work, work_folder
from chatmill.distill.run import build_synth_kd
from chatmill.errors import ConfigError
from chatmill.store.durable import remove_path
from tests.compiler.builds import chats, digest, plain_recipe, write_jsonl
from tests.distill.inputs import chat, row, write_input


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of somebody's, with names that a build uses too."""
    folder = tmp_path / "victim"
    for name in ("parts/000000/receipt.json", "joined/train/tokens.bin", "spool/x/y", "state.json", "deep/a/b", "mine"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious")
    return folder


def holds(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    path = write_jsonl(tmp_path / "chats.jsonl.gz", chats(12))  # packed, so there is a spool
    return plain_recipe(path, split={"val_fraction": 0.25})


class StoppedError(Exception):
    """Stands for whatever ends a build."""


def stopped(recipe: dict[str, Any], out: Path, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that ends at a fault point."""

    def stop(name: str) -> None:
        if name == point:
            raise StoppedError

    with monkeypatch.context() as patched:
        patched.setattr("chatmill.compiler.finish.fault_point", stop)
        with pytest.raises(StoppedError):
            run_build(recipe, out, workers=0)


def linked(out: Path, target: Path) -> Path:
    out.mkdir()
    (out / ".build").symlink_to(target, target_is_directory=True)
    return out


def test_a_build_in_a_linked_work_folder_leaves_the_target_as_it_was(
    recipe: dict[str, Any], tmp_path: Path, victim: Path
) -> None:
    recipe |= {"packing": {"max_length": 2048, "overflow": "drop"}}
    before = holds(victim)
    run_build(recipe, tmp_path / "plain", workers=0)
    out = linked(tmp_path / "out", victim)
    assert run_build(recipe, out, workers=0).outcome is Outcome.BUILT
    assert holds(victim) == before
    assert (out / ".build").is_symlink(), "the link is the user's"
    assert sorted(path.name for path in victim.iterdir()) == ["deep", "joined", "mine", "parts", "spool", "state.json"]
    (out / ".build").unlink()
    assert digest(out) == digest(tmp_path / "plain")


def test_a_link_beside_a_finished_dataset_is_not_followed(recipe: dict[str, Any], tmp_path: Path, victim: Path) -> None:
    out, before = tmp_path / "out", holds(victim)
    run_build(recipe, out, workers=0)
    (out / ".build").symlink_to(victim)
    assert run_build(recipe, out, workers=0).outcome is Outcome.ALREADY_BUILT
    assert merge_build(out).outcome is Outcome.ALREADY_BUILT
    with pytest.raises(ConfigError, match="another dataset"):
        run_build({**recipe, "keep_kinds": False}, out, workers=0)
    assert holds(victim) == before


def test_a_build_behind_a_link_is_resumed_also_from_another_disk(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between disks nothing can be renamed: the splits are copied, and the bytes are the same."""
    run_build(recipe, tmp_path / "plain", workers=0)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    out = linked(tmp_path / "out", scratch)
    rename, refused = os.replace, []

    def other_disk(source: Any, target: Any, **options: Any) -> None:
        behind = [".build" in Path(path).parts for path in (source, target)]
        if behind[0] != behind[1]:
            refused.append(source)
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(source))
        rename(source, target, **options)

    monkeypatch.setattr("os.replace", other_disk)
    stopped(recipe, out, "before_manifest", monkeypatch)
    assert refused
    assert (scratch / "out.build" / MARK).is_file()
    with pytest.raises(ConfigError, match="--resume"):
        run_build(recipe, out, workers=0)
    assert run_build(recipe, out, workers=0, resume=True).outcome is Outcome.BUILT
    assert list(scratch.iterdir()) == []
    (out / ".build").unlink()
    assert digest(out) == digest(tmp_path / "plain")


@pytest.mark.parametrize("name", ["joined", "shards", "spool", "shards/000000", "joined/train"])
def test_a_link_inside_a_work_folder_is_refused(
    name: str, recipe: dict[str, Any], tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, before = tmp_path / "out", holds(victim)
    stopped(recipe, out, "before_publish", monkeypatch)
    link = out / ".build" / name
    remove_path(link)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(victim)
    with pytest.raises(ConfigError, match="is a link, and no build made it"):
        run_build(recipe, out, workers=0, resume=True)
    with pytest.raises(ConfigError, match="is a link, and no build made it"):
        merge_build(out)
    assert holds(victim) == before


@pytest.mark.parametrize("name", ["train", "rejected.jsonl"])
def test_a_link_in_the_place_of_a_split_is_refused(
    name: str, recipe: dict[str, Any], tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, before = tmp_path / "out", holds(victim)
    stopped(recipe, out, "before_publish", monkeypatch)
    (out / name).symlink_to(victim)
    with pytest.raises(ConfigError, match="is a link, and no build made it"):
        run_build(recipe, out, workers=0, resume=True)
    assert holds(victim) == before


def test_a_link_to_no_folder_or_to_one_that_is_taken_is_refused(recipe: dict[str, Any], tmp_path: Path) -> None:
    out = linked(tmp_path / "out", tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="which is no folder"):
        run_build(recipe, out, workers=0)
    (tmp_path / "nowhere" / "out.build").mkdir(parents=True)
    (tmp_path / "nowhere" / "out.build" / "mine").write_text("precious")
    with pytest.raises(ConfigError, match="no build made it"):
        run_build(recipe, out, workers=0)
    remove_work(out)
    assert (tmp_path / "nowhere" / "out.build" / "mine").read_text() == "precious"
    other = tmp_path / "other"
    other.mkdir()
    (other / ".build").write_text("a file")
    with pytest.raises(ConfigError, match="no folder"):
        claim_work(other)


def test_a_link_behind_a_link_is_refused_and_not_followed(tmp_path: Path, victim: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    out = linked(tmp_path / "out", scratch)
    (victim / MARK).write_text("as if a build had made it")
    (scratch / "out.build").symlink_to(victim, target_is_directory=True)
    before = holds(victim)
    with pytest.raises(ConfigError, match=r"out\.build is a link, and no build made it"):
        claim_work(out)
    remove_work(out)
    assert (scratch / "out.build").is_symlink()
    assert holds(victim) == before


def test_links_are_copied_to_another_disk_as_links(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, rename = tmp_path / "source", tmp_path / "target", os.replace
    source.mkdir()
    (source / "file").write_text("x")
    (source / "link").symlink_to(victim, target_is_directory=True)

    def other_disk(one: Any, other: Any) -> None:
        if Path(one) == source:
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(one))
        rename(one, other)

    monkeypatch.setattr("os.replace", other_disk)
    before = holds(victim)
    move_path(source, target)
    assert (target / "link").is_symlink()
    assert (target / "file").read_text() == "x"
    assert not source.exists()
    assert holds(victim) == before


def test_removal_takes_links_and_not_what_they_lead_to(tmp_path: Path, victim: Path) -> None:
    before = holds(victim)
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "link").symlink_to(victim)
    (folder / "broken").symlink_to(tmp_path / "nothing")
    (folder / "file").write_text("x")
    remove_path(folder)
    assert not folder.exists()
    link = tmp_path / "link"
    for target in (victim, tmp_path / "nothing"):
        link.symlink_to(target)
        remove_path(link)
        assert not link.is_symlink()
    assert holds(victim) == before


def test_synth_kd_behind_a_link(tmp_path: Path, victim: Path) -> None:
    rows = [row(f"r{number}", chat(user=f"What is {number}?")) for number in range(6)]
    source = write_input(tmp_path / "in", [rows])
    before = holds(victim)
    out = linked(tmp_path / "kd", victim)
    assert build_synth_kd(source, out, workers=0, audit=0, resume=True).outcome is Outcome.BUILT
    assert build_synth_kd(source, out, workers=0, audit=0, resume=True).outcome is Outcome.ALREADY_BUILT
    assert holds(victim) == before
    assert work_folder(out) == out / ".build" / "kd.build"
    assert not work_folder(out).exists()
