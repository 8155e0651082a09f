"""What a training recipe names becomes objects: tokenizer, loaders and model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from chatmill.cli.train_recipe import OF_FOLDERS, DataSection, TrainRecipe
from chatmill.cli.train_rows import open_packed_rows
from chatmill.cli.vocabulary import RunVocabulary, findable, refuse_other_tokenizer, vocabulary_of
from chatmill.compiler.paths import local_paths
from chatmill.errors import ConfigError, FormatError
from chatmill.label.presets import find_policy
from chatmill.load.config import Planning
from chatmill.load.make import make_loader
from chatmill.load.option_checks import as_flag
from chatmill.read.transcripts import read_transcripts
from chatmill.render.templates.markers import EOS, Markers
from chatmill.store.episode_layout import MASK
from chatmill.store.episode_manifest import read_split_manifest
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.kd import shard_prefixes
from chatmill.store.pack_plan import PACK
from chatmill.store.receipts import FORMAT, manifest_kind, read_manifest
from chatmill.systems.post_training import pack_transcripts
from chatmill.tokenizer.load import load_tokenizer
from chatmill.train.gpt import GPT, GPTConfig
from chatmill.train.open_model import open_model
from chatmill.train.stream_blocks import StreamBlockLoader

log = logging.getLogger("chatmill.train")
ASSISTANT = "assistant"
"""The policy of the post-training mode on a dataset of episodes."""
DEFAULT_BLOCK_SIZE = 1024
VOCABULARY_MULTIPLE = 128
"""A new model's embedding is rounded up to this many rows, which GPUs like."""


def open_data(recipe: TrainRecipe) -> tuple[Any, Any, RunVocabulary]:
    """Loader, loader of val (None: the loader's own, if it has one), and what is known of the tokenizer."""
    data = recipe.data
    if recipe.train.post_training and data.transcripts:
        return _stream(recipe)
    if data.texts or data.rows:
        return open_packed_rows(recipe)
    if data.dataset is None:
        if data.transcripts:
            raise ConfigError(
                "transcripts are read in the post-training mode: set train.post_training to true (or POST_TRAINING=1)"
            )
        raise ConfigError("nothing to train on: set data.dataset, or data.transcripts with train.post_training")
    directory = Path(data.dataset)
    if directory.is_dir() and (shard_prefixes(directory / "train") or shard_prefixes(directory)):
        raise ConfigError(
            f"{directory} holds Megatron's indexed datasets, which `chatmill train` does not read: train on them with "
            "Megatron Core (docs/megatron.md), or build the same conversations as episodes with `chatmill build` "
            "(template: harmony, policy: synth_kd)"
        )
    manifest = _manifest(directory)
    known = _vocabulary(recipe, manifest)
    if recipe.train.post_training:
        recipe = replace(recipe, data=assistant_only(recipe.data, directory, manifest))
    return _dataset_loader(recipe, directory, known), None, known


def assistant_only(data: DataSection, directory: Path, manifest: dict[str, Any] | None) -> DataSection:
    """The data section for the post-training mode, which trains assistant tokens alone and sees every row.

    Where kinds are stored, the trainer knows whose each token is and the masks may be of any policy; without masks the
    policy `assistant` makes them. A dataset without kinds must have been built with a policy of the assistant alone.
    """
    if not any((directory / "train").rglob("episodes.idx")):
        raise ConfigError(
            f"{directory} holds token files, which are read at random without end: the post-training mode makes one "
            "pass over episodes (chatmill build) or transcripts"
        )
    policy, use_mask = data.loader.get("policy"), data.loader.get("use_loss_mask")
    if policy is not None:
        if not find_policy(policy).trains_assistant_only:
            raise ConfigError(
                f"data.policy is {policy!r}, which trains more than the assistant; the post-training mode trains "
                "assistant tokens only: give assistant, or leave it out"
            )
        return data
    masks = use_mask is not False and _has_masks(directory)
    if _stores_kinds(directory):
        if masks:
            return data
        log.info("post_training: the policy 'assistant' chooses what is trained, from the stored kinds")
        return replace(data, loader=data.loader | {"policy": ASSISTANT, "use_loss_mask": None})
    if masks and (use_mask or (manifest is not None and _stored_policy_fits(manifest))):
        return data
    raise ConfigError(
        f"{directory} does not say which tokens are the assistant's (it stores no kinds, and has no manifest with a "
        "policy that trains the assistant alone), and the post-training mode trains nothing else: build it with "
        "chatmill build, or, where its masks mark assistant tokens, set data.use_loss_mask to true"
    )


