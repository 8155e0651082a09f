"""Log-probabilities of sampled tokens reach batches next to the targets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from chatmill.compiler.run import run_build
from chatmill.errors import ConfigError, DataError
from chatmill.export.hf_rows import to_hf_dataset
from chatmill.load.collate import DataCollatorForCausalLM
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.packed_batch import PackedBatch
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import write_jsonl

BLOCK = 23


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calls of different lengths, some longer than a row, some without log-probabilities."""
    folder, generator = tmp_path_factory.mktemp("logprobs"), np.random.default_rng(5)
    records = []
    for number in range(40):
        sizes = generator.integers(1, 18, 2).tolist()
        prompt, own = (generator.integers(0, 256, size).tolist() for size in sizes)
        logprobs = (-generator.random(sizes[1])).tolist() if number % 3 else None
        records.append({"id": str(number), "prompt_token_ids": prompt, "token_ids": own, "logprobs": logprobs})
    path = write_jsonl(folder / "calls.jsonl", records)
    recipe = {"sources": [{"path": str(path)}], "tokenizer": "bytes", "template": "chatml", "logprobs": True}
    for name, stored in (("with", True), ("without", False)):
        run_build({**recipe, "add_control_tokens": True, "logprobs": stored}, folder / name, workers=0)
    return folder


@pytest.mark.parametrize("pack", [False, True])
def test_batches_have_them_aligned_with_the_targets(built: Path, pack: bool) -> None:
    config = {"batch_size": 3, "block_size": BLOCK, "use_loss_mask": True, "pad_token_id": 0, "epoch_drop_last": False}
    loader = GPTEpisodeDataLoader(config, dataset_dir=built / "with", pack=pack, logprobs=True)
    episodes, known = EpisodeDataset(built / "with"), 0
    for _ in range(loader.steps_per_epoch()):
        batch = loader.get_batch()
        given = batch.logprobs if isinstance(batch, PackedBatch) else batch[3]
        assert given is not None
        wanted = np.zeros((3, BLOCK + 1), dtype=np.float32)
        for row, numbers in enumerate(loader.last_episodes()):
            found = np.concatenate([episodes[number].logprobs for number in numbers])[: BLOCK + 1]
            wanted[row, : len(found)] = found
        np.testing.assert_array_equal(given.numpy(), wanted[:, 1:])
        known += np.count_nonzero(np.isfinite(wanted) & (wanted != 0))
    assert known > 100


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize("most", [None, 11])
def test_the_collator_has_them_beside_the_labels(built: Path, flattened: bool, most: int | None) -> None:
    rows = list(to_hf_dataset(built / "with"))[:5]
    options = {} if most is None else {"max_length": most, "truncation": True}
    tokenizer = type("T", (), {"eos_token_id": 0})()
    collate = DataCollatorForCausalLM(tokenizer, return_flattened=flattened, **options)
    batch = collate(rows)
    cut = [np.array(row["logprobs"], dtype=np.float32)[:most] for row in rows]
    lines = [np.concatenate(cut)] if flattened else cut
    wanted = np.zeros(batch["labels"].shape, dtype=np.float32)
    for row, line in enumerate(lines):
        wanted[row, : len(line)] = line
    np.testing.assert_array_equal(batch["logprobs"].numpy(), wanted)
    with pytest.raises(DataError, match="logprobs of row 0"):
        collate([{**rows[0], "logprobs": [0.0]}])


def test_what_is_not_stored_is_not_given(built: Path) -> None:
    assert "logprobs" not in to_hf_dataset(built / "without").column_names
    with pytest.raises(ConfigError, match="build with logprobs: true"):
        GPTEpisodeDataLoader(
            {"batch_size": 1, "block_size": 8, "pad_token_id": 0}, dataset_dir=built / "without", logprobs=True
        )
