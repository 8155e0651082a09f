"""Exports of pairs and labels, read by the collators of the trainers themselves."""

from __future__ import annotations

import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from chatmill.dataset.stored import Dataset
from chatmill.errors import ConfigError, DataError, RecordError
from chatmill.export.export import export_dataset
from chatmill.export.hf_rows import to_hf_dataset
from chatmill.prove.verify import verify
from chatmill.store.episodes import Episode, EpisodeDataset
from tests.compiler.test_pairs import build, random_pairs, said
from tests.damage import flip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pairs"), random_pairs(40))


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [{"prompt": f"q{n}", "completion": f"a{n}" * (n + 1), "label": n % 3 == 0} for n in range(12)]
    return build(tmp_path_factory.mktemp("labels"), records)


def collated(trainer: str, rows: list[dict[str, Any]]) -> Any:
    """A batch of one of TRL's trainers; importing one takes seconds, and few tests need it."""
    name = "DataCollatorForUnpairedPreference" if trainer == "kto" else "DataCollatorForPreference"
    return getattr(import_module(f"trl.trainer.{trainer}_trainer"), name)(pad_token_id=0)(rows)


def rows(dataset: Path, to: str, out: Path) -> list[dict[str, Any]]:
    export_dataset(dataset, to, out / to)
    return list(datasets.load_from_disk(str(out / to))["train"])


def trained(episode: Episode) -> list[tuple[int, ...]]:
    """(place, id) of everything that is trained."""
    assert episode.weights is not None
    return [(place, int(episode.ids[place])) for place in episode.weights.nonzero()[0].tolist()]


def masked(ids: torch.Tensor, mask: torch.Tensor) -> list[tuple[int, ...]]:
    return [(place, int(ids[place])) for place in mask.nonzero().flatten().tolist()]


def test_the_collator_of_dpo_trains_what_the_dataset_trains(pairs: Path, tmp_path: Path) -> None:
    batch = collated("dpo", rows(pairs, "trl-dpo", tmp_path))
    found = [masked(*one) for one in zip(batch["input_ids"], batch["completion_mask"], strict=True)]
    episodes = list(EpisodeDataset(pairs))
    assert len(episodes) == 80
    assert found == [trained(one) for one in (*episodes[::2], *episodes[1::2])]


@pytest.mark.parametrize("kind", ["pairs", "labels"])
def test_the_collator_of_kto_trains_what_the_dataset_trains(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)
    batch = collated("kto", rows(folder, "trl-kto", tmp_path))
    episodes = list(EpisodeDataset(folder))
    found = [masked(*one) for one in zip(batch["input_ids"], batch["completion_mask"], strict=True)]
    assert found == [trained(one) for one in episodes]
    assert list(map(bool, batch["label"])) == [one.side in ("chosen", "liked") for one in episodes]


