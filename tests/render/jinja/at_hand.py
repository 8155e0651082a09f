"""The published templates that tests can read, conversations for them, and transformers' own rendering."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np

from chatmill.core.conversation import Conversation
from chatmill.core.texts import Texts
from chatmill.read.conversations import ConversationFile
from chatmill.render.document_items import Ids, TextPart, items_of
from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.options import TemplateOptions
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.model_template import JinjaSource, ModelTemplate, TextDocuments
from chatmill.render.render import Rendered, render
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.render.reference import on
from tools.template_survey import TODAY, bind_bytes

DATA = Path(__file__).parents[2] / "data"
FOLDER = DATA / "templates"
CONVERSATIONS = sorted((DATA / "conversations").glob("*.jsonl.gz"))


def bundled() -> list[str]:
    """Names of the templates of this repository, as the index has them."""
    with (FOLDER / "index.tsv").open(encoding="utf-8") as file:
        return [row["file"] for row in csv.DictReader(file, delimiter="\t")]


def of_trl() -> dict[str, Path]:
    """Templates that the installed `trl` carries and this repository does not."""
    import importlib.util

    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    found = sorted((Path(spec.submodule_search_locations[0]) / "chat_templates").glob("*.jinja"))
    return {f"trl/{path.name}": path for path in found if f"trl/{path.name}" not in bundled()}


@cache
def text_of(name: str) -> str:
    path = FOLDER / name
    return (path if path.is_file() else of_trl()[name]).read_text(encoding="utf-8")


@cache
def bound(name: str) -> ModelTemplate:
    return bind_bytes(name, text_of(name))


def of_text(
    text: str, stops: tuple[str, ...] = ("<|im_end|>",), more: tuple[str, ...] = ("<|im_start|>",), **given: Any
) -> ModelTemplate:
    """A template of a test, with a vocabulary of bytes, its stops and more control tokens."""
    source = JinjaSource(name="own", text=text, path="", stop_tokens=stops)
    return ModelTemplate(
        source, byte_tokenizer(list(dict.fromkeys([*stops, *more]))), TemplateOptions(today=TODAY, **given)
    )


def rendered_like_plain_jinja(template: ModelTemplate, records: Sequence[Conversation]) -> Rendered:
    """A batch in which the text of every record that is not refused is that of plain Jinja."""
    rendered = render(records, template, collect_failures=True)
    for place, index in enumerate(rendered.kept.tolist()):
        record = records[index]
        plain = template.plain(record, record.options, len(record.messages), prompt=False)
        assert template.tokenizer.decode(rendered.tokens.conversation(place).ids) == plain
    return rendered


def items_alone(written: TextDocuments, template: ModelTemplate) -> list[list[Ids | TextPart]]:
    """The items of every document of a conversation that was written alone, without stretches, plans or columns."""
    rules = template.rules
    return [items_of(one.spans, rules, Notes(), rules.first, ends=True)[0] for one in written.documents]


class OneRow(NamedTuple):
    """A row of a conversation that was written alone."""

    ids: list[int]
    kinds: list[int]
    messages: list[int]


def row_of(items: Any, tokenizer: Any) -> OneRow:
    """Items as tokens, piece by piece, in plain Python: a token belongs to the part in which it starts."""
    row = OneRow([], [], [])
    groups: list[list[Any]] = []
    for item in items:
        if isinstance(item, Ids) or item.opens or not groups or isinstance(groups[-1][0], Ids):
            groups.append([])
        groups[-1].append(item)
    texts = Texts.of(["" if isinstance(group[0], Ids) else "".join(p.text for p in group) for group in groups])
    encoded = tokenizer.encode_batch(texts)
    for number, parts in enumerate(groups):
        if isinstance(parts[0], Ids):
            ids, cuts = list(parts[0].ids), [len(parts[0].ids)]
        else:
            first, last = encoded[1][number : number + 2]
            ids = encoded[0][first:last].tolist()
            ends = np.cumsum([len(part.text.encode()) for part in parts])[:-1]
            inner = tokenizer.byte_points(encoded, np.full(len(ends), number, dtype=np.int64), ends, texts)
            cuts = [*(inner - first).tolist(), len(ids)]
        begin = 0
        for part, end in zip(parts, cuts, strict=True):
            row.kinds.extend([part.kind] * (end - begin))
            row.messages.extend([part.message] * (end - begin))
            begin = end
        row.ids.extend(ids)
    return row


def ids_alone(conversation: Conversation, template: ModelTemplate) -> list[list[int]]:
    """The ids of every document of a conversation; a `RecordError` where it is refused."""
    written = template.text_documents(conversation)
    return [row_of(items, template.tokenizer).ids for items in items_alone(written, template)]


@cache
def samples(count: int) -> tuple[Conversation, ...]:
    """The same few conversations of every bundled source, spread over its file."""
    found: list[Conversation] = []
    for path in CONVERSATIONS:
        read = list(ConversationFile(path))
        found += read[:: max(1, len(read) // count)][:count]
    return tuple(found)


def by_transformers(
    template: ModelTemplate, conversation: Conversation, options: dict[str, Any], *, prompt: bool
) -> str | None:
    """A conversation as `apply_chat_template` writes it; None where the template refuses it."""
    from transformers.utils import chat_template_utils

    messages, tools = RecordView(conversation, template.form).values(len(conversation.messages), None)
    values = {**template.named_tokens, **options, "add_generation_prompt": prompt, "tools": tools}
    try:
        with on(TODAY):
            texts, _ = chat_template_utils.render_jinja_template(
                [messages], chat_template=template.source.text, **values
            )
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return None
    text: str = texts[0]
    return text
