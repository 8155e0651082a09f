"""Where a run writes what it sees: lines, a JSONL file, TensorBoard where it is installed, and a progress bar."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chatmill.core.whole_file import whole_file

LOG, SETTINGS = "log.jsonl", "run.json"
log = logging.getLogger("chatmill.train")


class RunLog:
    """Takes one mapping per logging step; only the first rank has one that writes."""

    def __init__(self, out: Path | None, *, steps: int, done: int, active: bool, bar: bool) -> None:
        """`done` of `steps` are done already; without `out` there are no files."""
        self._active = active
        self._file = None
        self._board: Any = None
        self._bar = _bar(steps, done) if active and bar and sys.stderr.isatty() else None
        if active and out is not None:
            out.mkdir(parents=True, exist_ok=True)
            _forget_after(out / LOG, done)
            self._file = (out / LOG).open("a", encoding="utf-8")
            self._board = _tensorboard(out / "tensorboard")

    def event(self, event: str, **values: Any) -> None:
        """Something that happened once (a start, a save), for the JSONL file."""
        if self._file is not None:
            self._file.write(json.dumps({"event": event, **values}) + "\n")
            self._file.flush()

    def values(self, values: Mapping[str, Any]) -> None:
        """The numbers of one step, `step` among them."""
        if not self._active:
            return
        if self._file is not None:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in _flat(values):
                self._board.add_scalar(name, value, values["step"])
        line = as_line(values)
        if self._bar is not None:
            self._bar.console.print(line)
        else:
            log.info(line)

    def advance(self, step: int, text: str) -> None:
        """Move the bar; nothing without one."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, text=text)

    def close(self) -> None:
        """Flush and close everything."""
        if self._bar is not None:
            self._bar.stop()
        for part in (self._board, self._file):
            if part is not None:
                part.close()


def write_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """The effective configuration of the newest start, whole or not at all; `log.jsonl` has that of every start."""
    with whole_file(out / SETTINGS) as partial:
        partial.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def as_line(values: Mapping[str, Any]) -> str:
    """The numbers of a step as one line for people."""
    if "val_loss" in values:
        return f"step {values['step']}  val loss {values['val_loss']:.4f} over {values['val_tokens']:,.0f} tokens"
    parts = [
        f"step {values['step']}",
        f"loss {values['loss']:.4f}",
        f"lr {values['lr']:.2e}",
        f"grad {values['grad_norm']:.2f}",
        f"{values['trained_tokens']:,} trained",
        f"{values['tokens_per_s']:,.0f} tokens/s",
    ]
    parts += [f"{name} {span['loss']:.4f} ({span['tokens']:,.0f})" for name, span in values.get("spans", {}).items()]
    return "  ".join(parts)


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            found.append((prefix + name, float(value)))
    return found


def _forget_after(path: Path, done: int) -> None:
    """Drop lines of steps that a killed run made after its last checkpoint: they will be made again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            step = json.loads(line).get("step", 0)
        except ValueError:  # the line that was being written when the run was killed
            continue
        if step <= done:
            kept.append(line)
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def _tensorboard(folder: Path) -> Any:
    """A writer of TensorBoard; None where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))


def _bar(steps: int, done: int) -> Any:
    """A progress bar on standard error, started; it has one task."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from chatmill.console import plain_column, plain_console

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), plain_column("{task.fields[text]}"))
    bar = Progress("train", *columns, console=plain_console(stderr=True))
    bar.add_task("train", total=steps, completed=done, text="")
    bar.start()
    return bar
