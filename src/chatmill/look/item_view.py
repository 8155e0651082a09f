"""One item made ready to be shown: its documents and runs with their text, a header line, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import RoleCode, kind_name, role_of
from chatmill.look.decoder import Decoder
from chatmill.look.items import Item
from chatmill.store.kd import SPAN_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Neighbouring tokens of one document, message, kind, span and weight."""

    start: int
    """Its first token in the item."""
    ids: NDArray[np.integer]
    message: int
    """Counted over the item, or as the record counts it where that is known."""
    kind: int | None
    """None where kinds are not stored."""
    span: int | None
    """None where spans are not stored."""
    weight: float | None
    """None where weights are not stored: every token counts."""

    @property
    def trained(self) -> bool:
        """Whether these tokens are targets."""
        return self.weight is None or self.weight > 0

    @property
    def label(self) -> str:
        """Who speaks, as far as it is stored: a role, a span, or nothing."""
        if self.span is not None:
            return SPAN_NAMES[self.span] if self.span else ""
        if self.kind is None or role_of(self.kind) is RoleCode.NONE:
            return ""
        return role_of(self.kind).name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentView:
    """One document of an item."""

    start: int
    ids: NDArray[np.integer]
    trained: int | None
    """Tokens that are targets; None where nothing is stored about that."""
    number: int | None
    """Its number in the order of the build; None where that is not stored."""
    record_id: str | None
    """Its record, in packed rows that know it."""
    text: str | None
    """The decoded ids; None without a tokenizer."""
    runs: tuple[RunView, ...]

    def messages(self, most_runs: int | None = None) -> list[tuple[str, list[RunView]]]:
        """Who speaks, and the runs of what is said, of the first `most_runs`."""
        grouped = groupby(self.runs[:most_runs], key=lambda run: (run.message, run.label))
        return [(label, list(runs)) for (_, label), runs in grouped]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemView:
    """One item, ready to be shown."""

    item: Item
    name: str
    """What an item is called: episode, row, block, document or conversation."""
    documents: tuple[DocumentView, ...]
    decoder: Decoder | None

    @property
    def runs(self) -> list[RunView]:
        """The runs of all documents."""
        return [run for document in self.documents for run in document.runs]

    def parts(self, run: RunView) -> list[tuple[bool, str]]:
        """(is a control token, text) parts of a run; its ids where there is no tokenizer."""
        if self.decoder is None:
            return [(False, " ".join(map(str, run.ids.tolist())) + " ")]
        return self.decoder.parts(run.ids)

    def title(self, run: RunView) -> str:
        """What a run is, in a few words: its kind or span, tokens and weight."""
        named = [kind_name(run.kind) if run.kind is not None else run.label, f"{len(run.ids):,} tokens"]
        return ", ".join([*filter(None, named), *([] if run.weight is None else [f"weight {run.weight:g}"])])

    @property
    def problem(self) -> str | None:
        """What is wrong with the stored boundaries."""
        return self.item.problem

    @property
    def header(self) -> str:
        """Such as `---- 0 Tokens: 512, Documents: 3, Trained: 200, Features: input_ids, document_starts ----`."""
        item = self.item
        parts = [f"Tokens: {len(item)}"]
        if item.has_starts:
            parts.append(f"Documents: {len(self.documents)}")
        if item.weights is not None:
            parts.append(f"Trained: {item.trained}")
        if item.padding:
            parts.append(f"Padding: {item.padding}")
        parts.append(f"Features: {', '.join(item.features)}")
        return f"---- {item.number} {', '.join(parts)} ----"

    @property
    def facts(self) -> str:
        """What is known of its record, in one line; empty where nothing is."""
        item = self.item
        facts = [item.record_id, f"source {item.source}" if item.source is not None else None]
        if item.turns is not None:
            facts.append(f"{item.turns} turn{'' if item.turns == 1 else 's'}")
        if item.spans is not None:
            counts = np.bincount(item.spans, minlength=len(SPAN_NAMES))
            facts.append(", ".join(f"{counts[code]:,} {SPAN_NAMES[code]}" for code in (1, 2)))
        return " \u00b7 ".join(fact for fact in facts if fact)

    def as_json(self) -> dict[str, Any]:
        """The same as plain values; ids where there is no text."""
        item = self.item
        out: dict[str, Any] = {self.name: item.number}
        if item.split:
            out["split"] = item.split
        out |= {"tokens": len(item), "features": list(item.features)}
        out |= {
            name: value
            for name, value in (("record_id", item.record_id), ("source", item.source), ("turns", item.turns))
            if value is not None
        }
        if item.weights is not None:
            out["trained"] = item.trained
        if item.capacity is not None:
            out["padding"] = item.padding
        out["documents"] = [self._document_json(document) for document in self.documents]
        out["problem"] = self.problem
        return out

    def _document_json(self, document: DocumentView) -> dict[str, Any]:
        entry: dict[str, Any] = {"start": document.start, "tokens": len(document.ids)}
        if document.number is not None:
            entry["document"] = document.number
        if document.record_id is not None:
            entry["record_id"] = document.record_id
        if document.trained is not None:
            entry["trained"] = document.trained
        entry |= {"ids": document.ids.tolist()} if document.text is None else {"text": document.text}
        if self.decoder is not None and self.item.kinds is None:
            # without kinds nothing else distinguishes a control token from text that spells it
            entry["control"] = np.flatnonzero(self.decoder.is_control(document.ids)).tolist()
        if any(column is not None for column in (self.item.kinds, self.item.weights, self.item.spans)):
            entry["runs"] = [self.run_json(run) for run in document.runs]
        return entry

    def run_json(self, run: RunView) -> dict[str, Any]:
        """A run as plain values."""
        entry: dict[str, Any] = {"start": run.start, "message": run.message}
        if run.kind is not None:
            entry["kind"] = kind_name(run.kind)
        if run.span is not None:
            entry["span"] = run.span
        if run.weight is not None:
            entry["weight"] = run.weight
        entry["ids"] = run.ids.tolist()
        if self.decoder is not None:
            entry["text"] = self.decoder.text(run.ids)
        return entry


def view_item(item: Item, decoder: Decoder | None, name: str) -> ItemView:
    """Cut an item into its documents and runs, and decode them; `name` is what an item is called."""
    runs = list(_runs(item))
    documents, at = [], 0
    trained = item.is_trained
    for index, (first, last) in enumerate(item.borders):
        mine = at
        while at < len(runs) and runs[at].start < last:
            at += 1
        ids = item.ids[first:last]
        documents.append(
            DocumentView(
                start=first,
                ids=ids,
                trained=None if item.weights is None else int(np.count_nonzero(trained[first:last])),
                number=None if item.documents is None else int(item.documents[index]),
                record_id=None if item.document_ids is None else item.document_ids[index],
                text=None if decoder is None else decoder.text(ids),
                runs=tuple(runs[mine:at]),
            )
        )
    return ItemView(item=item, name=name, documents=tuple(documents), decoder=decoder)


def _runs(item: Item) -> Iterator[RunView]:
    starts = item.run_starts()
    known = item.messages
    messages = np.searchsorted(item.message_starts, starts, side="right") - 1 if known is None else known[starts]
    for (first, last), message in zip(pairwise([*starts.tolist(), len(item)]), messages.tolist(), strict=True):
        yield RunView(
            start=first,
            ids=item.ids[first:last],
            message=message,
            kind=None if item.kinds is None else int(item.kinds[first]),
            span=None if item.spans is None else int(item.spans[first]),
            weight=None if item.weights is None else float(item.weights[first]),
        )
