"""Count the characters of contents and reasoning that no document of their conversation shows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chatmill.core.conversations import Conversations
from chatmill.core.native.document_layout import ItemTable, Layout, Origin
from chatmill.render.fill import texts_at

Ints = NDArray[np.int64]


def count_lost(layout: Layout, runs: Ints, kept: Ints, table: ItemTable, batch: Conversations) -> tuple[Ints, Ints]:
    """Count hidden characters for every conversation of a batch.

    Args:
        layout: The items of all documents.
        runs: First item of each document.
        kept: Index of the conversation of each document.
        table: The table of items.
        batch: The conversations.

    Returns:
        All hidden characters. And those that are more than white space around a text, in three columns: of contents,
        of the reasoning of answers that may be trained, and of the reasoning of answers that are context.
    """
    stripped = np.zeros(len(batch), dtype=np.int64)
    lost = np.zeros((len(batch), 3), dtype=np.int64)
    is_kept = np.zeros(len(batch), dtype=np.bool_)
    is_kept[kept] = True
    wanted = np.repeat(is_kept, np.diff(batch.offsets))
    messages = batch.offsets[layout.conversations] + layout.bases + table.items["message"][layout.lines]
    item_origins = table.items["origin"][layout.lines]
    origins = ((Origin.CONTENT, batch.messages.contents), (Origin.REASONING, batch.messages.reasoning))
    for column, (origin, texts) in enumerate(origins):
        is_missing = wanted & (texts.lengths > 0) & ~layout.whole[:, column]
        shown = np.flatnonzero(item_origins == origin)  # after operations, which may change nothing
        places, owners = layout.others[shown], messages[shown]
        is_same = np.array([buffer is texts.data for buffer in layout.buffers])[layout.which[places]]
        is_same &= layout.text_sizes[places] == texts.lengths[owners]
        is_missing[owners[is_same]] = False
        missing = np.flatnonzero(is_missing)
        if not len(missing):
            continue
        is_part = is_missing[owners]
        hidden_texts = texts.take(missing)
        hidden = (
            hidden_texts.characters()
            - _most_shown(places[is_part], owners[is_part], layout, runs, len(wanted))[missing]
        )
        around = hidden_texts.characters() - hidden_texts.trimmed(None).characters()
        conversations = np.searchsorted(batch.offsets, missing, side="right") - 1
        np.add.at(stripped, conversations, np.maximum(hidden, 0))
        hidden = np.maximum(hidden - around, 0)
        is_context = batch.messages.weights[missing] == 0
        is_apart = is_context & (origin == Origin.REASONING)
        np.add.at(lost[:, column], conversations[~is_apart], hidden[~is_apart])
        np.add.at(lost[:, -1], conversations[is_apart], hidden[is_apart])
    return stripped, lost


def _most_shown(places: Ints, owners: Ints, layout: Layout, runs: Ints, messages: int) -> Ints:
    """Return for every message how many characters of some of its texts the document has that has most of them."""
    most = np.zeros(messages, dtype=np.int64)
    if len(places):
        documents = np.searchsorted(runs, layout.text_items[places], side="right")
        pairs, which = np.unique(np.stack([owners, documents], axis=1), axis=0, return_inverse=True)
        sums = np.zeros(len(pairs), dtype=np.int64)
        np.add.at(sums, which, texts_at(places, layout).characters())
        np.maximum.at(most, pairs[:, 0], sums)
    return most
