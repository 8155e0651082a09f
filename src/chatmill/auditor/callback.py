"""A callback for transformers' Trainer and its subclasses: audits the first batches before the first step."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from chatmill.auditor.live import kept_random_states
from chatmill.auditor.report import AuditReport, print_report
from chatmill.auditor.run import audit
from chatmill.console import plain_console
from chatmill.errors import ConfigError

VARIABLE = "CHATMILL_AUDIT"


class AuditCallback(TrainerCallback):  # type: ignore[misc]
    """Prints the audit of the first batches before the first step, and keeps it as `report`. Training goes on.

    Every process audits its own batches and has a report of its own. The first one prints: its own report, and those of
    other processes with a kind of fault that no process before them has.

    `batches` is how many; by default the number in CHATMILL_AUDIT, and nothing is read without it. `model` is needed if
    the trainer has no `processing_class`; `options` are those of `audit`.
    """

    def __init__(self, model: Any = None, *, batches: int | None = None, **options: Any) -> None:
        self.report: AuditReport | None = None
        self._model, self._batches, self._options = model, batches, options

    @kept_random_states()
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Audit the trainer's own loader."""
        batches = _default_batches() if self._batches is None else self._batches
        if not batches:
            return
        model = self._model or kwargs.get("processing_class") or kwargs["model"]
        try:
            self.report = audit(kwargs["train_dataloader"], model, batches=batches, **self._options)
        finally:  # other processes wait for it, also if it failed
            reports = _of_all_processes(self.report)
        if not state.is_world_process_zero:
            return
        console, seen = plain_console(), set[str]()
        for process, report in enumerate(reports):
            codes = set() if report is None else {finding.code for finding in report.findings}
            if report is not None and (process == 0 or codes - seen):
                if len(reports) > 1:
                    console.print(f"Process {process} of {len(reports)}:")
                print_report(console, report)
            seen |= codes


def _of_all_processes(report: AuditReport | None) -> list[AuditReport | None]:
    """Gather the reports of all processes that train together; None for an audit that failed."""
    import torch.distributed as processes

    if not processes.is_available() or not processes.is_initialized():
        return [report]
    reports: list[AuditReport | None] = [None] * processes.get_world_size()
    processes.all_gather_object(reports, report)
    return reports


def _default_batches() -> int:
    """Read the number from the environment; 0 if there is none."""
    value = os.environ.get(VARIABLE) or "0"
    if not value.isdecimal():
        raise ConfigError(f"{VARIABLE} is the number of batches to audit, such as 20, not {value!r}")
    return int(value)
