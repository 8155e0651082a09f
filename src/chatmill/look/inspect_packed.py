"""Shows packed blocks: a header line, then each document's text with its boundaries, readable without colour."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from chatmill.core.blocks import boundaries_from_starts, whole_rows
from chatmill.core.shift import IGNORE_INDEX
from chatmill.errors import DataError, FormatError
from chatmill.look.packed_rows import PackedRow
from chatmill.tokenizer.protocol import Tokenizer

INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that would move the cursor, colour the terminal or turn the reading direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentView:
    """One document of a block."""

    start: int
    ids: list[int]
    text: str | None
    """The decoded ids; None without a tokenizer."""
    trained: int | None
    """Tokens with a label; None where the block brings neither `labels` nor `loss_mask`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockView:
    """One packed block, ready to be shown."""

    index: int
    tokens: int
    features: tuple[str, ...]
    documents: tuple[DocumentView, ...]
    has_starts: bool
    problem: str | None
    """What is wrong with the stored boundaries; the block is then shown as one document."""

    @property
    def header(self) -> str:
        """Such as `---- 0 Tokens: 512, Documents: 3, Features: input_ids, document_starts ----`."""
        documents = f"Documents: {len(self.documents)}, " if self.has_starts else ""
        return f"---- {self.index} Tokens: {self.tokens}, {documents}Features: {', '.join(self.features)} ----"

    def as_json(self) -> dict[str, Any]:
        """The same as plain values; ids stand in where there is no text."""
        documents = []
        for document in self.documents:
            entry: dict[str, Any] = {"start": document.start, "tokens": len(document.ids)}
            if document.trained is not None:
                entry["trained"] = document.trained
            entry |= {"ids": document.ids} if document.text is None else {"text": document.text}
            documents.append(entry)
        return {
            "block": self.index,
            "tokens": self.tokens,
            "features": list(self.features),
            "documents": documents,
            "problem": self.problem,
        }


def view_block(row: PackedRow, tokenizer: Tokenizer | None = None) -> BlockView:
    """Cut a stored block into its documents and decode them."""
    columns = row.columns
    if "input_ids" not in columns:
        raise FormatError(f"the dataset has no column input_ids, only: {', '.join(columns)}")
    ids = list(columns["input_ids"])
    lengths = np.array([len(ids)], dtype=np.int64)
    starts, problem = columns.get("document_starts"), None
    boundaries = whole_rows(lengths)
    if starts is not None:
        try:
            boundaries = boundaries_from_starts([starts], lengths)
        except DataError as error:
            problem = str(error).replace("of row 0", f"of block {row.index}", 1)
    trained = _trained(columns)
    borders = [*boundaries.starts.tolist(), len(ids)]
    return BlockView(
        index=row.index,
        tokens=len(ids),
        features=tuple(columns),
        documents=tuple(
            DocumentView(
                start=start,
                ids=ids[start:end],
                text=tokenizer.decode(ids[start:end]) if tokenizer else None,
                trained=None if trained is None else int(trained[start:end].sum()),
            )
            for start, end in pairwise(borders)
        ),
        has_starts=starts is not None,
        problem=problem,
    )


def _trained(columns: dict[str, Any]) -> Any:
    if columns.get("labels") is not None:
        return np.asarray(columns["labels"]) != IGNORE_INDEX
    if columns.get("loss_mask") is not None:
        return np.asarray(columns["loss_mask"]) != 0
    return None


def block_lines(block: BlockView, *, width: int = 80, most_lines: int = 0) -> Iterator[str]:
    """The lines of one block: its header, and per document a line `[n] tokens a-b` and the text behind `| `.

    `most_lines` per document (0: all); the middle of a longer one is left out, and counted.
    """
    yield block.header
    if block.problem:
        yield f"!! {block.problem}"
    for number, document in enumerate(block.documents):
        last = document.start + len(document.ids) - 1
        trained = "" if document.trained is None else f", {document.trained} trained"
        yield f"[{number}] tokens {document.start}-{last} ({len(document.ids)}{trained})"
        text = " ".join(map(str, document.ids)) if document.text is None else visible(document.text)
        lines = [part for line in text.split("\n") for part in _wrapped(line, width - 2)]
        if most_lines and len(lines) > most_lines:
            head = (most_lines + 1) // 2
            tail = most_lines - head
            left_out = f"... {len(lines) - most_lines} lines left out ..."
            lines = [*lines[:head], left_out, *lines[len(lines) - tail :]]
        yield from (f"| {line}".rstrip() for line in lines)


def visible(text: str) -> str:
    """The text with tabs as spaces and with characters that would disturb a terminal spelled out."""

    def spelled(match: re.Match[str]) -> str:
        code = ord(match[0])
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"

    return INVISIBLE.sub(spelled, text).expandtabs(4)


def _wrapped(line: str, width: int) -> list[str]:
    """Cut a line to `width` columns, at a space where one is near; wide characters count as two."""
    from rich.cells import cell_len, chop_cells

    parts = []
    while cell_len(line) > width:
        part = chop_cells(line[: width + 1], width)[0]
        space = part.rfind(" ") + 1
        if space > len(part) // 2:
            part = part[:space]
        parts.append(part)
        line = line[len(part) :]
    return [*parts, line]
