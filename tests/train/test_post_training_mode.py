"""The post-training mode of spec 2: transcripts to targets, one pass, skipped blocks, and the warmup."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatmill.cli.train import data_line
from chatmill.cli.train_data import make_model, open_data
from chatmill.cli.train_recipe import read_recipe
from chatmill.compiler.run import run_build
from chatmill.errors import ConfigError, DataError
from chatmill.pack.stream import PackedStream, pack_post_training_stream, post_training_loss_mask
from chatmill.read.transcripts import read_transcripts
from chatmill.systems.post_training import encode_transcripts, pack_transcripts, transcribe
from chatmill.tokenizer.byte_level import byte_tokenizer
from chatmill.tokenizer.load import load_tokenizer
from chatmill.train.batch import TrainBatch, as_batch
from chatmill.train.config import TrainConfig
from chatmill.train.step import Stepper
from chatmill.train.stream_blocks import StreamBlockLoader
from tests.load.sets import Item, write_set
from tests.train.command import run_command
from tests.train.test_trainer import ALONE, CPU, loader_over, small_items
from tests.train.tiny import short_conversations, tiny_gpt

IDS = {"system_id": 10, "user_id": 11, "assistant_id": 12, "end_id": 13, "eos_id": 0}
LONG = [11, *[2] * 30, 13, 12, 7, 13]
"""A user span longer than two blocks: nothing of it trains."""
SHORT = [11, 3, 13, 12, 7, 8, 13]


def stream(records: list[list[int]], block_size: int = 9) -> PackedStream:
    return pack_post_training_stream(records, block_size=block_size, **IDS)


def test_batches_are_shifted_and_masked_targets_are_minus_100() -> None:
    packed = stream([[10, 1, 13, 11, 2, 3, 4, 5, 6, 13, 12, 7, 13]])
    loader = StreamBlockLoader(packed, batch_size=1, eos_id=0)
    assert (len(loader), loader.skipped) == (1, 1)
    sample = loader.sample(0)
    assert sample["input_ids"].tolist() == [10, 1, 13, 11, 13, 12, 7, 13, 0]
    assert sample["loss_mask"].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 0]
    x, y, mask, starts = loader.get_batch()
    assert x.tolist() == [[10, 1, 13, 11, 13, 12, 7, 13]]
    assert y.tolist() == [[-100, -100, -100, -100, 12, 7, 13, -100]]
    assert mask.tolist() == [[0, 0, 0, 0, 1, 1, 1, 0]]
    assert starts.tolist() == [[0]]
    with pytest.raises(StopIteration):
        loader.get_batch()


def test_blocks_without_targets_are_skipped_and_counted() -> None:
    packed = stream([LONG, SHORT, LONG, SHORT, SHORT])
    trains = [bool(mask[1:].any()) for mask in packed.loss_mask]
    loader = StreamBlockLoader(packed, batch_size=2, eos_id=0)
    assert loader.skipped == trains.count(False) > 0
    assert loader.kept.tolist() == [block for block, yes in enumerate(trains) if yes]
    given = [batch.x for batch in loader]
    assert len(given) == len(loader)
    with pytest.raises(DataError, match="none of the"):
        StreamBlockLoader(stream([LONG]), batch_size=2, eos_id=0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_the_blocks_and_the_state_is_global(ranks: int) -> None:
    packed = stream([[11, n, 13, 12, n, 13] for n in range(20, 41)], block_size=7)
    loaders = [StreamBlockLoader(packed, batch_size=2, eos_id=0, rank=r, world_size=ranks) for r in range(ranks)]
    assert len({len(loader) for loader in loaders}) == 1
    seen: list[int] = []
    for step in range(len(loaders[0])):
        batches = [loader.get_batch() for loader in loaders]
        seen += [int(row[1]) for batch in batches for row, own in zip(batch.x, batch.mask, strict=True) if own.any()]
        if step == 0:
            state = json.loads(json.dumps(loaders[-1].state_dict()))
    assert seen == list(range(20, 41))
    alone = StreamBlockLoader(packed, batch_size=2, eos_id=0)
    alone.load_state_dict(state)
    rest = [int(row[1]) for batch in alone for row, own in zip(batch.x, batch.mask, strict=True) if own.any()]
    assert rest == list(range(20 + 2 * ranks, 41))
    other = StreamBlockLoader(stream([SHORT]), batch_size=2, eos_id=0)
    with pytest.raises(ConfigError, match="stream blocks: the state belongs to another dataset"):
        other.load_state_dict(state)


def test_conversations_of_a_block_do_not_see_each_other_unless_asked() -> None:
    model = tiny_gpt(init_std=0.5).double()
    first, second = ([11, n, n, 13, 12, n, 13] for n in (40, 41))
    alone = stream([first], block_size=8)
    both = stream([second, first], block_size=16)
    sums = {}
    for name, packed, isolate in (("alone", alone, True), ("both", both, True), ("seen", both, False)):
        loader = StreamBlockLoader(packed, batch_size=1, eos_id=0, isolate=isolate)
        batch = as_batch(loader.get_batch(), CPU)
        own = batch.labels.clone()
        own[:, : -8 if name != "alone" else 0] = -100
        hidden = model.hidden_states(batch.input_ids, batch.documents)
        logits = hidden @ model.head_weight.T
        sums[name] = torch.nn.functional.cross_entropy(logits[0], own[0], reduction="sum").item()
    assert sums["both"] == pytest.approx(sums["alone"], abs=1e-9)
    assert abs(sums["seen"] - sums["alone"]) > 1e-3


def test_the_mode_makes_one_pass_and_no_more() -> None:
    records = [[11, n, 13, 12, n, 13] for n in range(20, 41)]
    loader = StreamBlockLoader(stream([LONG, *records], block_size=7), batch_size=2, eos_id=0)
    skipped = loader.skipped
    result = tiny_gpt().fit(loader, post_training=True, log_every=1, accumulation=3)
    assert skipped > 0
    assert result.skipped_blocks == skipped
    assert result.step == 4  # 11 batches
    assert sum(values["trained_tokens"] for values in result.history) == 3 * len(records)
    with pytest.raises(ConfigError, match="one pass"):
        tiny_gpt().fit(loader, post_training=True, epochs=2)


def test_more_steps_than_data_end_with_the_data(tmp_path: Path) -> None:
    packed = stream([[11, n, 13, 12, n, 13] for n in range(20, 41)], block_size=7)
    result = tiny_gpt().fit(StreamBlockLoader(packed, batch_size=2, eos_id=0), post_training=True, steps=1000)
    assert result.step == 11
    write_set(tmp_path, small_items(21))
    episodes = tiny_gpt().fit(loader_over(tmp_path, epoch_drop_last=False), post_training=True, steps=1000)
    assert episodes.step == 6
    with pytest.raises(ConfigError, match="would leave out 1 of"):
        tiny_gpt().fit(loader_over(tmp_path), post_training=True)
    with pytest.raises(ConfigError, match="trains every token"):
        tiny_gpt().fit(loader_over(tmp_path, use_loss_mask=False, pack=True), post_training=True)
    endless = loader_over(tmp_path, batch_sampling_mode="random")
    with pytest.raises(ConfigError, match="never does"):
        tiny_gpt().fit(endless, post_training=True, steps=3)


def test_the_warmup_is_a_fraction_of_the_phase() -> None:
    packed = stream([[11, n, 13, 12, n, 13] for n in range(20, 60)], block_size=7)
    loader = StreamBlockLoader(packed, batch_size=1, eos_id=0)
    result = tiny_gpt().fit(loader, post_training=True, warmup_pct=0.25, learning_rate=1.0e-3, log_every=1)
    rates = [values["lr"] for values in result.history]
    assert len(rates) == 40
    assert rates[:10] == pytest.approx([1e-4 * (n + 1) for n in range(10)])
    assert max(rates) == rates[9]
    assert TrainConfig().warmup_pct == 0.03


def test_the_loss_is_that_of_the_masked_positions_alone() -> None:
    packed = stream([SHORT, SHORT], block_size=16)
    loader = StreamBlockLoader(packed, batch_size=2, eos_id=0)
    batch = as_batch(loader.get_batch(), CPU)
    stepper = Stepper(tiny_gpt().double(), TrainConfig(), ALONE)
    values = stepper.values(stepper.gradients([batch]))
    assert values["trained_tokens"] == int(packed.loss_mask[:, 1:].sum()) == 8
    for block, mask in zip(packed.input_ids, packed.loss_mask, strict=True):
        assert np.array_equal(mask, post_training_loss_mask(block, **IDS))


@pytest.fixture(scope="module")
def transcripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real conversations as a file of transcripts."""
    path = tmp_path_factory.mktemp("transcripts") / "t.jsonl"
    made = transcribe(short_conversations(50), tokenizer=byte_tokenizer(), context_length=250)
    texts = [one.text for one in made if one.text is not None]
    assert len(texts) > 20
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