def _stored_policy_fits(manifest: dict[str, Any]) -> bool:
    try:
        return find_policy(str(manifest["recipe"].get("policy"))).trains_assistant_only
    except ConfigError:  # a policy file of another machine
        return False


def _stores_kinds(directory: Path) -> bool:
    return "kinds" in EpisodeDataset(directory, "train").columns


def _dataset_loader(recipe: TrainRecipe, directory: Path, known: RunVocabulary) -> Any:
    data = recipe.data
    is_episodes = any((directory / "train").rglob("episodes.idx"))
    policy, use_mask = data.loader.get("policy"), data.loader.get("use_loss_mask")
    mode = data.loader.get("dataset_mode", "sft_episode" if is_episodes else "token_stream")
    if mode == "sft_episode" and not is_episodes:
        raise ConfigError(
            f"{directory}/train has no episodes.idx, but data.dataset_mode is sft_episode: use token_stream"
        )
    if use_mask is None:
        use_mask = not recipe.defaults_of_loader and _has_masks(directory)
    config = {
        **data.loader,
        "batch_size": data.batch_size,
        "block_size": data.block_size or _planned_block_size(directory, data) or DEFAULT_BLOCK_SIZE,
        "pack": data.pack,
        "dataset_mode": mode,
        "use_loss_mask": use_mask,
    }
    # A run that is to train on masks stops without them; a policy reads kinds in their place.
    strict = use_mask and policy is None
    if mode == "token_stream":
        if policy is not None:
            raise ConfigError("data.policy chooses by episode; a token_stream has its stored masks (use_loss_mask)")
        with _mask_way_out(strict):
            return make_loader(config, directory, check=data.check)
    if known.pad_id is not None:
        config.setdefault("pad_token_id", known.pad_id)
    if not recipe.defaults_of_loader:
        config.setdefault("overflow", "error")
    if recipe.train.post_training or not recipe.defaults_of_loader:
        config.setdefault("epoch_drop_last", False)
    with _mask_way_out(strict):
        return make_loader(config, directory, strict=strict, check=data.check)


def _planned_block_size(directory: Path, data: DataSection) -> int | None:
    """What the rows of a pack plan fill: a row is cut from block_size + 1 tokens. None where no plan is to be used."""
    if not data.pack or data.loader.get("planning") == Planning.EPOCH or not (directory / "train" / PACK).is_dir():
        return None
    plan = EpisodeDataset(directory, "train", strict=False).plan
    return None if plan is None else plan.length - 1


def _has_masks(directory: Path) -> bool:
    """Whether there are masks, or a manifest says that there were."""
    if any((directory / "train").rglob("*mask.bin")):
        return True
    manifest = read_split_manifest(directory / "train")
    return manifest is not None and any(MASK in shard.files for shard in manifest.shards)


@contextmanager
def _mask_way_out(strict: bool) -> Iterator[None]:
    """Say what to do where there are no masks."""
    try:
        yield
    except (ConfigError, FormatError) as error:
        if not strict or "mask" not in str(error):
            raise
        raise type(error)(
            f"{error}. Training would count every token: build or copy the dataset again, or say in the recipe "
            "data.use_loss_mask: false"
        ) from None


