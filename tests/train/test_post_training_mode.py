"""The post-training mode of spec 2, and `chatmill train`: one config, the environment, signals and resuming."""

from __future__ import annotations

import json
import logging
import os
import runpy
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from chatmill.cli.app import app
from chatmill.errors import ChatmillError, ConfigError, DataError
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.row_buffer import RowBuffer
from chatmill.load.stream_blocks import StreamBlockLoader, StreamBlocks
from chatmill.load.token_stream import GPTDataLoader, make_loader
from chatmill.pack.stream import PackedStream, pack_post_training_stream
from chatmill.read.transcripts import read_transcripts
from chatmill.systems.post_training import pack_transcripts
from chatmill.tokenizer.byte_level import byte_tokenizer
from chatmill.train.losses import token_losses
from chatmill.train.options import TrainOptions
from chatmill.train.run import open_data, read_run
from chatmill.train.trainer import _Run, fit
from tests.forked import Forked
from tests.load.sets import same, write_set
from tests.train.tiny import IDS, loader_over, numbered, small_items, tiny_model

LONG = [11, *[2] * 30, 13, 12, 7, 13]
"""A user span longer than two blocks: nothing of it trains."""
SHORT = [11, 3, 13, 12, 7, 8, 13]


def stream(records: list[list[int]], block_size: int = 9) -> PackedStream:
    return pack_post_training_stream(records, block_size=block_size, **IDS)


def loader_of(packed: PackedStream, batch_size: int = 1, **options: Any) -> StreamBlockLoader:
    return StreamBlockLoader(packed, batch_size=batch_size, eos_id=0, **options)


def numbers_of(batches: Iterable[Any]) -> list[int]:
    """What is asked in the rows that train."""
    return [int(row[1]) for batch in batches for row, own in zip(batch.x, batch.mask, strict=True) if own.any()]


def test_batches_are_shifted_and_masked_targets_are_minus_100() -> None:
    loader = loader_of(stream([[10, 1, 13, 11, 2, 3, 4, 5, 6, 13, 12, 7, 13]]))
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
    with pytest.raises(ConfigError, match=r"no split 'val' \(there is: train\)$"):
        loader.get_batch("val")


def test_blocks_without_targets_are_skipped_and_counted() -> None:
    packed = stream([LONG, SHORT, LONG, SHORT, SHORT])
    trains = [bool(mask[1:].any()) for mask in packed.loss_mask]
    loader = loader_of(packed, 2)
    assert loader.skipped == trains.count(False) > 0
    assert loader.kept.tolist() == [block for block, yes in enumerate(trains) if yes]
    assert len(list(loader)) == len(loader)
    with pytest.raises(DataError, match="none of the"):
        loader_of(stream([LONG]))
    report = loader_of(stream([LONG, SHORT, [11, 3, 13, 12, *[7] * 20, 13]])).data_report()
    assert (report["assistant_tokens"], report["trained_tokens"]) == (3 + 4 + 22, 4)
    assert report["lost_at_edges"] == pytest.approx(25 / 29)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_the_blocks_and_the_state_is_global(ranks: int) -> None:
    loaders = [loader_of(numbered(), 2, rank=rank, world_size=ranks) for rank in range(ranks)]
    assert len({len(loader) for loader in loaders}) == 1
    seen = numbers_of(loader.get_batch() for loader in loaders)
    state = json.loads(json.dumps(loaders[-1].state_dict()))
    seen += numbers_of(loader.get_batch() for _ in range(len(loaders[0]) - 1) for loader in loaders)
    assert seen == list(range(20, 41))
    alone = loader_of(numbered(), 2)
    alone.load_state_dict(state)
    assert numbers_of(alone) == list(range(20 + 2 * ranks, 41))
    with pytest.raises(ConfigError, match="stream blocks: the state belongs to another dataset"):
        loader_of(stream([SHORT])).load_state_dict(state)


def test_conversations_of_a_block_do_not_see_each_other_unless_asked() -> None:
    model = tiny_model(initializer_range=0.5).double().eval()
    first, second = ([11, n, n, 13, 12, n, 13] for n in (40, 41))

    def loss_of_first(packed: PackedStream, isolate: bool) -> float:
        loader = loader_of(packed, isolate=isolate)
        batch = _Run(model, loader, None, TrainOptions())._batch(loader.get_batch())
        batch.labels[:, :-8] = -100
        with torch.no_grad():
            return token_losses(model(**batch.inputs).logits, batch.labels).sum().item()

    both = stream([second, first], block_size=16)
    alone = loss_of_first(stream([first], block_size=8), isolate=True)
    assert loss_of_first(both, isolate=True) == pytest.approx(alone, abs=1e-9)
    assert abs(loss_of_first(both, isolate=False) - alone) > 1e-3