RECIPE = """
out: run
tokenizer: bytes
model: {layers: 1, hidden: 32, heads: 2}
data:
  transcripts: TRANSCRIPTS
  val_transcripts: TRANSCRIPTS
  batch_size: 4
  block_size: 256
train: {learning_rate: 0.003, log_every: 1, eval_batches: 2}
"""


def test_the_command_reads_transcripts_in_the_mode_and_only_in_it(transcripts: Path, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE.replace("TRANSCRIPTS", str(transcripts)))
    refused = run_command("train", "r.yaml", cwd=tmp_path)
    assert refused.returncode == 2
    assert "POST_TRAINING=1" in refused.stderr
    env = {"POST_TRAINING": "1", "WARMUP_PCT": "0.5", "CHATMILL_BATCH_SIZE": "2", "SEED": "3"}
    done = run_command("train", "r.yaml", "--json", "--quiet", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    texts = [transcript.text for transcript in read_transcripts(transcripts)]
    packed = pack_transcripts(texts, tokenizer=byte_tokenizer(), block_size=256)
    kept = int(packed.loss_mask[:, 1:].any(axis=1).sum())
    assert said["outcome"] == "finished"
    assert said["step"] == -(-kept // 2)
    assert said["skipped_blocks"] == len(packed) - kept
    del env["SEED"]
    for name, value in env.items():
        assert f"from the environment: {name}={value}" in done.stderr, "also with --quiet"
    assert "SEED is in the environment and is not read; CHATMILL_SEED would be" in done.stderr
    assert said["data"] == StreamBlockLoader(packed, batch_size=2, eos_id=0).data_report()
    assert said["data"]["left_out"] == packed.report.left_out
    whole = [
        post_training_loss_mask(r, **_keywords(texts))
        for r in encode_transcripts(texts, tokenizer=byte_tokenizer()).records
    ]
    assert said["data"]["assistant_tokens"] == sum(int(mask.sum()) for mask in whole)
    assert said["data"]["trained_tokens"] == int(packed.loss_mask.sum())
    assert 0 < said["data"]["lost_at_edges"] < 1
    stored = json.loads((tmp_path / "run" / "run.json").read_text())
    assert stored["from_environment"] == env
    assert (stored["data"]["batch_size"], stored["data"]["block_size"], stored["train"]["seed"]) == (2, 256, 1337)
    assert stored["train"]["warmup_pct"] == 0.5
    assert stored["model"] == {"layers": 1, "hidden": 32, "heads": 2}
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert log[0]["warmup"] == -(-said["step"] // 2)
    assert log[0]["skipped_blocks"] == said["skipped_blocks"]
    assert (log[0]["data"], log[0]["config"]) == (said["data"], stored)
    assert any("val_loss" in entry for entry in log)
    trained = sum(entry.get("trained_tokens", 0) for entry in log)
    assert trained == int(packed.loss_mask[:, 1:].sum())
    markers = encode_transcripts(texts, tokenizer=byte_tokenizer()).markers
    assert json.loads((tmp_path / said["checkpoint"] / "model.json").read_text())["vocab_size"] > markers["eos_id"]


def test_a_dataset_of_episodes_trains_the_assistant_alone_and_every_row(
    tmp_path: Path, trained: list[TrainBatch]
) -> None:
    """Built with the policy `all`, where one answer is not to be trained: neither it nor the users' words are."""
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"ask {n}"},
                {"role": "assistant", "content": f"no {n}", "weight": 0},
                {"role": "user", "content": f"more {n}"},
                {"role": "assistant", "content": f"yes {n}"},
            ]
        }
        for n in range(7)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    common = {"sources": [{"path": str(tmp_path / "chats.jsonl")}], "tokenizer": "bytes", "template": "chatml"}
    for policy in ("all", "assistant"):
        run_build(common | {"add_control_tokens": True, "policy": policy}, tmp_path / policy, workers=0)
    tokenizer = load_tokenizer("bytes", control_tokens=["<|im_start|>", "<|im_end|>"])
    wanted = Counter(token for n in range(7) for token in tokenizer.encode(f"yes {n}"))
    wanted[tokenizer.control("<|im_end|>")] = 7
    sizes = "model: {layers: 1, hidden: 16, heads: 2}"
    for policy, extra in (("all", ""), ("all", "pack: false,"), ("assistant", ""), ("all", "policy: last_turn,")):
        (tmp_path / "r.yaml").write_text(
            f"out: {tmp_path / policy / ('run' + str(len(extra)))}\n{sizes}\n"
            f"data: {{dataset: {tmp_path / policy}, {extra} batch_size: 4, block_size: 128}}\n"
        )
        recipe = read_recipe(tmp_path / "r.yaml", {"POST_TRAINING": "1"})
        loader, _, vocabulary = open_data(recipe)
        trained.clear()
        make_model(recipe, vocabulary).fit(loader, config=recipe.train)
        expected = Counter(wanted)
        if policy == "all" and not extra.startswith("policy"):  # this policy trains wrappers of the assistant too
            for token in [tokenizer.control("<|im_start|>"), *tokenizer.encode("assistant\n\n")]:
                expected[token] += 7
        assert trained_tokens(trained) == expected
    (tmp_path / "r.yaml").write_text(f"out: a\n{sizes}\ndata: {{dataset: {tmp_path / 'all'}, policy: all}}\n")
    with pytest.raises(ConfigError, match="trains more than the assistant"):
        open_data(read_recipe(tmp_path / "r.yaml", {"POST_TRAINING": "1"}))


