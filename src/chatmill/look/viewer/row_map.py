"""A packed row as a map: every document a stretch, what is trained a bar inside it, padding at the end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from chatmill.look.item_view import ItemView

WIDTH = 640
LINE = 26
"""Height of a line, with the gap below it."""
Box = tuple[float, int, float]
"""x, y and width."""


def row_map(view: ItemView) -> dict[str, Any] | None:
    """Draw the map of an item as boxes, read like text; None for one document in a row without a fixed size.

    `labels` are numbers of documents, and where each fits.
    """
    item = view.item
    total = item.capacity or len(item)
    if not total or not (item.capacity or len(view.documents) > 1):
        return None
    lines = min(max(4, math.ceil(math.sqrt(total / 24))), 24)
    per_line = math.ceil(total / lines)

    def boxes(first: int, end: int) -> Iterator[Box]:
        while first < end:
            line = first // per_line
            upto = min(end, (line + 1) * per_line)
            scale = WIDTH / per_line
            yield round((first - line * per_line) * scale, 1), line * LINE, max(round((upto - first) * scale, 1), 0.5)
            first = upto

    documents = [
        (number, list(boxes(document.start, document.start + len(document.ids))))
        for number, document in enumerate(view.documents)
    ]
    widest = [(number, max(drawn, key=lambda box: box[2])) for number, drawn in documents if drawn]
    return {
        "per_line": per_line,
        "height": math.ceil(total / per_line) * LINE - 5,
        "documents": documents,
        "trained": [box for first, end in view.trained_stretches for box in boxes(first, end)],
        "padding": list(boxes(len(item), total)),
        "labels": [(number, x, y) for number, (x, y, width) in widest if width > 26],
    }
