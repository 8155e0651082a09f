"""Puts the figures of a results file into the docs: no figure there is typed by hand.

    python -m benchmarks.publish [RESULTS.json] [--check]

Writes the tables between the marks in `docs/benchmarks.md`, and the chart `docs/images/benchmarks.svg`; without a file
it takes the newest one of `benchmarks/results`. `--check` writes nothing and fails when the page says something else.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chart import write_chart
from benchmarks.run import BENCHMARKS, RESULTS, rows_of

ROOT = Path(__file__).parents[1]
PAGE, CHART = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "images" / "benchmarks.svg"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
FULL_RUN = re.compile(r"\d{4}-\d\d-\d\d-\w+-\d+cores\.json")
NONE_YET = "No full run has been published yet: `make bench`, then `python -m benchmarks.publish`."


def newest() -> Path:
    """The latest results file of a full run."""
    found = sorted(path for path in RESULTS.glob("*.json") if FULL_RUN.fullmatch(path.name))
    if not found:
        raise SystemExit(f"no results of a full run in {RESULTS}: run `make bench` first")
    return found[-1]


def tables(results: dict[str, Any], name: str) -> str:
    """The Markdown between the marks."""
    versions = ", ".join(f"{package} {version}" for package, version in results["versions"].items())
    where = f"{results['machine']}, {results['cores']} cores, Python {results['python']}, {results['date']}"
    lines = [
        f"From `benchmarks/results/{name}` ({where}; the whole run took {results['seconds'] / 60:.0f} minutes).",
        "",
        "![How many times faster Chatmill is than each tool](images/benchmarks.svg)",
        "",
        "| what | chatmill | peer | result | target | |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for benchmark in ordered(results):
        for row in rows_of(results["benchmarks"][benchmark]):
            lines.append(
                f"| {row.what} | {row.ours} | {row.peer} | **{row.shown}** | {row.target} | {row.verdict.lower()} |"
            )
    if results["failed"]:
        lines += ["", f"Failed in this run: {', '.join(results['failed'])}."]
    lines += ["", "The details of each row:", ""]
    for benchmark in ordered(results):
        result = results["benchmarks"][benchmark]
        lines += [f"- {row.what}: {row.detail}." for row in rows_of(result) if row.detail]
        lines += [f"- {note}." for note in result.get("notes", [])]
    took = ", ".join(f"{name} {results['benchmarks'][name].get('seconds', 0):.0f}" for name in ordered(results))
    lines += ["", f"Seconds each benchmark took: {took}.", "", f"Versions: {versions}."]
    return "\n".join(lines)


def ordered(results: dict[str, Any]) -> list[str]:
    """The benchmarks of a run, in the order of the table."""
    return [name for name in BENCHMARKS if name in results["benchmarks"]]


def filled(page: str, text: str) -> str:
    """The page with a text between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def published(page: str) -> str | None:
    """The name of the results file that a page was made from."""
    found = re.search(r"`benchmarks/results/([^`]+\.json)` \(", page.split(BEGIN)[1].split(END)[0])
    return found[1] if found else None


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and the chart, or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, help="a results file [the newest full run]")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 when the page differs")
    arguments = parser.parse_args(argv)
    path = arguments.results or newest()
    results = json.loads(path.read_text())
    if results["quick"]:
        raise SystemExit(f"{path} is of a --quick run: its figures are not for the docs")
    page = PAGE.read_text()
    made = filled(page, tables(results, path.name))
    if arguments.check:
        print("the page is as the results file says" if made == page else f"{PAGE.name} differs from {path.name}")
        return int(made != page)
    PAGE.write_text(made)
    CHART.parent.mkdir(parents=True, exist_ok=True)
    write_chart(results, CHART)
    print(f"wrote {PAGE.relative_to(ROOT)} and {CHART.relative_to(ROOT)} from {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
