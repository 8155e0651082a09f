"""What `{% generation %}` tags of a template would train, compared with what is proved."""

from __future__ import annotations

from collections.abc import Iterator

import jinja2

from chatmill.core.conversation import Conversation
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import Sandboxes, TemplateRunner
from chatmill.render.jinja.rendering import Rendering, common_start
from chatmill.render.jinja.rules import Answer
from chatmill.render.jinja.sandbox import PlainSandbox
from chatmill.render.jinja.tracing_sandbox import TracingSandbox
from chatmill.render.jinja.turns import Turns
from chatmill.render.model_template import ModelTemplate

OPENS, CLOSES = "\ue000", "\ue001"
"""Characters of the private use area, which no probe and no template writes."""


class _Marking(PlainSandbox):
    """Writes a character before and after everything that is tagged."""

    generation_marks = (OPENS, CLOSES)


def has_tags(text: str) -> bool:
    """Return whether a template tags what an assistant says."""
    return "endgeneration" in text


def tag_differences(
    chat: ModelTemplate, conversation: Conversation, options: dict[str, object]
) -> list[tuple[str, str]]:
    """Compare the tags with the proof in all proved answers: (code of the finding, text) of each difference."""
    variables = {**chat.named_tokens, **options}
    today = chat.given.today
    sandboxes = Sandboxes(TracingSandbox(today), _Marking(today))
    renderer = TemplateRunner(chat.source.text, sandboxes, variables, chat.name, chat.store.keys)
    turns = chat.turns(conversation, options)
    differences: list[tuple[str, str]] = []
    for answer in turns.answers():
        if answer.reason:
            continue
        tagged, is_sampled = _tagged(renderer, turns, answer.message + 1), turns.is_as_sampled(answer)
        trained, ended = turns.trained(answer.message), turns.until(answer.message)
        if tagged is not None and isinstance(ended, Rendering) and trained.text == ended.text:
            differences += _compared(turns, answer, tagged)
        if not is_sampled and not turns.is_stable(answer):
            differences += _changed(turns, answer, _tagged(renderer, turns, len(turns.messages)) or [])
    return differences


def _tagged(renderer: TemplateRunner, turns: Turns, count: int) -> list[bool] | None:
    """Mark which characters of a rendering are tagged; None if the tags change the text."""
    view = RecordView(turns.view.conversation, turns.view.form)
    try:
        marked = renderer.plain(view, count, False)
    except jinja2.TemplateError:
        return None
    tagged: list[bool] = []
    depth = 0
    for character in marked:
        if character in (OPENS, CLOSES):
            depth += 1 if character == OPENS else -1
        else:
            tagged.append(depth > 0)
    plain = turns.until(count - 1)
    return tagged if isinstance(plain, Rendering) and len(plain.text) == len(tagged) else None


def _compared(turns: Turns, answer: Answer[int], tagged: list[bool]) -> Iterator[tuple[str, str]]:
    ended = turns.until(answer.message)
    assert isinstance(ended, Rendering)
    others = [p.stop for p in ended.pieces if p.owner not in (None, answer.message) and p.stop <= answer.begin]
    before = max(others, default=0)
    earlier = turns.until(answer.message - 1) if answer.message else None
    if isinstance(earlier, Rendering):  # what closes the message before is no part of the prompt
        before = max(before, common_start(earlier.text, ended.text[: answer.begin]))
    stop_begin, end = answer.generations[-1][1:]
    for fault, start, stop, wanted in (
        ("tags_train_prompt", before, answer.begin, False),
        ("tags_miss_answer", answer.begin, stop_begin, True),
        ("tags_miss_stop", stop_begin, end, True),
        ("tags_train_after_stop", end, len(ended.text), False),
    ):
        text = "".join(ended.text[at] for at in range(start, stop) if tagged[at] is not wanted)
        if text:
            yield fault, text


def _changed(turns: Turns, answer: Answer[int], tagged: list[bool]) -> Iterator[tuple[str, str]]:
    """Find answers that later messages change and the tags train in their changed form."""
    whole = turns.whole
    pieces = [p for p in whole.pieces if p.owner == answer.message and p.start < p.stop]
    if tagged and any(tagged[at] for piece in pieces for at in range(piece.start, piece.stop)):
        yield "tags_train_changed_turns", "".join(whole.text[p.start : p.stop] for p in pieces)
