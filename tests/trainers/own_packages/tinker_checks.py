"""The datums of documents are those of tinker-cookbook's own function; the service itself is not called."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from tinker_cookbook.supervised.common import datum_from_model_input_weights

from chatmill.errors import ConfigError
from tests.trainers.sets import trees, weighted_items, weighted_set, weights_by_document

ROOT = Path(__file__).parents[3]


def builder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """Run the lines of the page."""
    monkeypatch.chdir(folder)
    page = (ROOT / "docs" / "inside-trainers.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("## Tinker")[1].split("```python")[1].split("```")[0], names)
    return names["builder"]


@pytest.mark.parametrize("fractional", [True, False])
def test_datums_are_those_of_the_cookbook(fractional: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = weighted_set(tmp_path / "built", weighted_items(20, fractional=fractional))
    train, validation = builder(monkeypatch, tmp_path)()
    weights = weights_by_document(folder)
    train.set_epoch(seed=3)
    seen = []
    for number in range(len(train)):
        for datum in pickle.loads(pickle.dumps(train)).get_batch(number):
            targets = datum.loss_fn_inputs["target_tokens"].tolist()
            ids = (datum.model_input.to_ints()[0], *targets)
            wanted = datum_from_model_input_weights(tinker.ModelInput.from_ints(list(ids)), torch.tensor(weights[ids]))
            assert datum.model_input == wanted.model_input
            for name, values in wanted.loss_fn_inputs.items():
                assert datum.loss_fn_inputs[name].dtype == values.dtype
                assert datum.loss_fn_inputs[name].tolist() == values.tolist()
            assert set(datum.loss_fn_inputs) == set(wanted.loss_fn_inputs)
            seen.append(ids)
    assert len(set(seen)) == len(seen) == 20
    orders = []
    for seed in (3, 4, 3):
        train.set_epoch(seed=seed)
        orders.append([datum.model_input for datum in train.get_batch(0)])
    assert orders[0] == orders[2] != orders[1]
    assert sum(len(validation.get_batch(number)) for number in range(len(validation))) == 5


def test_what_has_no_datum_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees(tmp_path)
    with pytest.raises(ConfigError, match="holds trees, and Tinker has no mask"):
        builder(monkeypatch, tmp_path)()
