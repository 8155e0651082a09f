"""Exports to trainers, read by the trainers' own classes: the same tokens and targets as in the dataset.

`make test-trainers` installs each trainer into a folder of its own, `.trainers/NAME`, from the pins in
`own_readers/NAME.txt`, and runs these tests. Each reader is a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from chatmill.distill.teacher import teacher_add, teacher_request
from chatmill.export.export import export_dataset
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import write_jsonl
from tests.compiler.test_pairs import build, random_pairs, said
from tests.distill.teachers import Teacher, requests
from tests.export.sets import CAPACITY, built, documents_of

ROOT = Path(__file__).parents[2]
READERS = Path(__file__).parent / "own_readers"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "axolotl": ("train", {}),
    "llamafactory": ("", {"max_length": CAPACITY}),
    "llamafactory unpacked": ("", {}),
    "megatron-bridge": ("train", {"max_length": CAPACITY}),
    "olmo-core": ("train", {"eod_id": 0}),
    "skyrl": ("train", {}),
    "levanter": ("train", {"max_length": CAPACITY, "packing_strategy": "alone"}),
    "torchtitan": ("train", {"max_length": CAPACITY}),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("built") / "episodes")


def read_by(name: str, module: str, export: Path, work: Path) -> Any:
    """What a reader, which has the package of a trainer, finds in an export."""
    package = ROOT / ".trainers" / name
    assert package.is_dir(), f"{package} is missing: run `make test-trainers`"
    environment = {
        **os.environ,
        "PYTHONPATH": str(package),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "home"),
        "JAX_PLATFORMS": "cpu",
        "AXOLOTL_DO_NOT_TRACK": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", module, str(export), str(work / "found")]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((work / "found").read_text())


@pytest.mark.trainers
@pytest.mark.parametrize("case", CASES)
def test_the_trainer_itself_reads_the_dataset(dataset: Path, tmp_path: Path, case: str) -> None:
    folder, options = CASES[case]
    name = case.split()[0]
    export_dataset(dataset, name, tmp_path / "out", **options)
    read = read_by(name, f"tests.export.own_readers.{name.replace('-', '_')}", tmp_path / "out" / folder, tmp_path)
    found = [(tuple(ids), tuple(places)) for ids, places in read]
    wanted = documents_of(dataset)
    assert len(wanted) > 20
    assert Counter(found) == Counter(wanted)


@pytest.mark.trainers
@pytest.mark.parametrize("kind", ["pairs", "labels"])
def test_the_collators_of_llamafactory_read_pairs_and_labels(tmp_path: Path, kind: str) -> None:
    labels = [{"prompt": f"q{n}", "completion": "a" * (n + 1), "label": n % 3 == 0} for n in range(12)]
    folder = build(tmp_path, random_pairs(20) if kind == "pairs" else labels)
    export_dataset(folder, "llamafactory", tmp_path / "out")
    batch = read_by("llamafactory", "tests.export.own_readers.llamafactory", tmp_path / "out", tmp_path)
    episodes = list(EpisodeDataset(folder))
    if kind == "pairs":
        episodes = [*episodes[::2], *episodes[1::2]]
    else:
        assert batch["kto_tags"] == [one.side == "liked" for one in episodes]
        assert len(batch["kl_input_ids"]) == len(episodes)
    assert len(batch["input_ids"]) == len(episodes)
    for ids, mask, targets, one in zip(
        batch["input_ids"], batch["attention_mask"], batch["labels"], episodes, strict=True
    ):
        size = sum(mask)
        assert ids[:size] == one.ids.tolist()
        assert one.weights is not None
        assert [target != -100 for target in targets[:size]] == (one.weights > 0).tolist()
        assert set(targets[size:]) <= {-100}


@pytest.mark.trainers
@pytest.mark.parametrize("k", [4, 261])
def test_the_collators_and_the_loss_of_axolotl_read_a_teacher(tmp_path: Path, k: int) -> None:
    chats = [{"messages": [said("user", "q" * n), said("assistant", "a" * n)]} for n in range(1, 9)]
    folder = build(tmp_path, chats, preferences="chosen")
    teacher = Teacher(261)
    teacher_request(folder, tmp_path / "requests", form="offline", top_k=k)
    answers = [teacher.answer(one) for one in requests(tmp_path / "requests")]
    teacher_add(folder, write_jsonl(tmp_path / "answers.jsonl", answers))
    export_dataset(folder, "axolotl", tmp_path / "out", teacher=True)
    found = read_by("axolotl", "tests.export.own_readers.axolotl_kd", tmp_path / "out" / "train", tmp_path)
    episodes = list(EpisodeDataset(folder))
    for name, batch in found.items():
        logits = torch.randn(len(batch["ids"]), len(batch["ids"][0]), 261, generator=torch.Generator().manual_seed(0))
        rows = [(logits[0] if name == "packed" else logits[number]) for number in range(len(episodes))]
        start, wanted, targets = 0, 0.0, 0
        for episode, row in zip(episodes, rows, strict=True):
            ids, weights = episode.ids.tolist(), episode.weights
            assert weights is not None
            for place in [place for place in range(1, len(ids)) if weights[place] > 0]:
                p, tokens = teacher.logprobs(ids)[place].topk(k)
                p = p.log_softmax(-1)  # Axolotl takes the k tokens for all
                q = row[start + place - 1].double().log_softmax(-1)[tokens]
                wanted, targets = wanted + float((p.exp() * (p - q)).sum()), targets + 1
            start += len(ids) if name == "packed" else 0
        assert batch["entries"] == targets * k > 0
        assert batch["sum"] == pytest.approx(wanted, rel=2e-3)
