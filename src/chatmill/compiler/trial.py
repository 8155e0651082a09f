"""A sample of a long build, tried before it starts: what share will be refused, and what turns will cost."""

from __future__ import annotations

import os
from collections import Counter

from chatmill.compiler.paths import resolve_paths
from chatmill.compiler.recipe import Recipe
from chatmill.compiler.run import driver_pipeline
from chatmill.compiler.template_comparison import sampled
from chatmill.read.places import is_elsewhere

LONG_INPUT = 8 << 20
"""Bytes of input from which on a build takes long enough to try some of it before."""


def trial_lines(recipe: Recipe) -> list[str]:
    """What the first records say about all of them; nothing where there are few, or nothing is to be said."""
    paths = [path for source in recipe.sources for path in resolve_paths(source.patterns)]
    here = [str(path) for path in paths if not is_elsewhere(str(path))]
    if sum(os.path.getsize(path) for path in here) < LONG_INPUT:
        return []
    chats = sampled(recipe)
    histories = {source.history for source in recipe.sources}
    compiled = driver_pipeline(recipe).compile(chats, history=histories.pop() if len(histories) == 1 else None)
    lines = []
    if compiled.failed:
        codes = Counter(error.code for _, error in compiled.failed)
        reasons = ", ".join(f"{code} {count}" for code, count in codes.most_common())
        share = len(compiled.failed) / len(chats)
        first = compiled.failed[0][1]
        lines.append(
            f"The template refuses {len(compiled.failed)} of the first {len(chats)} records ({share:.0%}): {reasons}. "
            f"The first: {first}"
        )
    if cost := compiled.ledger.cost_of_turns():
        lines.append(f"In the first {len(chats)} records: {cost}")
    return lines
