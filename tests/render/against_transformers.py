"""Ids of our renderings against transformers' `apply_chat_template(tokenize=True)`, every difference explained.

The one difference that is meant: no token lies across the place where a model starts to write. Where the reference has
such a token, ours must be the ids of the same text cut at these places.
"""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

from chatmill.core.conversation import Conversation
from chatmill.render.jinja.options import Expand, TemplateOptions, Unproved
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.turn_documents import TextDocument
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind, find_template
from chatmill.render.render import render
from chatmill.tokenizer.load import with_control_tokens

DATE = datetime.date(2026, 1, 2)
SPECIAL = re.compile(
    r"<\|[^|<>\s{}'\"]+\|>|<｜[^｜<>]+｜>|\[/?[A-Z_]{3,}\]|\[gMASK\]|<sop>|</?s>|<(?:start|end)_of_turn>|<bos>"
)
"""How families spell special tokens."""


def special_tokens_in(template: str) -> list[str]:
    """The special tokens that the text of a template spells, in order."""
    return list(dict.fromkeys(SPECIAL.findall(template)))


def with_tokens_of(templates: Iterable[str], ours: Any, theirs: Any) -> tuple[Any, Any]:
    """A vocabulary in both libraries with the special tokens of templates added; theirs is changed."""
    wanted: dict[str, None] = {}
    for source in map(find_template, templates):
        wanted |= dict.fromkeys([*special_tokens_in(source.text), *source.control_tokens])
    names = [name for name in wanted if name not in ours.control_ids]
    theirs.add_special_tokens({"additional_special_tokens": names})
    ours = with_control_tokens(ours, names)
    assert [ours.control(name) for name in names] == theirs.convert_tokens_to_ids(names)
    return ours, theirs


def bound(template: str, ours: Any) -> ModelTemplate:
    """A template whose rows are whole renderings."""
    made = bind(template, ours, TemplateOptions(today=DATE, expand=Expand.NONE, unproved=Unproved.UNTRAINED))
    assert isinstance(made, ModelTemplate)
    return made


def compare(
    template: str, ours: Any, theirs: Any, conversations: Sequence[Conversation], *, anchor: str = ""
) -> Counter[str]:
    """Compare all that the template shows and that spell no special token, in bulk and one by one.

    `anchor` is text that merges with nothing, for vocabularies that put a space before text: it takes that space where
    a document is cut.

    Counts: `compared`, `broken` (a token of the reference lies where a model starts to write), `appended` (a stop that
    the template leaves to the next header), `refused`, `spelled`.
    """
    one_by_one, bulk = bound(template, ours), bound(template, ours)
    text = find_template(template).text
    rendered = render(conversations, bulk, collect_failures=True)
    counts = Counter(refused=len(rendered.failed))
    offsets = rendered.tokens.offsets.tolist()
    for position, index in enumerate(rendered.kept.tolist()):
        conversation = conversations[index]
        if spells_special(conversation, ours):
            counts["spelled"] += 1
            continue
        ids = rendered.tokens.ids[offsets[position] : offsets[position + 1]].tolist()
        alone = render([conversation], one_by_one)
        assert alone.tokens.ids.tolist() == ids, f"{template}: bulk differs: {conversation.where}"
        written = one_by_one.text_documents(conversation)
        reference = _reference(conversation, text, theirs, one_by_one, dict(written.options))
        counts["compared"] += 1
        document = written.documents[-1]
        if document.appended:
            counts["appended"] += 1
            ids = ids[: -document.appended]
        if ids != reference:
            assert ids == _cut_where_models_write(document, theirs, anchor), f"{template}: {conversation.where}"
            counts["broken"] += 1
    return counts


def spells_special(conversation: Conversation, tokenizer: Any) -> bool:
    """Whether a text of the conversation spells a special token."""
    text = json.dumps([conversation.messages, conversation.tools], ensure_ascii=False)
    return any(json.dumps(name, ensure_ascii=False)[1:-1] in text for name in tokenizer.special_tokens)


def _reference(
    conversation: Conversation, text: str, theirs: Any, template: ModelTemplate, options: dict[str, Any]
) -> list[int]:
    messages, tools = RecordView(conversation, template.form).values(len(conversation.messages), None)
    with mock.patch("transformers.utils.chat_template_utils.datetime", _FixedDay):
        ids = theirs.apply_chat_template(
            messages, tools=tools, chat_template=text, tokenize=True, return_dict=False, **options
        )
    return list(ids)


class _FixedDay(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _FixedDay:
        return cls(DATE.year, DATE.month, DATE.day, tzinfo=tz)


def _cut_where_models_write(document: TextDocument, theirs: Any, anchor: str) -> list[int]:
    """The ids of a document's text as transformers encodes it, cut where a model starts to write."""
    pieces = [""]
    for span in document.spans:
        if span.breaks:
            pieces.append("")
        pieces[-1] += span.text
    ids = theirs.encode(pieces[0], add_special_tokens=False)
    known, before = len(theirs.encode(anchor, add_special_tokens=False)), pieces[0]
    for piece in pieces[1:]:
        inside = anchor and not before.endswith(tuple(theirs.all_special_tokens))
        begun = (anchor if inside else theirs.bos_token if anchor else "") + piece
        ids += theirs.encode(begun, add_special_tokens=False)[known if inside else bool(anchor) :]
        before = piece
    return ids[: -document.appended] if document.appended else ids
