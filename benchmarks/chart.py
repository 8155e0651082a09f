"""The chart of a run: how many times faster Chatmill is than each tool, on a logarithmic axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BAR, GRID, TEXT = "#2f6f73", "#d5dadd", "#3c4a50"


def bars_of(results: dict[str, Any]) -> list[tuple[str, float]]:
    """Name and times faster of every row that compares with another tool, in the order of the table."""
    return [
        (row["what"], row["value"])
        for result in results["benchmarks"].values()
        for row in result.get("rows", [])
        if row.get("in_chart")
    ]


def write_chart(results: dict[str, Any], path: Path) -> Path | None:
    """An SVG that is the same for the same results; None if there is nothing to show."""
    bars = bars_of(results)
    if not bars:
        return None
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    with mpl.rc_context({"svg.hashsalt": "chatmill", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(8, 0.8 + 0.36 * len(bars)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        names, values = [name for name, _ in bars], [value for _, value in bars]
        axes.set_xscale("log")
        axes.barh(names, [value - 1 for value in values], left=1, color=BAR, height=0.62)
        axes.invert_yaxis()
        axes.set_xlim(min(1, *values) * 0.9, max(values) * 2.2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.axvline(1, color=TEXT, linewidth=0.8)
        for place, value in enumerate(values):
            axes.annotate(
                f"{value:.3g}x",
                (max(value, 1), place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                color=TEXT,
            )
        axes.set_xlabel("times faster (logarithmic); the same work on both sides", color=TEXT)
        axes.tick_params(length=0, colors=TEXT)
        axes.grid(axis="x", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(False)
        where = f"{results['machine']}, {results['cores']} cores, {results['date']}"
        axes.set_title(f"Chatmill against other tools ({where})", loc="left", color=TEXT, fontsize=11)
        figure.savefig(path, format="svg", metadata={"Date": None})
    return path
