"""A training run from one config file, YAML or the XML of spec 4: its options, its data, its model, and `fit`."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chatmill.errors import ConfigError
from chatmill.load.config import KINDS, DatasetMode, TrainingConfig, load_training_config
from chatmill.load.loader import BatchLoader
from chatmill.load.stream_blocks import StreamBlockLoader
from chatmill.load.token_stream import make_loader
from chatmill.read.transcripts import read_transcripts
from chatmill.store.episode_layout import dataset_folder
from chatmill.store.receipts import FORMAT, KD_SCHEMA, manifest_kind, read_manifest
from chatmill.structs import misspelt
from chatmill.systems.post_training import EOS, MARKERS, pack_transcripts
from chatmill.tokenizer.load import load_tokenizer
from chatmill.train.hf_model import load_hf_model
from chatmill.train.options import TrainOptions, checked
from chatmill.train.trainer import FitResult, fit

log = logging.getLogger("chatmill.train")
VARIABLES = ("POST_TRAINING", "WARMUP_PCT")
"""Environment variables that replace a key (spec 2)."""


class TrainRun(TrainOptions, frozen=True, kw_only=True):
    """What a config file has besides the options of its loader (`TrainingConfig`)."""

    model: str
    """A model folder of transformers."""
    out: str
    """Folder of log and checkpoints."""
    random_weights: bool = False
    """Read config.json of the model alone, and draw weights by `seed`."""
    transcripts: str | list[str] = ()  # type: ignore[assignment]
    """Files of marker transcripts, for the post-training mode, in place of `dataset_dir`."""
    tokenizer: str | None = None
    """For transcripts."""


def train(path: Path, *, resume: bool = True, **overrides: Any) -> FitResult:
    """Train as a config file says; `overrides` that are not None, and `VARIABLES`, replace its options."""
    run, config = read_run(path, os.environ, **overrides)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("`chatmill train` runs in one process: start it without torchrun, or use another trainer")
    loader, fingerprint = open_data(run, config)
    model = load_hf_model(run.model, random_weights=run.random_weights, seed=run.seed, way_out="random_weights: true")
    options = {name: getattr(run, name) for name in TrainOptions.__struct_fields__}
    return fit(model, loader, out=run.out, resume=resume, tokenizer=fingerprint, **options)


def read_run(path: Path, environment: Mapping[str, str], **overrides: Any) -> tuple[TrainRun, TrainingConfig]:
    """Read a config file: options of the loader, and all others.

    An element that is not an option is logged and ignored, unless it looks like a misspelt option.
    """
    chosen = {name: value for name, value in overrides.items() if value is not None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what is not used is named below
        config = load_training_config(path, **{name: chosen.pop(name) for name in list(chosen) if name in KINDS})
    fields = {name: value for name, value in config.extra.items() if name in TrainRun.__struct_fields__}
    unused = [name for name in config.extra if name not in fields]
    for name in unused:
        if (suggestion := misspelt(name, TrainRun.__struct_fields__)) is not None:
            raise ConfigError(f"{path}: {name!r} is not an option; did you mean {suggestion!r}?")
    if unused:
        log.info("%s: not options of training, not used: %s", path, ", ".join(unused))
    variables = {name.lower(): environment[name] for name in VARIABLES if environment.get(name)}
    for name, value in variables.items():
        log.info("from the environment: %s=%s", name.upper(), value)
    try:
        run = checked(TrainRun, fields | variables | chosen)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return run, config


def open_data(run: TrainRun, config: TrainingConfig) -> tuple[BatchLoader, str | None]:
    """Open the loader of a run; also the fingerprint of the tokenizer, if it is known."""
    if run.transcripts:
        return _stream(run, config)
    if config.dataset_dir is None:
        raise ConfigError("nothing to train on: set dataset_dir, or transcripts with post_training")
    directory = dataset_folder(config.dataset_dir)
    kind = manifest_kind(directory)
    if kind == KD_SCHEMA:
        raise ConfigError(
            f"{directory} holds Megatron's indexed datasets for distillation, which Megatron reads (SynthKDDataset); "
            "to train here, export them first: chatmill export"
        )
    manifest = read_manifest(directory) if kind == FORMAT else None
    about = {} if manifest is None else manifest["tokenizer"]
    if config.dataset_mode is DatasetMode.SFT_EPISODE:
        if config.pad_token_id is None:
            config = config.replace(pad_token_id=about.get("pad_id"))
        if run.post_training and "epoch_drop_last" in config.left_out:
            config = config.replace(epoch_drop_last=False)
    elif not config.use_loss_mask and any((directory / "train").rglob("episodes.idx")):
        log.warning(
            "%s holds episodes and dataset_mode is token_stream without masks: every token is trained. For whole "
            "conversations set dataset_mode to sft_episode and use_loss_mask to true",
            directory,
        )
    # A run that is to train on masks must not go on without them.
    strict = {"strict": config.use_loss_mask} if config.dataset_mode is DatasetMode.SFT_EPISODE else {}
    return make_loader(config, directory, **strict), about.get("fingerprint")


def _stream(run: TrainRun, config: TrainingConfig) -> tuple[BatchLoader, str]:
    """Transcripts to blocks: read, encode, pack; the tokenizer gets the markers it lacks."""
    if not run.post_training:
        raise ConfigError("transcripts are read in the post-training mode: set post_training to true (POST_TRAINING=1)")
    if run.tokenizer is None:
        raise ConfigError("transcripts need a tokenizer: set 'tokenizer'")
    tokenizer = load_tokenizer(run.tokenizer, control_tokens=MARKERS)
    files = [run.transcripts] if isinstance(run.transcripts, str) else run.transcripts
    records = [transcript for file in files for transcript in read_transcripts(file)]
    packed = pack_transcripts(
        [record.text for record in records],
        tokenizer=tokenizer,
        block_size=config.block_size,
        places=[record.where for record in records],
    )
    loader = StreamBlockLoader(
        packed, batch_size=config.batch_size, eos_id=tokenizer.control(EOS), device=config.device
    )
    return loader, tokenizer.fingerprint
