"""Renderings of a record by plain Jinja, and the special tokens in them that the template itself wrote.

Nothing here knows traced strings, nor anything of how the fast path tells text of the record from text of the template.
Where texts of a record spell a special token, the record is rendered once more with other letters in its place: where
these letters come out, the token is the record's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import jinja2

from chatmill.core.conversation import Conversation, Message, ToolCall
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.sandbox import PlainSandbox
from chatmill.render.model_template import ModelTemplate

LETTERS = range(0xA000, 0xA48D)
"""Yi syllables: printable, without case, and hardly ever in a record. Those that are there are not used."""


CONSTRAIN = "<|constrain|>"


class SpelledToken(NamedTuple):
    """A special token in a rendering."""

    start: int
    stop: int
    name: str


class PlainText(NamedTuple):
    """A rendering."""

    text: str
    tokens: tuple[SpelledToken, ...]
    """Special tokens and stops that the template wrote, in order."""
    unknown: bool = False
    """A text of the record spells a special token whose origin cannot be told here."""

    def cut(self, stop: int, more: str = "") -> PlainText:
        """Return the beginning of a rendering, with a token of the template after it."""
        kept = tuple(token for token in self.tokens if token.stop <= stop)
        added = (SpelledToken(stop, stop + len(more), more),) if more else ()
        return PlainText(self.text[:stop] + more, (*kept, *added), self.unknown)


class PlainTemplate:
    """A template in a sandbox of its own; only what it is given is taken from the fast path's."""

    def __init__(self, chat: ModelTemplate) -> None:
        """Its text, date, tokens, stops, and the form of its input."""
        self._sandbox = PlainSandbox(chat.given.today)
        self._template = self._sandbox.template(chat.source.text)
        self.tokens, self.form = chat.named_tokens, chat.form
        names = sorted({*chat.tokenizer.special_tokens, *chat.stops.names}, key=len, reverse=True)
        self.names = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        """Finds special tokens and stops."""

    def run(self, values: Mapping[str, Any], *, prompt: bool) -> str:
        """Return what it writes."""
        variables = {**self.tokens, **values, "documents": None, "add_generation_prompt": prompt}
        return self._sandbox.render(self._template, variables)


