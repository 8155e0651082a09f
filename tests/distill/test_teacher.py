"""A teacher's distributions: asked for with exact ids, checked, stored, loaded, exported and trained on."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import chatmill
from chatmill.errors import ChatmillError, ConfigError, DataError, FormatError
from chatmill.store.receipts import read_manifest
from chatmill.train.losses import weighted_loss
from tests.compiler.builds import OPEN_GATES, plain_recipe, random_chat, write_jsonl
from tests.damage import flip
from tests.distill.teachers import Teacher, requests

K = 5
COLUMNS = ("ids", "logprobs", "rest")


def build(folder: Path, count: int = 12, seed: int = 0, **options: Any) -> Path:
    rng = random.Random(seed)
    chats = write_jsonl(folder / "chats.jsonl", [random_chat(rng, f"c{n}", words=8) for n in range(count)])
    chatmill.build(plain_recipe(chats, gates=OPEN_GATES, **options), folder / "built", workers=0)
    return folder / "built"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("asked"))


@pytest.fixture(scope="module")
def teacher(dataset: Path) -> Teacher:
    manifest = read_manifest(dataset)
    assert manifest is not None
    return Teacher(manifest["tokenizer"]["vocab_size"])


def answered(teacher: Teacher, dataset: Path, work: Path, **options: Any) -> list[dict[str, Any]]:
    chatmill.teacher_request(dataset, work / "requests", **options)
    found = [teacher.answer(one) for one in requests(work / "requests")]
    shutil.rmtree(work / "requests")
    return found


@pytest.fixture
def mine(dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset, tmp_path / "mine"))


@pytest.fixture(scope="module")
def all_answers(dataset: Path, teacher: Teacher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of each form with an answer for each document."""
    work = tmp_path_factory.mktemp("whole")
    made = {form: answered(teacher, dataset, work, form=form, top_k=K) for form in ("batch", "offline", "sglang")}
    return {form: write_jsonl(work / f"{form}.jsonl", answers) for form, answers in made.items()}


@pytest.fixture(scope="module")
def whole(dataset: Path, all_answers: dict[str, Path]) -> Path:
    """The dataset with all answers."""
    folder = Path(shutil.copytree(dataset, dataset.parent / "whole"))
    chatmill.teacher_add(folder, all_answers["batch"])
    return folder


def direct(known: torch.Tensor, student: torch.Tensor, k: int) -> float:
    """KL over the k most likely tokens and all the others as one."""
    p, q = known.exp(), student.double().softmax(-1)
    top = p.topk(k).indices
    named = float((p[top] * (p[top] / q[top]).log()).sum())
    rest, others = float(1 - p[top].sum()), float(1 - q[top].sum())
    return named + (rest * float(np.log(rest / others)) if rest > 1e-9 else 0.0)


@pytest.mark.parametrize(("form", "k"), [("batch", K), ("offline", 1), ("sglang", 1000)])
def test_the_loss_on_stored_answers_is_the_loss_on_the_teachers_logits(
    dataset: Path, mine: Path, teacher: Teacher, tmp_path: Path, form: str, k: int
) -> None:
    answers = answered(teacher, mine, tmp_path, form=form, top_k=k)
    counts = chatmill.teacher_add(mine, write_jsonl(tmp_path / "a.jsonl", answers))
    vocabulary = teacher.model.config.vocab_size
    k = min(k, vocabulary)
    loader = chatmill.Dataset(mine).to_torch(4, shuffle=False, teacher=True)
    episodes, seen = chatmill.EpisodeDataset(dataset), 0
    torch.manual_seed(0)
    for first in range(0, len(episodes), 4):
        x, y, mask, *said = loader.get_batch()
        logits = torch.randn(*x.shape, vocabulary)
        losses = chatmill.teacher_losses(logits, *said)
        assert said[0].shape == (*y.shape, k)
        for row, episode in enumerate(list(episodes)[first : first + 4]):
            assert episode.weights is not None
            known = zip(teacher.logprobs(episode.ids.tolist())[1:], logits[row], episode.weights[1:], strict=False)
            wanted = [direct(one, student, k) if weight > 0 else 0.0 for one, student, weight in known]
            seen += sum(one != 0 for one in wanted)
            np.testing.assert_allclose(losses[row, : len(wanted)], wanted, rtol=2e-3, atol=2e-3)  # 16 bits are stored
            assert not losses[row, len(wanted) :].any()
        assert (losses != 0).equal(mask > 0)
        assert weighted_loss(losses, mask).loss.isfinite()
    assert seen == counts["distributions"] > 100


