"""The isolation check of trees passes on models that read the mask, and sees one that does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from chatmill.cli import app
from chatmill.errors import DataError
from chatmill.export.export import export_dataset
from chatmill.export.hf_rows import to_hf_dataset
from chatmill.train.tree_isolation import check_trees
from tests.load.test_trees import LONGEST, built, tiny

__all__ = ["built"]


def rows(built: Path, count: int = 2) -> list[dict[str, Any]]:
    return list(to_hf_dataset(built, max_length=LONGEST, pack=True))[:count]


def test_trees_train_as_their_rows_do(built: Path) -> None:
    report = check_trees(tiny("eager"), rows(built), gradients=True)
    assert report.passed, str(report)
    assert report.moved == 0
    assert len(report.documents) > 5
    assert report.trained["gradients"] < 1e-9
    assert str(report).startswith("isolated")


@pytest.mark.parametrize("leaks", [True, False])
def test_a_model_that_reads_another_mask_is_seen(built: Path, leaks: bool) -> None:
    """Branches see each other; or, cut off by their positions, not even what they branch from."""
    model = tiny("sdpa")
    forward = model.forward

    def call(**inputs: Any) -> Any:
        mask = inputs.get("attention_mask")
        wide = None if mask is None or not leaks else torch.full_like(mask, torch.finfo(mask.dtype).min).triu(1)
        return forward(**{**inputs, "attention_mask": wide})

    model.forward = call
    report = check_trees(model, rows(built))
    assert not report.passed
    assert (report.moved > report.moved_tolerance) == leaks
    assert report.alone > report.alone_tolerance
    assert report.trained["loss"] > report.trained_tolerance
    assert "NOT ISOLATED" in str(report)


def test_rows_without_branches_show_nothing(built: Path) -> None:
    count = 8
    plain = {"input_ids": list(range(count)), "labels": list(range(count))}
    plain |= {"position_ids": list(range(count)), "ends": [count] * count}
    with pytest.raises(DataError, match="no tree of these rows has a branch"):
        check_trees(tiny("sdpa"), [plain])


def test_the_command_checks_an_export_of_trees(built: Path, tmp_path: Path) -> None:
    model = tiny("sdpa", "qwen3", torch.float32)
    model.save_pretrained(tmp_path / "model")
    export_dataset(built, "hf", tmp_path / "hf", max_length=LONGEST)
    call = ["isolate", str(tmp_path / "model"), str(tmp_path / "hf"), "--split", "train", "--max-length", str(LONGEST)]
    done = CliRunner().invoke(app, [*call, "--gradients", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["passed"]
    assert found["trained"].keys() == {"loss", "gradients"}
    refused = CliRunner().invoke(app, ["isolate", str(tmp_path / "model"), "--gradients"])
    assert refused.exit_code != 0
