"""The table of export targets. Importing it imports nothing else: a target's code is loaded when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chatmill.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from chatmill.export.targets import Export

OPTIONS = {
    "max_length": "pack rows",
    "eod_id": "end documents with a token",
    "record_ids": "store record ids beside the tokens",
    "teacher": "hold what a teacher says of the targets",
}
"""Options that not every target takes, and what those that take one do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One thing that a dataset can be exported to. Adding one is writing a function and naming it in the table."""

    name: str
    write: Callable[[Export], None] | str
    """Writes the files into `export.folder`; a text is `module:function`, loaded when it is needed."""
    takes: frozenset[str] = frozenset({"max_length"})
    """Which of `OPTIONS` it takes."""
    no_rows: str = ""
    """Of a target that takes no `max_length`: why, and what to set in the trainer."""
    trees: bool = False
    """Whether it holds trees, as `position_ids` and `ends`."""
    pictures: bool = False
    """Whether it holds pictures, in a column `images`."""
    pairs: bool = False
    """Whether it holds the two answers of pairs, and labels."""
    cached: bool = False
    """Whether the `datasets` library, which leaves caches in the folder, opens it."""

    def run(self, export: Export) -> None:
        """Write the export."""
        write = self.write
        if isinstance(write, str):
            module, _, function = write.partition(":")
            write = getattr(importlib.import_module(module), function)
        write(export)

    def check(self, **given: object) -> None:
        """Refuse an option that was given (not None, not False) and that the target does not take."""
        for option, value in given.items():
            if value is None or value is False or option in self.takes:
                continue
            if option == "max_length" and self.no_rows:
                raise ConfigError(self.no_rows)
            takers = [target.name for target in TARGETS.values() if option in target.takes]
            raise ConfigError(
                f"{option} is for exports to {', '.join(takers)}, which {OPTIONS[option]}; "
                f"{self.name} does not: leave it out"
            )


def _target(name: str, write: str, *takes: str, **more: Any) -> Target:
    return Target(name=name, write=f"chatmill.export.{write}", takes=frozenset(takes), **more)


ALONE = "Trainers of preferences read one document a row: leave out max_length, and build with --max-length"
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _target(
            "hf",
            "lossless:to_hf",
            "max_length",
            "teacher",
            cached=True,
            trees=True,
            pictures=True,
            pairs=True,
        ),
        _target("trl", "lossless:to_trl", "max_length", cached=True),
        _target("trl-dpo", "pairs:to_trl_dpo", cached=True, pairs=True, no_rows=ALONE),
        _target("trl-kto", "pairs:to_trl_kto", cached=True, pairs=True, no_rows=ALONE),
        _target("trl-reward", "pairs:to_trl_reward", cached=True, pairs=True, no_rows=ALONE),
        _target(
            "parquet",
            "lossless:to_parquet",
            "max_length",
            "teacher",
            trees=True,
            pictures=True,
            pairs=True,
        ),
        _target(
            "megatron",
            "megatron:to_megatron",
            "eod_id",
            "record_ids",
            no_rows=(
                "Megatron cuts its samples from whole documents itself: leave out max_length and set sequence_length "
                "there"
            ),
        ),
        _target("megatron-bridge", "trainers:to_megatron_bridge", "max_length"),
        _target(
            "axolotl",
            "trainers:to_axolotl",
            "teacher",
            cached=True,
            no_rows=(
                "Axolotl packs rows itself: leave out max_length and set sample_packing: true and sequence_len there"
            ),
        ),
        _target(
            "llamafactory",
            "llamafactory:to_llamafactory",
            "max_length",
            cached=True,
            pairs=True,
            pictures=True,
        ),
        _target(
            "olmo-core",
            "olmo:to_olmo_core",
            "eod_id",
            no_rows="OLMo-core packs documents itself: leave out max_length and set sequence_length there",
        ),
        _target(
            "skyrl",
            "trainers:to_skyrl",
            no_rows=(
                "SkyRL packs sequences itself: leave out max_length and set use_sequence_packing: true and max_length "
                "there"
            ),
        ),
        _target("levanter", "trainers:to_levanter", "max_length"),
        _target("torchtitan", "trainers:to_torchtitan", "max_length"),
    )
}
"""The targets of this package."""


def find_target(to: str | Callable[[Export], None]) -> Target:
    """The target of a name, or one that a function of yours is."""
    if not isinstance(to, str):
        return Target(name=getattr(to, "__name__", "function"), write=to)
    if to not in TARGETS:
        raise UnknownNameError("export target", to, list(TARGETS))
    return TARGETS[to]
