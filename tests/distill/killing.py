"""Distillation builds that end by SIGKILL, in forked processes of one interpreter that has loaded everything before.

Run as `python -m tests.distill.killing` with a JSON object on the standard input; prints one JSON line for each kill.
"""

from __future__ import annotations

import gc
import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chatmill.distill.audit import AUDIT_RATE
from tests.compiler.builds import digest
from tests.compiler.killing import in_child, report_of, watch_files
from tests.distill.inputs import in_chunks_of, leftovers


def builder(order: dict[str, Any], out: Path, *, resume: bool = False, audit: float = 0) -> Callable[[], None]:
    """Without the audit, which changes no byte and takes a third of the time."""

    def work() -> None:
        options = {"valid_fraction": 0.3, "workers": 0, "on_error": "quarantine", "resume": resume, "audit": audit}
        in_chunks_of(7, order["input"], out, **options)

    return work


def after_kill(order: dict[str, Any], out: Path, status: int, expected: dict[str, str]) -> dict[str, Any]:
    return report_of(status, out, builder(order, out, resume=True), digest, leftovers, expected)


def main() -> None:
    order = json.load(sys.stdin)
    home = Path(order["home"])
    out, note = home / "out", home / "note"
    builder(order, home / "whole", audit=AUDIT_RATE)()  # here, so that children find made what a first build makes
    gc.collect()
    gc.freeze()  # a collection in a child would copy all that it shares
    expected = digest(home / "whole")

    def counted(at: int, listed: Path | None) -> Callable[[], None]:
        def work() -> None:
            watch_files(out, at, listed)
            builder(order, out)()

        return work

    assert in_child(counted(0, note)) == 0, "the build that counts its operations failed"
    shutil.rmtree(out)
    operations = len(note.read_text().splitlines())
    moments = range(1, operations + 1)
    for at in moments if order["kills"] is None else random.Random(6).sample(moments, order["kills"]):
        status = in_child(counted(at, None))
        print(json.dumps({"at": at, "operations": operations, **after_kill(order, out, status, expected)}), flush=True)


if __name__ == "__main__":
    main()
