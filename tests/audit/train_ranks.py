"""One of two processes that train together with `AuditCallback`; writes what it read, found and printed."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers as hf

import chatmill
from tests.audit.test_live import Padding, tokenizer_of, trainer_of


def main(rank: int, folder: Path, out: Path) -> None:
    """Train on every set of rows in their order: process 0 has the batches 0, 2, ..., process 1 the others."""
    hf.Trainer._get_train_sampler = lambda trainer, *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    found = []
    for rows in json.loads((out / "rows.json").read_text()):
        seen: list[Any] = []
        padding = Padding()

        def collate(features: Any, seen: list[Any] = seen, padding: Padding = padding) -> Any:
            seen.append(padding(features))
            return seen[-1]

        callback, printed = chatmill.AuditCallback(batches=2), io.StringIO()
        trainer = trainer_of(folder, rows, out / "run", callback, steps=2, data_collator=collate)
        with contextlib.redirect_stdout(printed):
            trainer.train()
        trained = chatmill.audit(seen[2:4], tokenizer_of(folder))  # the first two were read by the callback
        assert callback.report is not None
        reports = [one.as_json() | {"name": ""} for one in (callback.report, trained)]
        found.append({"reports": reports, "printed": printed.getvalue()})
    (out / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
