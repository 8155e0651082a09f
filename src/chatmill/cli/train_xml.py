"""An XML config of the loaders as a training recipe: the same options, read by the same reader."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chatmill.errors import ConfigError
from chatmill.load.config import OPTIONS, load_training_config
from chatmill.load.config_files import read_elements

log = logging.getLogger("chatmill.train")
NOT_IN_DATA = ("device", "dataset_dir")
"""Options of the loaders that a recipe has elsewhere."""


def read_xml_recipe(path: Path, train_keys: Sequence[str], top_keys: Sequence[str]) -> dict[str, Any]:
    """The sections of a recipe as a mapping; `<training>` becomes `data`, and its options of training become `train`.

    What `<training>` holds beside these is named in the log and is not used. Elements elsewhere that are no section of
    a recipe are left alone.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what is not used is named below
        config = load_training_config(path)
    beside = {name: value for name, value in read_elements(path).items() if name in top_keys}
    recipe = {name: _typed(value) for name, value in beside.items()}
    for name in ("data", "train", "model", "post_training"):
        if not isinstance(recipe.setdefault(name, {}), dict):
            raise ConfigError(f"{path}: <{name}> must hold elements, not {recipe[name]!r}")
    of_training = {name: _typed(value) for name, value in config.extra.items() if name in train_keys}
    if config.device is not None:
        of_training["device"] = config.device
    unused = [name for name in config.extra if name not in of_training]
    if unused:
        log.info("%s: elements of <training> that are not used: %s", path, ", ".join(unused))
    options = {name: getattr(config, name) for name in OPTIONS if name not in NOT_IN_DATA}
    given = {name: value for name, value in options.items() if name not in config.left_out and value is not None}
    if config.dataset_dir is not None:
        given["dataset"] = config.dataset_dir
    recipe["data"] = given | recipe["data"]
    recipe["train"] = of_training | recipe["train"]
    return recipe


def _typed(value: Any) -> Any:
    """The text of an element in the type that YAML would give it; elements below it one by one."""
    import yaml

    if isinstance(value, Mapping):
        return {name: _typed(inner) for name, inner in value.items()}
    try:
        typed = yaml.safe_load(value) if value else None
    except yaml.YAMLError:
        return value
    if isinstance(typed, bool | int | float | None):
        return typed
    try:
        return float(value) if value[0].isdigit() else value  # 1e-4: YAML alone wants 1.0e-4
    except ValueError:
        return value
