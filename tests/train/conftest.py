"""What the tests of training share."""

from __future__ import annotations

from typing import Any

import pytest

from chatmill.train.batch import TrainBatch
from chatmill.train.step import Trainer


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[TrainBatch]:
    """The batches of all steps that are taken from here on."""
    batches: list[TrainBatch] = []
    step = Trainer.step

    def recorded(trainer: Trainer, given: Any, rate: float) -> Any:
        batches.extend(given)
        return step(trainer, given, rate)

    monkeypatch.setattr(Trainer, "step", recorded)
    return batches
