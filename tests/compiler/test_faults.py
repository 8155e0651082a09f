"""A fault of Chatmill while a record is written costs that record: it is counted, named, and the build goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import chatmill.compiler.pipeline as pipeline_module
from chatmill import errors
from chatmill.core.conversations import Conversations
from chatmill.errors import RecordError
from chatmill.prove.verify import verify
from chatmill.render.model_template import ModelTemplate
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import OPEN_GATES, plain_recipe, talk, write_jsonl
from tests.compiler.verify_sets import build_into

BAD = "r5"
Fault = Callable[[pytest.MonkeyPatch], None]


def while_a_record_is_written(patch: pytest.MonkeyPatch) -> None:
    check = ModelTemplate.check

    def checked(self: ModelTemplate, view: Any) -> None:
        if view.named == BAD:
            raise AttributeError("no turn runs")
        check(self, view)

    patch.setattr(ModelTemplate, "check", checked)


def while_its_batch_is_written(patch: pytest.MonkeyPatch) -> None:
    """What works on many records at once fails for all of them."""
    render = vars(pipeline_module)["render_repaired"]

    def rendered(batch: Conversations, *more: Any) -> Any:
        if BAD in [batch.ids[index] for index in range(len(batch))]:
            raise SystemError("Negative size passed to PyBytes_FromStringAndSize")
        return render(batch, *more)

    patch.setattr(pipeline_module, "render_repaired", rendered)


def records(*left_out: str) -> list[dict[str, Any]]:
    names = [name for name in (f"r{number}" for number in range(12)) if name not in left_out]
    said = {name: [f"Question {name}?", f"Answer {name}."] for name in names}
    return [{"id": name, "messages": talk(*said[name] * (1 + (name == BAD)))} for name in names]


@pytest.fixture(params=[while_a_record_is_written, while_its_batch_is_written])
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    request.param(monkeypatch)
    monkeypatch.setattr(errors, "are_faults_raised", False)


def recipe(folder: Path, *left_out: str, **more: Any) -> dict[str, Any]:
    path = write_jsonl(folder / f"chats{len(left_out)}.jsonl", records(*left_out))
    return plain_recipe(path, **{"on_error": "quarantine", "gates": OPEN_GATES, **more})


@pytest.mark.usefixtures("fault")
@pytest.mark.parametrize("expand", ["turns", "tree"])
def test_a_fault_costs_one_record_and_all_others_are_as_without_it(tmp_path: Path, expand: str) -> None:
    folder = build_into(tmp_path / "built", recipe(tmp_path, expand=expand))
    (line,) = (folder / "rejected.jsonl").read_text(encoding="utf-8").splitlines()
    entry = json.loads(line)
    assert (entry["id"], entry["reason"]) == (BAD, "internal_error")
    assert entry["where"].endswith("chats0.jsonl:6")
    assert "a fault of Chatmill, not of the record" in entry["message"]
    assert "Please report these words" in entry["message"]
    others = build_into(tmp_path / "others", recipe(tmp_path, BAD, expand=expand))
    built, wanted = (EpisodeDataset(one) for one in (folder, others))
    assert [one.record_id for one in built] == [one.record_id for one in wanted]
    assert [one.ids.tolist() for one in built] == [one.ids.tolist() for one in wanted]
    report = verify(folder, deep=True)
    assert report.passed, report.findings


@pytest.mark.usefixtures("fault")
def test_records_that_share_a_tree_with_it_are_lost_at_most(tmp_path: Path) -> None:
    """A fault in what works on a whole batch cannot be told apart inside of a group."""
    grouped = [{**one, "group": f"g{int(one['id'][1:]) // 3}"} for one in records()]
    path = write_jsonl(tmp_path / "grouped.jsonl", grouped)
    options = {"on_error": "quarantine", "gates": OPEN_GATES, "expand": "tree", "tree": {"group": "group"}}
    folder = build_into(tmp_path / "built", plain_recipe(path, **options))
    entries = [json.loads(line) for line in (folder / "rejected.jsonl").read_text(encoding="utf-8").splitlines()]
    assert BAD in [entry["id"] for entry in entries]
    assert {entry["id"] for entry in entries} <= {"r3", "r4", "r5"}


@pytest.mark.usefixtures("fault")
def test_a_build_that_stops_at_errors_says_which_record_and_how_to_report_it(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"(?s)chats0.jsonl:6.*a fault of Chatmill.*in chatmill\..*Please report"):
        build_into(tmp_path / "built", recipe(tmp_path, on_error="fail"))


@pytest.mark.usefixtures("fault")
def test_tests_see_a_fault_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be one refused record among those that a test expects."""
    monkeypatch.setattr(errors, "are_faults_raised", True)
    with pytest.raises((AttributeError, SystemError)):
        build_into(tmp_path / "built", recipe(tmp_path))


def test_what_is_the_machines_is_no_fault_of_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "are_faults_raised", False)
    for error in (MemoryError(), OSError(28, "No space left on device"), errors.ConfigError("no date")):
        with pytest.raises(type(error)):
            errors.fault_of(error)
