"""What the tests of training share."""

from __future__ import annotations

from typing import Any

import pytest

from chatmill.train.batch import TrainBatch
from chatmill.train.step import Stepper


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[TrainBatch]:
    """The batches of all steps that are taken from here on."""
    batches: list[TrainBatch] = []
    step = Stepper.step

    def recorded(stepper: Stepper, given: Any, rate: float) -> Any:
        batches.extend(given)
        return step(stepper, given, rate)

    monkeypatch.setattr(Stepper, "step", recorded)
    return batches