def test_the_collator_of_reward_models_reads_whole_documents(pairs: Path, tmp_path: Path) -> None:
    batch = collated("reward", rows(pairs, "trl-reward", tmp_path))
    episodes = list(EpisodeDataset(pairs))
    found = [ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    assert found == [one.ids.tolist() for one in (*episodes[::2], *episodes[1::2])]


def test_llamafactory_gets_ids_and_labels(pairs: Path, labels: Path, tmp_path: Path) -> None:
    for row, (chosen, rejected) in zip(rows(pairs, "llamafactory", tmp_path), _couples(pairs), strict=True):
        for name, episode in (("chosen", chosen), ("rejected", rejected)):
            assert row[f"{name}_input_ids"] == episode.ids.tolist()
            assert _labelled(row[f"{name}_labels"]) == trained(episode)
    episodes, made = list(EpisodeDataset(labels)), rows(labels, "llamafactory", tmp_path / "kto")
    for number, (row, episode) in enumerate(zip(made, episodes, strict=True)):
        other, begins = episodes[number - 1], trained(episode)[0][0]
        assert row["input_ids"] == episode.ids.tolist()
        assert _labelled(row["labels"]) == trained(episode)
        assert row["kto_tags"] == (episode.side == "liked")
        assert row["kl_input_ids"] == [*episode.ids[:begins].tolist(), *other.ids[trained(other)[0][0] :].tolist()]
        assert [one for _, one in _labelled(row["kl_labels"])] == [one for _, one in trained(other)]


def _couples(folder: Path) -> list[tuple[Episode, Episode]]:
    episodes = list(EpisodeDataset(folder))
    return list(zip(episodes[::2], episodes[1::2], strict=True))


def _labelled(labels: list[int]) -> list[tuple[int, ...]]:
    return [(place, label) for place, label in enumerate(labels) if label != -100]


def test_answers_with_untrained_parts_are_not_for_trl(tmp_path: Path) -> None:
    later = [said("assistant", "b"), said("user", "why?"), said("assistant", "so")]
    folder = build(tmp_path, [{"prompt": "q", "chosen": "a", "rejected": later}])
    with pytest.raises(DataError, match=r"1 answers have .* untrained tokens"):
        export_dataset(folder, "trl-dpo", tmp_path / "dpo")
    row = rows(folder, "llamafactory", tmp_path)[0]
    assert bytes(one for _, one in _labelled(row["rejected_labels"]) if one < 256) == b"bso"


def test_targets_that_know_nothing_of_sides_refuse(pairs: Path, labels: Path, tmp_path: Path) -> None:
    for to in ("trl", "axolotl", "megatron", "torchtitan"):
        with pytest.raises(ConfigError, match="would train the rejected ones too"):
            export_dataset(pairs, to, tmp_path / to)
    with pytest.raises(ConfigError, match="no partner"):
        export_dataset(labels, "trl-dpo", tmp_path / "dpo")
    plain = build(tmp_path, [{"prompt": "q", "completion": "a"}], preferences=None)
    with pytest.raises(ConfigError, match="no answers that people compared"):
        export_dataset(plain, "trl-dpo", tmp_path / "dpo")
    trees = build(tmp_path, random_pairs(3), "trees", expand="tree")
    with pytest.raises(ConfigError, match="--expand turns"):
        export_dataset(trees, "trl-dpo", tmp_path / "dpo", trees="expand")
    assert "ends" in rows(trees, "hf", tmp_path)[0]


def test_margins_are_stored_proved_and_read_by_the_collator_of_rewards(tmp_path: Path) -> None:
    records = random_pairs(8)
    for number, record in enumerate(records):
        record |= {0: {"margin": 0.1}, 1: {"chosen_score": 7, "rejected_score": 4.5}, 2: {}}[number % 3]
    folder = build(tmp_path, records)
    stored = EpisodeDataset(folder)
    wanted = [float(np.float32({0: 0.1, 1: 2.5}.get(n % 3, np.nan))) for n in range(8)]
    np.testing.assert_array_equal(stored.column("margin"), np.repeat(wanted, 2))
    report = verify(folder, deep=True)
    assert report.passed, report.findings
    assert "margin" not in str(Dataset(folder).counts["notes"])
    changed = stored.folder / "margin.f32"
    flip(changed, 2)
    assert any("the margin is" in one.message for one in verify(folder, deep=True).findings)
    flip(changed, 2)

    result = export_dataset(folder, "trl-reward", tmp_path / "rewards")
    batch = collated("reward", list(datasets.load_from_disk(str(tmp_path / "rewards"))["train"]))
    assert batch["margin"].tolist() == [0.0 if np.isnan(one) else one for one in wanted]
    assert "2 pairs have no margin, and get 0" in result.not_held
    assert "margin" not in rows(build(tmp_path, random_pairs(2), "none"), "trl-reward", tmp_path)[0]
    export_dataset(folder, "parquet", tmp_path / "parquet")
    margins = pq.read_table(tmp_path / "parquet" / "train")["margin"].to_pylist()
    assert margins == [None if np.isnan(one) else one for one in np.repeat(wanted, 2)]
    assert list(to_hf_dataset(folder)["margin"]) == margins
    assert to_hf_dataset(tmp_path / "none").column_names == ["input_ids", "labels", "side"]
    with pytest.raises(RecordError) as found:
        build(tmp_path, [{"prompt": "q", "chosen": "a", "rejected": "b", "margin": "much"}], "bad")
    assert found.value.code == "margin_type"


SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def first_step(folder: Path, kind: str, model: Any, out: Path, **more: Any) -> dict[str, Any]:
    """What TRL logs of one step on an export, with the lines that the export prints."""
    import trl
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    name = {"dpo": "DPO", "kto": "KTO", "reward": "Reward"}[kind]
    result = export_dataset(folder, f"trl-{kind}", out / kind)
    made: dict[str, Any] = {"Trainer": getattr(trl, f"{name}Trainer"), f"{name}Trainer": getattr(trl, f"{name}Trainer")}
    lines = result.config.splitlines()
    exec("\n".join(line for line in lines if line.startswith(("class Trainer", "    "))), made)
    told = eval(next(line for line in lines if line.startswith(f"{name}Config")), {f"{name}Config": dict})
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"p": 0}, unk_token="p")), pad_token="p")
    data = datasets.load_from_disk(str(out / kind))["train"]
    options = {"per_device_train_batch_size": len(data), "max_steps": 1, "logging_steps": 1, "learning_rate": 1e-3}
    options |= {"use_cpu": True, "bf16": False, "report_to": [], **told}
    args = getattr(trl, f"{name}Config")(str(out / "run"), **options)
    trainer = made["Trainer"](model=model, args=args, train_dataset=data, processing_class=words, **more)
    trainer.train()
    logged: dict[str, Any] = trainer.state.log_history[0]
    return logged