def entries_of(owners: Any, ids: Any, values: Any, rest: Any) -> set[Any]:
    """Distributions, each with its document; what is padding or has none is left out."""
    return {
        (int(number), tuple(one), tuple(own), float(mass))
        for number, one, own, mass in zip(owners, ids, values, rest, strict=True)
        if len(one) and own[0] > -np.inf
    }


def test_a_packed_loader_rows_for_trainers_and_exports_have_the_same_distributions(whole: Path, tmp_path: Path) -> None:
    stored = chatmill.EpisodeDataset(whole)
    owners, found = np.repeat(np.arange(len(stored)), stored.lengths), stored.teacher.gather(np.arange(len(stored)))
    wanted = entries_of(owners[found.at], found.ids.tolist(), found.logprobs.tolist(), found.rest)
    assert len(wanted) > 100

    loader = chatmill.Dataset(whole).to_torch(2, packed=True, length=int(stored.lengths.max()) * 2, teacher=True)
    seen: set[Any] = set()
    for _ in range(len(loader)):
        batch: Any = loader.get_batch()
        assert batch.teacher[1][..., 0].isfinite().equal(batch[2] > 0)
        for row, documents in enumerate(loader.last_episodes()):
            of_row = np.repeat(documents, stored.lengths[documents])[1:]
            seen |= entries_of(of_row, *(tensor[row][: len(of_row)].tolist() for tensor in batch.teacher))
    assert seen == wanted

    rows = list(chatmill.to_hf_dataset(whole, teacher=True))
    for flattened in (False, True):
        made = chatmill.DataCollatorForCausalLM(type("T", (), {"eos_token_id": 0})(), return_flattened=flattened)(rows)
        assert made["teacher_ids"].shape == (*made["labels"].shape, K)
        said, targets = made["teacher_logprobs"][..., 0].isfinite(), made["labels"] != -100
        assert int((targets & ~said).sum()) == int(sum(one.weights[0] > 0 for one in stored))  # type: ignore[index]
        real = torch.arange(said.shape[1]) < torch.tensor(stored.lengths)[:, None] if not flattened else said >= 0
        assert entries_of(owners, *(made[f"teacher_{name}"][real].tolist() for name in COLUMNS)) == wanted

    for to in ("parquet", "hf"):
        chatmill.export_dataset(whole, to, tmp_path / to, split="train", teacher=True)
    tables = pq.read_table(tmp_path / "parquet" / "train").to_pylist(), datasets.load_from_disk(str(tmp_path / "hf"))
    for table in tables:
        read = [(number, [row[f"teacher_{name}"] for name in COLUMNS]) for number, row in enumerate(table)]
        assert set().union(*(entries_of([number] * len(parts[0]), *parts) for number, parts in read)) == wanted


def numbers_of(lines: Iterable[dict[str, Any]]) -> list[int]:
    return [int(one["custom_id"].split(":")[1]) for one in lines]


