"""A function in place of a target's name, trees as trees or rows, and pairs read by the collators of trainers."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import chatmill
from chatmill.core.shift import IGNORE_INDEX
from chatmill.errors import ConfigError, DataError, RecordError
from chatmill.export.check import verify_export
from chatmill.export.registry import TARGETS, WITHOUT_EXPORT, find_target
from chatmill.export.targets import Export
from chatmill.store.documents import open_dataset
from chatmill.store.episodes import Episode
from chatmill.store.tree_rows import RowsOfTrees
from tests.cli.run import invoke
from tests.compiler.builds import thinking_chats, write_jsonl
from tests.compiler.test_pairs import build, random_pairs, said
from tests.damage import flip
from tests.load.test_trees import gradients, one_by_one
from tests.pages import DOCS
from tests.train.tiny import tiny_model


def lines(export: Export) -> None:
    """Ids as lines of text: all that a target of one's own needs."""
    for split, rows in export.rows().items():
        with (export.folder / f"{split}.txt").open("w") as file:
            for batch in export.batches(split, rows):
                for start, end in pairwise(batch.token_offsets.tolist()):
                    file.write(" ".join(map(str, batch.documents.ids[start:end].tolist())) + "\n")
    export.say("masks are not kept")


def test_a_function_is_a_target_and_packed_rows_come_with_what_the_trainer_must_be_told(tmp_path: Path) -> None:
    with chatmill.EpisodeWriter(tmp_path / "a", "train") as writer:
        writer.append([5, 6, 7], [0, 1, 1])
        writer.append([8, 9], [0, 1])
    result = chatmill.export_dataset(tmp_path / "a", lines)
    assert result.directory == tmp_path / "a-lines"
    assert (result.directory / "train.txt").read_text() == "5 6 7\n8 9\n"
    assert result.not_held == ("masks are not kept",)
    assert result.splits["train"] == {"rows": 2, "documents": 2, "tokens": 5, "trained": 3}
    assert json.loads((result.directory / "export.json").read_text())["to"] == "lines"
    assert verify_export(result.directory).passed
    packed = chatmill.export_dataset(tmp_path / "a", lines, tmp_path / "packed", max_length=5)
    assert (packed.directory / "train.txt").read_text() == "5 6 7 8 9\n"
    for to, begin in (("trl", "SFTConfig("), ("hf", "TRL: SFTConfig(")):
        packed = chatmill.export_dataset(tmp_path / "a", to, tmp_path / f"{to}-packed", max_length=8)
        assert packed.config.startswith(f"{begin}padding_free=True, max_length=None)")
        alone = chatmill.export_dataset(tmp_path / "a", to, tmp_path / f"{to}-alone")
        assert "padding_free" not in alone.config, "rows of one document need no such thing"


def told(lines: str, trainer: str, names: dict[str, Any]) -> dict[str, Any]:
    """What the lines that an export prints give a trainer, beside its model and its rows."""
    made: dict[str, Any] = {"chatmill": chatmill, **names}
    for line in lines.splitlines():
        if line.startswith("collator = "):
            exec(line, made)
    (call,) = re.findall(rf"^{trainer}: \w*Trainer\(\.\.\., (.*)\)$", lines, re.M)
    given: dict[str, Any] = eval(f"dict({call})", {**made, "SFTConfig": dict, "TrainingArguments": dict})
    return given


def test_docs_name_every_target() -> None:
    table = (DOCS / "commands" / "export.md").read_text().splitlines()
    row = next(line for line in table if line.startswith("| `--to`"))
    page = (DOCS / "trainers.md").read_text()
    assert [name for name in TARGETS if f"`{name}`" not in row or f"--to {name}" not in page] == []


# Trees.


class Special:
    eos_token_id = pad_token_id = 2


def build_rows(folder: Path, name: str, chats: list[dict[str, Any]], **changes: Any) -> Path:
    source = {"path": str(write_jsonl(folder / f"{name}.jsonl", chats)), "name": "chats"}
    recipe = {"sources": [source], "tokenizer": "bytes", "template": "qwen3", "add_control_tokens": True}
    chatmill.build({**recipe, **changes}, folder / name, workers=0)
    return folder / name


