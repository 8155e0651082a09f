"""Audits of what a training script feeds its model: DataLoaders, Trainers, TRL's trainer, collators with pictures."""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image

import chatmill
import chatmill.auditor.run  # imports of its libraries draw random numbers, as any import may
from chatmill.errors import ConfigError, DataError
from chatmill.render.registry import bind, find_template
from tests.audit.sets import Row, clean_rows, conversations, padded, write_tokenizer
from tests.compiler.builds import talk, write_jsonl
from tests.images.model_folders import FAMILIES, picture, processor_of, write_model
from tests.pages import run_python
from tests.train.ranks import run_two_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("live") / "model")


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[Row]:
    chats = [one for one in conversations() if not any(m.tool_calls for m in one.messages)]
    return clean_rows(bind(find_template(folder), chatmill.load_tokenizer(folder)), chats)


class Padding:
    """A collator that pads, and draws a number from every generator, as collators that change texts do."""

    def __call__(self, features: Sequence[Row]) -> dict[str, Any]:
        random.random()
        np.random.rand()
        torch.rand(1)
        return {name: torch.from_numpy(values) for name, values in padded(features, 0).items()}


def tokenizer_of(folder: Path) -> Any:
    return hf.PreTrainedTokenizerFast.from_pretrained(folder)


def tiny_model() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=2100, **sizes))


def trainer_of(folder: Path, rows: list[Row], out: Path, *callbacks: Any, steps: int = 4, **more: Any) -> Any:
    hf.set_seed(3)
    options = {"max_steps": steps, "logging_steps": 1, "report_to": "none", "use_cpu": True, "save_strategy": "no"}
    options |= {"per_device_train_batch_size": 2, "remove_unused_columns": False, "disable_tqdm": True}
    return hf.Trainer(
        model=tiny_model(),
        args=hf.TrainingArguments(output_dir=str(out), **options),
        train_dataset=rows,
        callbacks=list(callbacks),
        **({"processing_class": tokenizer_of(folder), "data_collator": Padding()} | more),
    )


@pytest.mark.parametrize(("workers", "own"), [(0, False), (0, True), (2, False)])
def test_a_loader_gives_the_same_batches_after_its_audit(
    workers: int, own: bool, folder: Path, rows: list[Row]
) -> None:
    def made() -> Any:
        hf.set_seed(7)
        generator = torch.Generator().manual_seed(5) if own else None
        options = {"batch_size": 2, "shuffle": True, "num_workers": workers, "generator": generator}
        return torch.utils.data.DataLoader(rows, collate_fn=Padding(), **options)

    expected = [*(one["input_ids"].tolist() for one in made()), torch.rand(2).tolist(), random.random()]
    loader = made()
    report = chatmill.audit(loader, folder, batches=3)
    assert (report.rows, report.findings) == (6, ())
    assert [*(one["input_ids"].tolist() for one in loader), torch.rand(2).tolist(), random.random()] == expected
    assert chatmill.audit(loader, tokenizer_of(folder)).rows == len(rows)


