"""The isolation check: proves on a user's own model that packed documents do not see each other.

Two things are shown, with the model run as the caller runs it:

1. The tokens of one document are changed; the logits of all other documents of the row must not move.
2. Every document's logits in the packed row equal the logits of the document alone.

The first is exact: a weight of 0 is 0 in any arithmetic, so whatever moves is a leak. The second holds up to rounding:
another width sums in another order. What it finds, such as positions that do not restart, is far above that.

A wrong call leaks without a word (an all-ones attention mask or a KV cache in transformers is enough), so the
report says by how much logits moved, where, and what to change.
"""

from __future__ import annotations

import inspect
import math
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chatmill.errors import ConfigError, DataError
from chatmill.train.isolation_batches import Document, alone, changed_document, find_documents, fresh_ids

ALONE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Allowed difference from the document alone, times the largest logit. Models in float64 take softmaxes in float32."""

Logits = Callable[[dict[str, Any]], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationReport:
    """The result of `check_isolation`; `str(report)` is a table that reads without colour."""

    documents: tuple[Document, ...]
    moved_tolerance: float
    alone_tolerance: float
    advice: tuple[str, ...] = ()
    """What to change, most likely first; empty when the check passed."""
    trained: Mapping[str, float] = field(default_factory=dict)
    """Of trees: how far loss and gradients are from those of their rows one by one, relative to the largest."""
    trained_tolerance: float = 0.0

    @property
    def moved(self) -> float:
        """The largest movement by another document's change."""
        return max(document.moved for document in self.documents)

    @property
    def alone(self) -> float:
        """The largest difference from a document alone."""
        return max(document.alone for document in self.documents)

    @property
    def leaking(self) -> tuple[Document, ...]:
        """Documents that move when another one is changed."""
        return tuple(d for d in self.documents if not d.moved <= self.moved_tolerance)  # `not <=`: a NaN counts

    @property
    def unlike_alone(self) -> tuple[Document, ...]:
        """Documents that no other one moves, but that are further from themselves alone than rounding explains."""
        leaking = self.leaking
        return tuple(d for d in self.documents if not d.alone <= self.alone_tolerance and d not in leaking)

    @property
    def passed(self) -> bool:
        """Whether all documents are isolated."""
        trains_alike = all(apart <= self.trained_tolerance for apart in self.trained.values())
        return not self.leaking and not self.unlike_alone and trains_alike

    def __str__(self) -> str:
        verdict = "isolated" if self.passed else "NOT ISOLATED"
        unlike = f", {len(self.unlike_alone)} unlike alone" if self.unlike_alone else ""
        lines = [
            f"{verdict}: {len(self.documents)} documents, {len(self.leaking)} leak{unlike}",
            f"  moved by another document  {self.moved:.3g}  (tolerance {self.moved_tolerance:.3g})",
            f"  unlike the document alone  {self.alone:.3g}  (tolerance {self.alone_tolerance:.3g})",
        ]
        for name, apart in self.trained.items():
            lines.append(f"  {name + ', relative':<25}  {apart:.3g}  (tolerance {self.trained_tolerance:.3g})")
        lines += ["", "row  doc   start  length     moved   by     alone"]
        wrong = {*self.leaking, *self.unlike_alone}
        shown = [d for d in self.documents if d in wrong] or self.documents
        for d in shown[:20]:
            by = "" if d.moved_by is None else str(d.moved_by)
            place = f"{d.row:>3}  {d.number:>3}  {d.start:>6}  {d.length:>6}"
            lines.append(f"{place}  {d.moved:>8.3g}  {by:>3}  {d.alone:>8.3g}")
        if len(shown) > 20:
            lines.append(f"... and {len(shown) - 20} more")
        if self.advice:
            lines += ["", "What to change:"]
            for advice in self.advice:
                lines += textwrap.wrap(advice, 78, initial_indent="  - ", subsequent_indent="    ")
        return "\n".join(lines)