def whole_weights() -> list[dict[str, Any]]:
    chats = thinking_chats(20, seed=5)
    for message in (message for record in chats for message in record["messages"]):
        message.pop("weight", None)
    return chats


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_rows(tmp_path_factory.mktemp("trees"), "trees", whole_weights(), expand="tree")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("max_length", [None, 2000])
@pytest.mark.parametrize("name", ["TRL", "transformers"])
def test_a_trainer_that_is_told_the_printed_lines_trains_trees_as_their_rows_one_by_one(
    name: str, max_length: int | None, tmp_path: Path, built: Path
) -> None:
    import transformers
    import trl

    result = chatmill.export_dataset(built, "hf", tmp_path / "hf", max_length=max_length)
    rows = datasets.load_from_disk(str(tmp_path / "hf"))["train"]
    sizes = {"num_attention_heads": 2, "head_dim": 16, "num_key_value_heads": 1}
    model = tiny_model(300, kind="Qwen3", max_position_embeddings=2048, attn_implementation="sdpa", **sizes)
    wanted, count = one_by_one(model, built)
    by_rows = float(gradients(model).norm()) / count
    given = told(result.config, name, {"tokenizer": Special(), "model": model})
    options = {"per_device_train_batch_size": len(rows), "max_steps": 1, "logging_steps": 1, "max_grad_norm": 1e9}
    arguments = given.pop("args") | options | {"use_cpu": True, "bf16": False, "report_to": []}
    if name == "TRL":
        words = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"p": 0})), pad_token="p")
        given |= {"processing_class": words}
        trainer = trl.SFTTrainer(model, trl.SFTConfig(str(tmp_path / "run"), **arguments), train_dataset=rows, **given)
    else:
        settings = transformers.TrainingArguments(str(tmp_path / "run"), **arguments)
        trainer = transformers.Trainer(model, settings, train_dataset=rows, **given)
    model.zero_grad()
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["loss"] == pytest.approx(wanted / count, rel=1e-4)
    assert logged["grad_norm"] == pytest.approx(by_rows, rel=1e-3)


def test_nobody_is_told_to_train_trees_on_a_model_with_recurrent_layers(tmp_path: Path, built: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_text", "vocab_size": 384}))
    for max_length in (None, 2000):
        out = tmp_path / f"{max_length}"
        result = chatmill.export_dataset(built, "hf", out, max_length=max_length, model=str(tmp_path))
        assert re.fullmatch("# qwen3_5_text has recurrent layers.* --trees expand", result.config)


def targets(rows: Any) -> Counter[bytes]:
    """Every target with all before it."""
    found: Counter[bytes] = Counter()
    for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True):
        for at in np.flatnonzero(np.array(labels) != IGNORE_INDEX).tolist():
            found[np.array(ids[: at + 1], dtype=np.int32).tobytes()] += 1
    return found


def test_hf_and_parquet_hold_trees(tmp_path: Path, built: Path) -> None:
    result = chatmill.export_dataset(built, "hf", tmp_path / "hf", max_length=2000)
    assert any("rows are trees" in sentence for sentence in result.not_held)
    rows = datasets.load_from_disk(str(tmp_path / "hf"))["train"]
    assert {"input_ids", "labels", "position_ids", "ends"} <= set(rows.column_names)
    assert not {"seq_lengths", "document_starts"} & set(rows.column_names)
    direct = chatmill.to_hf_dataset(built, max_length=2000, packed=True)
    collate = chatmill.DataCollatorForCausalLM(Special(), model="sdpa")
    other = collate(list(direct))
    for name, value in collate(list(rows)).items():
        assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
    chatmill.export_dataset(built, "parquet", tmp_path / "parquet")
    table = pq.read_table(next((tmp_path / "parquet").rglob("*.parquet")))
    assert {"position_ids", "ends", "loss_mask"} <= set(table.column_names)
    assert table.num_rows == 20


OPTIONS: dict[str, dict[str, Any]] = {
    "olmo-core": {"eod_id": 1},
    "levanter": {"max_length": 2000, "packing_strategy": "alone"},
}


@pytest.mark.parametrize("to", [name for name in TARGETS if name not in ("hf", "parquet") and name[:4] != "trl-"])
def test_other_formats_refuse_trees_and_take_their_rows(tmp_path: Path, built: Path, to: str) -> None:
    options = OPTIONS.get(to, {"max_length": 2000} if not TARGETS[to].no_rows else {})
    with pytest.raises(ConfigError, match="--trees expand"):
        chatmill.export_dataset(built, to, tmp_path / "no", **options)
    result = chatmill.export_dataset(built, to, tmp_path / "out", trees="expand", **options)
    assert any("times" in sentence for sentence in result.not_held)
    rows = RowsOfTrees(open_dataset(built).splits["train"])
    assert result.splits["train"]["documents"] == len(rows) > 20


