"""What Chatmill 0.3.0 wrote opens, or is refused with the version that wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import chatmill
from chatmill.errors import ConfigError, FormatError

WRITTEN = Path(__file__).parents[1] / "data" / "0.3.0"


@pytest.mark.parametrize("build", ["turns", "trees", "pairs"])
def test_builds_of_another_format_are_refused_with_the_version_that_wrote_them(build: str) -> None:
    with pytest.raises(FormatError, match=r"format 4, written by Chatmill 0\.3\.0; .* reads format 5: build it again"):
        chatmill.Dataset(WRITTEN / build)
    with pytest.raises(FormatError, match=r"written by Chatmill 0\.3\.0"):
        chatmill.verify_dataset(WRITTEN / build)


def test_a_distillation_set_is_read_and_verified() -> None:
    report = chatmill.verify_synth_kd(WRITTEN / "synth_kd")
    assert report.passed
    assert report.counts["files"] > 0


def test_an_export_is_read() -> None:
    datasets = pytest.importorskip("datasets")
    exported = datasets.load_from_disk(str(WRITTEN / "turns-hf"))
    assert exported["train"].num_rows > 0

    report = chatmill.audit(WRITTEN / "turns-hf", WRITTEN.parent / "tokenizers" / "qwen3")
    assert report.passed


def test_a_loader_reads_the_rows_and_refuses_the_state_by_its_version() -> None:
    options = {"batch_size": 2, "block_size": 4096, "pad_token_id": 151643}
    loader = chatmill.GPTEpisodeDataLoader(options, None, WRITTEN / "turns", use_loss_mask=True)
    _, _, mask = loader.get_batch("train")
    assert mask.sum() > 0

    state = json.loads((WRITTEN / "loader_state.json").read_text(encoding="utf-8"))
    with pytest.raises(ConfigError, match=r"saved this state \(state version 1\); this one reads state version 2"):
        loader.load_state_dict(state)