def test_the_callback_audits_what_the_trainer_reads_and_changes_nothing(
    folder: Path, rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def losses(trainer: Any) -> list[float]:
        trainer.train()
        return [one["loss"] for one in trainer.state.log_history if "loss" in one]

    rows = [row | {"labels": row["input_ids"]} for row in rows]
    alone = losses(trainer_of(folder, rows, tmp_path))
    capsys.readouterr()
    silent = chatmill.AuditCallback()
    assert losses(trainer_of(folder, rows, tmp_path, silent)) == alone
    assert silent.report is None
    monkeypatch.setenv("CHATMILL_AUDIT", "2")
    speaking = chatmill.AuditCallback()
    assert losses(trainer_of(folder, rows, tmp_path, speaking)) == alone
    assert speaking.report.rows == 4
    assert [one.code for one in speaking.report.findings] == ["mask_full"]
    assert "everything trained  mask_full" in capsys.readouterr().out
    monkeypatch.setenv("CHATMILL_AUDIT", "many")
    with pytest.raises(ConfigError, match="CHATMILL_AUDIT is the number of batches"):
        losses(trainer_of(folder, rows, tmp_path, chatmill.AuditCallback()))


@pytest.mark.slow
def test_processes_audit_their_own_batches_and_the_first_one_speaks(
    folder: Path, rows: list[Row], tmp_path: Path
) -> None:
    """What every process finds is what an audit of the batches that it trains finds."""
    full = [row | {"labels": row["input_ids"]} for row in rows]
    odd = [full[n] if n // 2 % 2 else row for n, row in enumerate(rows)]
    (tmp_path / "rows.json").write_text(json.dumps([odd[:8], full[:8], rows[:8]]))
    run_two_ranks(Path(__file__), folder, tmp_path, preload=("transformers", "chatmill", "tests.audit.test_live"))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for one in (*first, *second):
        callback, trained = one["reports"]
        assert callback == trained
        assert callback["rows"] == 4
    codes = [[one["code"] for one in run["reports"][0]["findings"]] for run in (*first, *second)]
    assert codes == [[], ["mask_full"], [], ["mask_full"], ["mask_full"], []]
    assert [run["printed"] for run in second] == ["", "", ""]
    told = [[f"Process {n} of 2:" in run["printed"] for n in (0, 1)] for run in first]
    assert told == [[True, True], [True, False], [True, False]]
    assert ["mask_full" in run["printed"] for run in first] == [True, True, False]


def train_as_one_of_two(rank: int, folder: Path, out: Path) -> None:
    """Train on every set of rows in their order: process 0 has the batches 0, 2, ..., process 1 the others."""
    hf.Trainer._get_train_sampler = lambda trainer, *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    found = []
    for rows in json.loads((out / "rows.json").read_text()):
        seen: list[Any] = []

        def collate(features: Any, seen: list[Any] = seen) -> Any:
            seen.append(Padding()(features))
            return seen[-1]

        callback, printed = chatmill.AuditCallback(batches=2), io.StringIO()
        trainer = trainer_of(folder, rows, out / "run", callback, steps=2, data_collator=collate)
        with contextlib.redirect_stdout(printed):
            trainer.train()
        trained = chatmill.audit(seen[2:4], tokenizer_of(folder))  # the first two were read by the callback
        assert callback.report is not None
        reports = [one.as_json() | {"name": ""} for one in (callback.report, trained)]
        found.append({"reports": reports, "printed": printed.getvalue()})
    (out / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_a_trainer_is_audited_in_one_line(folder: Path, rows: list[Row], tmp_path: Path) -> None:
    trainer = trainer_of(folder, rows, tmp_path)
    report = chatmill.audit(trainer, batches=2)
    assert (report.rows, report.passed) == (4, True)
    assert "No faults found in 6 answers in 4 documents" in str(report)
    bare = trainer_of(folder, rows, tmp_path, processing_class=None)
    assert chatmill.audit(bare, folder, batches=1).rows == 2
    with pytest.raises(ConfigError, match="audit needs the model"):
        chatmill.audit(bare, batches=1)
    with pytest.raises(ConfigError, match="was not loaded from a folder"):
        chatmill.audit(bare, bare.model, batches=1)
    bare.model.name_or_path = str(folder)
    assert chatmill.audit(bare, bare.model, batches=1).rows == 2
    tokenizer = tokenizer_of(folder)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template"):
        chatmill.audit(bare, tokenizer)
    with pytest.raises(DataError, match="item 0 is a tuple"):
        chatmill.audit([(1, 2)], folder)


@pytest.mark.parametrize("assistant_only", [True, False])
def test_trl(assistant_only: bool, folder: Path, tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    plain = [one for one in conversations() if not any(m.tool_calls for m in one.messages)]
    chats = [{"messages": [{"role": str(m.role), "content": m.content} for m in one.messages]} for one in plain]
    options = {"per_device_train_batch_size": 2, "max_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False}
    callback = chatmill.AuditCallback(batches=3)
    trainer = trl.SFTTrainer(
        model=tiny_model(),
        args=trl.SFTConfig(str(tmp_path), assistant_only_loss=assistant_only, save_strategy="no", **options),
        train_dataset=datasets.Dataset.from_list(chats),
        processing_class=tokenizer_of(folder),
        callbacks=[callback],
    )
    trainer.train()
    assert callback.report is not None
    assert callback.report.rows == 6
    assert [one.code for one in callback.report.findings] == ([] if assistant_only else ["mask_full"])


class Pictures:
    """The collator of transformers' examples: the processor makes the batch, and the answer at the end is trained."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, chats: Sequence[Any]) -> Any:
        texts = [self.processor.apply_chat_template(one["messages"]) for one in chats]
        batch = self.processor(text=texts, images=[one["images"] for one in chats], padding=True, return_tensors="pt")
        labels, tokenizer = batch["input_ids"].clone(), self.processor.tokenizer
        labels[batch["attention_mask"] == 0] = -100
        begin = tokenizer.convert_tokens_to_ids("<|im_start|>")
        header = len(tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"])
        for row, ids in zip(labels, batch["input_ids"], strict=True):
            row[: int((ids == begin).nonzero()[-1]) + header] = -100
        return {**batch, "labels": labels}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "qwen3_vl" else [pytest.mark.slow]) for name in sorted(FAMILIES)]
)
def test_collators_with_pictures(name: str, tmp_path: Path) -> None:
    sft = pytest.importorskip("trl.trainer.sft_trainer")
    processor = processor_of(write_model(tmp_path / name, name), name)
    chats = []
    for number in range(4):
        shown = [{"type": "image"}, {"type": "text", "text": f"What is this, number {number}?"}]
        answer = [{"type": "text", "text": f"Picture number {number}, I think."}]
        messages = [{"role": "user", "content": shown}, {"role": "assistant", "content": answer}]
        chats.append({"messages": messages, "images": [Image.new("RGB", (60 + 30 * number, 80))]})
    trl = sft.DataCollatorForVisionLanguageModeling(processor)  # its default trains everything
    for collator, codes in ((Pictures(processor), []), (trl, ["mask_full"])):
        loader = torch.utils.data.DataLoader(chats, batch_size=2, collate_fn=collator)
        report = chatmill.audit(loader, processor, batches=2)
        assert [one.code for one in report.findings] == codes
        assert (report.documents, report.answers) == (4, 4)
        assert all(len(str(report).splitlines()) < 40 for _ in codes)


def test_packed_rows_with_pictures_are_known_by_their_positions_and_compared_with_the_source(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen3_vl")
    records = []
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(picture(64 + 32 * number, 100))
        messages = talk(f"<image>What is number {number}?", "A circle.")
        records.append({"messages": messages, "images": [f"{number}.png"]})
    source = write_jsonl(tmp_path / "chats.jsonl", records)
    recipe = {"sources": [{"path": str(source)}], "tokenizer": str(model)}
    chatmill.build(recipe, tmp_path / "built", workers=0)
    collator = chatmill.DataCollatorForCausalLM(hf.AutoTokenizer.from_pretrained(model))
    loader = torch.utils.data.DataLoader(
        chatmill.to_hf_dataset(tmp_path / "built", max_length=4096, packed=True),
        collate_fn=chatmill.PictureCollator(collator, model, tmp_path),
    )
    assert next(iter(loader))["position_ids"].ndim == 3
    report = chatmill.audit(loader, model, batches=5, source=source)
    assert (report.rows, report.documents, report.findings) == (1, 3, ())
    assert report.source is not None
    assert (report.source["equal"], report.source["missing"]) == (3, 0)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHATMILL_AUDIT", "2")
    names = run_python("commands/audit.md", blocks=2)
    assert names["report"].verdict == "1 kind of fault found: everything trained."


if __name__ == "__main__":
    train_as_one_of_two(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
