"""The isolation check: proves on a user's own model that packed documents do not see each other.

Two things are shown, with the model run as the caller runs it:

1. The tokens of one document are changed; the logits of all other documents of the row must not move.
2. Every document's logits in the packed row equal the logits of the document alone.

A wrong call leaks without a word (an all-ones attention mask or a KV cache in transformers is enough), so the
report says by how much logits moved, where, and what to change.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chatmill.core.blocks import boundaries_from_starts
from chatmill.errors import ConfigError, DataError
from chatmill.load.collate import flex_document_mask

ALONE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Allowed difference from the document alone, times the largest logit: other shapes sum in another order."""

USUAL_INPUTS = {"input_ids", "position_ids", "attention_mask"}
"""What a wrapper that takes any keyword (PEFT, a compiled or a parallel module) is given."""

Logits = Callable[[dict[str, Any]], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentIsolation:
    """What was measured for one document of a packed row; differences are the largest over all its logits."""

    row: int
    number: int
    """Counted from 0 in the row; the padding behind the last document is one more."""
    start: int
    length: int
    moved: float
    """How far its logits moved when another document of the row was changed; 0 when isolated."""
    moved_by: int | None
    """The document whose change moved it most; None where nothing moved."""
    alone: float
    """How far its logits are from those of the document alone in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationReport:
    """The result of `check_isolation`; `str(report)` is a table that reads without colour."""

    documents: tuple[DocumentIsolation, ...]
    moved_tolerance: float
    alone_tolerance: float
    advice: tuple[str, ...] = ()
    """What to change, most likely first; empty when the check passed."""

    @property
    def moved(self) -> float:
        """The largest movement by another document's change."""
        return max(document.moved for document in self.documents)

    @property
    def alone(self) -> float:
        """The largest difference from a document alone."""
        return max(document.alone for document in self.documents)

    @property
    def leaking(self) -> tuple[DocumentIsolation, ...]:
        """Documents over one of the tolerances."""
        # `not <=`, so that a NaN counts as leaking.
        return tuple(
            d for d in self.documents if not (d.moved <= self.moved_tolerance and d.alone <= self.alone_tolerance)
        )

    @property
    def passed(self) -> bool:
        """Whether all documents are isolated."""
        return not self.leaking

    def __str__(self) -> str:
        verdict = "isolated" if self.passed else "NOT ISOLATED"
        lines = [
            f"{verdict}: {len(self.documents)} documents, {len(self.leaking)} leak",
            f"  moved by another document  {self.moved:.3g}  (tolerance {self.moved_tolerance:.3g})",
            f"  unlike the document alone  {self.alone:.3g}  (tolerance {self.alone_tolerance:.3g})",
            "",
            "row  doc   start  length     moved   by     alone",
        ]
        shown = self.leaking or self.documents
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
    moved_tolerance: float | None = None,
    alone_tolerance: float | None = None,
    seed: int = 0,
    **call_options: Any,
) -> IsolationReport:
    """Show that the documents of packed rows do not influence each other in `model`.

    `model` is a transformers model (or any module whose `forward` takes `input_ids`): it is called in eval
    mode with the entries of the batch that its `forward` names, but `labels`, and with `call_options` such as
    `use_cache=False`. Or it is any callable from a batch to logits `(B, T, V)`. `batch` is what the collator
    gives; documents are known from `document_starts`, else `batch["seq_idx"]`, else `batch["position_ids"]`.

    At most `max_probes` documents of each row are changed, spread over the row; all are compared with
    themselves alone. Tolerances are absolute. By default nothing may move by more than one rounding step of
    the largest logit (or twice what the model differs from itself when run again), and a document alone may
    differ by what another order of summing explains in the logits' dtype.
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        raise DataError("the batch needs input_ids as a (B, T) tensor, as the collator gives it")
    rows = _rows(batch, ids, document_starts)
    if max(map(len, rows)) < 2:
        raise DataError("no row of the batch holds two documents, so there is nothing to keep apart: pack first")
    logits_of = _caller(model, call_options)
    with _still(model), torch.no_grad():
        base = logits_of(dict(batch))
        if base.shape[:-1] != ids.shape:
            raise DataError(f"logits have shape {tuple(base.shape)}, wanted (B, T, V) of {tuple(ids.shape)} ids")
        scale = max(1.0, float(base.abs().max()))
        noise = float((logits_of(dict(batch)) - base).abs().max())
        if moved_tolerance is None:
            moved_tolerance = max(torch.finfo(base.dtype).eps * scale, 2 * noise)
        if alone_tolerance is None:
            alone_tolerance = ALONE_TOLERANCE[base.dtype] * scale
        if noise > alone_tolerance:
            raise DataError(
                f"run twice on the same batch, the model's logits differ by {noise:.3g}: nothing can be "
                "shown; switch dropout off, and give a callable that keeps no state"
            )
        _measure_movement(logits_of, batch, base, rows, max_probes=max_probes, seed=seed)
        _measure_alone(logits_of, batch, base, rows)
    report = IsolationReport(
        documents=tuple(document.result() for row in rows for document in row),
        moved_tolerance=moved_tolerance,
        alone_tolerance=alone_tolerance,
    )
    return report if report.passed else replace(report, advice=_advice(report, model, batch, call_options))


@dataclass(slots=True, kw_only=True)
class _Document:
    """One document while it is being measured."""

    row: int
    number: int
    start: int
    end: int
    moved: float = 0.0
    moved_by: int | None = None
    alone: float = 0.0

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The document's part of values over (rows, tokens, ...)."""
        return values[self.row, self.start : self.end]

    def result(self) -> DocumentIsolation:
        return DocumentIsolation(
            row=self.row,
            number=self.number,
            start=self.start,
            length=self.end - self.start,
            moved=self.moved,
            moved_by=self.moved_by,
            alone=self.alone,
        )


