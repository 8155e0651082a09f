"""Report missing parts of agents' files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from chatmill.core.conversations import LACKS
from chatmill.read.agents.branches import AgentOptions
from chatmill.read.agents.registry import AGENT_FORMATS
from chatmill.read.files import read_records
from chatmill.read.places import Place


def lacking_lines(path: Place, shape: str, agent: AgentOptions | None = None) -> Iterator[str]:
    """Describe the missing parts of a file, with shares.

    There are no lines for files of other kinds.

    Args:
        path: The file.
        shape: Name of its record format.
        agent: What the recipe gives for it.
    """
    if shape not in AGENT_FORMATS:
        return
    counts: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for raw in read_records(path, agent, shape):
        for name, value in raw.value.items() if raw.error is None else ():
            if name.startswith(LACKS):
                counts[name.removeprefix(LACKS)] += value[0]
                totals[name.removeprefix(LACKS)] += value[1]
    if not counts:
        return
    ranked = sorted(counts, key=lambda name: (-counts[name], name))
    listed = [f"{name} {counts[name]:,} of {totals[name]:,} ({counts[name] / totals[name]:.0%})" for name in ranked]
    yield f"Not in {path}: {', '.join(listed)}."