def trained_tokens(batches: list[TrainBatch]) -> Counter[int]:
    """The targets with a weight."""
    found: Counter[int] = Counter()
    for batch in batches:
        assert batch.weights is not None
        found.update(batch.labels[batch.weights != 0].tolist())
    return found


def test_masks_of_unknown_making_are_refused_unless_vouched_for(tmp_path: Path) -> None:
    write_set(tmp_path / "set", small_items(8))

    def opened(extra: str = "") -> Any:
        (tmp_path / "r.yaml").write_text(f"out: a\ndata: {{dataset: {tmp_path / 'set'}, pad_token_id: 1{extra}}}\n")
        return open_data(read_recipe(tmp_path / "r.yaml", {"POST_TRAINING": "1"}))[0]

    with pytest.raises(ConfigError, match="does not say which tokens are the assistant's"):
        opened()
    assert opened(", use_loss_mask: true").gives_masks()


def _keywords(texts: list[str]) -> dict[str, int]:
    return encode_transcripts(texts, tokenizer=byte_tokenizer()).markers


def test_the_line_about_the_data_names_what_is_lost() -> None:
    packed = stream([LONG, SHORT, [11, 3, 13, 12, *[7] * 20, 13]])
    report = StreamBlockLoader(packed, batch_size=1, eos_id=0).data_report()
    assert (report["assistant_tokens"], report["trained_tokens"]) == (3 + 4 + 22, 4)
    line = data_line(report)
    assert f"{report['left_out']:,} tokens left out" in line
    assert "25 of 29 assistant tokens (86.21%) lost at block edges" in line
    episodes = {
        "episodes": 4, "episodes_too_short": 1, "episodes_cut": 2, "episodes_dropped": 0, "tokens_left_out": 9,
        "trained_tokens_left_out": 7, "rows_left_out": 0,
    }  # fmt: skip
    assert data_line(episodes) == (
        "4 episodes, 9 tokens left out (7 trained tokens, 2 episodes cut to a row, 1 episodes too short)"
    )