@pytest.mark.parametrize(("kind", "loss"), [("dpo", np.log(2)), ("kto", 0.5)])
def test_a_step_of_dpo_or_kto_has_the_log_probabilities_of_what_the_dataset_trains(
    kind: str, loss: float, tmp_path: Path
) -> None:
    """A policy that is its own reference has a loss that is known."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = build(tmp_path, random_pairs(4))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=270, **SIZES)).eval()
    sums: list[float] = []
    for episode in EpisodeDataset(folder):
        ids = torch.from_numpy(episode.ids.astype(np.int64))
        logprobs = model(ids[None]).logits[0].detach().log_softmax(-1)
        sums.append(sum(float(logprobs[place - 1, token]) for place, token in trained(episode)))
    logged = first_step(folder, kind, model, tmp_path, ref_model=copy.deepcopy(model))
    assert logged["loss"] == pytest.approx(loss, abs=1e-4)
    assert logged["logps/chosen"] == pytest.approx(np.mean(sums[::2]), rel=1e-4)
    assert logged["logps/rejected"] == pytest.approx(np.mean(sums[1::2]), rel=1e-4)


@pytest.mark.parametrize("margins", [False, True])
def test_a_step_of_a_reward_model_compares_whole_documents_by_their_margins(margins: bool, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    records = [record | ({"margin": 0.5 * n} if margins else {}) for n, record in enumerate(random_pairs(4))]
    folder = build(tmp_path, records)
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(vocab_size=270, num_labels=1, pad_token_id=0, **SIZES)).eval()
    documents = [torch.from_numpy(episode.ids.astype(np.int64)) for episode in EpisodeDataset(folder)]
    rewards = torch.tensor([float(model(ids[None]).logits.detach()) for ids in documents])
    wanted = torch.tensor([record.get("margin", 0.0) for record in records])
    better = rewards[::2] - rewards[1::2]
    logged = first_step(folder, "reward", model, tmp_path)
    assert logged["loss"] == pytest.approx(float(-torch.nn.functional.logsigmoid(better - wanted).mean()), abs=1e-4)
    assert logged["margin"] == pytest.approx(float(better.mean()), abs=1e-5)
    assert logged["mean_reward"] == pytest.approx(float(rewards.mean()), abs=1e-5)