def _rows(batch: Mapping[str, Any], ids: torch.Tensor, document_starts: Sequence[Any] | None) -> list[list[_Document]]:
    """The documents of every row; padding behind the last counts as a document where the batch shows it."""
    count, width = ids.shape
    if document_starts is not None:
        checked = boundaries_from_starts(document_starts, np.full(count, width, dtype=np.int64))
        begins = np.zeros((count, width), dtype=np.bool_)
        begins[checked.rows, checked.starts] = True
    elif "seq_idx" in batch:
        begins = np.diff(batch["seq_idx"].cpu().numpy(), axis=1, prepend=-1) != 0
    elif "position_ids" in batch:
        begins = np.diff(batch["position_ids"].cpu().numpy(), axis=1, prepend=-2) != 1
    else:
        raise ConfigError(
            "where do documents begin? The batch has neither position_ids nor seq_idx: pass document_starts"
        )
    rows = []
    for row in range(count):
        starts = np.flatnonzero(begins[row]).tolist()
        ends = [*starts[1:], width]
        rows.append(
            [_Document(row=row, number=n, start=a, end=b) for n, (a, b) in enumerate(zip(starts, ends, strict=True))]
        )
    return rows


def _caller(model: Any, call_options: dict[str, Any]) -> Logits:
    """A function from a batch to logits, whatever the model is."""
    if isinstance(model, torch.nn.Module):
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        if "input_ids" in parameters or takes_any:
            names = (set(parameters) | (USUAL_INPUTS if takes_any else set())) - {"labels"}
            device = next((p.device for p in model.parameters()), torch.device("cpu"))

            def call_module(batch: dict[str, Any]) -> torch.Tensor:
                inputs = {n: v.to(device) if hasattr(v, "to") else v for n, v in batch.items() if n in names}
                return _logits(model(**inputs, **call_options))

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
def _still(model: Any) -> Iterator[None]:
    """Dropout off while the check runs."""
    was_training = isinstance(model, torch.nn.Module) and model.training
    if was_training:
        model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()


def _measure_movement(
    logits_of: Logits,
    batch: Mapping[str, Any],
    base: torch.Tensor,
    rows: list[list[_Document]],
    *,
    max_probes: int,
    seed: int,
) -> None:
    """Change one document of every row at a time and note how far the others move."""
    random = np.random.RandomState(seed)
    fresh_ids = _fresh_ids(batch["input_ids"], rows, vocabulary=base.shape[-1])
    probes = [[row[i] for i in _spread(len(row), max_probes)] for row in rows]
    for turn in range(max(map(len, probes))):
        changed = [row_probes[turn] for row_probes in probes if turn < len(row_probes)]
        ids = batch["input_ids"].clone()
        for document in changed:
            ids[document.row, document.start : document.end] = _other_tokens(document.of(ids), fresh_ids, random)
        logits = logits_of({**batch, "input_ids": ids})
        for probe in changed:
            for document in rows[probe.row]:
                moved = float((document.of(logits) - document.of(base)).abs().max())
                if document is probe:
                    _check_probe(document, moved)
                elif not moved <= document.moved:  # a NaN is kept
                    document.moved, document.moved_by = moved, probe.number