def test_the_rows_of_trees_train_what_rows_per_turn_train(tmp_path: Path, built: Path) -> None:
    plain = build_rows(tmp_path, "rows", whole_weights())
    for source, more in ((built, {"trees": "expand"}), (plain, {})):
        chatmill.export_dataset(source, "hf", tmp_path / f"{source.name}-hf", **more)
    apart, rows = (datasets.load_from_disk(str(tmp_path / f"{name}-hf"))["train"] for name in ("trees", "rows"))
    assert {"position_ids", "ends"}.isdisjoint(apart.column_names)
    assert targets(apart) == targets(rows)
    assert sorted(map(len, apart["input_ids"])) == sorted(map(len, rows["input_ids"]))
    with pytest.raises(ConfigError, match="holds no trees"):
        chatmill.export_dataset(plain, "hf", tmp_path / "no", trees="expand")


def test_diff_compares_rows_of_trees(tmp_path: Path, built: Path) -> None:
    same = chatmill.diff_datasets(built, build_rows(tmp_path, "again", whole_weights(), expand="tree"))
    assert same.equal
    assert same.totals_a.records > 20
    chats = whole_weights()
    chats[3]["messages"][0]["content"] += " really"
    changed = chatmill.diff_datasets(built, build_rows(tmp_path, "changed", chats, expand="tree"))
    rows = RowsOfTrees(open_dataset(built).splits["train"])
    assert changed.counts["ids"] == int((rows.trees_of(np.arange(len(rows))) == 3).sum())


def test_inspect_shows_the_row_of_a_branch(tmp_path: Path, built: Path) -> None:
    chatmill.export_dataset(built, "parquet", tmp_path / "rows", trees="expand")
    rows = pq.read_table(next((tmp_path / "rows").rglob("*.parquet"))).to_pylist()
    expected = Counter((tuple(row["input_ids"]), sum(row["loss_mask"])) for row in rows)
    shown: Counter[tuple[tuple[int, ...], int]] = Counter()
    trees = open_dataset(built).splits["train"]
    for episode, branches in enumerate(trees.branches(np.arange(len(trees))).counts.tolist()):
        for branch in range(branches + 1):
            result = invoke("inspect", built, "--episode", episode, "--branch", branch, "--json")
            (document,) = json.loads(result.output)["documents"]
            ids = tuple(token for run in document["runs"] for token in run["ids"])
            shown[ids, document["trained"]] += 1
    assert shown == expected
    assert "there is no branch 99" in str(invoke("inspect", built, "--branch", 99).exception)


# Pairs and labels.


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pairs"), random_pairs(40))


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [{"prompt": f"q{n}", "completion": f"a{n}" * (n + 1), "label": n % 3 == 0} for n in range(12)]
    return build(tmp_path_factory.mktemp("labels"), records)


def collated(to: str, rows: list[dict[str, Any]]) -> Any:
    """A batch of one of TRL's trainers; importing one takes seconds, and few tests need it."""
    name = "DataCollatorForUnpairedPreference" if to == "trl-kto" else "DataCollatorForPreference"
    return getattr(import_module(f"trl.trainer.{to[4:]}_trainer"), name)(pad_token_id=0)(rows)


def rows(dataset: Path, to: str, out: Path) -> list[dict[str, Any]]:
    chatmill.export_dataset(dataset, to, out / to)
    return list(datasets.load_from_disk(str(out / to))["train"])


def trained(episode: Episode) -> list[tuple[int, int]]:
    """(place, id) of everything that is trained."""
    assert episode.weights is not None
    return [(place, int(episode.ids[place])) for place in episode.weights.nonzero()[0].tolist()]


def labelled(labels: list[int]) -> list[tuple[int, int]]:
    return [(place, label) for place, label in enumerate(labels) if label != -100]


