"""How long a user waits before anything happens: imports and `--help`, each in a fresh process.

    python -m benchmarks.startup [--quick] [--json]

Wall seconds of the whole command, the start of Python included; medians, taking turns. The peers do another job, so
there is no ratio: their start is shown for what it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import Report, alternate, missing, run_one

PEERS = {"import trl": "trl", "import datasets": "datasets", "import transformers": "transformers"}


def run(*command: str) -> None:
    """One command, its output thrown away."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


def measure(*, quick: bool) -> Report:
    """Time them."""
    report = Report()
    python, chatmill = sys.executable, str(Path(sys.executable).with_name("chatmill"))
    commands = {
        "import chatmill": (python, "-c", "import chatmill"),
        "chatmill --help": (chatmill, "--help"),
        "python": (python, "-c", "pass"),
    }
    for code, module in PEERS.items():
        if not missing(module) and not quick:
            commands[code] = (python, "-c", code)
    for command in commands.values():
        run(*command)  # from here on the files are in the page cache
    timings = alternate(
        {name: (lambda command=command: run(*command), 1.0) for name, command in commands.items()},
        rounds=5 if quick else 7,
    )
    for name, target in (("import chatmill", "< 0.2"), ("chatmill --help", "< 0.5")):
        timing = timings[name]
        report.measured(
            name, timing.median, "s", target=target, detail=f"{len(timing.seconds)} rounds, spread {timing.spread:.0%}"
        )
    others = [
        f"{name} {timings[name].median:.2f} s"
        for name in commands
        if name not in ("import chatmill", "chatmill --help")
    ]
    report.notes.append("for comparison: " + ", ".join(others))
    report.figures["timings"] = {name: timing.as_json() for name, timing in timings.items()}
    return report


if __name__ == "__main__":
    sys.exit(run_one("startup", str(__doc__), measure))
