"""Puts a measured curve over numbers of workers into the docs: the table and the chart.

    python -m benchmarks.publish_curve CURVE.json [CURVE.json ...] --name 2026-11-19-curve-16cores

The files are those that `python -m benchmarks.workers --curve ... --out CURVE.json` writes, of one machine. Their
points are kept together in `benchmarks/results`, the table is written between the marks in `docs/benchmarks.md`, and
the chart is `docs/images/workers.svg`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chart import GRID, TEXT
from benchmarks.run import RESULTS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
CHART = ROOT / "docs" / "images" / "workers.svg"
BEGIN = "<!-- curve: begin -->"
END = "<!-- curve: end -->"
COLOURS = {"many": "#2f6f73", "one": "#b8642b"}
NAMES = {"many": "many files", "one": "one file"}

Points = list[dict[str, Any]]


def read_points(paths: Sequence[Path]) -> tuple[dict[str, Any], Points]:
    """Read the machine, and the points of all files."""
    about: dict[str, Any] = {}
    points: Points = []
    for path in paths:
        content = json.loads(path.read_text())
        for result in content if isinstance(content, list) else [content]:
            about = about or {key: result[key] for key in ("machine", "cores", "python", "size")}
            points += result["points"]
    return about, points


def group_points(points: Points) -> dict[tuple[str, int], Points]:
    """Group the rounds of each input and number of workers, in order."""
    groups: dict[tuple[str, int], Points] = {}
    for point in sorted(points, key=lambda point: (point["input"], point["workers"], point["round"])):
        groups.setdefault((point["input"], point["workers"]), []).append(point)
    return groups


def _each(rounds: Points, name: str, digits: int) -> str:
    return ", ".join(f"{point[name]:.{digits}f}" for point in rounds)


def curve_table(points: Points) -> list[str]:
    """Write the rows of the table: all rounds of a measurement in one row."""
    lines = [
        "| input | workers | GB | independent, M tokens/s | build, M tokens/s | ratio | seconds | driver's CPU |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (name, workers), rounds in group_points(points).items():
        first = rounds[0]
        files = f"{first['files']} file{'s' if first['files'] > 1 else ''}"
        share = ", ".join(f"{point['driver_cpu_share']:.1%}" for point in rounds)
        cells = [
            files if name == "many" else NAMES[name],
            str(workers),
            f"{first['bytes'] / 1e9:.1f}",
            _each(rounds, "independent_m_tokens_per_s", 1),
            _each(rounds, "build_m_tokens_per_s", 1),
            _each(rounds, "ratio", 2),
            _each(rounds, "build_seconds", 1),
            share,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def write_curve_chart(points: Points, about: dict[str, Any], path: Path) -> None:
    """Draw M tokens/s over workers, as an SVG that is the same for the same points."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "chatmill", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(8, 4.2), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        groups = group_points(points)
        for name in dict.fromkeys(name for name, _ in groups):
            workers = [count for own, count in groups if own == name]
            for key, style, words in (
                ("build_m_tokens_per_s", "-", "build"),
                ("independent_m_tokens_per_s", ":", "independent processes"),
            ):
                rates = [statistics.mean(point[key] for point in groups[name, count]) for count in workers]
                axes.plot(workers, rates, style, marker="o", color=COLOURS[name], label=f"{words}, {NAMES[name]}")
        axes.set_xlabel("workers", color=TEXT)
        axes.set_ylabel("M tokens/s", color=TEXT)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.set_xticks(sorted({count for _, count in groups}))
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, labelcolor=TEXT)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.set_title(f"Builds on {about['cores']} cores ({about['machine']})", loc="left", color=TEXT, fontsize=11)
        figure.savefig(path, format="svg", metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", nargs="+", type=Path)
    parser.add_argument("--name", required=True, help="of the file in benchmarks/results")
    options = parser.parse_args(argv)
    about, points = read_points(options.curves)
    kept = RESULTS / f"{options.name}.json"
    kept.write_text(json.dumps({**about, "points": points}, indent=1) + "\n")
    write_curve_chart(points, about, CHART)
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    said = (
        f"From `benchmarks/results/{kept.name}` ({about['machine']}, {about['cores']} cores, Python {about['python']})."
    )
    text = "\n".join([said, "", "![M tokens/s over workers](images/workers.svg)", "", *curve_table(points)])
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
