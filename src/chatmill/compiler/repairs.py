"""Repairs: what a recipe may change in a record that the template refuses, each once and counted.

A repair changes the record and never what the template writes. One that leaves the template's complaint as it was is
taken back.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from chatmill.compiler.recipe import NotShown, Repair
from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.conversations import Conversations, record_key
from chatmill.core.ledger import LOST_CALLS, LOST_CONTENT, LOST_REASONING, LOST_TOOLS, REASONING, REPAIRED
from chatmill.core.tools import listed_tools
from chatmill.errors import RecordError
from chatmill.render.model_template import ModelTemplate
from chatmill.render.render import Rendered, render_batch

ID_LENGTH = 9
LETTERS = string.ascii_letters + string.digits
CALL_ID = re.compile(rf"[A-Za-z0-9]{{{ID_LENGTH}}}")
PLACE = re.compile(r"messages\[(\d+)\]\.(?:(content)|tool_calls\[(\d+)\]\.(name|arguments))")
"""Where a refusal says that something is not shown."""
REFUSED = ("template_refused", "no_prompt")
SHOWING = (Repair.PARALLEL_CALLS, Repair.TEXT_WITH_CALL)
"""Repairs after which a template may show what it left out."""
Counts = Counter[str]
Result = TypeVar("Result")


class _Repaired(NamedTuple):
    """A record that the template takes after changes."""

    conversation: Conversation
    notes: Counts
    """Repairs that were made, and characters that are lost."""


Attempts = Generator[Conversation, RecordError | None, _Repaired]
"""Changed forms of a record, one at a time; each is answered with its error, or None where the template takes it."""


def _attempts(
    conversation: Conversation, error: RecordError, repairs: Sequence[Repair], not_shown: NotShown
) -> Attempts:
    """Try each repair once, then take out what is not shown; a change that the error survives is taken back.

    Raises:
        RecordError: The one that nothing helped against.
    """
    notes: Counts = Counter()
    for repair in repairs:
        if error.code not in REFUSED and not (error.code == "not_shown" and repair in SHOWING):
            continue
        result = REPAIRS[repair](conversation)
        if result is None:
            continue
        changed, lost = result
        answer = yield changed
        if answer is not None and _is_same(answer, error):
            continue
        conversation = changed
        notes += lost
        notes[REPAIRED + repair] = 1
        if answer is None:
            return _Repaired(conversation, notes)
        error = answer

    while not_shown is NotShown.DROP and error.code == "not_shown":
        result = _without(conversation, error.path)
        if result is None:
            break
        changed, lost = result
        answer = yield changed
        if answer is not None and _is_same(answer, error):
            break
        conversation = changed
        notes += lost
        if answer is None:
            return _Repaired(conversation, notes)
        error = answer
    raise error


def _is_same(error: RecordError, other: RecordError) -> bool:
    return (error.code, error.path, error.message) == (other.code, other.path, other.message)


def render_repaired(
    batch: Conversations, template: ModelTemplate, repairs: Sequence[Repair], not_shown: NotShown
) -> tuple[Conversations, Rendered, dict[int, Counts]]:
    """Render a batch, and repair records that the template refuses.

    Return the conversations as rendered, and the ledger notes of those that were changed. A record that no repair
    helps has the error that none helped against.
    """
    rendered = render_batch(batch, template)
    repairs = useful_repairs(repairs, template)
    if not rendered.failed or not (repairs or not_shown is NotShown.DROP):
        return batch, rendered, {}

    errors = dict(rendered.failed)
    mended: dict[int, _Repaired] = {}
    parts: list[Rendered] = []
    attempts = {index: _attempts(batch[index], error, repairs, not_shown) for index, error in errors.items()}
    answers: dict[int, RecordError | None] = dict.fromkeys(attempts)
    while answers:
        tries: dict[int, Conversation] = {}
        for index, answer in answers.items():
            try:
                tries[index] = attempts[index].send(answer)
            except StopIteration as end:
                mended[index] = end.value
            except RecordError as error:
                errors[index] = error
        if not tries:
            break
        retry = render_batch(Conversations.of(list(tries.values())), template)
        failed = dict(retry.failed)
        answers = {index: failed.get(place) for place, index in enumerate(tries)}
        parts.append(replace(retry, kept=np.array(list(tries), dtype=np.int64)[retry.kept], failed=()))

    refused = tuple((index, error) for index, error in errors.items() if index not in mended)
    rendered = replace(rendered, failed=refused)
    if not mended:
        return batch, rendered, {}
    places = sorted(mended)
    order_of = np.arange(len(batch))
    order_of[places] = len(batch) + np.arange(len(places))
    changed = Conversations.of([mended[place].conversation for place in places])
    joined = Conversations.joined([batch, changed]).take(order_of)
    whole = Rendered.joined([rendered, *parts])
    return joined, whole, {index: repaired.notes for index, repaired in mended.items()}


def useful_repairs(repairs: Sequence[Repair], template: ModelTemplate) -> list[Repair]:
    """Choose the repairs that can help, in the order in which they are tried: those that lose something last.

    Text that becomes reasoning would be lost where the template shows none.
    """
    listed = sorted(repairs, key=list(Repair).index)
    return [repair for repair in listed if template.reads_reasoning or repair is not Repair.TEXT_WITH_CALL]


def derived_repaired(
    conversation: Conversation, repairs: Sequence[Repair], not_shown: NotShown, derive: Callable[[Conversation], Result]
) -> tuple[Conversation, Result, Counts]:
    """Repair one record until `derive` accepts it, which raises a `RecordError` to refuse."""
    try:
        return conversation, derive(conversation), Counter()
    except RecordError as error:
        attempts = _attempts(conversation, error, repairs, not_shown)
    changed = next(attempts)
    while True:
        try:
            result = derive(changed)
        except RecordError as error:
            changed = attempts.send(error)
            continue
        try:
            attempts.send(None)
        except StopIteration as end:
            return end.value.conversation, result, end.value.notes


def _call_ids(conversation: Conversation) -> tuple[Conversation, Counts] | None:
    """Replace call ids by nine letters and digits, as Mistral's templates want; results get those of their calls.

    They are hashes of the record's key and the place of the call, so a model cannot learn a pattern.
    """
    key, new_ids, waiting = record_key(conversation), {}, []
    messages: list[Message] = []
    for number, message in enumerate(conversation.messages):
        if message.tool_calls:
            calls = []
            for place, call in enumerate(message.tool_calls):
                new = call.id if call.id and CALL_ID.fullmatch(call.id) else _short_id(f"{key}\0{number}\0{place}")
                calls.append(call._replace(id=new))
                if call.id is not None:
                    new_ids[call.id] = new
            waiting = [call.id or "" for call in calls]
            message = message._replace(tool_calls=tuple(calls))
        elif message.role is Role.TOOL:
            old = message.tool_call_id
            new = new_ids.get(old or "") or (waiting[0] if waiting else _short_id(f"{key}\0{number}\0{old}"))
            waiting = [waiting_id for waiting_id in waiting if waiting_id != new]
            message = message._replace(tool_call_id=new)
        messages.append(message)
    changed = conversation._replace(messages=tuple(messages))
    return None if changed.messages == conversation.messages else (changed, Counter())


def _short_id(text: str) -> str:
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    digits = []
    for _ in range(ID_LENGTH):
        number, digit = divmod(number, len(LETTERS))
        digits.append(LETTERS[digit])
    return "".join(digits)


def _leading_answer(conversation: Conversation) -> tuple[Conversation, Counts] | None:
    """Without what comes between the system messages and the first user message."""
    messages = conversation.messages
    first = next((k for k, message in enumerate(messages) if message.role is Role.USER), None)
    if first is None:
        return None
    dropped = [message for message in messages[:first] if message.role in (Role.ASSISTANT, Role.TOOL)]
    if not dropped:
        return None
    kept = tuple(message for message in messages[:first] if message.role not in (Role.ASSISTANT, Role.TOOL))
    return conversation._replace(messages=(*kept, *messages[first:])), sum(map(_lost, dropped), Counter())


def _text_with_call(conversation: Conversation) -> tuple[Conversation, Counts] | None:
    """Text before a call as the last paragraph of its reasoning: for templates that take one of them, or drop both."""
    messages = tuple(
        message._replace(
            reasoning="\n\n".join(filter(None, (message.reasoning, message.content))), content="", has_content=False
        )
        if message.tool_calls and message.content and not message.spans
        else message
        for message in conversation.messages
    )
    return None if messages == conversation.messages else (conversation._replace(messages=messages), Counter())


def _tool_descriptions(conversation: Conversation) -> tuple[Conversation, Counts] | None:
    """Tools with an empty description where they have none."""
    tools = tuple(_described(tool) for tool in conversation.tools)
    return None if tools == tuple(conversation.tools) else (conversation._replace(tools=tools), Counter())


def _described(tool: Any) -> Any:
    inner = tool.get("function")
    if isinstance(inner, dict):
        return {**tool, "function": _described(inner)}
    return tool if "description" in tool else {**tool, "description": ""}


def _parallel_calls(conversation: Conversation) -> tuple[Conversation, Counts] | None:
    """Split messages into one per call, each followed by its results; text and reasoning stay with the first."""
    messages: list[Message] = []
    queue = list(conversation.messages)
    while queue:
        message = queue.pop(0)
        if len(message.tool_calls) < 2 or message.spans:
            messages.append(message)
            continue
        results: list[Message] = []
        while queue and queue[0].role is Role.TOOL:
            results.append(queue.pop(0))
        for place, call in enumerate(message.tool_calls):
            single = message._replace(tool_calls=(call,))
            messages.append(single if place == 0 else single._replace(content="", reasoning=None, has_content=False))
            mine = _results_of(call, results, last=place == len(message.tool_calls) - 1)
            messages += mine
            results = [result for result in results if not any(result is other for other in mine)]
    changed = conversation._replace(messages=tuple(messages))
    return None if changed.messages == conversation.messages else (changed, Counter())


def _results_of(call: ToolCall, results: Sequence[Message], *, last: bool) -> list[Message]:
    """The results of a call: those with its id; where results have none, the next one; the last call takes the rest."""
    if last:
        return list(results)
    if any(result.tool_call_id is not None for result in results) and call.id is not None:
        return [result for result in results if result.tool_call_id == call.id]
    return list(results[:1])


REPAIRS: dict[Repair, Callable[[Conversation], tuple[Conversation, Counts] | None]] = {
    Repair.CALL_IDS: _call_ids,
    Repair.PARALLEL_CALLS: _parallel_calls,
    Repair.LEADING_ANSWER: _leading_answer,
    Repair.TEXT_WITH_CALL: _text_with_call,
    Repair.TOOL_DESCRIPTIONS: _tool_descriptions,
}
"""What each repair makes of a conversation, with what is lost; None where it changes nothing."""


def _without(conversation: Conversation, path: str) -> tuple[Conversation, Counts] | None:
    """Remove what a template leaves out of a record, and count the characters."""
    if path == "tools":
        lost = len(listed_tools(conversation.tools))
        return conversation._replace(tools=()), Counter({LOST_TOOLS: lost})
    match = PLACE.fullmatch(path)
    if match is None:
        return None
    number = int(match[1])
    messages = list(conversation.messages)
    message = messages[number]
    if message.spans:  # weights are those of the text that the record has
        return None
    if match[2]:
        if message.role in (Role.SYSTEM, Role.DEVELOPER):  # an empty one would still be written in prompts
            del messages[number]
        else:
            messages[number] = message._replace(content="", has_content=False)
        return conversation._replace(messages=tuple(messages)), Counter({LOST_CONTENT: len(message.content)})
    place = int(match[3])
    call, calls = message.tool_calls[place], list(message.tool_calls)
    if match[4] == "arguments":
        calls[place] = call._replace(arguments="{}")
        messages[number] = message._replace(tool_calls=tuple(calls))
        return conversation._replace(messages=tuple(messages)), Counter({LOST_CALLS: len(call.arguments)})
    del calls[place]
    messages[number] = message._replace(tool_calls=tuple(calls))
    notes = Counter({LOST_CALLS: len(call.name) + len(call.arguments)})
    kept = []
    for k, other in enumerate(messages):
        if k > number and call.id is not None and other.role is Role.TOOL and other.tool_call_id == call.id:
            notes += _lost(other)
        else:
            kept.append(other)
    return conversation._replace(messages=tuple(kept)), notes


def _lost(message: Message) -> Counts:
    """Return the characters of a message that is left out."""
    calls = sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
    thought = len(message.reasoning or "")
    return +Counter(
        {LOST_CONTENT: len(message.content), LOST_CALLS: calls, LOST_REASONING: thought, REASONING: thought}
    )