def test_answers_come_in_any_order_and_in_parts_of_any_format(
    mine: Path, whole: Path, teacher: Teacher, tmp_path: Path
) -> None:
    stored = chatmill.EpisodeDataset(whole)
    answers = answered(teacher, mine, tmp_path, form="offline", top_k=K)
    random.Random(1).shuffle(answers)
    failed = {"custom_id": answers[0]["custom_id"], "response": {"status_code": 500, "body": None}, "error": None}
    counts = chatmill.teacher_add(mine, write_jsonl(tmp_path / "1.jsonl.gz", [*answers[:3], failed]))
    distributions = sum(len(stored.teacher.gather(np.array([n])).at) for n in numbers_of(answers[:3]))
    assert counts == {"added": 3, "distributions": distributions, "there_already": 0, "failed": 1}
    with pytest.raises(ConfigError, match=rf"has answered 3 of {len(stored)} documents"):
        chatmill.Dataset(mine).to_torch(2, teacher=True)
    pq.write_table(pa.Table.from_pylist(answers[2:7]), tmp_path / "2.parquet")
    assert chatmill.teacher_add(mine, [tmp_path / "2.parquet"])["there_already"] == 1
    chatmill.teacher_request(mine, tmp_path / "left")
    assert sorted(numbers_of(requests(tmp_path / "left"))) == sorted(numbers_of(answers[7:]))
    fewer = answered(teacher, mine, tmp_path, form="sglang", top_k=2)
    chatmill.teacher_add(mine, write_jsonl(tmp_path / "3.jsonl", fewer))
    both = [chatmill.EpisodeDataset(folder).teacher for folder in (mine, whole)]
    assert len(both[0].parts) == 3
    order = np.random.default_rng(0).permutation(len(stored))
    lengths = np.maximum(stored.lengths[order] // 2, 1)
    for cut in (None, lengths):
        one, other = (column.gather(order, cut) for column in both)
        assert one.at.tolist() == other.at.tolist()
        named = np.isfinite(one.logprobs)
        assert set(named.sum(axis=1)) == {2, K}
        np.testing.assert_array_equal(one.ids[named], other.ids[named])
        np.testing.assert_array_equal(one.logprobs[named], other.logprobs[named])
    report = chatmill.verify_dataset(mine)
    assert report.passed
    assert report.counts["teacher_distributions"] == len(both[1].gather(np.arange(len(stored))).at)
    said = repr(chatmill.Dataset(mine).stats())
    assert f"teacher: {len(stored)} of {len(stored)} documents with targets" in said
    assert "(100.0%), 5 entries each" in said
    again = pickle.loads(pickle.dumps(chatmill.EpisodeDataset(mine)))
    np.testing.assert_array_equal(again.teacher.gather(order).ids, both[0].gather(order).ids)


def test_documents_are_cut_at_the_context_of_the_teacher(
    mine: Path, teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chatmill.distill.teacher.FILE_REQUESTS", 5)
    stored = chatmill.EpisodeDataset(mine)
    context = int(np.median(stored.lengths))
    counts = chatmill.teacher_request(mine, tmp_path / "r", top_k=K, max_length=context)
    asked = list(requests(tmp_path / "r"))
    assert [len(path.read_bytes().splitlines()) for path in sorted((tmp_path / "r").iterdir())] == [5, 5, 2]
    assert max(len(one["body"]["prompt"]) for one in asked) == context - 1
    assert counts["targets_cut"] > 0
    for one in asked:
        episode = stored[int(one["custom_id"].split(":")[1])]
        assert one["body"]["prompt"] == episode.ids[: len(one["body"]["prompt"])].tolist()
    added = chatmill.teacher_add(mine, write_jsonl(tmp_path / "a.jsonl", [teacher.answer(one) for one in asked]))
    assert added["distributions"] == counts["targets"]
    again = chatmill.EpisodeDataset(mine).teacher
    found = again.coverage()
    assert found["distributions"] == found["targets"] - counts["targets_cut"]
    assert chatmill.verify_dataset(mine).passed
    _, _, mask, _, values, _ = chatmill.Dataset(mine).to_torch(len(stored), shuffle=False, teacher=True).get_batch()
    said = values[..., 0].isfinite()
    assert not (said & (mask == 0)).any()
    assert int((mask > 0).sum() - said.sum()) == counts["targets_cut"]
    assert not said[:, context - 2 :].any()


KILLED = """
import os, signal, sys
from chatmill.distill.teacher import teacher_add
import chatmill.store.teacher as stored
stored.os.replace = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
teacher_add(*sys.argv[1:])
"""


def test_a_part_is_there_whole_or_not_at_all(mine: Path, whole: Path, all_answers: dict[str, Path]) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, mine, all_answers["batch"]], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = (mine / "teacher" / "train").iterdir()
    assert left.name.startswith(".tmp-")
    assert not chatmill.EpisodeDataset(mine).teacher.parts
    assert chatmill.verify_dataset(mine).passed
    chatmill.teacher_add(mine, all_answers["batch"])
    (part,) = (mine / "teacher" / "train").iterdir()
    assert part.read_bytes() == next((whole / "teacher" / "train").iterdir()).read_bytes()


def listed(answer: dict[str, Any]) -> list[Any]:
    """`prompt_logprobs`."""
    found: list[Any] = answer["response"]["body"]["choices"][0]["prompt_logprobs"]
    return found


def state(answer: dict[str, Any], logprob: float) -> None:
    for entry in listed(answer)[1:]:
        entry.update({token: {"logprob": logprob} for token in entry})


BROKEN: list[tuple[str, Any, str]] = [
    ("batch", lambda a: a.update(custom_id="answer-1"), "not that of a request"),
    ("batch", lambda a: a.update(custom_id="x" + a["custom_id"]), "split 'xtrain'"),
    ("batch", lambda a: a.update(custom_id="train:1:3:0:00"), "0 entries"),
    ("batch", lambda a: a.update(custom_id="train:99999:3:5:00"), "document 99999"),
    ("batch", lambda a: a.update(custom_id=a["custom_id"].rpartition(":")[0] + ":12"), "other ids than those"),
    ("batch", lambda a: listed(a).append(None), "another prompt"),
    ("batch", lambda a: listed(a).insert(0, listed(a).pop()), "another prompt|not an answer"),
    ("batch", lambda a: [one.popitem() for one in listed(a)[1:]], "were asked for|another prompt"),
    ("batch", lambda a: state(a, 0.0), "do not add up to 1"),
    ("batch", lambda a: state(a, 0.5), "above 0"),
    ("batch", lambda a: a["response"]["body"]["choices"][0].pop("prompt_logprobs"), "neither prompt_logprobs"),
    ("batch", lambda a: a["response"].update(body=[]), "neither prompt_logprobs|not an answer"),
    ("offline", lambda a: a.update(teacher_ids=[[5000, 1, 2, 3, 4]] * len(a["teacher_ids"])), "not in the vocabulary"),
    ("offline", lambda a: a.update(teacher_ids=[[1, 1, 2, 3, 4]] * len(a["teacher_ids"])), "an id twice"),
    ("sglang", lambda a: a["meta_info"]["input_token_logprobs"][1].__setitem__(1, 3), "input_token_logprobs"),
    ("cut", lambda a: None, "not JSON"),
]


@pytest.mark.parametrize("fault", range(len(BROKEN)))
def test_an_answer_that_does_not_fit_is_one_error_and_nothing_is_added(
    mine: Path, all_answers: dict[str, Path], tmp_path: Path, fault: int
) -> None:
    form, broken, words = BROKEN[fault]
    lines: list[Any] = all_answers.get(form, all_answers["batch"]).read_text().splitlines()
    answer = json.loads(lines[4])
    broken(answer)
    lines[4] = lines[4][:-9] if form == "cut" else json.dumps(answer)
    path = write_jsonl(tmp_path / "answers.jsonl", lines)
    with pytest.raises(DataError, match=rf"answers.jsonl:5: .*({words}).*Nothing was added"):
        chatmill.teacher_add(mine, path)
    left = [name for _, _, names in os.walk(mine / "teacher") for name in names]
    assert not left
    assert not chatmill.EpisodeDataset(mine).teacher.parts


def test_what_a_teacher_cannot_read_or_was_not_asked_for_is_refused(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "trees").mkdir()
    trees = build(tmp_path / "trees", expand="tree")
    with pytest.raises(ConfigError, match="holds trees"):
        chatmill.teacher_request(trees, tmp_path / "r")
    for options, words in (({"top_k": 0}, "top_k"), ({"max_length": 2}, "max_length"), ({"form": "x"}, "form")):
        with pytest.raises(ChatmillError, match=words):
            chatmill.teacher_request(whole, tmp_path / "r", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "r").exists()
    with pytest.raises(ConfigError, match="load has others"):
        chatmill.Dataset(whole).to_torch(2, teacher=True, policy="assistant")
    with pytest.raises(ConfigError, match="teacher is for exports to hf, parquet, axolotl"):
        chatmill.export_dataset(whole, "skyrl", tmp_path / "out", teacher=True)


def test_changed_parts_and_parts_of_another_dataset_are_found(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "damaged"))
    (path,) = (folder / "teacher" / "train").iterdir()
    size = path.stat().st_size
    for place in (size // 3, size // 2):
        flip(path, place)
        report = chatmill.verify_dataset(folder)
        assert report.findings[0].file == f"teacher/train/{path.name}"
        assert "its bytes have changed" in report.findings[0].message
        flip(path, place)
    assert chatmill.verify_dataset(folder).passed
    for place in range(0, size, size // 97):
        flip(path, place)
        try:
            problems = list(chatmill.EpisodeDataset(folder).teacher.problems(261))
        except FormatError:
            problems = [(path, "cannot be read")]
        assert problems
        flip(path, place)
    (tmp_path / "other").mkdir()
    other = build(tmp_path / "other", seed=1)
    shutil.copytree(folder / "teacher", other / "teacher")
    assert "other tokens or masks" in chatmill.verify_dataset(other).findings[0].message
    with pytest.raises(FormatError, match=r"remove .*teacher"):
        chatmill.Dataset(other).to_torch(2, teacher=True)
    os.truncate(path, size // 2)
    assert "cannot be read" in chatmill.verify_dataset(folder).findings[0].message
