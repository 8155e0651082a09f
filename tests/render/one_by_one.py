"""Conversations written alone: the texts of their spans as items, without stretches, plans or columns."""

from __future__ import annotations

from chatmill.core.conversation import Conversation
from chatmill.render.document_items import Ids, TextPart, items_of
from chatmill.render.jinja.expressions import Notes
from chatmill.render.model_template import ModelTemplate, TextDocuments


def items_alone(written: TextDocuments, template: ModelTemplate) -> list[list[Ids | TextPart]]:
    """The items of every document of a conversation."""
    rules = template.rules
    return [items_of(one.spans, rules, Notes(), rules.first, ends=True)[0] for one in written.documents]


def ids_alone(conversation: Conversation, template: ModelTemplate) -> list[list[int]]:
    """The ids of every document of a conversation; a `RecordError` where it is refused."""
    rows: list[list[int]] = []
    for items in items_alone(template.text_documents(conversation), template):
        pieces: list[list[int] | str] = []
        for item in items:
            if isinstance(item, Ids):
                pieces.append(list(item.ids))
            elif item.opens or not pieces or not isinstance(pieces[-1], str):
                pieces.append(item.text)
            else:
                pieces[-1] += item.text
        encoded = (template.tokenizer.encode(piece) if isinstance(piece, str) else piece for piece in pieces)
        rows.append([one for ids in encoded for one in ids])
    return rows