def _stream(recipe: TrainRecipe) -> tuple[Any, Any, RunVocabulary]:
    """Transcripts to blocks: read, encode, pack; the tokenizer gets the markers it lacks."""
    if recipe.tokenizer is None:
        raise ConfigError("transcripts need a tokenizer: set 'tokenizer' in the recipe")
    if recipe.template not in (None, "markers"):
        raise ConfigError(f"transcripts are of the template 'markers', but the recipe says {recipe.template!r}")

    tokenizer = load_tokenizer(recipe.tokenizer, control_tokens=Markers.control_tokens)
    eos = tokenizer.control(EOS)
    loader = _stream_loader(recipe.data.transcripts, recipe.data, tokenizer, eos)
    val = None
    if recipe.data.val_transcripts:
        val = _stream_loader(recipe.data.val_transcripts, recipe.data, tokenizer, eos, split="val")
    notes = {"tokenizer": findable(recipe.tokenizer), "template": "markers", "add_control_tokens": True}
    size, fingerprint = tokenizer.vocab_size, tokenizer.fingerprint
    return loader, val, RunVocabulary(size=size, pad_id=eos, fingerprint=fingerprint, notes=notes)


def _stream_loader(files: tuple[str, ...], data: DataSection, tokenizer: Any, eos: int, split: str = "train") -> Any:
    found = list(read_transcripts(local_paths(list(files))))
    packed = pack_transcripts(
        [transcript.text for transcript in found],
        tokenizer=tokenizer,
        block_size=data.block_size or DEFAULT_BLOCK_SIZE,
        drop_last=data.drop_last,
        places=[transcript.where for transcript in found],
    )
    return StreamBlockLoader(packed, batch_size=data.batch_size, eos_id=eos, isolate=data.isolate, split=split)


def _vocabulary(recipe: TrainRecipe, manifest: dict[str, Any] | None) -> RunVocabulary:
    """From the recipe's tokenizer, else from the dataset's manifest, else nothing is known."""
    if recipe.tokenizer is not None:
        return vocabulary_of(recipe, recipe.tokenizer)
    if manifest is None:
        return RunVocabulary(size=None, pad_id=None, fingerprint=None, notes={})
    about, built = manifest["tokenizer"], manifest["recipe"]
    notes = {
        "tokenizer": findable(about["given_as"]),
        "pattern": built.get("pattern"),
        "template": recipe.template or built["template"],
        "add_control_tokens": built["add_control_tokens"],
    }
    return RunVocabulary(
        size=about["vocab_size"], pad_id=about["pad_id"], fingerprint=about["fingerprint"], notes=notes
    )


def _manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of a build; None where the dataset was not made by one."""
    return read_manifest(directory) if manifest_kind(directory) == FORMAT else None


def make_model(recipe: TrainRecipe, vocabulary: RunVocabulary) -> Any:
    """A new GPT of the recipe's sizes, or the model of a folder."""
    import torch

    sizes = dict(recipe.model)
    torch.manual_seed(recipe.train.seed)
    if "path" in sizes:
        extra = [name for name in sizes if name not in ("path", *OF_FOLDERS)]
        if extra:
            raise ConfigError(f"model.path names a model with sizes of its own: remove {', '.join(extra)}")
        dtype = getattr(torch, str(sizes.get("dtype", "float32")), None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"model.dtype is {sizes['dtype']!r}; give float32, bfloat16, float16 or float64")
        if as_flag("model.check_tokenizer", sizes.get("check_tokenizer", True)):
            refuse_other_tokenizer(Path(str(sizes["path"])), vocabulary)
        model = open_model(
            str(sizes["path"]),
            attention=recipe.attention,
            dtype=dtype,
            random_weights=as_flag("model.random_weights", sizes.get("random_weights", False)),
        )
        rows = len(model.head_weight)
        if vocabulary.size is not None and rows < vocabulary.size:
            if not as_flag("model.resize", sizes.get("resize", False)):
                raise ConfigError(
                    f"{sizes['path']} has {rows:,} embeddings, but the tokenizer has {vocabulary.size:,} ids: use the "
                    "model's own tokenizer, or set model.resize to true, which adds embeddings"
                )
            model.grow(vocabulary.size)
            log.info("model: %d embeddings added, each the mean of the %d others", vocabulary.size - rows, rows)
        return model
    for name in OF_FOLDERS:
        if name in sizes:
            raise ConfigError(f"model.{name} goes with model.path")
    if "vocab_size" not in sizes:
        if vocabulary.size is None:
            raise ConfigError("model.vocab_size is missing, and neither a tokenizer nor a manifest gives it")
        sizes["vocab_size"] = -(-vocabulary.size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return GPT(GPTConfig.from_json(sizes), attention=recipe.attention)