def _fresh_ids(ids: torch.Tensor, rows: list[list[_Document]], *, vocabulary: int) -> NDArray[np.int64]:
    """Ids to write into a document: none that begins or ends a document; those of the batch if they suffice.

    Ids of the batch are valid for any model; the width of the logits is the second guess.
    """
    edges = torch.stack([document.of(ids)[[0, -1]] for row in rows for document in row]).cpu().numpy()
    fresh = np.setdiff1d(ids.cpu().numpy(), edges)
    return fresh if len(fresh) > 1 else np.setdiff1d(np.arange(vocabulary), edges)


def _check_probe(document: _Document, moved: float) -> None:
    if moved == 0:
        raise DataError(
            f"row {document.row}: new tokens in document {document.number} did not move its own logits: the "
            "check sees nothing. Does the model read batch['input_ids']?"
        )


def _other_tokens(tokens: torch.Tensor, fresh_ids: NDArray[np.int64], random: np.random.RandomState) -> torch.Tensor:
    """Other ids everywhere, but for the first and last token of a document of three and more.

    Those stay, and `fresh_ids` holds none of them, so that a model which finds documents by BOS or EOS finds
    the same ones.
    """
    old = tokens.cpu().numpy()
    pick = random.randint(len(fresh_ids), size=len(old))
    new = fresh_ids[pick]
    new = np.where(new == old, fresh_ids[(pick + 1) % len(fresh_ids)], new)
    if len(old) > 2:
        new[[0, -1]] = old[[0, -1]]
    return torch.from_numpy(new).to(tokens)


def _spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices, the first and the last among them."""
    return sorted({int(i) for i in np.linspace(0, count - 1, min(count, most)).round()})


def _measure_alone(
    logits_of: Logits, batch: Mapping[str, Any], base: torch.Tensor, rows: list[list[_Document]]
) -> None:
    for document in (document for row in rows for document in row):
        logits = logits_of(_alone(batch, document))
        document.alone = float((logits[0] - document.of(base)).abs().max())


def _alone(batch: Mapping[str, Any], document: _Document) -> dict[str, Any]:
    """A batch of one row that holds one document, with the same entries where they can be made."""
    ids = document.of(batch["input_ids"])[None]
    length = ids.shape[1]
    made: dict[str, Any] = {"input_ids": ids}
    for name, value in batch.items():
        if name == "position_ids":
            made[name] = torch.arange(length, device=ids.device)[None]
        elif name == "seq_idx":
            made[name] = torch.zeros_like(document.of(value))[None]
        elif name == "cu_seqlens":
            made[name] = torch.full_like(value, length).index_fill_(0, torch.tensor([0], device=value.device), 0)
        elif name == "max_seqlen":
            made[name] = torch.full_like(value, length)
        elif name in ("attention_mask", "document_mask"):
            made[name] = _mask_alone(value, document)
    return made


def _mask_alone(mask: Any, document: _Document) -> Any:
    if not isinstance(mask, torch.Tensor):  # a FlexAttention BlockMask
        return flex_document_mask(torch.zeros(1, document.end - document.start, device=mask.kv_indices.device))
    if mask.ndim == 4:
        own = slice(document.start, document.end)
        return mask[document.row : document.row + 1, :, own, own]
    return document.of(mask)[None]


def _advice(
    report: IsolationReport, model: Any, batch: Mapping[str, Any], call_options: Mapping[str, Any]
) -> tuple[str, ...]:
    """What usually is the reason, in the order in which to look."""
    advice = []
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        advice.append("leave attention_mask out: with one, transformers does not read documents from position_ids")
    if isinstance(mask, torch.Tensor) and mask.ndim == 4 and not mask.is_floating_point():
        advice.append("give the 4D mask as additive float (return_document_mask=True): eager attention misreads bool")
    if "position_ids" not in batch:
        advice.append("give position_ids that begin at 0 in every document (DataCollatorForCausalLM makes them)")
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False) and call_options.get("use_cache") is not False:
        advice.append("pass use_cache=False (or set model.config.use_cache): a cache switches isolation off")
    if report.moved <= report.moved_tolerance:
        advice.append("documents do not see each other, but positions do not restart: give position_ids from 0")
    advice.append(
        "else this model or kernel does not read the boundaries it was given: try document_mask, "
        "cu_seqlens or seq_idx, or put one document into a row"
    )
    return tuple(advice)
