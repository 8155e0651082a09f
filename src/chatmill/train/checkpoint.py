"""Checkpoints: a folder per saved step that is there whole or not at all, and what a run needs to resume from it.

    OUT/checkpoints/step_00000200/
        model.safetensors       weights (a transformers model: what `save_pretrained` writes)
        model.json              the sizes of the GPT
        optimizer.safetensors   the moments of AdamW, by parameter name
        state.json              step, phase, spec, place of the loader, and notes such as tokenizer and template

A folder grows under a hidden name, is synced to disk and renamed; `state.json` is written last.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chatmill.core.json_files import read_object
from chatmill.core.machine_limits import is_full_disk
from chatmill.core.whole_file import sync_folder
from chatmill.errors import ConfigError, FormatError, need
from chatmill.store.durable import sync_tree

FORMAT = "chatmill-checkpoint"
VERSION = 1
FOLDER = "checkpoints"
MODEL, MODEL_SIZES, OPTIMIZER, STATE = "model.safetensors", "model.json", "optimizer.safetensors", "state.json"
NAME = re.compile(r"step_(\d{8,})")
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """What a phase trains on; when one of these changes between runs, a new phase begins with a warmup."""

    mode: str
    """`post_training` or `training`."""
    data: str | None
    """Fingerprint of the data."""
    tokenizer: str | None
    """Fingerprint of the tokenizer."""

    def differences(self, other: TrainingSpec) -> list[str]:
        """One phrase for each difference."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{name} ({theirs[name]} -> {mine[name]})" for name in mine if mine[name] != theirs[name]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run after some optimizer steps."""

    step: int
    """Optimizer steps since the beginning of the run."""
    phase_start: int
    """The step at which the present phase began."""
    spec: TrainingSpec
    loader: Any
    """The loader's own state."""
    first_epoch: int = 0
    """The epoch of the loader in which the present phase began."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What the caller wants to find again: tokenizer, template."""


def save_checkpoint(out: Path, model: Any, optimizer: torch.optim.Optimizer, state: RunState, *, keep: int) -> Path:
    """Write the checkpoint of `state.step` and remove all but the newest `keep`."""
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"step_{state.step:08d}"
    partial = folder / f".{target.name}.partial"
    for rest in folder.glob(".step_*.partial"):  # of a run that was killed while it saved or removed one
        shutil.rmtree(rest)
    with _full_disk_named(out, partial):
        partial.mkdir()
        model.save_weights(partial)
        _write(partial / OPTIMIZER, _moments(model, optimizer))
        described = {"format": FORMAT, "version": VERSION, **asdict(state)}
        (partial / STATE).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
        sync_tree(partial)
    if target.exists():  # the same step once more, after a run that was resumed with the same steps
        shutil.rmtree(target)
    partial.rename(target)
    sync_folder(folder)
    for _, old in checkpoints(out)[:-keep]:
        shutil.rmtree(old.rename(folder / f".{old.name}.partial"))
    return target


@contextmanager
def _full_disk_named(out: Path, partial: Path) -> Iterator[None]:
    """A disk that is full while a checkpoint is written: half of it goes, and the error says what is left and helps.

    Libraries that write weights report it as errors of their own.
    """
    try:
        yield
    except Exception as error:
        if not is_full_disk(error):
            raise
        shutil.rmtree(partial, ignore_errors=True)
        kept = checkpoints(out)
        left = f"the newest checkpoint is {kept[-1][1].name}" if kept else "no checkpoint is saved yet"
        raise ConfigError(
            f"{partial.parent}: the disk is full and this checkpoint is not saved; {left}. Free some space there, or "
            "lower train.keep, and run the same command again: it resumes from the newest checkpoint"
        ) from error


def save_module(folder: Path, module: nn.Module, sizes: Mapping[str, Any]) -> None:
    """The weights and sizes of a GPT; shared weights are written once."""
    _write(folder / MODEL, {name: parameter.data for name, parameter in module.named_parameters()})
    (folder / MODEL_SIZES).write_text(json.dumps(sizes, indent=1) + "\n", encoding="utf-8")


def load_module(folder: Path, module: nn.Module) -> None:
    """Read weights into a module of the same shape; every name must be there."""
    stored = _read(folder / MODEL)
    own = dict(module.named_parameters())
    wrong = [name for name in own.keys() | stored.keys() if name not in own or name not in stored]
    wrong += [name for name in own.keys() & stored.keys() if own[name].shape != stored[name].shape]
    if wrong:
        raise ConfigError(
            f"{folder / MODEL} holds another model: {len(wrong)} parameters differ, {min(wrong)!r} for one; open it "
            "with the sizes it was saved with (model.json beside it), or train into another folder"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(stored[name])


def checkpoints(out: Path) -> list[tuple[int, Path]]:
    """All whole checkpoints of a run, oldest first, as (step, folder)."""
    found = []
    for path in (out / FOLDER).glob("step_*"):
        match = NAME.fullmatch(path.name)
        if match and (path / STATE).is_file():
            found.append((int(match[1]), path))
    return sorted(found)


def find_checkpoint(path: Path) -> Path:
    """A checkpoint folder itself, or the newest of a run's folder."""
    if (path / STATE).is_file():
        return path
    known = checkpoints(path)
    if not known:
        raise ConfigError(f"{path} is no checkpoint and holds none: a run writes them to OUT/{FOLDER}/step_NNNNNNNN")
    return known[-1][1]


def read_state(folder: Path) -> RunState:
    """The state of a checkpoint; another format or version is refused."""
    path = folder / STATE
    values = read_object(path)
    if values.pop("format", None) != FORMAT:
        raise FormatError(f"{path} is not the state of a {FORMAT}")
    version = values.pop("version", None)
    if version != VERSION:
        raise FormatError(f"{path} has version {version!r}; this package reads {VERSION}")
    return RunState(**(values | {"spec": TrainingSpec(**values["spec"])}))


def load_optimizer(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Bring the moments back, by parameter name."""
    stored = _read(folder / OPTIMIZER)
    for name, parameter in model.named_parameters():
        if f"step.{name}" in stored:
            # AdamW keeps its step count on the CPU unless it is fused; the moments go with the parameter.
            fused = optimizer.param_groups[0].get("fused")
            optimizer.state[parameter] = {
                moment: stored[f"{moment}.{name}"].to(parameter.device if moment != "step" or fused else "cpu")
                for moment in MOMENTS
            }


def _moments(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{moment}.{name}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for moment in MOMENTS
    }


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    need("safetensors", "saving checkpoints")
    from safetensors.torch import save_file

    save_file({name: one.detach().contiguous() for name, one in tensors.items()}, path, {"format": "pt"})


def _read(path: Path) -> dict[str, torch.Tensor]:
    need("safetensors", "opening checkpoints")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        stored: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise FormatError(f"{path} is no whole safetensors file: {error}") from None
    return stored
