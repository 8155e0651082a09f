"""The table of export targets. Importing it imports nothing else: a target's code is loaded when it is asked for."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chatmill.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from chatmill.export.targets import Export


@dataclass(frozen=True, slots=True)
class Target:
    """One thing that a dataset can be exported to. Adding one is writing a function and naming it in the table."""

    name: str
    write: Callable[..., None] | str
    """Writes the files into `export.folder`; its keyword-only parameters are the options that it takes.

    A text is `module:function`, loaded when it is needed."""
    holds: tuple[str, ...] = ()
    """`trees` as `position_ids` and `ends`, `pictures` in a column `images`, `pairs` of answers and labels."""
    no_rows: str = ""
    """Of a target that takes no `max_length`: why, and what to set in the trainer."""

    @property
    def function(self) -> Callable[..., None]:
        """What writes it."""
        if not isinstance(self.write, str):
            return self.write
        module, _, name = self.write.partition(":")
        function: Callable[..., None] = getattr(importlib.import_module(f"chatmill.export.{module}"), name)
        return function

    def takes(self, option: str) -> bool:
        """Return whether it has this option."""
        return option in inspect.signature(self.function).parameters

    def check(self, max_length: int | None, options: Mapping[str, Any]) -> None:
        """Refuse an option that was given and that the target does not take."""
        if max_length is not None and self.no_rows:
            raise ConfigError(self.no_rows)
        for option in options:
            if not self.takes(option):
                takers = ", ".join(target.name for target in TARGETS.values() if target.takes(option))
                raise ConfigError(f"{option} is for exports to {takers}; {self.name} does not take it: leave it out")


EVERYTHING, PAIRS = ("trees", "pictures", "pairs"), ("pairs",)
ALONE = "Trainers of preferences read one document a row: leave out max_length, and build with --max-length"
ITSELF = "{} itself: leave out max_length and set {} there"
_TABLE = (
    Target("hf", "lossless:to_hf", EVERYTHING),
    Target("trl", "lossless:to_trl"),
    Target("trl-dpo", "pairs:to_trl_dpo", PAIRS, ALONE),
    Target("trl-kto", "pairs:to_trl_kto", PAIRS, ALONE),
    Target("trl-reward", "pairs:to_trl_reward", PAIRS, ALONE),
    Target("parquet", "lossless:to_parquet", EVERYTHING),
    Target(
        "megatron",
        "megatron:to_megatron",
        no_rows=ITSELF.format("Megatron cuts its samples from whole documents", "sequence_length"),
    ),
    Target("megatron-bridge", "trainers:to_megatron_bridge"),
    Target(
        "axolotl",
        "trainers:to_axolotl",
        no_rows=ITSELF.format("Axolotl packs rows", "sample_packing: true and sequence_len"),
    ),
    Target("llamafactory", "llamafactory:to_llamafactory", ("pairs", "pictures")),
    Target("olmo-core", "olmo:to_olmo_core", no_rows=ITSELF.format("OLMo-core packs documents", "sequence_length")),
    Target(
        "skyrl",
        "trainers:to_skyrl",
        no_rows=ITSELF.format("SkyRL packs sequences", "use_sequence_packing: true and max_length"),
    ),
    Target("levanter", "trainers:to_levanter"),
    Target("torchtitan", "trainers:to_torchtitan"),
)
TARGETS: dict[str, Target] = {target.name: target for target in _TABLE}


WITHOUT_EXPORT = ("ms-swift", "verl", "nemo-automodel", "tinker")
"""Trainers that have no format of files, and an adapter in `chatmill.trainers`."""


def holders(kind: str) -> str:
    """Return the names of the targets that hold trees, pictures or pairs."""
    return ", ".join(target.name for target in _TABLE if kind in target.holds)


def find_target(to: str | Callable[[Export], None]) -> Target:
    """Return the target of a name, or one that a function of yours is."""
    if not isinstance(to, str):
        return Target(getattr(to, "__name__", "function"), to)
    if to in WITHOUT_EXPORT:
        raise ConfigError(
            f"{to} needs no export: it trains on the folder of a build, or on a recipe, by one import "
            "(docs/inside-trainers.md)"
        )
    if to not in TARGETS:
        raise UnknownNameError("export target", to, list(TARGETS))
    return TARGETS[to]