def test_no_target_is_at_the_start_of_a_document() -> None:
    columns = {"input_ids": [[5, 0, 6, 7]], "loss_mask": [[1] * 4], "injected": [0], "tokens": [4]}
    block: Any = SimpleNamespace(**{name: np.array(values) for name, values in columns.items()})
    buffer = RowBuffer(1, 3, pad_id=0, weights=np.dtype(np.uint8), pin=False)
    buffer.clear()
    StreamBlocks(block, np.array([0]), 0, isolate=True).lay(buffer, 0, np.array([0]), np.array([0]))
    assert buffer.weights is not None
    assert buffer.weights.tolist() == [[0, 1, 0, 1]]


def test_the_mode_makes_one_pass_and_no_more() -> None:
    records = [[11, n, 13, 12, n, 13] for n in range(20, 41)]
    packed = stream([LONG, *records], block_size=7)
    loader = loader_of(packed, 2)
    assert loader.skipped > 0
    result = fit(tiny_model(), loader, post_training=True, log_every=1, accumulation=3, steps=1000)
    assert result.data["blocks_skipped"] == loader.skipped
    assert result.step == 4  # 11 batches, whatever steps says
    trained = sum(values["tokens"] for values in result.history)
    assert trained == 3 * len(records) == int(packed.loss_mask[:, 1:].sum())


def test_a_dataset_of_episodes_is_read_once_and_whole(tmp_path: Path) -> None:
    write_set(tmp_path, small_items(21))
    episodes = fit(tiny_model(), loader_over(tmp_path, epoch_drop_last=False), post_training=True, steps=1000)
    assert episodes.step == 6
    for options, says in (
        ({}, "sees every row once"),
        ({"use_loss_mask": False, "pack": True}, "trains every token"),
        ({"batch_sampling_mode": "random", "epoch_drop_last": False}, "never ends"),
    ):
        with pytest.raises(ConfigError, match=says):
            fit(tiny_model(), loader_over(tmp_path, **options), post_training=True, steps=3)


# ---- the command

STEPS = 24
CHAT = "<|USER|>What is {0}?<|END|><|ASSISTANT|>It is {0}.<|END|><|EOS|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(300).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_set(tmp_path / "set", small_items(21), small_items(6, seed=1))
    return tmp_path


