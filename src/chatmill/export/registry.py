"""The table of export targets. Importing it imports nothing else: a target's code is loaded when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatmill.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from chatmill.export.targets import Export

OPTIONS = {
    "max_length": "pack rows",
    "eod_id": "end documents with a token",
    "record_ids": "store record ids next to the tokens",
    "teacher": "hold what a teacher says of the targets",
}
"""Options that not every target takes, and what those that take one do."""


@dataclass(frozen=True, slots=True)
class Target:
    """One thing that a dataset can be exported to. Adding one is writing a function and naming it in the table."""

    name: str
    write: Callable[[Export], None] | str
    """Writes the files into `export.folder`; a text is `module:function`, loaded when it is needed."""
    takes: tuple[str, ...] = ("max_length",)
    """Which of `OPTIONS` it takes."""
    holds: tuple[str, ...] = ()
    """`trees` as `position_ids` and `ends`, `pictures` in a column `images`, `pairs` of answers and labels."""
    no_rows: str = ""
    """Of a target that takes no `max_length`: why, and what to set in the trainer."""
    cached: bool = False
    """Whether the `datasets` library, which leaves caches in the folder, opens it."""

    def run(self, export: Export) -> None:
        """Write the export."""
        write = self.write
        if isinstance(write, str):
            module, _, function = write.partition(":")
            write = getattr(importlib.import_module(f"chatmill.export.{module}"), function)
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


ROWS, TEACHER, EVERYTHING = ("max_length",), ("max_length", "teacher"), ("trees", "pictures", "pairs")
ALONE = "Trainers of preferences read one document a row: leave out max_length, and build with --max-length"
ITSELF = "leave out max_length and set"
_TABLE = (
    Target("hf", "lossless:to_hf", TEACHER, EVERYTHING, cached=True),
    Target("trl", "lossless:to_trl", ROWS, cached=True),
    Target("trl-dpo", "pairs:to_trl_dpo", (), ("pairs",), ALONE, cached=True),
    Target("trl-kto", "pairs:to_trl_kto", (), ("pairs",), ALONE, cached=True),
    Target("trl-reward", "pairs:to_trl_reward", (), ("pairs",), ALONE, cached=True),
    Target("parquet", "lossless:to_parquet", TEACHER, EVERYTHING),
    Target(
        "megatron",
        "megatron:to_megatron",
        ("eod_id", "record_ids"),
        no_rows=f"Megatron cuts its samples from whole documents itself: {ITSELF} sequence_length there",
    ),
    Target("megatron-bridge", "trainers:to_megatron_bridge", ROWS),
    Target(
        "axolotl",
        "trainers:to_axolotl",
        ("teacher",),
        no_rows=f"Axolotl packs rows itself: {ITSELF} sample_packing: true and sequence_len there",
        cached=True,
    ),
    Target("llamafactory", "llamafactory:to_llamafactory", ROWS, ("pairs", "pictures"), cached=True),
    Target(
        "olmo-core",
        "olmo:to_olmo_core",
        ("eod_id",),
        no_rows=f"OLMo-core packs documents itself: {ITSELF} sequence_length there",
    ),
    Target(
        "skyrl",
        "trainers:to_skyrl",
        (),
        no_rows=f"SkyRL packs sequences itself: {ITSELF} use_sequence_packing: true and max_length there",
    ),
    Target("levanter", "trainers:to_levanter", ROWS),
    Target("torchtitan", "trainers:to_torchtitan", ROWS),
)
TARGETS: dict[str, Target] = {target.name: target for target in _TABLE}


def holders(kind: str) -> str:
    """The names of the targets that hold trees, pictures or pairs."""
    return ", ".join(target.name for target in _TABLE if kind in target.holds)


def find_target(to: str | Callable[[Export], None]) -> Target:
    """The target of a name, or one that a function of yours is."""
    if not isinstance(to, str):
        return Target(getattr(to, "__name__", "function"), to)
    if to not in TARGETS:
        raise UnknownNameError("export target", to, list(TARGETS))
    return TARGETS[to]
