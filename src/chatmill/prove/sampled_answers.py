"""What a model writes after a prompt that opens its reasoning, from plain Jinja alone.

History has no such answer: the template cuts the reasoning out of it. What the model wrote is put together from the
record, and given to the template as the content of the message. It is right if the template makes the same history of
it, or shows all of it after the prompt. Nothing here knows where a character of a rendering is from: letters that no
text has are put into the record, and looked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from chatmill.core.conversation import Message
from chatmill.prove.plain import PlainRecord, PlainText, SpelledToken
from chatmill.render.jinja.options import AnswerText, NoReasoning, TemplateOptions
from chatmill.render.jinja.stops import BLOCKS, THINKING

EMPTY_BLOCK = re.compile("|".join(rf"(?:{re.escape(a)}\s*{re.escape(b)}\s*)" for a, b in BLOCKS.items()))
"""Reasoning that is closed at once."""


class _Opener(NamedTuple):
    """What a prompt ends with, and history does not have."""

    text: str
    mark: str
    close: str
    """The mark that ends reasoning."""
    between: str
    """What is between reasoning and content: as the template writes it, else as the recipe has it."""


class _Said(NamedTuple):
    """What a model may have written, without calls and stop."""

    text: str
    given: str
    """What the template is given: the same, or that without white space around the mark."""


def prefers_sampled(record: PlainRecord, message: Message, index: int, given: TemplateOptions) -> bool:
    """Return whether a recipe wants an answer as it was sampled, although history follows the prompt.

    It does where history leaves the reasoning out: a letter in it does not come out.
    """
    if given.answers is not AnswerText.SAMPLED:
        return False
    (letter,) = record.letters(1)
    content, reasoning = message.content, message.reasoning or ""
    if reasoning.strip():
        shown = record.instead(index, content=content, reasoning=_with_letter(reasoning, letter))
    else:
        mark = next((word for word in THINKING if content.lstrip().startswith(word)), None)
        opened = len(content) - len(content.lstrip()) + len(mark or "")
        inside, close, _ = content[opened:].partition(THINKING.get(mark or "", "\0"))
        if not close or not inside.strip():
            return False
        changed = content[:opened] + _with_letter(inside, letter) + content[opened + len(inside) :]
        shown = record.instead(index, content=changed, reasoning=message.reasoning)
    return isinstance(shown, PlainText) and letter not in shown.text


def _with_letter(text: str, letter: str) -> str:
    """Return a text with a letter after its first one."""
    begin = len(text) - len(text.lstrip()) + 1
    return text[:begin] + letter + text[begin:]


def sampled_answer(
    record: PlainRecord, message: Message, index: int, prompt: PlainText, ended: PlainText, given: TemplateOptions
) -> PlainText | str | None:
    """Return P(i) and what a model writes there, with what A(i) has after it; what is wrong where that is not proved.

    None where plain Jinja does not tell.
    """
    opener = _opener(record, index, prompt, given)
    if opener is None:
        return _without_opener(record, message, index, prompt, ended)
    for said in _said(record, message, index, opener, ended, given):
        if said.text.count(opener.close) != 1:
            return f"what ends its reasoning is there {said.text.count(opener.close)} times"
        given_text = opener.text + said.given
        shown = record.instead(index, content=given_text, reasoning=None)
        if said.given == said.text and isinstance(shown, PlainText) and shown.text.startswith(prompt.text + said.text):
            return None if shown.unknown else _with_mark(shown, len(prompt.text), opener.close, record)
        is_cut = isinstance(shown, PlainText) and shown.text == ended.text
        if is_cut or (message.tool_calls and _is_cut_without_calls(record, message, index, given_text)):
            return _after_prompt(record, message, index, opener, said.text, prompt, ended)
    return "plain Jinja makes another history of what a model would write"


def _without_opener(
    record: PlainRecord, message: Message, index: int, prompt: PlainText, ended: PlainText
) -> PlainText | str | None:
    """Return the same where a prompt has an empty block of reasoning that history lacks, or other white space."""
    places = record.ends_of(index - 1, (index, True), (index + 1, False)) if index else None
    if places is None:
        return None
    block = _block_at_end(prompt.text)
    for size in ([block.start()] if block else []) + [len(prompt.text)]:
        begin = _begin_of_answer(record, message, index, prompt.text[places[0] : size], places[1], ended)
        if begin is None or (block and size == block.start() and EMPTY_BLOCK.match(ended.text[begin:])):
            continue
        given = prompt.text[size:] + message.content
        shown = record.instead(index, content=given, reasoning=message.reasoning) if size < len(prompt.text) else ended
        if isinstance(shown, str) or not (shown.text == ended.text or shown.text.startswith(prompt.text)):
            return "plain Jinja makes another history of what a model would write"
        by = len(prompt.text) - begin
        tokens = [token for token in ended.tokens if token.start >= begin]
        moved = (SpelledToken(token.start + by, token.stop + by, token.name) for token in tokens)
        return PlainText(prompt.text + ended.text[begin:], (*prompt.tokens, *moved))
    return "plain Jinja does not write its prompt as history"


def _block_at_end(text: str) -> re.Match[str] | None:
    """Find reasoning that is closed at once at the end of a prompt."""
    return next((match for match in EMPTY_BLOCK.finditer(text) if match.end() == len(text)), None)


def _begin_of_answer(
    record: PlainRecord, message: Message, index: int, closing: str, at: int, ended: PlainText
) -> int | None:
    """Return where an answer begins in A(i): behind what closes the message before it and opens its own.

    Both may have other white space. A letter before the content shows where that ends.
    """
    letters = r"\s*".join(map(re.escape, "".join(closing.split())))
    header = re.compile(rf"\s*{letters}(\s*)").match(ended.text, at)
    if header is None:
        return None
    (letter,) = record.letters(1)
    shown = record.instead(index, content=letter + message.content, reasoning=message.reasoning)
    if isinstance(shown, PlainText) and letter in shown.text and shown.text.replace(letter, "") == ended.text:
        place = shown.text.index(letter)
        if header.start(1) <= place <= header.end():
            return place
    return at + len(closing) if ended.text.startswith(closing, at) else header.end()


def _is_cut_without_calls(record: PlainRecord, message: Message, index: int, given: str) -> bool:
    """Return whether the template cuts what a model may have written, where it calls nothing."""
    without = record.instead(index, content=message.content, reasoning=message.reasoning, calls=())
    shown = record.instead(index, content=given, reasoning=None, calls=())
    return isinstance(without, PlainText) and isinstance(shown, PlainText) and without.text == shown.text


def _after_prompt(
    record: PlainRecord,
    message: Message,
    index: int,
    opener: _Opener,
    said: str,
    prompt: PlainText,
    ended: PlainText,
) -> PlainText | None:
    """Return P(i), what is said there, and what A(i) has after the content."""
    rest = _behind_content(record, message, index, ended)
    if rest is None and ended.text.count(said) == 1:
        rest = ended.text.index(said) + len(said)
    if rest is None and not message.content:
        rest = _behind_nothing(record, index, ended)
    if rest is None:
        return None
    begin, by = len(prompt.text), len(prompt.text) + len(said) - rest
    tokens = [token for token in ended.tokens if token.start >= rest]
    moved = (SpelledToken(token.start + by, token.stop + by, token.name) for token in tokens)
    text = PlainText(prompt.text + said + ended.text[rest:], (*prompt.tokens, *moved))
    return _with_mark(text, begin, opener.close, record)


def _behind_nothing(record: PlainRecord, index: int, ended: PlainText) -> int | None:
    """Return where an empty content is in A(i): where A(i) parts from the same message with one; None if it is not."""
    (letter,) = record.letters(1)
    with_letter = record.instead(index, content=letter, reasoning=None)
    if isinstance(with_letter, str) or letter not in with_letter.text:
        return None
    place = with_letter.text.index(letter)
    return place if with_letter.text[:place] == ended.text[:place] else None


def _opener(record: PlainRecord, index: int, prompt: PlainText, given: TemplateOptions) -> _Opener | None:
    """Find what a prompt opens: a mark of reasoning at its end, or words that a rendering with a letter lacks."""
    reasoning, content = record.letters(2)
    both = record.instead(index, content=content, reasoning=reasoning)
    between = ""
    if isinstance(both, PlainText) and reasoning in both.text and content in both.text:
        between = both.text[both.text.index(reasoning) + 1 : both.text.index(content)]
    mark = next((word for word in THINKING if prompt.text.rstrip().endswith(word)), None)
    if mark is not None:
        text, close = prompt.text[prompt.text.rindex(mark) :], THINKING[mark]
    elif _block_at_end(prompt.text) is not None:
        return None
    else:
        alone = record.instead(index, content=content, reasoning=None)
        if isinstance(alone, str):
            return None
        shared = alone.text.split(content)[0]
        text = prompt.text.removeprefix(shared)
        mark, close = text.strip(), between.strip()
        if not prompt.text.startswith(shared) or not mark or not close:
            return None
    if close not in between:
        between = f"\n{close}\n\n" if given.thinking_close is None else given.thinking_close
    return _Opener(text, mark, close, between)


def _said(
    record: PlainRecord, message: Message, index: int, opener: _Opener, ended: PlainText, given: TemplateOptions
) -> Iterator[_Said]:
    """Yield what a model may have written."""
    content, reasoning = message.content, message.reasoning or ""
    if reasoning.strip():
        shown = _shown(record, message, index, ended, opener)
        if shown is not None:
            yield _Said(shown, shown)
            return
        yield from _joined(reasoning, opener, _trimmed_content(record, message, index, ended))
    elif content.lstrip().startswith(opener.mark):
        behind = content.lstrip().removeprefix(opener.mark)
        blank = opener.text[len(opener.text.rstrip()) :]
        same = next((n for n in range(len(blank), 0, -1) if behind.startswith(blank[:n])), 0)
        yield _Said(behind[same:], behind[same:])
    elif opener.close in content:
        yield _Said(content, content)
    elif given.no_reasoning is NoReasoning.CLOSE:
        yield from _joined("", opener, _trimmed_content(record, message, index, ended))


def _trimmed_content(record: PlainRecord, message: Message, index: int, ended: PlainText) -> str:
    """Return the content as the template shows it: without the white space that makes no difference."""
    content = message.content
    for trimmed in (content.strip(), content.rstrip(), content.lstrip()):
        shown = record.instead(index, content=trimmed, reasoning=message.reasoning)
        if isinstance(shown, PlainText) and shown.text == ended.text:
            return trimmed
    return content


def _joined(reasoning: str, opener: _Opener, content: str) -> Iterator[_Said]:
    text = reasoning + opener.between + content
    yield _Said(text, text)
    yield _Said(text, reasoning + opener.close + content)


def _shown(record: PlainRecord, message: Message, index: int, ended: PlainText, opener: _Opener) -> str | None:
    """Return reasoning and content as A(i) has both; None where it has no reasoning."""
    (letter,) = record.letters(1)
    with_letter = record.instead(index, reasoning=letter, content=message.content)
    if isinstance(with_letter, str) or letter not in with_letter.text:
        return None
    begin, end = with_letter.text.index(letter), _behind_content(record, message, index, ended)
    if with_letter.text[:begin] != ended.text[:begin]:
        return None
    if end is None and opener.between in ended.text[begin:]:  # and no content
        end = ended.text.index(opener.between, begin) + len(opener.between)
        if ended.text.startswith(message.content, end):  # or one of white space
            end += len(message.content)
    return None if end is None else ended.text[begin:end]


def _behind_content(record: PlainRecord, message: Message, index: int, ended: PlainText) -> int | None:
    """Return where the content of a message ends in A(i); None where plain Jinja does not tell."""
    places = record.ends_of(index, (index + 1, False))
    if places is None:
        return None
    blank = message.content[len(message.content.rstrip()) :]
    return places[0] + (len(blank) if ended.text.startswith(blank, places[0]) else 0)


def _with_mark(text: PlainText, begin: int, close: str, record: PlainRecord) -> PlainText:
    """Return a text in which the mark that ends reasoning is a token, where the vocabulary has it as one."""
    at = text.text.index(close, begin)
    if not record.names.fullmatch(close) or any(token.start == at for token in text.tokens):
        return text
    token = SpelledToken(at, at + len(close), close)
    return text._replace(tokens=tuple(sorted((*text.tokens, token))))
