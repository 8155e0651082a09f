"""Checks the pack plans of a dataset: readable, of this recipe, and what the planner makes of the stored lengths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chatmill import __version__
from chatmill.compiler.recipe import Recipe
from chatmill.core.tokens import first_difference
from chatmill.errors import FormatError
from chatmill.pack.plan import plan
from chatmill.prove.report import Finding, VerifyReport
from chatmill.store.episodes import EpisodeDataset
from chatmill.store.pack_plan import ORDER, PACK, ROWS, PackPlan, read_pack_plan
from chatmill.store.receipts import MANIFEST


def check_plans(
    folder: Path, manifest: Mapping[str, Any], recipe: Recipe, splits: Mapping[str, EpisodeDataset], book: VerifyReport
) -> int | None:
    """Places of padding in the rows of all splits; None where a plan cannot be read, which is a finding."""
    padding: int | None = 0
    for name, split in splits.items():
        try:
            stored = read_pack_plan(folder / name, split.lengths)
        except FormatError as error:
            book.wrong(f"{name}/{PACK}", f"the pack plan cannot be read: {error}")
            padding = None
            continue
        if recipe.pack is None:
            if stored is not None:
                book.wrong(f"{name}/{PACK}", "a pack plan, and the recipe has no 'pack'")
        elif stored is None:
            book.wrong(f"{name}/{PACK}", "missing, and the recipe has 'pack'")
            padding = None
        else:
            _check_plan(name, stored, manifest, recipe, split, book)
            padding = None if padding is None else padding + stored.padding
    return padding


def _check_plan(
    name: str, stored: PackPlan, manifest: Mapping[str, Any], recipe: Recipe, split: EpisodeDataset, book: VerifyReport
) -> None:
    assert recipe.pack is not None
    assert recipe.pack.length is not None
    book.counts["rows"] += len(stored)
    book.counts["padding"] += stored.padding
    for key, found in (("rows", len(stored)), ("padding", stored.padding)):
        if manifest["splits"][name].get(key) != found:
            book.wrong(MANIFEST, f"says {manifest['splits'][name].get(key)} {key} in {name}; the plan has {found:,}")
    for key, said, found_value in (
        ("length", recipe.pack.length, stored.length),
        ("strategy", str(recipe.pack.strategy), stored.strategy),
    ):
        if said != found_value:
            book.wrong(f"{name}/{PACK}", f"the {key} of its rows is {found_value}; the recipe says {said}")
            return
    if manifest["package_version"] != __version__:
        book.unchecked.append(f"the rows of {name} were not planned again: another version of Chatmill made the plan")
        return
    made = plan(split.lengths, recipe.pack.length, recipe.pack.strategy)
    for file, values, planned in (
        (ORDER, stored.order, made.order),
        (ROWS, stored.row_offsets, made.bin_offsets),
    ):
        at = first_difference(values, planned)
        if at is not None:
            there = f"{values[at]:,}" if at < len(values) else "nothing"
            must = f"{planned[at]:,}" if at < len(planned) else "nothing"
            sentence = f"number {at:,} is {there}; the planner gives {must}"
            book.found(Finding(file=f"{name}/{PACK}/{file}", offset=at * 8, split=name, message=sentence))
    book.compared.append(f"{len(stored):,} packed rows of {name} with those that the planner makes of the lengths")
