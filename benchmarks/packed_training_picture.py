"""Draws a result of benchmarks.packed_training: loss curves on top of each other, and against time.

python -m benchmarks.packed_training_picture RESULT.json PICTURE.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

COLOURS = {"packed": "#1b7f5c", "padded to the longest": "#c47f17", "padded": "#8a3b8f"}
WIDTHS = {"packed": 1.4, "padded to the longest": 3.5, "padded": 6.0}


def draw(result: dict[str, Any], target: Path) -> None:
    """One picture with two panels: the same curve by step, another by second."""
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "chatmill"  # the same bytes every time
    from matplotlib import pyplot

    figure, (by_step, by_second) = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for run in sorted(result["training"], key=lambda run: -WIDTHS[run["contestant"]]):
        name, losses = run["contestant"], run["losses"]
        style: dict[str, Any] = {"color": COLOURS[name], "linewidth": WIDTHS[name], "solid_capstyle": "butt"}
        label = f"{name}: {run['trained_tokens_per_s']:,.0f} trained tokens/s"
        by_step.plot(range(1, len(losses) + 1), losses, label=label, **style)
        by_second.plot(np.cumsum(run["seconds"]), losses, **style)
    by_step.set(xlabel="optimizer step (the same documents)", ylabel="loss")
    by_second.set(xlabel="seconds")
    by_step.legend(frameon=False, fontsize=8)
    for axes in (by_step, by_second):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.suptitle(f"{result['parameters'] / 1e6:.0f} M GPT on one {result['gpu']}, real episode lengths", fontsize=10)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
