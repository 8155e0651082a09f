"""All benchmarks one after the other, each in a process of its own.

    python -m benchmarks.run [--quick] [--json]      (make bench)

With `--json` each prints one JSON object a line.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.harness import options

BENCHMARKS = ("render", "plan", "loader", "compile")
"""Modules of this package, in the order of the data's way."""


def main() -> int:
    """Run each with the same options; the exit status is 1 when one of them failed."""
    arguments = options(str(__doc__)).parse_args()
    passed_on = [f"--{name}" for name in ("quick", "json") if getattr(arguments, name)]
    failed = []
    for name in BENCHMARKS:
        if not arguments.json:
            print(f"\n== {name} ==", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *passed_on], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
