"""Checkpoints: one folder per saved step, there whole or not at all, that transformers opens as a model.

    OUT/checkpoints/step_00000200/
        config.json, model.safetensors   what `save_pretrained` writes
        optimizer.pt                     the moments of AdamW
        state.json                       step, phase, training spec, place of the loader

A folder grows under a temporary name, is synced to disk and renamed.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from chatmill.core.json_files import read_object
from chatmill.core.machine_limits import is_full_disk
from chatmill.core.publish import sweep_orphans, temporary_beside, whole_folder
from chatmill.errors import ConfigError, FormatError
from chatmill.load.model_folder import LOCAL

FORMAT, VERSION = "chatmill-checkpoint", 2
FOLDER, OPTIMIZER, STATE = "checkpoints", "optimizer.pt", "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run after some optimizer steps."""

    step: int
    """Optimizer steps since the beginning of the run."""
    phase_start: int
    """The step at which the present phase began."""
    spec: dict[str, str | None]
    """What the phase trains on: `mode`, and fingerprints of `data` and `tokenizer`. With others a new one begins."""
    loader: Any
    """The loader's own state."""


def save_checkpoint(out: Path, model: Any, optimizer: torch.optim.Optimizer, state: RunState, *, keep: int) -> Path:
    """Write the checkpoint of `state.step` and remove all but the newest `keep`."""
    folder = out / FOLDER
    target = folder / f"step_{state.step:08d}"
    sweep_orphans(folder)  # of a run that was killed while it saved or removed one
    try:
        with whole_folder(target, replace=True) as partial:  # a run that was resumed may save the same step once more
            model.save_pretrained(partial)
            torch.save(optimizer.state_dict(), partial / OPTIMIZER)
            described = {"format": FORMAT, "version": VERSION, **asdict(state)}
            (partial / STATE).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    except Exception as error:  # libraries that write weights report a full disk as errors of their own
        if not is_full_disk(error):
            raise
        raise ConfigError(
            f"{folder}: the disk is full and this checkpoint is not saved. Free some space there, or lower `keep`, and "
            "run the same command again: it resumes from the newest checkpoint"
        ) from error
    for old in checkpoints(out)[:-keep]:
        shutil.rmtree(old.rename(temporary_beside(old)))
    return target


def checkpoints(out: Path) -> list[Path]:
    """List all complete checkpoints of a run, oldest first."""
    return sorted(state.parent for state in (out / FOLDER).glob(f"step_*/{STATE}"))


def read_state(folder: Path) -> RunState:
    """Read the state of a checkpoint; another format or version is refused."""
    path = folder / STATE
    values = read_object(path)
    kind, version = values.pop("format", None), values.pop("version", None)
    if (kind, version) != (FORMAT, VERSION):
        raise FormatError(f"{path} is {kind!r} version {version!r}; this package reads {FORMAT} version {VERSION}")
    return RunState(**values)


def load_checkpoint(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Read weights and moments into a model and its optimizer."""
    try:
        stored = type(model).from_pretrained(folder, **LOCAL, dtype=model.dtype)
        model.load_state_dict(stored.state_dict())
        moments = torch.load(folder / OPTIMIZER, map_location=model.device, weights_only=True)["state"]
        optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
    except Exception as error:  # of safetensors, torch or transformers, as the damage is
        raise ConfigError(
            f"{folder} cannot be resumed from: it holds another model, or is damaged ({error}). Train into another "
            "folder, or remove this checkpoint"
        ) from error
