"""`chatmill.compile`: records in whatever people hold them, and a model, become a dataset in one call."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chatmill.compiler.gates import GateError
from chatmill.compiler.paths import not_read_sentences, resolve_paths
from chatmill.compiler.progress import shown_progress
from chatmill.compiler.recipe import Recipe, recipe_of
from chatmill.compiler.run import SMALL, driver_pipeline, run_build
from chatmill.core.scratch import Scratch
from chatmill.dataset.models import named_model
from chatmill.dataset.objects import RECORDS, RecordFile, paths_of, write_objects
from chatmill.dataset.stored import Dataset
from chatmill.errors import ChatmillError, ConfigError, short_errors
from chatmill.look.decoder import Decoder
from chatmill.read.places import size_of
from chatmill.render.jinja.sandbox import MissingDateError

SMALL_BYTES = 8 << 20
"""Input up to this size is compiled in this process: others would take longer to begin."""
SHOWN_BYTES = 32 << 20
"""Input from this size on has a progress bar in a terminal."""


NO_OPTIONS: dict[str, Any] = {
    "packing": {"max_length": None, "overflow": "error"},
    "split": {"val_fraction": 0.0},
    "on_error": "fail",
}
"""What the keywords of `compile` say where they are not given."""


@short_errors
def compile(
    source: Any,
    model: Any = None,
    *,
    max_length: int | None = None,
    overflow: str = "error",
    template: str | None = None,
    policy: str | None = None,
    shape: str | None = None,
    name: str | None = None,
    val_fraction: float = 0.0,
    on_error: str = "fail",
    workers: int | None = None,
    **recipe: Any,
) -> Dataset:
    """Compile conversations for a model: the same tokens, targets and files as `chatmill build`, as an object.

    - `source`: file names or globs; a list or iterator of dicts (or of lists of messages); a `datasets.Dataset`; a
      pandas or polars frame, or anything else that gives Arrow; the path of a recipe (.yaml), or a `Recipe`.
    - `model`: a model folder, a tokenizer of transformers, or a vocabulary's name.
    - `max_length`: tokens of the longest episode. What happens to longer conversations is `overflow`: error, windows,
      drop_oldest_turns, drop or cut; what that costs is counted and shown.
    - `template` (default: the model's own), `policy`, `shape` (default: that of the first records), `val_fraction`
      and `on_error` (fail, or quarantine: leave bad records out and count them) are keys of a recipe, as are all
      further keywords: `gates`, `pack`, `date`, `template_options`, `add_control_tokens`, ...
    - `name`: the source name of records that do not name their own.
    - `workers`: processes; default: one for each core, and none for small input.
    """
    _refuse_twice(
        recipe,
        packing=(max_length, overflow) != (None, "error") and "max_length and overflow",
        split=val_fraction != 0 and "val_fraction",
        tokenizer=model is not None and "model",
        sources="source",
    )
    options = {
        "packing": {"max_length": max_length, "overflow": overflow},
        "split": {"val_fraction": val_fraction},
        "on_error": on_error,
        "policy": policy,
        **recipe,
    }
    scratch = Scratch()
    records: RecordFile | None = None
    if _is_recipe(source):
        _refuse_options(options | {"model": model, "template": template, "shape": shape, "name": name})
        checked = recipe_of(source)
    else:
        entry: dict[str, Any] = {"path": paths_of(source), "shape": shape}
        if entry["path"] is not None:
            resolve_paths(entry["path"])  # a name that is not there is reported before a tokenizer is loaded
            for sentence in not_read_sentences(entry["path"]):
                warnings.warn(sentence, UserWarning, stacklevel=2)
        tokenizer = named_model(model)
        if entry["path"] is None:
            records = write_objects(source, scratch.folder / "input", name or RECORDS)
            entry["path"] = [records.name]
        elif name is not None:
            entry["name"] = name
        checked = recipe_of({"sources": [entry], "tokenizer": tokenizer, "template": template or "", **options})
    size = _size(checked, records)
    with explained(records):
        return build_here(checked, scratch, records, workers, size)


def build_here(recipe: Recipe, scratch: Scratch, records: RecordFile | None, workers: int | None, size: int) -> Dataset:
    """Build into the temporary folder."""
    if workers is None and SMALL < size <= SMALL_BYTES:  # a build takes one process by itself for less
        workers = 0
    folder = scratch.folder / "dataset"
    with shown_progress(quiet=size < SHOWN_BYTES) as on_progress:
        run_build(recipe, folder, workers=workers, on_progress=on_progress, base=records.base if records else None)
    tokenizer = driver_pipeline(recipe).template.tokenizer  # which is kept from the build
    decoder = Decoder(tokenizer) if tokenizer.prefix is None else None  # else it reads its vocabulary in another way
    return Dataset(folder, scratch=scratch, records=records, decoder=decoder)


@contextmanager
def explained(records: RecordFile | None) -> Iterator[None]:
    """Errors in the words of Python: records by their index, and keywords in the place of options."""
    try:
        yield
    except ChatmillError as error:
        if records is not None:
            records.explain(error)
        if isinstance(error, GateError):
            error.add_note(f"In Python: compile(..., gates={dict.fromkeys(error.names)}) turns the gate off.")
        elif isinstance(error, MissingDateError):
            error.add_note('In Python: compile(..., date="2026-01-31").')
        elif "overflow policy" in str(error):
            error.add_note(
                'In Python: compile(..., overflow="windows"), or another one of them, or a larger max_length.'
            )
        elif getattr(error, "code", "unknown_shape") != "unknown_shape":
            error.add_note('compile(..., on_error="quarantine") leaves such records out, and counts them.')
        raise


def _refuse_twice(recipe: dict[str, Any], **keywords: str | bool) -> None:
    """Raise a `ConfigError` for a recipe key whose value a keyword of `compile` gives, too: one would be lost."""
    for key, keyword in keywords.items():
        if keyword and key in recipe:
            raise ConfigError(f"{key} and {keyword} say the same thing, and one of them would be lost: leave {key} out")


def _refuse_options(options: dict[str, Any]) -> None:
    """Refuse options next to a recipe: it has them all, and these would be lost."""
    for name, value in options.items():
        if value not in (None, NO_OPTIONS.get(name)):
            raise ConfigError(
                f"a recipe holds all options ({name} is one): give workers alone next to it, and write the "
                "others into the recipe"
            )


def _is_recipe(source: Any) -> bool:
    return isinstance(source, Recipe) or (
        isinstance(source, str | os.PathLike) and os.fspath(source).endswith((".yaml", ".yml"))
    )


def _size(recipe: Recipe, records: RecordFile | None) -> int:
    """Bytes of the input files, as they lie on the disk."""
    base = records.base if records else Path()
    patterns = [str(base / name) if records else name for source in recipe.sources for name in source.patterns]
    return sum(map(size_of, resolve_paths(patterns)))