def test_episodes_that_are_cut_or_too_short_are_counted(tmp_path: Path) -> None:
    write_set(tmp_path, [Item(ids=list(range(1, n + 1)), weights=[1.0] * n) for n in (1, 4, 17, 20, 40)])
    result = tiny_gpt().fit(loader_over(tmp_path, batch_size=3), steps=1)
    assert result.data == {
        "episodes": 4, "episodes_too_short": 1, "episodes_cut": 2, "episodes_dropped": 0,
        "tokens_left_out": 1 + 3 + 23, "trained_tokens_left_out": 3 + 23, "rows_left_out": 1,
    }  # fmt: skip


TWO_PHASES = """
out: OUT
tokenizer: bytes
template: markers
add_control_tokens: true
model: {layers: 1, hidden: 16, heads: 2}
data: {dataset: SET, transcripts: TEXTS, batch_size: 4, block_size: 256, pad_token_id: 1}
train: {LENGTH: 2, learning_rate: 0.001, log_every: 1}
post_training: {learning_rate: 0.0005}
"""


@pytest.mark.parametrize("length", ["steps", "epochs"])
def test_two_phases_each_have_their_own_length(
    length: str, transcripts: Path, tmp_path: Path, trained: list[TrainBatch]
) -> None:
    write_set(tmp_path / "set", small_items(9))
    text = TWO_PHASES.replace("OUT", str(tmp_path / "run")).replace("SET", str(tmp_path / "set"))
    (tmp_path / "r.yaml").write_text(text.replace("TEXTS", str(transcripts)).replace("LENGTH", length))

    def run(**environment: str) -> tuple[Any, Any]:
        recipe = read_recipe(tmp_path / "r.yaml", environment)
        loader, _, vocabulary = open_data(recipe)
        trained.clear()
        model = make_model(recipe, vocabulary)
        return recipe, model.fit(loader, config=recipe.train, out=recipe.out, tokenizer=vocabulary)

    recipe, first = run()
    assert (first.step, recipe.of_other_phase) == (2, {})
    if length == "epochs":
        once = Counter(i for item in small_items(9) for i, w in zip(item.ids[1:], item.weights[1:], strict=True) if w)
        assert trained_tokens(trained) == once + once
    recipe, second = run(POST_TRAINING="1")
    assert recipe.of_other_phase == {length: 2}
    texts = [transcript.text for transcript in read_transcripts(transcripts)]
    packed = pack_transcripts(texts, tokenizer=byte_tokenizer(), block_size=256)
    assert trained_tokens(trained) == Counter(packed.input_ids[packed.loss_mask != 0].tolist())
    assert second.step - first.step == len(StreamBlockLoader(packed, batch_size=4, eos_id=0)) > 2
    assert max(values["lr"] for values in second.history) == pytest.approx(0.0005)


