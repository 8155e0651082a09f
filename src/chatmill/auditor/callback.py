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

    Of several processes each audits its own batches, and the first one prints.

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
        self.report = audit(kwargs["train_dataloader"], model, batches=batches, **self._options)
        if state.is_world_process_zero:
            print_report(plain_console(), self.report)


def _default_batches() -> int:
    """Read the number from the environment; 0 if there is none."""
    value = os.environ.get(VARIABLE) or "0"
    if not value.isdecimal():
        raise ConfigError(f"{VARIABLE} is the number of batches to audit, such as 20, not {value!r}")
    return int(value)
