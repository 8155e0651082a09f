"""`chatmill train`: one config as YAML or XML, the environment, signals and resuming, transcripts, and an answer."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from chatmill.cli import app
from chatmill.errors import ChatmillError, ConfigError
from chatmill.load.episodes import GPTEpisodeDataLoader
from chatmill.load.token_stream import GPTDataLoader, make_loader
from chatmill.read.transcripts import read_transcripts
from chatmill.systems.post_training import pack_transcripts
from chatmill.tokenizer.byte_level import byte_tokenizer
from chatmill.train.run import open_data, read_run
from tests.forked import Forked
from tests.load.sets import same, write_set
from tests.train.tiny import small_items, tiny_model

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


def options(folder: Path, model: Path, /, **more: Any) -> dict[str, Any]:
    """What a config holds."""
    own = {"model": str(model), "out": str(folder / "run"), "dataset_dir": str(folder / "set"), "batch_size": 4,
           "block_size": 16, "dataset_mode": "sft_episode", "use_loss_mask": True, "pad_token_id": 96, "pack": True,
           "steps": STEPS, "learning_rate": 0.01, "log_every": 1}  # fmt: skip
    return {name: value for name, value in (own | more).items() if value is not None}


def yaml_file(folder: Path, model: Path, /, **more: Any) -> Path:
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump({"training": options(folder, model, **more)}))
    return path


def xml_file(folder: Path, model: Path, /, **more: Any) -> Path:
    path = folder / "train.xml"
    texts = {n: str(v).lower() if isinstance(v, bool) else v for n, v in options(folder, model, **more).items()}
    elements = "".join(f"<{name}>{value}</{name}>" for name, value in texts.items())
    path.write_text(f"<config><training>{elements}</training><other>left alone</other></config>")
    return path


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def test_sigterm_saves_ends_with_143_and_resumes(folder: Path, model: Path) -> None:
    """That losses are those of a run without a stop is shown by test_trainer.py."""
    config, log = yaml_file(folder, model), folder / "run" / "log.jsonl"
    process = Forked("chatmill", "train", config, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while not log.exists() or '"step": 3,' not in log.read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate()
    assert process.returncode == 143, errors
    assert "stopped: step" in out
    done = invoke(config, "--json", "--quiet")
    assert done.exit_code == 0, done.exception
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["outcome"], said["step"]) == ("finished", STEPS)
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    assert [entry["step"] for entry in logged if "loss" in entry] == list(range(1, STEPS + 1))
    assert [entry["step"] for entry in logged if "val_loss" in entry] == [STEPS]


@pytest.mark.filterwarnings("ignore:.*not options of the loaders")
@pytest.mark.parametrize(
    ("write", "more"),
    [
        (yaml_file, {"dataset_mode": None, "pack": None}),
        (xml_file, {"batch_sampling_mode": "random", "epoch_seed": 5}),
        (xml_file, {"pack": None, "epoch_shuffle": False, "epoch_drop_last": False, "episode_min_tokens": 6}),
    ],
)
def test_the_loader_is_the_one_that_make_loader_gives(folder: Path, model: Path, write: Any, more: Any) -> None:
    path = write(folder, model, **more)
    given, _ = open_data(*read_run(path, {}))
    wanted = make_loader(path)
    assert type(given) is type(wanted) is (GPTDataLoader if "dataset_mode" in more else GPTEpisodeDataLoader)
    for split in ("train", "val"):
        for _ in range(7):
            assert same(tuple(given.get_batch(split)), tuple(wanted.get_batch(split)))


def test_xml_trains_and_names_what_it_does_not_use(folder: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "chatmill.train")
    path = xml_file(folder, model, flavour="mint", steps=3, learning_rate="1e-3", model=None)
    done = invoke(path, "--json", "--model", model)
    assert done.exit_code == 0, (done.output, done.exception)
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["outcome"], said["step"]) == ("finished", 3)
    assert "not used: flavour" in caplog.text
    again = invoke(path, "--model", model, "--fresh")
    assert "resume, or choose another folder" in str(again.exception)


def test_the_environment_turns_the_mode_on(folder: Path, model: Path) -> None:
    path = yaml_file(folder, model)
    run, config = read_run(path, {"POST_TRAINING": "1", "WARMUP_PCT": "0.2", "SEED": "5"})
    assert (run.post_training, run.warmup_pct, run.seed) == (True, 0.2, 1337)
    assert open_data(run, config)[0].config.epoch_drop_last is False
    off, _ = read_run(yaml_file(folder, model, post_training=True), {"POST_TRAINING": "0"})
    assert off.post_training is False


def test_mistakes_are_one_clear_error(folder: Path, model: Path) -> None:
    for more, says in (
        ({"learning_rat": 1}, r"'learning_rat' is not an option; did you mean 'learning_rate'"),
        ({"bach_size": 1}, "did you mean <batch_size>"),
        ({"warmup_pct": 3}, r"train.yaml: warmup_pct: should be a number of at most 1.0 \(found 3\)"),
        ({"out": None}, r"train.yaml: the options: 'out' is missing$"),
        ({"dataset_dir": None}, "nothing to train on"),
        ({"transcripts": "t.jsonl"}, "POST_TRAINING=1"),
        ({"transcripts": "t.jsonl", "post_training": True}, "need a tokenizer"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"model": str(folder)}, "has no config.json"),
    ):
        with pytest.raises(ChatmillError, match=says):
            raise invoke(yaml_file(folder, model, **more), "--quiet").exception
    (folder / "set/train/mask.bin").unlink()
    with pytest.raises(ConfigError, match="masks are asked for"):
        raise invoke(yaml_file(folder, model), "--quiet").exception
    logger = logging.getLogger("chatmill")
    assert not [one for one in logger.handlers if type(one) is logging.StreamHandler], "no handler is left behind"


def test_several_processes_are_refused(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "one process" in str(invoke(yaml_file(folder, model)).exception)


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
    done = invoke(yaml_file(folder, model, **config), "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "from the environment: POST_TRAINING=1" in caplog.text
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["outcome"], said["step"]) == ("finished", -(-kept // 2))
    assert said["data"]["blocks_skipped"] == len(packed) - kept
    logged = [json.loads(line) for line in (folder / "run/log.jsonl").read_text().splitlines()]
    assert sum(entry["tokens"] for entry in logged) == int(packed.loss_mask[:, 1:].sum())


def test_the_example_learns_answers_and_stops(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "examples" / "train_tiny.py"
    spec = importlib.util.spec_from_file_location("train_tiny", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    records, result, answers = example.run(tmp_path, steps=20)
    assert len(records) == len(answers) >= 8
    assert result.step == 20
    assert result.loss < 4
