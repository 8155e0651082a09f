"""Rows in Levanter's own data config and training set: weights, and masks that keep documents apart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.export.isolation import bounds_of, measured, model_of
from tests.export.own_readers.levanter_runners import stand_in_for_runners
from tests.trainers.sets import obvious_loss, trees, weighted_items, weighted_set, weights_by_document

MODEL = model_of("qwen3")  # before the stand-ins, which confuse transformers
stand_in_for_runners()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from haliax import Axis  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from chatmill.errors import ConfigError  # noqa: E402

ROOT = Path(__file__).parents[3]
LENGTH = 32


def config_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the lines of the page."""
    monkeypatch.chdir(folder.parent)
    page = (ROOT / "docs" / "inside-trainers.md").read_text()
    code = page.split("## Levanter")[1].split("```python")[1].split("```")[0].replace("8192", str(LENGTH))
    names: dict[str, Any] = {}
    exec(code.replace('"built"', repr(folder.name)), names)
    return names["data"]


def test_its_training_set_has_the_weights_and_keeps_documents_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = weighted_set(tmp_path / "built", weighted_items())
    data = config_of(folder, monkeypatch)
    wanted = weights_by_document(folder)
    rows = data.components["chats"].datasets["train"]
    count = asyncio.run(rows.async_len())
    train = data.train_sets(Axis("position", LENGTH), key=jax.random.PRNGKey(0))["chats"]
    examples = asyncio.run(train.get_batch(list(range(count))))

    seen, total, divisor = [], 0.0, 0.0
    for example in examples:
        ids = torch.tensor(np.asarray(example.tokens).tolist())[None]
        weights = torch.tensor(np.asarray(example.loss_weight).tolist())
        sees = torch.from_numpy(np.array(example.attn_mask.materialize_mask(LENGTH, LENGTH)))[None]
        positions = torch.arange(LENGTH)[None]  # as Levanter's models have them
        spans = bounds_of(ids.tolist(), set(wanted))
        seen += [tuple(ids[0, first:last].tolist()) for _, first, last in spans]
        mask = torch.where(sees, 0.0, torch.finfo(torch.float32).min)[:, None]
        with torch.no_grad():
            logits = MODEL(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[0]
        total += float((cross_entropy(logits, ids[0].roll(-1), reduction="none") * weights).sum())
        divisor += float(weights.sum())
        if len(spans) > 1:
            moves = measured(MODEL, ids, sees, positions, spans)
            assert moves["moved"] < 1e-4
            assert moves["seen"] > 1e-2
    assert sorted(seen) == sorted(wanted)
    batches = [torch.tensor(np.asarray(example.tokens).tolist())[None] for example in examples]
    assert total / divisor == pytest.approx(obvious_loss(MODEL, batches, wanted), rel=1e-3)


def test_what_it_cannot_take_is_refused(tmp_path: Path) -> None:
    from chatmill.trainers.levanter import LevanterRows

    with pytest.raises(ConfigError, match="holds trees, and Levanter has no mask"):
        LevanterRows(trees(tmp_path), "train", train_seq_len=700)