def test_an_empty_variable_unsets_and_a_phase_may_have_a_length(tmp_path: Path) -> None:
    def read(text: str, **environment: str) -> Any:
        (tmp_path / "r.yaml").write_text(f"out: a\n{text}")
        return read_recipe(tmp_path / "r.yaml", environment)

    both = "train: {steps: 5, seed: 3}\npost_training: {steps: 7}\ndata: {batch_size: 3}"
    assert read(both).train.steps == 5
    assert read(both, POST_TRAINING="1").train.steps == 7
    assert read(both, POST_TRAINING="1", CHATMILL_STEPS="9").train.steps == 9
    assert read(both, POST_TRAINING="1", CHATMILL_STEPS="").train.steps is None
    unset = read(both, CHATMILL_STEPS="", CHATMILL_SEED="", CHATMILL_BATCH_SIZE="")
    assert (unset.train.steps, unset.train.seed, unset.data.batch_size) == (None, 1337, 8)
    assert unset.from_environment == {"CHATMILL_STEPS": "", "CHATMILL_SEED": "", "CHATMILL_BATCH_SIZE": ""}
    own = "train: {post_training: true, steps: 5}"
    assert (read(own).train.steps, read(own).of_other_phase) == (5, {})
    off = read(own, POST_TRAINING="")
    assert (off.train.post_training, off.train.steps) == (False, 5)
    with pytest.raises(ConfigError, match=r"post_training\.post_training"):
        read("post_training: {post_training: true}")
