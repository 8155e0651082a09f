"""The data loader for torchtitan's main branch, on a stand-in for it; and what is said where torchtitan is missing.

torchtitan 0.3.0 itself runs in `tests/export/test_own_readers.py`. Its main branch is on no index: it was not run.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from chatmill.errors import ConfigError
from chatmill.export.export import export_dataset
from tests.export.sets import Document, aligned, built, cut, documents_of

MAIN = Path(__file__).parent / "torchtitan_main"
WIDTH, PAD = 6000, 258
Load = Callable[[Path | None], Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Imports `chatmill.torchtitan` where the package torchtitan is in a folder, or nowhere."""

    def forget() -> None:
        for name in list(sys.modules):
            if name.split(".")[0] == "torchtitan" or name == "chatmill.torchtitan":
                del sys.modules[name]

    def loaded(folder: Path | None) -> Any:
        forget()
        if folder is not None:
            monkeypatch.syspath_prepend(str(folder))
        return importlib.import_module("chatmill.torchtitan")

    yield loaded
    forget()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("built") / "episodes")


@pytest.fixture(scope="module")
def export(dataset: Path) -> Path:
    out = dataset.with_name("titan")
    export_dataset(dataset, "torchtitan", out, max_length=WIDTH)
    return out / "train"


def loader(module: Any, export: Path, tokens: int = 2 * WIDTH, rank: int = 0, ranks: int = 1, **options: Any) -> Any:
    """A loader as the trainer of the main branch builds it."""
    config = module.ChatmillDataLoader.Config(dataset_path=str(export), **{"infinite": False, "seed": 7, **options})
    return config.build(
        dp_world_size=ranks, dp_rank=rank, tokenizer=None, max_context_length=WIDTH, num_tokens_per_batch=tokens
    )


def documents_in(batches: list[Any]) -> list[Document]:
    """Documents of batches without rows: one begins where a position is 0."""
    found = []
    for inputs, shifted in batches:
        ids, positions = inputs["input"].tolist(), inputs["positions"].tolist()
        starts = [place for place, position in enumerate(positions) if position == 0]
        documents = cut(ids, aligned(shifted.tolist()), starts)
        found += [one for one in documents if set(one[0]) != {PAD}]
    return found


def test_the_main_branch_gets_flat_batches_with_the_documents_of_the_dataset(
    load: Load, dataset: Path, export: Path
) -> None:
    module = load(MAIN)
    batches = list(loader(module, export, tokens=WIDTH))
    for inputs, labels in batches:
        for values in (inputs["input"], inputs["positions"], labels):
            assert values.shape == (WIDTH,)
            assert values.dtype == torch.int64
    assert Counter(documents_in(batches)) == Counter(documents_of(dataset))
    of_two = list(loader(module, export))
    assert len(of_two) == len(batches) // 2 > 3
    for number, (inputs, labels) in enumerate(of_two):
        first, second = batches[2 * number : 2 * number + 2]
        assert torch.equal(inputs["input"], torch.cat([first[0]["input"], second[0]["input"]]))
        assert torch.equal(labels, torch.cat([first[1], second[1]]))


def test_a_run_on_the_main_branch_goes_on_where_its_checkpoint_was_written(load: Load, export: Path) -> None:
    module = load(MAIN)
    whole = list(loader(module, export, rank=1, ranks=2, tokens=WIDTH))
    first = loader(module, export, rank=1, ranks=2, tokens=WIDTH)
    reading = iter(first)
    begun = [next(reading) for _ in range(3)]
    second = loader(module, export, rank=1, ranks=2, tokens=WIDTH)
    second.load_state_dict({**loader(module, export, ranks=2).state_dict(), **first.state_dict()})
    assert documents_in([*begun, *second]) == documents_in(whole)
    other = documents_in(list(loader(module, export, rank=0, ranks=2, tokens=WIDTH)))
    assert not set(other) & set(documents_in(whole))
    endless = iter(loader(module, export, tokens=WIDTH, infinite=True))
    epochs = [next(endless) for _ in range(4 * len(whole))]
    assert Counter(documents_in(epochs[: 2 * len(whole)])) == Counter(documents_in(epochs[2 * len(whole) :]))
    with pytest.raises(ConfigError, match="written by 2 data-parallel ranks, and there are 1"):
        loader(module, export).load_state_dict(first.state_dict())
    first.close()


def test_batches_that_rows_do_not_fill_are_refused(load: Load, export: Path) -> None:
    module = load(MAIN)
    with pytest.raises(ConfigError, match="6,000 tokens, which do not fill a batch of 6,001"):
        loader(module, export, tokens=WIDTH + 1)
    config = module.ChatmillDataLoader.Config(dataset_path=str(export))
    ranks = {"dp_world_size": 1, "dp_rank": 0, "tokenizer": None}
    with pytest.raises(ConfigError, match="max_context_length is 4,096"):
        config.build(**ranks, max_context_length=4096, num_tokens_per_batch=WIDTH)
    with pytest.raises(ConfigError, match="Chatmill does not know it"):
        config.build(**ranks, rows=3)
    with pytest.raises(ConfigError, match="dataset_path is missing"):
        module.ChatmillDataLoader.Config().build(**ranks, seq_len=WIDTH, local_batch_size=1)


def test_who_has_torchtitan_is_not_told_to_install_it(load: Load, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not installed: pip install torchtitan"):
        load(None)
    package = tmp_path / "other" / "torchtitan"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    with pytest.raises(ConfigError) as found:
        load(tmp_path / "other")
    assert str(package) in str(found.value)
    assert "torchtitan.components.data.loader" in str(found.value)
    assert "pip install" not in str(found.value)
    (package / "__init__.py").write_text("import nothing_of_this_name")
    with pytest.raises(ConfigError, match="importing it fails: No module named 'nothing_of_this_name'") as found:
        load(tmp_path / "other")
    assert "pip install" not in str(found.value)