def config_file(folder: Path, model: Path, form: str = "yaml", /, **more: Any) -> Path:
    own = {"model": str(model), "out": str(folder / "run"), "dataset_dir": str(folder / "set"), "batch_size": 4,
           "block_size": 16, "dataset_mode": "sft_episode", "use_loss_mask": True, "pad_token_id": 96, "pack": True,
           "steps": STEPS, "learning_rate": 0.01, "log_every": 1}  # fmt: skip
    options = {name: value for name, value in (own | more).items() if value is not None}
    path = folder / f"train.{form}"
    if form == "yaml":
        path.write_text(yaml.safe_dump({"training": options}))
        return path
    texts = {name: str(value).lower() if isinstance(value, bool) else value for name, value in options.items()}
    elements = "".join(f"<{name}>{value}</{name}>" for name, value in texts.items())
    path.write_text(f"<config><training>{elements}</training><other>left alone</other></config>")
    return path


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def finished(*arguments: Any) -> dict[str, Any]:
    """What a run that ends well says at last."""
    done = invoke(*arguments, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert said["outcome"] == "finished"
    return said


def test_sigterm_saves_ends_with_143_and_resumes(folder: Path, model: Path) -> None:
    """That losses are those of a run without a stop is shown by test_trainer.py."""
    config, log = config_file(folder, model), folder / "run" / "log.jsonl"
    process = Forked("chatmill", "train", config, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while not log.exists() or '"step": 3,' not in log.read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate()
    assert process.returncode == 143, errors
    assert "stopped: step" in out
    assert finished(config, "--quiet")["step"] == STEPS
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    assert [entry["step"] for entry in logged if "loss" in entry] == list(range(1, STEPS + 1))
    assert [entry["step"] for entry in logged if "val_loss" in entry] == [STEPS]


@pytest.mark.filterwarnings("ignore:.*not options of the loaders")
@pytest.mark.parametrize(
    ("form", "more"),
    [
        ("yaml", {"dataset_mode": None, "pack": None}),
        ("xml", {"batch_sampling_mode": "random", "epoch_seed": 5}),
        ("xml", {"pack": None, "epoch_shuffle": False, "epoch_drop_last": False, "episode_min_tokens": 6}),
    ],
)
def test_the_loader_is_the_one_that_make_loader_gives(folder: Path, model: Path, form: str, more: Any) -> None:
    path = config_file(folder, model, form, **more)
    given, _ = open_data(*read_run(path, {}))
    wanted = make_loader(path)
    assert type(given) is type(wanted) is (GPTDataLoader if "dataset_mode" in more else GPTEpisodeDataLoader)
    for split in 7 * ("train", "val"):
        assert same(tuple(given.get_batch(split)), tuple(wanted.get_batch(split)))


def test_xml_trains_and_names_what_it_does_not_use(folder: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "chatmill.train")
    path = config_file(folder, model, "xml", flavour="mint", steps=3, learning_rate="1e-3", model=None)
    assert finished(path, "--model", model)["step"] == 3
    assert "not used: flavour" in caplog.text
    again = invoke(path, "--model", model, "--fresh")
    assert "resume, or choose another folder" in str(again.exception)


def test_the_environment_turns_the_mode_on(folder: Path, model: Path) -> None:
    run, config = read_run(config_file(folder, model), {"POST_TRAINING": "1", "WARMUP_PCT": "0.2", "SEED": "5"})
    assert (run.post_training, run.warmup_pct, run.seed) == (True, 0.2, 1337)
    assert open_data(run, config)[0].config.epoch_drop_last is False
    off, _ = read_run(config_file(folder, model, post_training=True), {"POST_TRAINING": "0"})
    assert off.post_training is False


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"learning_rat": 1}, r"'learning_rat' is not an option; did you mean 'learning_rate'"),
        ({"bach_size": 1}, "did you mean <batch_size>"),
        ({"warmup_pct": 3}, r"train.yaml: warmup_pct: should be a number of at most 1.0 \(found 3\)"),
        ({"out": None}, r"train.yaml: the options: 'out' is missing$"),
        ({"dataset_dir": None}, "nothing to train on"),
        ({"transcripts": "t.jsonl"}, "POST_TRAINING=1"),
        ({"transcripts": "t.jsonl", "post_training": True}, "need a tokenizer"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"model": "."}, "has no config.json"),
        ({"pack": False}, "masks are asked for"),
        ({}, "one process"),
    ],
)
def test_mistakes_are_one_clear_error(
    folder: Path, model: Path, more: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not more:
        monkeypatch.setenv("WORLD_SIZE", "2")
    if "pack" in more:
        (folder / "set/train/mask.bin").unlink()
    with pytest.raises(ChatmillError, match=says):
        raise invoke(config_file(folder, model, **more), "--quiet").exception
    logger = logging.getLogger("chatmill")
    assert not [one for one in logger.handlers if type(one) is logging.StreamHandler], "no handler is left behind"


def test_transcripts_are_read_in_one_pass(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps({"text": CHAT.format(n)}) + "\n" for n in range(40)))
    texts = [transcript.text for transcript in read_transcripts(path)]
    packed = pack_transcripts(texts, tokenizer=byte_tokenizer(), block_size=64)
    kept = int(packed.loss_mask[:, 1:].any(axis=1).sum())
    config = {"transcripts": str(path), "tokenizer": "bytes", "batch_size": 2, "block_size": 64, "steps": None}
    monkeypatch.setenv("POST_TRAINING", "1")
    caplog.set_level(logging.INFO, "chatmill.train")
    said = finished(config_file(folder, model, **config))
    assert "from the environment: POST_TRAINING=1" in caplog.text
    assert (said["step"], said["data"]["blocks_skipped"]) == (-(-kept // 2), len(packed) - kept)
    logged = [json.loads(line) for line in (folder / "run/log.jsonl").read_text().splitlines()]
    assert sum(entry["tokens"] for entry in logged) == int(packed.loss_mask[:, 1:].sum())


def test_the_example_learns_answers_and_stops(tmp_path: Path) -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "train_tiny.py"))
    records, result, answers = example["run"](tmp_path, steps=20)
    assert len(records) == len(answers) >= 8
    assert result.step == 20
    assert result.loss < 4
