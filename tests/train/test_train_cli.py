"""`chatmill train` and `chatmill sample`: recipes, the environment, signals, resuming, and asking the result."""

from __future__ import annotations

import importlib.util
import json
import logging
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chatmill.cli import app
from chatmill.cli.sample import bound_template
from chatmill.cli.train_data import make_model, open_data
from chatmill.cli.train_recipe import read_recipe
from chatmill.compiler.run import run_build
from chatmill.errors import ConfigError
from chatmill.load.episode_rows import PlannedRows
from chatmill.load.token_stream import GPTDataLoader
from chatmill.render.registry import bind
from chatmill.tokenizer.load import load_tokenizer
from chatmill.train.gpt import GPT
from chatmill.train.prompt import prompt_ids, stop_ids
from tests.load.sets import items, write_by_hand
from tests.train.command import run_command, started
from tests.train.tiny import short_conversations

STEPS = 24
RECIPE = """
out: OUT
model: {layers: 1, hidden: 32, heads: 2}
data: {dataset: DATA, batch_size: 2, block_size: 256}
train: {steps: STEPS, learning_rate: 0.01, log_every: 1, eval_every: 20, eval_batches: 2}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real build of short real conversations, with a val split and a manifest."""
    folder = tmp_path_factory.mktemp("built")
    lines = [
        {"id": c.id, "messages": [{"role": m.role.value, "content": m.content} for m in c.messages]}
        for c in short_conversations(50)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = {
        "sources": [{"path": str(folder / "chats.jsonl")}],
        "tokenizer": "bytes",
        "template": "chatml",
        "add_control_tokens": True,
        "split": {"val_fraction": 0.2},
    }
    run_build(recipe, folder / "dataset", workers=0)
    return folder / "dataset"


def recipe_file(folder: Path, built: Path, out: str = "run", text: str = RECIPE) -> Path:
    path = folder / f"{out}.yaml"
    filled = text.replace("OUT", str(folder / out)).replace("DATA", str(built)).replace("STEPS", str(STEPS))
    path.write_text(filled)
    return path


def test_sigterm_saves_ends_with_143_and_goes_on_to_the_same_loss(built: Path, tmp_path: Path) -> None:
    """Both runs are processes of the same command with one thread; another process may round differently."""
    recipe = recipe_file(tmp_path, built)
    log = tmp_path / "run" / "log.jsonl"
    unbroken, process = started("train", recipe_file(tmp_path, built, "unbroken")), started("train", recipe)
    while not log.exists() or '"step": 3,' not in log.read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate()
    assert process.returncode == 143, errors
    assert "stopped: step" in out
    _, errors = unbroken.communicate()
    assert unbroken.returncode == 0, errors

    done = run_command("train", recipe, "--json")
    assert done.returncode == 0, done.stderr
    assert "resuming from step_" in done.stderr
    said = json.loads(done.stdout)
    assert (said["outcome"], said["step"]) == ("finished", STEPS)
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    wanted = [json.loads(line) for line in (tmp_path / "unbroken" / "log.jsonl").read_text().splitlines()]
    assert said["loss"] == [entry["loss"] for entry in logged if "loss" in entry][-1]
    for name, steps in (("loss", list(range(1, STEPS + 1))), ("val_loss", [20, STEPS])):
        curve, whole = ({e["step"]: e[name] for e in entries if name in e} for entries in (logged, wanted))
        assert list(curve) == steps
        assert curve == pytest.approx(whole, abs=1e-4)
        assert len({round(value, 3) for value in curve.values()}) > len(curve) / 2, "the bound tells steps apart"
    assert all(entry["spans"]["final"]["tokens"] > 0 for entry in logged if "loss" in entry)

    asked = CliRunner().invoke(
        app, ["sample", str(tmp_path / "run"), "Who are you?", "--json", "--max-new-tokens", "8"]
    )
    assert asked.exit_code == 0, asked.output
    answer = json.loads(asked.stdout)
    assert answer["finish"] in ("stop", "length")
    assert len(answer["ids"]) <= 8
    assert answer["checkpoint"].endswith(f"step_{STEPS:08d}")


def test_the_recipe_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    def read(text: str, **environment: str) -> Any:
        (tmp_path / "r.yaml").write_text(text)
        return read_recipe(tmp_path / "r.yaml", environment)

    for text, message in (
        ("out: a\ntrain: {learning_rat: 1}", r"unknown key 'train.learning_rat', did you mean 'train.learning_rate'"),
        ("out: a\ndata: {bach_size: 1}", r"did you mean 'data.batch_size'"),
        ("out: a\nmodel: {layer: 1}", r"did you mean 'model.layers'"),
        ("out: a\nmodl: {}", r"did you mean 'model'"),
        ("train: {}", "'out' is missing"),
        ("out: a\ntrain: 5", "must be a mapping"),
        ("- a", "must hold a mapping"),
        ("out: [", "is not YAML"),
        ("out: a\ndata: {batch_size: many}", "data.batch_size is 'many'"),
        ("out: a\ntrain: {warmup_pct: 3}", "warmup_pct is 3; allowed: a number, 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(text)
    with pytest.raises(ConfigError, match="no recipe file"):
        read_recipe(tmp_path / "none.yaml", {})
    with pytest.raises(ConfigError, match=r"from the environment: CHATMILL_LEARNING_RATE\): learning_rate is 'fast'"):
        read("out: a", CHATMILL_LEARNING_RATE="fast")


def test_every_key_is_an_environment_variable(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("out: a\ntrain: {learning_rate: 1, steps: 5}\ndata: {pack: true}\n")
    plain = read_recipe(tmp_path / "r.yaml", {"PATH": "x"})
    assert (plain.train.learning_rate, plain.data.pack, plain.from_environment) == (1.0, True, {})
    given = {"CHATMILL_LEARNING_RATE": "2e-3", "POST_TRAINING": "1", "WARMUP_PCT": "0.2", "CHATMILL_PACK": "0"}
    given |= {"CHATMILL_BATCH_SIZE": "3", "CHATMILL_TRANSCRIPTS": "a.jsonl b.jsonl", "CHATMILL_PRECISION": "fp32"}
    given |= {"CHATMILL_STEPS": "7"}
    read = read_recipe(tmp_path / "r.yaml", {**given, "SEED": "5", "DEVICE": "tpu"})
    assert (read.train.seed, read.train.device, read.not_read) == (1337, "auto", ("DEVICE", "SEED"))
    assert (read.train.learning_rate, read.train.post_training, read.train.warmup_pct) == (2e-3, True, 0.2)
    assert (read.data.pack, read.data.batch_size, read.train.steps) == (False, 3, 7)
    assert read.data.transcripts == ("a.jsonl", "b.jsonl")
    (tmp_path / "r.yaml").write_text("out: a\ndata: {use_loss_mask: null, dataset_mode: null, epoch_shuffle: off}\n")
    assert read_recipe(tmp_path / "r.yaml", {"CHATMILL_EPOCH_DROP_LAST": "yes"}).data.loader == {
        "epoch_shuffle": False,
        "epoch_drop_last": True,
    }
    assert read.from_environment == given


def test_data_and_model_that_do_not_fit_are_told(built: Path, tmp_path: Path) -> None:
    def opened(text: str) -> Any:
        (tmp_path / "r.yaml").write_text(text)
        settings = read_recipe(tmp_path / "r.yaml", {})
        loader, _, vocabulary = open_data(settings)
        return loader, make_model(settings, vocabulary)

    for text, message in (
        ("out: a", "nothing to train on"),
        ("out: a\ntokenizer: bytes\ndata: {transcripts: x.jsonl}", "post_training"),
        ("out: a\ndata: {transcripts: x.jsonl}\ntrain: {post_training: true}", "need a tokenizer"),
        (f"out: a\ndata: {{dataset: {built}}}\nmodel: {{path: {tmp_path}, layers: 2}}", "remove layers"),
        (f"out: a\ndata: {{dataset: {built}}}\nmodel: {{path: {tmp_path}}}", "holds no model"),
        (f"out: a\ndata: {{dataset: {built}}}\nmodel: {{random_weights: true}}", "goes with model.path"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(text)
    loader, model = opened(f"out: a\ndata: {{dataset: {built}}}\nmodel: {{layers: 1, hidden: 32, heads: 2}}")
    assert isinstance(model, GPT)
    assert model.config.vocab_size == 384
    assert loader.pad_token_id == json.loads((built / "manifest.json").read_text())["tokenizer"]["pad_id"]
    write_by_hand(tmp_path / "flat" / "train", items(20), mask="u1")
    for name in ("tokens.bin", "mask.bin", "episodes.idx"):
        source = tmp_path / "flat" / "train" / name
        target = {"tokens.bin": "a.bin", "mask.bin": "a_mask.bin"}.get(name)
        source.unlink() if target is None else source.rename(source.with_name(target))
    sizes = "model: {layers: 1, hidden: 32, heads: 2, vocab_size: 30000}"
    loader, _ = opened(f"out: a\ndata: {{dataset: {tmp_path / 'flat'}, block_size: 8}}\n{sizes}")
    assert isinstance(loader, GPTDataLoader)
    assert len(loader.get_batch()) == 3
    with pytest.raises(ConfigError, match="vocab_size is missing"):
        opened(f"out: a\ndata: {{dataset: {tmp_path / 'flat'}, block_size: 8}}\nmodel: {{layers: 1}}")


@pytest.mark.parametrize(
    ("template", "prompt", "stops"),
    [
        ("chatml", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", ["<|im_end|>"]),
        ("markers", "<|USER|>Hi<|END|><|ASSISTANT|>", ["<|END|>", "<|EOS|>"]),
    ],
)
def test_a_prompt_ends_where_the_assistant_begins(template: str, prompt: str, stops: list[str]) -> None:
    from chatmill.render.registry import find_template

    tokenizer = load_tokenizer("bytes", control_tokens=find_template(template).control_tokens)
    bound = bind(template, tokenizer)
    assert tokenizer.decode(prompt_ids(bound, [{"role": "user", "content": "Hi"}])) == prompt
    assert stop_ids(bound) == {tokenizer.control(name) for name in [*stops, "<|eos|>"]}


def test_harmony_stops_at_return(o200k: Any) -> None:
    bound = bind("harmony", o200k)
    assert o200k.control("<|return|>") in stop_ids(bound)
    assert o200k.control("<|end|>") not in stop_ids(bound)
    assert o200k.decode(prompt_ids(bound, [{"role": "user", "content": "Hi"}])).endswith("<|start|>assistant")


def test_sample_says_what_it_misses() -> None:
    for notes, missing in (({}, "tokenizer"), ({"tokenizer": "bytes"}, "template")):
        with pytest.raises(ConfigError, match=f"give --{missing}"):
            bound_template(notes, None, None)
    bound = bound_template({"tokenizer": "bytes", "template": "markers", "add_control_tokens": True}, None, "chatml")
    assert bound.name == "chatml"


def test_the_example_runs(tmp_path: Path) -> None:
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


def test_the_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    from benchmarks.packed_training import Contestant, Sizes, isolation, read_episodes, steps_of_documents, train
    from chatmill.train.gpt import GPTConfig
    from tests.train.test_trainer import ALONE, CPU

    small = GPTConfig(vocab_size=50304, layers=1, hidden=16, heads=2, ffn=32)
    sizes = Sizes(model=small, block=128, rows=4, steps=2, rate=1e-2)
    episodes = read_episodes()
    steps = steps_of_documents(episodes, sizes)
    runs = [
        train(Contestant(name, episodes, sizes, 32), steps, sizes, ALONE)
        for name in ("packed", "padded to the longest", "padded")
    ]
    assert runs[0]["trained_tokens"] == runs[1]["trained_tokens"] == runs[2]["trained_tokens"] > 50
    for run in runs[1:]:
        assert run["losses"] == pytest.approx(runs[0]["losses"], abs=1e-5)
        assert run["positions"] > runs[0]["positions"]
    assert [check["passed"] for check in isolation(CPU)] == [True]


def test_a_pack_plan_gives_rows_and_their_size(built: Path, tmp_path: Path) -> None:
    recipe = json.loads((built / "manifest.json").read_bytes())["recipe"]
    run_build({**recipe, "pack": {"length": 300}, "packing": {"overflow": "cut"}}, tmp_path / "packed", workers=0)
    text = RECIPE.replace(", block_size: 256}", "MORE}")
    for more, size, planned in (("", 299, True), (", block_size: 300", 300, True), (", block_size: 200", 200, False),
                                (", planning: epoch", 1024, False), (", pack: false", 1024, False)):  # fmt: skip
        settings = read_recipe(recipe_file(tmp_path, tmp_path / "packed", text=text.replace("MORE", more)), {})
        loader = open_data(settings)[0]
        assert loader.block_size == size, more
        assert isinstance(loader.episode_feed("train").rows, PlannedRows) == planned, more
    loader = open_data(read_recipe(recipe_file(tmp_path, tmp_path / "packed", text=text.replace("MORE", "")), {}))[0]
    batch = loader.get_batch()
    assert batch.x.shape == (2, 299)
    assert int((batch.document_starts >= 0).sum()) > 2


def test_the_command_leaves_no_log_handler_behind(tmp_path: Path) -> None:
    """Standard error of the command is closed afterwards: a handler that is left would fail with every later line."""
    logger = logging.getLogger("chatmill")
    before = logger.level, list(logger.handlers)
    done = CliRunner().invoke(app, ["train", str(tmp_path / "none.yaml")])
    assert done.exit_code
    assert (logger.level, list(logger.handlers)) == before
