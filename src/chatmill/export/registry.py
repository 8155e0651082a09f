"""The table of export targets, and where more of them come from: a Python file, or an installed package.

Importing this module imports nothing else of the export: a target's code is loaded when it is asked for.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatmill.core.packages import NAME, additions
from chatmill.errors import ChatmillError, ConfigError, UnknownNameError

if TYPE_CHECKING:
    from chatmill.export.targets import Export

GROUP = "chatmill.exports"
"""The entry-point group in which a package names its targets."""
VARIABLE = "target"
"""What a Python file calls its target."""
OPTIONS = {
    "max_length": "pack rows",
    "eod_id": "end documents with a token",
    "record_ids": "store record ids beside the tokens",
    "hub": "have a layout for the Hugging Face Hub",
}
"""Options that not every target takes, and what those that take one do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One thing that a dataset can be exported to. Adding one is writing a function and naming it in a `Target`."""

    name: str
    about: str
    """Who reads it, in one line."""
    write: Callable[[Export], None] | str
    """Writes the files into `export.folder`; a text is `module:function`, loaded when it is needed."""
    takes: frozenset[str] = frozenset({"max_length"})
    """Which of `OPTIONS` it takes."""
    no_rows: str = ""
    """Of a target that takes no `max_length`: why, and what to set in the trainer."""
    cached: bool = False
    """Whether the `datasets` library, which leaves caches in the folder, opens it."""
    origin: str = "chatmill"
    """Where the target comes from: this package, another one, or a file."""
    sha256: str | None = None
    """Of the file that it comes from."""

    def run(self, export: Export) -> None:
        """Write the export. What fails in foreign code is one error that names its file and line."""
        write = _loaded(self.write) if isinstance(self.write, str) else self.write
        if self.origin == "chatmill":
            write(export)
            return
        try:
            write(export)
        except (ChatmillError, OSError, MemoryError):
            raise
        except Exception as error:
            raise ConfigError(
                f"the export target {self.name!r} ({self.origin}) failed: {type(error).__name__}: {error}"
                f"{_place(error)}"
            ) from error

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


def _target(name: str, about: str, write: str, *takes: str, **more: Any) -> Target:
    return Target(name=name, about=about, write=f"chatmill.export.{write}", takes=frozenset(takes), **more)


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _target(
            "hf",
            "datasets.load_from_disk, TRL, Trainer; --hub: a folder for the Hugging Face Hub",
            "lossless:to_hf",
            "max_length",
            "hub",
            cached=True,
        ),
        _target("parquet", "pyarrow, DuckDB, datasets.load_dataset", "lossless:to_parquet", "max_length"),
        _target(
            "episodes",
            "Chatmill itself, and any reader of its three files",
            "lossless:to_episodes",
            no_rows="episodes are not packed into rows: leave out max_length, or export to hf or parquet",
        ),
        _target(
            "megatron",
            "Megatron Core: indexed datasets",
            "megatron:to_megatron",
            "eod_id",
            "record_ids",
            no_rows=(
                "Megatron cuts its samples from whole documents itself: leave out max_length and set sequence_length "
                "there"
            ),
        ),
        _target("megatron-bridge", "Megatron Bridge: packed Parquet", "trainers:to_megatron_bridge", "max_length"),
        _target(
            "axolotl",
            "Axolotl: tokenized datasets",
            "trainers:to_axolotl",
            cached=True,
            no_rows=(
                "Axolotl packs rows itself: leave out max_length and set sample_packing: true and sequence_len there"
            ),
        ),
        _target(
            "llamafactory",
            "LLaMA-Factory: tokenized_path, packed rows for neat_packing",
            "trainers:to_llamafactory",
            "max_length",
            cached=True,
        ),
        _target(
            "olmo-core",
            "OLMo-core: token and mask arrays",
            "olmo:to_olmo_core",
            "eod_id",
            no_rows="OLMo-core packs documents itself: leave out max_length and set sequence_length there",
        ),
        _target(
            "skyrl",
            "SkyRL: pretokenized Parquet",
            "trainers:to_skyrl",
            no_rows=(
                "SkyRL packs sequences itself: leave out max_length and set use_sequence_packing: true and max_length "
                "there"
            ),
        ),
        _target("levanter", "Levanter: prebuilt rows of one length", "trainers:to_levanter", "max_length"),
        _target("torchtitan", "torchtitan: arrays of rows, read at random", "trainers:to_torchtitan", "max_length"),
    )
}
"""The targets of this package."""


def find_target(to: str) -> Target:
    """The target of a name, of a Python file (`./my_target.py`), or of an installed package."""
    if to in TARGETS:
        return TARGETS[to]
    if to.endswith(".py"):
        return _from_file(Path(to))
    others = {target.name: target for target in packaged_targets()}
    if to in others:
        return others[to]
    raise UnknownNameError(
        "export target", to, [*TARGETS, *others], f"A Python file with a {VARIABLE!r} works too: --to ./my_target.py."
    )


def packaged_targets() -> list[Target]:
    """The targets of installed packages (entry points of the group `chatmill.exports`), by name.

    One that has the name of a target of Chatmill is refused: no package can change what a name here means.
    """
    return [
        replace(_checked(addition.load(), addition.origin), origin=addition.origin)
        for addition in additions(GROUP, "export target", TARGETS).values()
    ]


def _from_file(path: Path) -> Target:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; --to takes a name ({', '.join(TARGETS)}) or a Python file")
    text = path.read_bytes()
    digest = hashlib.sha256(text).hexdigest()
    name = f"chatmill_export_{digest[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles of the file look it up
    try:
        exec(compile(text, str(path), "exec", dont_inherit=True), vars(module))  # never a compiled file beside it
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{path}: cannot be imported: {type(error).__name__}: {error}{_place(error)}") from error
    if not hasattr(module, VARIABLE):
        raise ConfigError(
            f"{path}: defines no {VARIABLE!r}. Write: from chatmill.export.registry import Target, and "
            f"{VARIABLE} = Target(name='my_target', about='...', write=my_function)"
        )
    return replace(_checked(getattr(module, VARIABLE), str(path)), origin=str(path), sha256=digest)


def _checked(value: Any, where: str) -> Target:
    if not isinstance(value, Target):
        raise ConfigError(
            f"{where}: its export target is {type(value).__name__}, not a chatmill.export.registry.Target"
        )
    if not NAME.fullmatch(value.name):
        raise ConfigError(
            f"{where}: {value.name!r} is no name for an export target: use small letters, digits, - and _"
        )
    if value.name in TARGETS:
        raise ConfigError(f"{where}: its export target is named {value.name!r}, which is one of Chatmill: rename it")
    if unknown := sorted(value.takes - set(OPTIONS)):
        raise ConfigError(
            f"{where}: the export target {value.name!r} takes {', '.join(unknown)}; there is {', '.join(OPTIONS)}"
        )
    return value


def _loaded(name: str) -> Callable[[Export], None]:
    module, _, function = name.partition(":")
    loaded: Callable[[Export], None] = getattr(importlib.import_module(module), function)
    return loaded


def _place(error: BaseException) -> str:
    """Where in foreign code an error came up, for the end of a sentence."""
    trace = error.__traceback__
    place = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file != __file__ and not file.startswith("<frozen"):
            place = f" ({file}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return place
