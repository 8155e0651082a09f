"""Exports to trainers, read by the trainers' own classes: the same tokens and targets as in the dataset.

`make test-trainers` installs each trainer into a folder of its own, `.trainers/NAME`, from the pins in
`own_readers/NAME.txt`, and runs these tests. Each reader is a process of its own.
"""

from __future__ import annotations

import dataclasses
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
from chatmill.export import export as export_module
from chatmill.export.export import export_dataset
from chatmill.store.documents import open_dataset
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import write_jsonl
from tests.compiler.test_pairs import build, random_pairs, said
from tests.distill.teachers import Teacher, requests
from tests.export.sets import END, built, documents_of

ROOT = Path(__file__).parents[2]
READERS = Path(__file__).parent / "own_readers"
LONGEST = 2048
"""Tokens of the longest document, so that it fills the shortest rows."""
LENGTHS = (2048, 3001, 4096)
"""Tokens of a row: lengths that people use, and an odd one."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "axolotl": ("train", {}),
    "llamafactory": ("", {}),
    "llamafactory unpacked": ("", {}),
    "megatron-bridge": ("train", {}),
    "olmo-core": ("train", {"eod_id": 0}),
    "skyrl": ("train", {}),
    "levanter": ("train", {"packing_strategy": "alone"}),
    "torchtitan": ("train", {}),
}
PACKS_ITSELF = ("axolotl", "olmo-core", "skyrl", "llamafactory unpacked")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    packing = {"max_length": LONGEST, "overflow": "cut"}
    return built(tmp_path_factory.mktemp("built") / "episodes", packing=packing)


def read_by(name: str, module: str, work: Path, *exports: str) -> Any:
    """What a reader, which has the package of a trainer, finds in exports."""
    package = ROOT / ".trainers" / name
    assert package.is_dir(), f"{package} is missing: run `make test-trainers`"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(package), str(READERS / "stand_ins")]),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "home"),
        "JAX_PLATFORMS": "cpu",
        "AXOLOTL_DO_NOT_TRACK": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        f"tests.export.own_readers.{module}",
        str(work / "found"),
        *exports,
    ]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((work / "found").read_text())


@pytest.mark.trainers
@pytest.mark.parametrize("case", CASES)
def test_the_trainer_itself_reads_the_dataset_and_its_batches_keep_documents_apart(
    dataset: Path, tmp_path: Path, case: str
) -> None:
    folder, options = CASES[case]
    name = case.split()[0]
    exports = []
    for length in LENGTHS:
        out = tmp_path / str(length)
        packing = {} if case in PACKS_ITSELF else {"max_length": length}
        export_dataset(dataset, name, out, **packing, **options)
        exports.append(f"{length}={out / folder}")
    found = read_by(name, name.replace("-", "_"), tmp_path, *exports)
    assert list(found) == [str(length) for length in LENGTHS]
    wanted = documents_of(dataset)
    assert len(wanted) > 20
    assert max(len(ids) for ids, _ in wanted) == LONGEST
    for of_length in found.values():
        read = [(tuple(ids), tuple(places)) for ids, places in of_length["documents"]]
        assert Counter(read) == Counter(wanted)
        if name != "axolotl":  # whose packed batches tests/export/test_own_trainers.py measures
            assert {"moved", "seen"} <= {what.split()[0] for what in of_length["measured"]}
        for what, value in of_length["measured"].items():
            if what.startswith("moved"):
                assert value < 1e-4, f"{what}: a document moves another one's logits"
            else:
                assert value > 1e-2, f"{what}: nothing moves, so nothing is proved"


@pytest.mark.trainers
def test_levanter_keeps_packed_documents_apart_that_end_in_their_only_end_token(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = []
    with EpisodeWriter(tmp_path / "ended", "train") as writer:
        for ids, places in documents_of(dataset):
            plain = [10 if token == END else token for token in ids[: LONGEST - 1]]
            trained = [place for place in places if place < len(plain)]
            writer.append([*plain, END], [float(place in trained) for place in range(len(plain) + 1)])
            wanted.append(((*plain, END), tuple(trained)))
    tokenizer = {"eos_id": END, "pad_id": 258, "vocab_size": 261}
    opened = dataclasses.replace(open_dataset(tmp_path / "ended"), about={"tokenizer": tokenizer})
    monkeypatch.setattr(export_module, "open_dataset", lambda *_: opened)
    exports = []
    for length in LENGTHS:
        out = tmp_path / "packed" / str(length)
        export_dataset(tmp_path / "ended", "levanter", out, max_length=length)
        exports.append(f"{length}={out / 'train'}")
    for of_length in read_by("levanter", "levanter", tmp_path, *exports).values():
        assert Counter((tuple(ids), tuple(places)) for ids, places in of_length["documents"]) == Counter(wanted)
        assert of_length["measured"]["moved"] < 1e-4
        assert of_length["measured"]["seen"] > 1e-2


@pytest.mark.trainers
@pytest.mark.parametrize("kind", ["pairs", "labels"])
def test_the_collators_of_llamafactory_read_pairs_and_labels(tmp_path: Path, kind: str) -> None:
    labels = [{"prompt": f"q{n}", "completion": "a" * (n + 1), "label": n % 3 == 0} for n in range(12)]
    folder = build(tmp_path, random_pairs(20) if kind == "pairs" else labels)
    export_dataset(folder, "llamafactory", tmp_path / "out")
    batch = read_by("llamafactory", "llamafactory_pairs", tmp_path, str(tmp_path / "out"))
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
    found = read_by("axolotl", "axolotl_kd", tmp_path, str(tmp_path / "out" / "train"))
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