class PlainRecord:
    """One conversation under the options that were chosen for it."""

    def __init__(self, template: PlainTemplate, conversation: Conversation, options: Mapping[str, Any]) -> None:
        """Nothing is rendered yet."""
        self._template, self._conversation, self._options = template, conversation, options
        self._known: dict[tuple[int, bool], PlainText | str] = {}
        texts = list(_texts(self._values(conversation, len(conversation.messages))))
        self._spelled = sorted({match.group() for text in texts for match in template.names.finditer(text)})
        """Special tokens in texts of the record."""
        self._used = set("".join(texts))
        """Characters in texts of the record."""
        self._letters = [
            letter for letter in map(chr, LETTERS) if self._spelled and not any(letter in t for t in texts)
        ]

    def rendering(self, count: int, *, prompt: bool) -> PlainText | str:
        """Return the first messages; the words of the template where it refuses them."""
        rendering = self._known.get((count, prompt))
        if rendering is None:
            rendering = self._known[count, prompt] = self._rendered(self._conversation, count, prompt)
        return rendering

    def followed(self, count: int, message: Message) -> PlainText | str:
        """Return the first messages and another one after them."""
        messages = (*self._conversation.messages[:count], message)
        return self._rendered(self._conversation._replace(messages=messages), count + 1, False)

    def with_message(self, index: int, message: Message) -> PlainRecord:
        """Return the record with another message in one place."""
        messages = [*self._conversation.messages]
        messages[index] = message
        return PlainRecord(self._template, self._conversation._replace(messages=tuple(messages)), self._options)

    @property
    def messages(self) -> Sequence[Message]:
        """Its messages."""
        return self._conversation.messages

    @property
    def names(self) -> re.Pattern[str]:
        """Finds special tokens and stops."""
        return self._template.names

    def letters(self, count: int) -> list[str]:
        """Return letters that no text of the record has."""
        return list(islice((letter for letter in map(chr, LETTERS) if letter not in self._used), count))

    def instead(
        self, index: int, *, content: str, reasoning: str | None, calls: tuple[ToolCall, ...] | None = None
    ) -> PlainText | str:
        """Return A(index), the message saying something else, and calling something else if `calls` are given."""
        messages = list(self._conversation.messages)
        message = messages[index]._replace(content=content, reasoning=reasoning, has_content=True)
        messages[index] = message if calls is None else message._replace(tool_calls=calls)
        return self._rendered(self._conversation._replace(messages=tuple(messages)), index + 1, False)

    def ends_of(self, message: int, *renderings: tuple[int, bool]) -> list[int] | None:
        """Where the content of a message ends in renderings, each a number of messages and whether it is a prompt.

        A letter is put after the content. None where it does not come out, or changes anything else.
        """
        original = self._conversation.messages[message]
        content = original.content if isinstance(original.content, str) else ""
        letter = next((candidate for candidate in map(chr, LETTERS) if candidate not in self._used), "")
        size = len(content.rstrip())
        if not size or not letter:
            return None
        changed = original._replace(content=content[:size] + letter + content[size:])
        messages = (*self._conversation.messages[:message], changed, *self._conversation.messages[message + 1 :])
        places: list[int] = []
        for count, prompt in renderings:
            shown = self._rendered(self._conversation._replace(messages=messages), count, prompt)
            text = self.rendering(count, prompt=prompt)
            if isinstance(shown, str) or isinstance(text, str) or shown.text.replace(letter, "") != text.text:
                return None
            if letter not in shown.text:
                return None
            places.append(shown.text.rindex(letter) - shown.text.count(letter) + 1)
        return places

    def _values(self, conversation: Conversation, count: int) -> dict[str, Any]:
        """Return what the record itself gives to the template."""
        messages, tools = RecordView(conversation, self._template.form).values(count, None)
        options = {name: value for name, value in self._options.items() if name in conversation.options}
        return {"messages": messages, "tools": tools, **options}

    def _rendered(self, conversation: Conversation, count: int, prompt: bool) -> PlainText | str:
        values = self._values(conversation, count)
        try:
            text = self._run(values, prompt)
        except jinja2.TemplateError as error:
            return str(error)
        shown, unknown = list(text), set()
        for name in self._spelled:
            places = self._places(values, prompt, text, name)
            if places is None:
                unknown.add(name)
            for place in places or ():
                shown[place] = "\0"
        tokens = tuple(
            SpelledToken(*match.span(), match.group()) for match in self._template.names.finditer("".join(shown))
        )
        return PlainText(text, tokens, any(token.name in unknown for token in tokens))

    def _places(self, values: Mapping[str, Any], prompt: bool, text: str, name: str) -> list[int] | None:
        """Characters of a rendering that are from a name in texts of the record; None where they cannot be told."""
        mask = "".join([letter for letter in self._letters if letter not in text][: len(name)])
        if len(mask) < len(name):
            return None
        try:
            masked = self._run(_replaced(values, name, mask), prompt)
        except jinja2.TemplateError:
            return None
        if masked.translate(str.maketrans(mask, name)) != text:
            return None
        return [place for place, letter in enumerate(masked) if letter in mask]

    def _run(self, values: Mapping[str, Any], prompt: bool) -> str:
        return self._template.run({**self._options, **values}, prompt=prompt)


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)


def _replaced(value: Any, old: str, new: str) -> Any:
    """Return a value with another spelling of a name in all of its texts."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, Mapping):
        return {_replaced(key, old, new): _replaced_in(key, item, old, new) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_replaced(item, old, new) for item in value]
    return value


def _replaced_in(key: Any, value: Any, old: str, new: str) -> Any:
    """Return a field with another spelling of a name; the mark that opens a content type of Harmony is no text."""
    if key == "content_type" and isinstance(value, str) and value.startswith(CONSTRAIN):
        return CONSTRAIN + _replaced(value.removeprefix(CONSTRAIN), old, new)
    return _replaced(value, old, new)
