"""What a template wants and writes, found out by running it on small conversations."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

import jinja2

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import ConfigError
from chatmill.render.jinja.limits import LimitError
from chatmill.render.jinja.record_view import Arguments, Content, InputForm, RecordView
from chatmill.render.jinja.renderer import TemplateRunner
from chatmill.render.jinja.rendering import Rendering

PRINTED_PART = re.compile(r"""[{,] *['"]text['"]: *['"]""")
"""A list of parts that is written as it is: the template takes it for a text, and cuts it or adds to it."""
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
CALL = ToolCall("get_weather", '{"city": "Oslo"}', "callid001")
USER, ANSWER = Message(Role.USER, "Q-one?"), Message(Role.ASSISTANT, "A-one.")
CALLING = Message(Role.ASSISTANT, "", tool_calls=(CALL,))
RESULT = Message(Role.TOOL, "R-one", tool_call_id=CALL.id, name=CALL.name)
PLAIN = (USER, ANSWER)
WITH_CALLS = ((USER, CALLING), (USER, CALLING, RESULT), (USER, CALLING, RESULT, ANSWER))
ANSWERED = (PLAIN, (*PLAIN, Message(Role.USER, "Q-two?"), Message(Role.ASSISTANT, "A-two.")))


def probed_form(renderers: Sequence[TemplateRunner], words: Collection[str]) -> InputForm:
    """Return the input that shows all of a conversation with calls: strings before objects, null before empty.

    `renderers` run the template under each choice of its options; `words` are those in its text.
    """
    names: tuple[str, ...] = REASONING_NAMES[:2]
    if "reasoning" in words and not any(name in words for name in names):
        names = REASONING_NAMES
    content = Content.TEXT
    if not _shows(PLAIN, InputForm(reasoning_names=names), renderers):
        forms = (InputForm(content=one, reasoning_names=names) for one in Content)
        content = next((form.content for form in forms if _shows(PLAIN, form, renderers)), content)
    best, most = InputForm(content=content, reasoning_names=names), -1
    for arguments in Arguments:
        for empty in (None, ""):  # DeepSeek V3 writes calls only next to null, others fail on it
            form = InputForm(arguments, content, empty, names)
            score = sum(_shows(probe, form, renderers) for probe in WITH_CALLS)
            if score > most:
                best, most = form, score
    return best


def _shows(messages: Sequence[Message], form: InputForm, renderers: Sequence[TemplateRunner]) -> bool:
    """Return whether the first rendering that the template does not refuse shows all texts of a probe as they are."""
    view = RecordView(Conversation(tuple(messages)), form)
    for renderer in renderers:
        try:
            text = renderer.plain(view, len(messages), False)
        except LimitError as error:
            raise ConfigError(
                f"the template {renderer.name!r} was stopped on {len(messages)} short messages: {error.message}"
            ) from None
        except jinja2.TemplateError:
            continue
        wanted = [text for message in messages for text in _texts_of(message)]
        spoiled = "None" in text or '\\"city' in text or "{'city" in text or '{{"city' in text
        return not (spoiled or PRINTED_PART.search(text)) and all(word in text for word in wanted)
    return False


def _texts_of(message: Message) -> list[str]:
    texts = [message.content] if message.content else []
    return texts + [text for call in message.tool_calls for text in (call.name, "Oslo")]


def habitual_stop(
    renderers: Sequence[TemplateRunner], form: InputForm, stops: re.Pattern[str], specials: re.Pattern[str]
) -> str | None:
    """Return a special token that the template writes after every answer, where no known stop is."""
    stops_seen: set[str | None] = set()
    for probe in ANSWERED:
        view = RecordView(Conversation(probe), form)
        renderings = (renderer.render(view, len(probe), False) for renderer in renderers)
        rendering = next((candidate for candidate in renderings if isinstance(candidate, Rendering)), None)
        if rendering is not None:
            stops_seen |= set(_behind_answers(rendering, probe, stops, specials))
    stops_seen.discard(None)
    return next(iter(stops_seen)) if len(stops_seen) == 1 else None


def _behind_answers(
    rendering: Rendering, probe: Sequence[Message], stops: re.Pattern[str], specials: re.Pattern[str]
) -> Iterator[str | None]:
    """Yield the first special token after each answer of a probe; None where a known stop is there too."""
    for index, message in enumerate(probe):
        last = max((p.stop for p in rendering.pieces if p.owner == index), default=None)
        if message.role is not Role.ASSISTANT or last is None:
            continue
        next_text = min((p.start for p in rendering.pieces if p.expression and p.start >= last), default=None)
        limit = len(rendering.text) if next_text is None else next_text
        special = specials.search(rendering.text, last, limit)
        yield special.group() if special and not stops.search(rendering.text, last, limit) else None