@pytest.mark.parametrize("to", ["trl-dpo", "trl-kto", "trl-kto labels", "trl-reward"])
def test_the_collator_trains_what_the_dataset_trains(to: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    to, _, kind = to.partition(" ")
    folder = request.getfixturevalue(kind or "pairs")
    batch = collated(to, rows(folder, to, tmp_path))
    episodes = list(chatmill.EpisodeDataset(folder))
    assert len(episodes) == (12 if kind else 80)
    ordered = episodes if to == "trl-kto" else [*episodes[::2], *episodes[1::2]]
    masks = batch["attention_mask" if to == "trl-reward" else "completion_mask"]
    for ids, mask, one in zip(batch["input_ids"], masks, ordered, strict=True):
        found = [(place, int(ids[place])) for place in mask.nonzero().flatten().tolist()]
        assert found == (list(enumerate(one.ids.tolist())) if to == "trl-reward" else trained(one))
    if to == "trl-kto":
        assert list(map(bool, batch["label"])) == [one.side in ("chosen", "liked") for one in episodes]


def test_llamafactory_gets_ids_and_labels(pairs: Path, labels: Path, tmp_path: Path) -> None:
    made, episodes = rows(pairs, "llamafactory", tmp_path), list(chatmill.EpisodeDataset(pairs))
    for row, chosen, rejected in zip(made, episodes[::2], episodes[1::2], strict=True):
        for name, episode in (("chosen", chosen), ("rejected", rejected)):
            assert row[f"{name}_input_ids"] == episode.ids.tolist()
            assert labelled(row[f"{name}_labels"]) == trained(episode)
    made, episodes = rows(labels, "llamafactory", tmp_path / "kto"), list(chatmill.EpisodeDataset(labels))
    for number, (row, episode) in enumerate(zip(made, episodes, strict=True)):
        other, begins = episodes[number - 1], trained(episode)[0][0]
        assert row["input_ids"] == episode.ids.tolist()
        assert labelled(row["labels"]) == trained(episode)
        assert row["kto_tags"] == (episode.side == "liked")
        assert row["kl_input_ids"] == [*episode.ids[:begins].tolist(), *other.ids[trained(other)[0][0] :].tolist()]
        assert [one for _, one in labelled(row["kl_labels"])] == [one for _, one in trained(other)]


def test_answers_with_untrained_parts_are_not_for_trl(tmp_path: Path) -> None:
    later = [said("assistant", "b"), said("user", "why?"), said("assistant", "so")]
    folder = build(tmp_path, [{"prompt": "q", "chosen": "a", "rejected": later}])
    with pytest.raises(DataError, match=r"1 answers have .* untrained tokens"):
        chatmill.export_dataset(folder, "trl-dpo", tmp_path / "dpo")
    row = rows(folder, "llamafactory", tmp_path)[0]
    assert bytes(one for _, one in labelled(row["rejected_labels"]) if one < 256) == b"bso"


def test_targets_that_know_nothing_of_sides_refuse(pairs: Path, labels: Path, tmp_path: Path) -> None:
    for to in ("trl", "axolotl", "megatron", "torchtitan"):
        with pytest.raises(ConfigError, match="would train the rejected ones too"):
            chatmill.export_dataset(pairs, to, tmp_path / to)
    with pytest.raises(ConfigError, match="no partner"):
        chatmill.export_dataset(labels, "trl-dpo", tmp_path / "dpo")
    plain = build(tmp_path, [{"prompt": "q", "completion": "a"}], preferences=None)
    with pytest.raises(ConfigError, match="no answers that people compared"):
        chatmill.export_dataset(plain, "trl-dpo", tmp_path / "dpo")
    trees = build(tmp_path, random_pairs(3), "trees", expand="tree")
    with pytest.raises(ConfigError, match="--expand turns"):
        chatmill.export_dataset(trees, "trl-dpo", tmp_path / "dpo", trees="expand")
    assert "ends" in rows(trees, "hf", tmp_path)[0]


def test_margins_are_stored_proved_and_read_by_the_collator_of_rewards(tmp_path: Path) -> None:
    records = random_pairs(8)
    for number, record in enumerate(records):
        record |= {0: {"margin": 0.1}, 1: {"chosen_score": 7, "rejected_score": 4.5}, 2: {}}[number % 3]
    folder = build(tmp_path, records)
    stored = chatmill.EpisodeDataset(folder)
    wanted = [float(np.float32({0: 0.1, 1: 2.5}.get(n % 3, np.nan))) for n in range(8)]
    np.testing.assert_array_equal(stored.column("margin"), np.repeat(wanted, 2))
    report = chatmill.verify_dataset(folder, deep=True)
    assert report.passed, report.findings
    assert "margin" not in str(chatmill.Dataset(folder).counts["notes"])
    changed = stored.folder / "margin.f32"
    flip(changed, 2)
    assert any("the margin is" in one.message for one in chatmill.verify_dataset(folder, deep=True).findings)
    flip(changed, 2)

    result = chatmill.export_dataset(folder, "trl-reward", tmp_path / "rewards")
    batch = collated("trl-reward", list(datasets.load_from_disk(str(tmp_path / "rewards"))["train"]))
    assert batch["margin"].tolist() == [0.0 if np.isnan(one) else one for one in wanted]
    assert "2 pairs have no margin, and get 0" in result.not_held
    assert not any("side" in sentence or "margin:" in sentence for sentence in result.not_held), "both are held"
    compared = chatmill.export_dataset(folder, "trl-dpo", tmp_path / "dpo")
    assert any(sentence.startswith("record_id, source, turns, margin, kinds:") for sentence in compared.not_held)
    assert "margin" not in rows(build(tmp_path, random_pairs(2), "none"), "trl-reward", tmp_path)[0]
    chatmill.export_dataset(folder, "parquet", tmp_path / "parquet")
    margins = pq.read_table(tmp_path / "parquet" / "train")["margin"].to_pylist()
    assert margins == [None if np.isnan(one) else one for one in np.repeat(wanted, 2)]
    assert list(chatmill.to_hf_dataset(folder)["margin"]) == margins
    assert chatmill.to_hf_dataset(tmp_path / "none").column_names == ["input_ids", "labels", "side"]
    with pytest.raises(RecordError) as found:
        build(tmp_path, [{"prompt": "q", "chosen": "a", "rejected": "b", "margin": "much"}], "bad")
    assert found.value.code == "margin_type"


SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def first_step(folder: Path, name: str, model: Any, out: Path, **more: Any) -> dict[str, Any]:
    """What TRL logs of one step on an export, with the lines that the export prints."""
    import trl
    from transformers import PreTrainedTokenizerFast

    trainer, config = (getattr(trl, f"{name}{part}") for part in ("Trainer", "Config"))
    result = chatmill.export_dataset(folder, f"trl-{name.lower()}", out / name)
    made: dict[str, Any] = {f"{name}Trainer": trainer}
    lines = result.config.splitlines()
    exec("\n".join(line for line in lines if line.startswith((f"class Ready{name}Trainer", "    "))), made)
    told = eval(next(line for line in lines if line.startswith(f"{name}Config")), {f"{name}Config": dict})
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"p": 0}, unk_token="p")), pad_token="p")
    data = datasets.load_from_disk(str(out / name))["train"]
    options = {"per_device_train_batch_size": len(data), "max_steps": 1, "logging_steps": 1, "learning_rate": 1e-3}
    args = config(str(out / "run"), use_cpu=True, bf16=False, report_to=[], **options, **told)
    ready = made.get(f"Ready{name}Trainer", trainer)  # the reward trainer takes rows as they are
    running = ready(model=model, args=args, train_dataset=data, processing_class=words, **more)
    running.train()
    logged: dict[str, Any] = running.state.log_history[0]
    return logged