def check_isolation(
    model: Any,
    batch: Mapping[str, Any],
    *,
    document_starts: Sequence[Any] | None = None,
    max_probes: int = 8,
    seed: int = 0,
    **call_options: Any,
) -> IsolationReport:
    """Show that the documents of packed rows do not influence each other in `model`.

    `model` is a transformers model (or any module whose `forward` takes `input_ids`): it is called in eval
    mode with the entries of the batch that its `forward` takes, but `labels`, and with `call_options`, which go before
    them. Or it is any callable from a batch to logits `(B, T, V)`. `batch` is what the collator
    gives; documents are known from `document_starts`, else `batch["seq_idx"]`, else `batch["position_ids"]`.

    At most `max_probes` documents of each row are changed, spread over the row; all are compared with
    themselves alone. Nothing may move by more than one rounding step of the largest logit (or twice what the model
    differs from itself when run again), and a document alone may differ by what another order of summing explains in
    the arithmetic of the model.
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        raise DataError("the batch needs input_ids as a (B, T) tensor, as the collator gives it")
    rows = find_documents(batch, ids, document_starts)
    if max(map(len, rows)) < 2:
        raise DataError("no row of the batch holds two documents, so there is nothing to keep apart: pack first")
    packed = _PackedBatch(_caller(model, call_options), batch, rows)
    with still(model), torch.no_grad():
        report = measure(packed, max_probes=max_probes, seed=seed)
    return report if report.passed else replace(report, advice=_advice(report, model, batch, call_options))


class PackedDocuments(ABC):
    """Packed rows as the check sees them: of texts, of trees, of texts with pictures."""

    rows: list[list[Document]]
    """The documents of each row."""

    @abstractmethod
    def logits(self, changed: Mapping[int, Document], random: np.random.RandomState) -> Sequence[torch.Tensor]:
        """Compute the logits (T, V) of each row, after changing one document of some rows."""

    @abstractmethod
    def apart(self, document: Document, base: torch.Tensor) -> torch.Tensor:
        """Measure how far the logits of a document in its row are from those of the document alone."""

    def probes(self, row: int, most: int) -> list[Document]:
        """Choose documents of a row to change, at most so many, spread over it."""
        return [self.rows[row][place] for place in spread(len(self.rows[row]), most)]

    def seen_behind(self, probe: Document) -> int:
        """Count the tokens behind a document that may see it."""
        return 0


def measure(packed: PackedDocuments, *, max_probes: int, seed: int) -> IsolationReport:
    """Change one document of every row at a time, and compare all of them with themselves alone.

    Args:
        packed: The rows, and how the model is called with them.
        max_probes: Documents that are changed, at most, as `PackedDocuments.probes` counts them.
        seed: Of the ids that are written into a document.
    """
    random = np.random.RandomState(seed)
    base = packed.logits({}, random)
    dtype = base[0].dtype
    scale = max(1.0, *(float(logits.abs().max()) for logits in base))
    again = packed.logits({}, random)
    noise = max(float((logits - first).abs().max()) for logits, first in zip(again, base, strict=True))
    if noise > ALONE_TOLERANCE[dtype] * scale:
        raise DataError(
            f"run twice on the same batch, the model's logits differ by {noise:.3g}: nothing can be "
            "shown; switch dropout off, and give a callable that keeps no state"
        )

    probes = [packed.probes(row, max_probes) for row in range(len(packed.rows))]
    for turn in range(max(map(len, probes))):
        changed = {row: row_probes[turn] for row, row_probes in enumerate(probes) if turn < len(row_probes)}
        logits = packed.logits(changed, random)
        for row, probe in changed.items():
            moved = (logits[row] - base[row]).abs().amax(-1)
            moved[probe.end : probe.end + packed.seen_behind(probe)] = 0
            _note_movement(packed.rows[row], probe, moved)

    documents = [document for row in packed.rows for document in row]
    for document in documents:
        document.alone = float(packed.apart(document, base[document.row]).max())
    return IsolationReport(
        documents=tuple(documents),
        moved_tolerance=max(torch.finfo(dtype).eps * scale, 2 * noise),
        alone_tolerance=max(_alone_tolerance(base[0]) * scale, 2 * noise),
    )


def _alone_tolerance(logits: torch.Tensor) -> float:
    """Choose how far documents may be from themselves alone; autocast and TF32 compute float32 more coarsely."""
    is_coarse = torch.is_autocast_enabled(logits.device.type) or torch.get_float32_matmul_precision() != "highest"
    return ALONE_TOLERANCE[torch.bfloat16 if is_coarse and logits.dtype is torch.float32 else logits.dtype]


class _PackedBatch(PackedDocuments):
    """A batch of packed texts."""

    def __init__(self, logits_of: Logits, batch: Mapping[str, Any], rows: list[list[Document]]) -> None:
        self.rows = rows
        self._logits_of = logits_of
        self._batch = batch
        self._fresh: NDArray[np.int64] | None = None
        """Ids that are written into documents."""

    def logits(self, changed: Mapping[int, Document], random: np.random.RandomState) -> Sequence[torch.Tensor]:
        """Compute the logits of each row, after changing one document of some rows."""
        ids = self._batch["input_ids"].clone()
        for document in changed.values():
            assert self._fresh is not None
            new = changed_document(document.of(ids), self._fresh, random)
            ids[document.row, document.start : document.end] = new
        logits = self._logits_of({**self._batch, "input_ids": ids})
        if logits.shape[:-1] != ids.shape:
            raise DataError(f"logits have shape {tuple(logits.shape)}, wanted (B, T, V) of {tuple(ids.shape)} ids")
        if self._fresh is None:
            self._fresh = fresh_ids(ids, self.rows, vocabulary=logits.shape[-1])
        return list(logits)

    def apart(self, document: Document, base: torch.Tensor) -> torch.Tensor:
        """Measure how far the logits of a document in its row are from those of the document alone."""
        return (self._logits_of(alone(self._batch, document))[0] - base[document.start : document.end]).abs()


def _caller(model: Any, call_options: dict[str, Any]) -> Logits:
    """Make a function from a batch to logits, whatever the model is."""
    if isinstance(model, torch.nn.Module):
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        if "input_ids" in parameters or takes_any:
            device = next((p.device for p in model.parameters()), torch.device("cpu"))

            def call_module(batch: dict[str, Any]) -> torch.Tensor:
                read = {n: v for n, v in batch.items() if n != "labels" and (takes_any or n in parameters)}
                inputs = {n: v.to(device) if hasattr(v, "to") else v for n, v in read.items()}
                return _logits(model(**{**inputs, **call_options}))

            return call_module
    if call_options:
        raise ConfigError(f"{', '.join(call_options)}: a plain callable is called with the batch alone")
    return lambda batch: _logits(model(batch))


def _logits(output: Any) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor):
        raise DataError(f"the model gave {type(output).__name__}; wanted a logits tensor, or an object with .logits")
    return logits.detach()


@contextmanager
def still(model: Any) -> Iterator[None]:
    """Dropout off while the check runs."""
    was_training = isinstance(model, torch.nn.Module) and model.training
    if was_training:
        model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()


def _note_movement(row: Sequence[Document], probe: Document, moved: torch.Tensor) -> None:
    """Note how far the logits of a row moved when one of its documents was changed; that one must move itself."""
    for document in row:
        far = float(moved[document.start : document.end].max())
        if document is not probe:
            if not far <= document.moved and not math.isnan(document.moved):  # the first NaN is kept
                document.moved, document.moved_by = far, probe.number
        elif far == 0:
            raise DataError(
                f"row {document.row}: new tokens in document {document.number} did not move its own logits: the "
                "check sees nothing. Does the model read batch['input_ids']?"
            )


def spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices, the first and the last among them."""
    return sorted({int(i) for i in np.linspace(0, count - 1, min(count, most)).round()})


def _advice(
    report: IsolationReport, model: Any, batch: Mapping[str, Any], call_options: Mapping[str, Any]
) -> tuple[str, ...]:
    """List the usual causes, the likeliest first."""
    advice = []
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        advice.append("leave attention_mask out: with one, transformers does not read documents from position_ids")
    if isinstance(mask, torch.Tensor) and mask.ndim == 4 and not mask.is_floating_point():
        advice.append("give the 4D mask as additive float (return_document_mask=True): eager attention misreads bool")
    if "position_ids" not in batch:
        advice.append("give position_ids that begin at 0 in every document (DataCollatorForCausalLM makes them)")
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False) and {**batch, **call_options}.get("use_cache") is not False:
        advice.append("pass use_cache=False (or set model.config.use_cache): a cache switches isolation off")
    if report.moved <= report.moved_tolerance:
        advice.append(
            "documents do not see each other, but positions do not restart (give position_ids from 0), or the model "
            "computes more coarsely than its logits say (check it in float32)"
        )
    advice.append(
        "else this model or kernel does not read the boundaries it was given: chatmill isolate tries the keys that "
        "models read (DataCollatorForCausalLM with model= gives them), or put one document into a row"
    )
    return tuple(advice)
