"""One item made ready to be shown: documents, messages, runs and tokens. Terminal, pages and notebooks draw this."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import PICTURE, Part, RoleCode, kind_name, parts_of, role_of, roles_of
from chatmill.core.tokens import segment_sums
from chatmill.core.words import counted
from chatmill.images.column import StoredPicture
from chatmill.label.policy import Policy
from chatmill.look.decoder import Decoder, TextPiece, pieces_of, text_of
from chatmill.look.items import Item
from chatmill.look.tree_branches import BranchView, MessageSpan, TreeSpan, describe_branches
from chatmill.store.kd_shard import SPAN_NAMES

OPENING = 40
"""Tokens of the text that stands for an item in lists."""


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
    stored: float | None
    """The stored weight, where `weight` is that of a policy that is tried."""

    @property
    def change(self) -> str:
        """What a policy that is tried does to these tokens: `gained`, `lost`, or nothing."""
        was = self.stored is None or self.stored > 0
        return "" if was == self.trained else "gained" if self.trained else "lost"

    @property
    def names(self) -> list[str]:
        """Role and part, or span: what the tokens are, for a style."""
        if self.span is not None:
            return [f"span-{SPAN_NAMES[self.span]}"]
        return ["none"] if self.kind is None else kind_name(self.kind).split(".")

    def cut(self, first: int, last: int) -> RunView:
        """Return the part between two tokens of the item."""
        return replace(
            self, start=max(self.start, first), ids=self.ids[max(0, first - self.start) : max(0, last - self.start)]
        )

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
class ShownMessage:
    """What one speaker says in a row: runs of one message."""

    label: str
    start: int
    tokens: int
    trained: int
    runs: tuple[RunView, ...]

    def cut(self, first: int, last: int) -> ShownMessage:
        """Keep only the runs between two tokens of the item; counts stay those of the whole message."""
        inside = (run.cut(first, last) for run in self.runs if run.start < last and run.start + len(run.ids) > first)
        return replace(self, runs=tuple(inside))


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
    runs: tuple[RunView, ...]

    @property
    def messages(self) -> list[ShownMessage]:
        """The runs grouped by message."""
        shown = []
        for (_, label), group in groupby(self.runs, key=lambda run: (run.message, run.label)):
            runs = tuple(group)
            sizes = [len(run.ids) for run in runs]
            trained = sum(size for run, size in zip(runs, sizes, strict=True) if run.trained)
            shown.append(ShownMessage(label=label, start=runs[0].start, tokens=sum(sizes), trained=trained, runs=runs))
        return shown

    @property
    def span(self) -> TreeSpan:
        """Where it is in the item, with its messages."""
        messages = [MessageSpan(message.start, message.tokens, message.label) for message in self.messages]
        return TreeSpan(self.start, len(self.ids), messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemView:
    """One item, ready to be shown."""

    item: Item
    name: str
    """What an item is called: episode, row, block, document or conversation."""
    documents: tuple[DocumentView, ...]
    decoder: Decoder | None
    branches: tuple[BranchView, ...] = ()
    """Those of its trees, in stored order."""

    @property
    def runs(self) -> list[RunView]:
        """The runs of all documents."""
        return [run for document in self.documents for run in document.runs]

    @property
    def message_numbers(self) -> dict[int, int]:
        """The number of each message, counted from 1 in the item, by its first token."""
        messages = chain.from_iterable(document.messages for document in self.documents)
        return {message.start: number for number, message in enumerate(messages, 1)}

    @property
    def trained(self) -> int:
        """Tokens that are targets, under the policy that is tried if there is one."""
        return sum(len(run.ids) for run in self.runs if run.trained)

    @property
    def trained_stretches(self) -> list[tuple[int, int]]:
        """First token and end of each stretch of targets."""
        grouped = (list(group) for wanted, group in groupby(self.runs, key=lambda run: run.trained) if wanted)
        return [(group[0].start, group[-1].start + len(group[-1].ids)) for group in grouped]

    def window(self, first: int, last: int) -> list[tuple[int, DocumentView, list[ShownMessage]]]:
        """Documents, by their places, with the messages that lie between two tokens of the item."""
        shown = []
        for place, document in enumerate(self.documents):
            if document.start < last and document.start + len(document.ids) > first:
                cut = [message.cut(first, last) for message in document.messages]
                shown.append((place, document, [message for message in cut if message.runs]))
        return shown

    def pieces(self, run: RunView) -> list[TextPiece]:
        """Decode the tokens of a run one by one; tokens that share a character are one piece."""
        return pieces_of(run.ids, self.decoder)

    def opening(self, start: int = 0, end: int | None = None, most: int = OPENING) -> str:
        """Choose the words that stand for a stretch; see `opening_text`."""
        return opening_text(self.item, self.decoder, start, end, most)

    def pictures(self, run: RunView) -> list[tuple[int, StoredPicture]]:
        """Find the pictures whose tokens a run has, numbered in the item."""
        end = run.start + len(run.ids)
        return [(n, picture) for n, picture in enumerate(self.item.pictures) if run.start <= picture.start < end]

    def parts(self, run: RunView) -> list[tuple[bool, str]]:
        """(is a control token, text) parts of a run; its ids if there is no tokenizer, its sizes for pictures."""
        if run.kind == PICTURE:
            words = " ".join(picture.words for _, picture in self.pictures(run))
            return [(False, words or f"[image, {len(run.ids)} tokens]")]
        if self.decoder is None:
            return [(False, " ".join(map(str, run.ids.tolist())) + " ")]
        return self.decoder.parts(run.ids)

    def title(self, run: RunView) -> str:
        """Describe a run: its kind or span, tokens and weight."""
        named = [kind_name(run.kind) if run.kind is not None else run.label, f"{len(run.ids):,} tokens"]
        return ", ".join([*filter(None, named), *([] if run.weight is None else [f"weight {run.weight:g}"])])

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
        facts = [item.record_id, item.side, f"source {item.source}" if item.source is not None else None]
        if item.turns is not None:
            facts.append(counted(item.turns, "turn"))
        if item.spans is not None:
            counts = np.bincount(item.spans, minlength=len(SPAN_NAMES))
            facts.append(", ".join(f"{counts[code]:,} {SPAN_NAMES[code]}" for code in (1, 2)))
        return " \u00b7 ".join(fact for fact in facts if fact)

    def as_json(self) -> dict[str, Any]:
        """Return plain values; ids if there is no text."""
        item = self.item
        facts = {name: getattr(item, name) for name in ("record_id", "side", "source", "turns")}
        return {
            self.name: item.number,
            **_without_none(split=item.split or None),
            "tokens": len(item),
            "features": list(item.features),
            **_without_none(
                **facts,
                trained=None if item.weights is None else item.trained,
                padding=None if item.capacity is None else item.padding,
            ),
            "documents": [self._document_json(document) for document in self.documents],
            "problem": item.problem,
        }

    def _document_json(self, document: DocumentView) -> dict[str, Any]:
        item, decoder = self.item, self.decoder
        last = document.start + len(document.ids)
        labelled = any(column is not None for column in (item.kinds, item.weights, item.spans))
        # without kinds nothing else distinguishes a control token from text that spells it
        shows_control = item.kinds is None
        return _without_none(
            start=document.start,
            tokens=len(document.ids),
            branches=[list(place) for place in item.branches if document.start <= place[0] < last] or None,
            document=document.number,
            record_id=document.record_id,
            trained=document.trained,
            ids=document.ids.tolist() if decoder is None else None,
            text=decoder and decoder.text(document.ids),
            control=np.flatnonzero(decoder.is_control(document.ids)).tolist() if decoder and shows_control else None,
            runs=[self.run_json(run) for run in document.runs] if labelled else None,
        )

    def run_json(self, run: RunView) -> dict[str, Any]:
        """Return a run as plain values."""
        return _without_none(
            start=run.start,
            message=run.message,
            kind=None if run.kind is None else kind_name(run.kind),
            span=run.span,
            weight=run.weight,
            ids=run.ids.tolist(),
            text=self.decoder and self.decoder.text(run.ids),
        )


def _without_none(**values: Any) -> dict[str, Any]:
    """Drop the values that are None."""
    return {name: value for name, value in values.items() if value is not None}


def view_item(item: Item, decoder: Decoder | None, name: str, policy: Policy | None = None) -> ItemView:
    """Cut an item into its documents and runs; `name` is what an item is called, `policy` one to try on its kinds."""
    tried = None
    if policy is not None and item.kinds is not None:
        tried = policy.token_weights(item.kinds, np.append(item.starts, len(item)))
    runs = list(_runs(item, tried))
    weights = item.weights if tried is None else tried
    trained = np.ones(len(item), dtype=np.bool_) if weights is None else np.asarray(weights > 0)
    counts = segment_sums(trained, np.append(item.starts, len(item))).tolist()
    documents, at = [], 0
    for index, (first, last) in enumerate(item.borders):
        mine = at
        while at < len(runs) and runs[at].start < last:
            at += 1
        documents.append(
            DocumentView(
                start=first,
                ids=item.ids[first:last],
                trained=None if weights is None else counts[index],
                number=None if item.documents is None else int(item.documents[index]),
                record_id=None if item.document_ids is None else item.document_ids[index],
                runs=tuple(runs[mine:at]),
            )
        )
    branches = tuple(describe_branches(item, [document.span for document in documents])) if item.branches else ()
    return ItemView(item=item, name=name, documents=tuple(documents), decoder=decoder, branches=branches)


def _runs(item: Item, tried: NDArray[Any] | None) -> Iterator[RunView]:
    starts = item.run_starts()
    if tried is not None and len(tried):
        starts = np.union1d(starts, np.flatnonzero(np.diff(tried)) + 1)
    numbers = item.messages
    messages = np.searchsorted(item.message_starts, starts, side="right") - 1 if numbers is None else numbers[starts]
    for (first, last), message in zip(pairwise([*starts.tolist(), len(item)]), messages.tolist(), strict=True):
        stored = None if item.weights is None else float(item.weights[first])
        yield RunView(
            start=first,
            ids=item.ids[first:last],
            message=message,
            kind=None if item.kinds is None else int(item.kinds[first]),
            span=None if item.spans is None else int(item.spans[first]),
            weight=stored if tried is None else float(tried[first]),
            stored=stored,
        )


def opening_text(
    item: Item, decoder: Decoder | None, start: int = 0, end: int | None = None, most: int = OPENING
) -> str:
    """Choose the words that stand for an item, a document or a message.

    The first words of a user, else of anyone, else of reasoning or a call, else any tokens.
    """
    end = len(item) if end is None else end
    if item.kinds is not None:
        kinds = item.kinds[start:end]
        parts = parts_of(kinds)
        content = (parts == Part.CONTENT) & (kinds != PICTURE)
        said = (content & (roles_of(kinds) == RoleCode.USER), content, parts == Part.TOOL_CALL, parts == Part.REASONING)
        for wanted in said:
            if wanted.any():
                begin = int(np.argmax(wanted))
                same = int(np.argmin(wanted[begin:])) or len(kinds) - begin
                return _words(item.ids[start + begin : start + begin + same], decoder, most)
    pictures = [picture.words for picture in item.pictures if start <= picture.start < end]
    return " ".join(pictures) or _words(item.ids[start:end], decoder, most)


def _words(ids: NDArray[np.integer], decoder: Decoder | None, most: int) -> str:
    """Decode the first tokens; a character that the cut splits is left out."""
    text = text_of(ids[:most], decoder)
    return text if len(ids) <= most else text.rstrip("\ufffd")
