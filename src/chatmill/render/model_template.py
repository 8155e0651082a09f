"""A model's own chat template, bound to a tokenizer: Jinja in, items with kinds out, every mask proved."""

from __future__ import annotations

from chatmill.core.conversation import Conversation
from chatmill.errors import TokenizerError
from chatmill.render.bound import BoundTemplate, Items, WrittenRecord
from chatmill.render.fragments import Fragments
from chatmill.render.jinja.chat_template import ChatTemplate, TemplateText
from chatmill.render.jinja.notes import Notes
from chatmill.render.jinja.options import TemplateOptions
from chatmill.render.row_items import TokenRules, items_of
from chatmill.render.template import refuse_channels
from chatmill.tokenizer.tokenizer import Tokenizer


class ModelTemplate(BoundTemplate):
    """A Jinja template with a vocabulary."""

    knows_by_value = False
    default_policy = "assistant"
    declares = "The template decides what it trims; reasoning and white space that it leaves out are counted."

    def __init__(self, source: TemplateText, tokenizer: Tokenizer, given: TemplateOptions | None = None) -> None:
        """Bind a template; its special tokens are those of the tokenizer."""
        tokenizer = tokenizer.for_rows()
        self.name, self.tokenizer = source.name, tokenizer
        self.rules = TokenRules(tokenizer)
        self.chat = ChatTemplate(source, given)
        self._fragments = Fragments(self.rules)
        missing = [name for name in self.chat.stops.names if name not in tokenizer.control_ids]
        if missing and not any(name in tokenizer.control_ids for name in self.chat.stops.names):
            raise TokenizerError(
                f"the template {self.name!r} ends answers with {missing[0]!r}, which tokenizer {tokenizer.name!r} does "
                "not have as a token: template and tokenizer belong to different models"
            )
        for name in tokenizer.single_words:
            if name in source.text:
                raise TokenizerError(
                    f"the template {self.name!r} writes {name!r}, which tokenizer {tokenizer.name!r} finds only where "
                    "no word is beside it (single_word): what is beside it differs from record to record. Take "
                    "single_word away from that token in tokenizer.json"
                )
        self.form = self.chat.form

    @property
    def fingerprint(self) -> str:
        """sha256 of the template, its options and its stops."""
        return self.chat.fingerprint

    def write(
        self, conversation: Conversation, notes: Notes | None = None, *, by_messages: bool = False
    ) -> WrittenRecord:
        """The rows of a conversation; a `RecordError` where it cannot be written and proved."""
        self.check(conversation)
        notes = Notes() if notes is None else notes
        written = self.chat.write(conversation, notes, by_messages=by_messages)
        rows = written.rows
        if written.composed is not None:
            fragments = self._fragments.of(written.composed.groups)
            if fragments is not None:
                return WrittenRecord((), written.counts, written.options, fragments)
            rows = (written.composed.row,)
        items = tuple(items_of(row, self.rules, notes) for row in rows)
        return WrittenRecord(items, written.counts, written.options)

    def write_prompt(self, conversation: Conversation) -> Items:
        """The generation prompt behind a conversation."""
        self.check(conversation)
        row, notes = self.chat.prompt(conversation)
        return items_of(row, self.rules, notes)

    def check(self, conversation: Conversation) -> None:
        """Jinja templates are given no channels, recipients or Harmony contents: these must not be lost."""
        for index, message in enumerate(conversation.messages):
            refuse_channels(self.name, message, index)