@pytest.mark.parametrize(("name", "loss"), [("DPO", np.log(2)), ("KTO", 0.5)])
def test_a_step_of_dpo_or_kto_has_the_log_probabilities_of_what_the_dataset_trains(
    name: str, loss: float, tmp_path: Path
) -> None:
    """A policy that is its own reference has a loss that is known."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = build(tmp_path, random_pairs(4))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=270, **SIZES)).eval()
    sums: list[float] = []
    for episode in chatmill.EpisodeDataset(folder):
        ids = torch.from_numpy(episode.ids.astype(np.int64))
        logprobs = model(ids[None]).logits[0].detach().log_softmax(-1)
        sums.append(sum(float(logprobs[place - 1, token]) for place, token in trained(episode)))
    logged = first_step(folder, name, model, tmp_path, ref_model=copy.deepcopy(model))
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
    documents = [torch.from_numpy(episode.ids.astype(np.int64)) for episode in chatmill.EpisodeDataset(folder)]
    rewards = torch.tensor([float(model(ids[None]).logits.detach()) for ids in documents])
    wanted = torch.tensor([record.get("margin", 0.0) for record in records])
    better = rewards[::2] - rewards[1::2]
    logged = first_step(folder, "Reward", model, tmp_path)
    assert logged["loss"] == pytest.approx(float(-torch.nn.functional.logsigmoid(better - wanted).mean()), abs=1e-4)
    assert logged["margin"] == pytest.approx(float(better.mean()), abs=1e-5)
    assert logged["mean_reward"] == pytest.approx(float(rewards.mean()), abs=1e-5)


@pytest.mark.parametrize("name", WITHOUT_EXPORT)
def test_trainers_without_an_export_name_the_page_of_their_import(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} needs no export: .*docs/inside-trainers\.md"):
        find_target(name)
    page = (Path(__file__).parents[2] / "docs" / "inside-trainers.md").read_text(encoding="utf-8").lower()
    assert name.replace("nemo-", "nemo ") in page
