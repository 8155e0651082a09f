"""Repairs: what a recipe may change in a record that the template refuses; each is kept only if it helps, and counted.

A repair changes the record and never what the template writes. One that leaves the template's complaint as it was is
taken back, so a record has no more changes than it needs.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

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
Counts = Counter[str]
Result = TypeVar("Result")


@dataclass(slots=True)
class _Case:
    """One record that the template refuses, with the changes that have helped so far."""

    conversation: Conversation
    error: RecordError
    repairs: Sequence[Repair]
    not_shown: NotShown
    notes: Counts = field(default_factory=Counter)
    tried: set[Repair] = field(default_factory=set)
    """Repairs that did not help against this error, or are done."""
    done: set[Repair] = field(default_factory=set)

    def candidate(self) -> tuple[Conversation, Counts, Repair | None] | None:
        """Apply one more repair: the record, what is lost and the repair; None if none is left."""
        place = PLACE.fullmatch(self.error.path)
        is_hidden = self.error.code == "not_shown"
        useful = [Repair.PARALLEL_CALLS if place[3] else Repair.TEXT_WITH_CALL] if is_hidden and place else []
        for repair in self.repairs if self.error.code in REFUSED else useful:
            if repair in self.repairs and repair not in self.tried:
                result = REPAIRS[repair](self.conversation)
                if result is not None:
                    return *result, repair
        if not is_hidden or self.not_shown is NotShown.REFUSE:
            return None
        result = _without(self.conversation, self.error.path)
        return None if result is None else (*result, None)

    def judge(self, candidate: tuple[Conversation, Counts, Repair | None], error: RecordError | None) -> None:
        """Keep a change that the error did not survive."""
        conversation, lost, repair = candidate
        old = self.error
        same = error is not None and (error.code, error.path, error.message) == (old.code, old.path, old.message)
        if same and repair is not Repair.END_EARLIER:  # which goes back one answer at a time
            self.tried |= {repair} if repair else set()
            if repair is None:  # what was taken away was not what the template leaves out
                self.not_shown = NotShown.REFUSE
            return
        self.conversation = conversation
        self.notes += lost
        if repair:
            self.notes[REPAIRED + repair] = 1
            self.done |= {repair} - {Repair.END_EARLIER}
        self.tried = set(self.done)
        if error is not None:
            self.error = error


def render_repaired(
    batch: Conversations,
    template: ModelTemplate,
    repairs: Sequence[Repair],
    not_shown: NotShown,
) -> tuple[Conversations, Rendered, dict[int, Counts]]:
    """Render a batch, and repair records that the template refuses.

    Return the conversations as rendered, and the ledger notes of those that were changed. A record that no repair
    helps keeps its error.
    """
    rendered = render_batch(batch, template)
    notes: dict[int, Counts] = {}
    repairs = useful_repairs(repairs, template)
    if not rendered.failed or not (repairs or not_shown is NotShown.DROP):
        return batch, rendered, notes
    mended: dict[int, _Case] = {}
    parts: list[Rendered] = []
    cases = {index: _Case(batch[index], error, repairs, not_shown) for index, error in rendered.failed}
    open_cases = cases
    while tries := {index: change for index, case in open_cases.items() if (change := case.candidate()) is not None}:
        open_cases = {index: open_cases[index] for index in tries}
        tried = Conversations.of([change[0] for change in tries.values()])
        retry = render_batch(tried, template)
        errors = dict(retry.failed)
        for place, (index, change) in enumerate(tries.items()):
            open_cases[index].judge(change, errors.get(place))
            if place not in errors:
                mended[index] = open_cases.pop(index)
                notes[index] = mended[index].notes
        parts.append(replace(retry, kept=np.array(list(tries), dtype=np.int64)[retry.kept], failed=()))
    refused = tuple((index, case.error) for index, case in cases.items() if index not in mended)
    rendered = replace(rendered, failed=refused)
    if not mended:
        return batch, rendered, notes
    places = sorted(mended)
    order_of = np.arange(len(batch))
    order_of[places] = len(batch) + np.arange(len(places))
    changed = Conversations.of([mended[place].conversation for place in places])
    joined = Conversations.joined([batch, changed]).take(order_of)
    whole = Rendered.joined([rendered, *parts])
    return joined, whole, notes


def useful_repairs(repairs: Sequence[Repair], template: ModelTemplate) -> list[Repair]:
    """Return the repairs that can help: text that becomes reasoning would be lost where the template shows none."""
    return [repair for repair in repairs if template.reads_reasoning or repair is not Repair.TEXT_WITH_CALL]


def derived_repaired(
    conversation: Conversation, repairs: Sequence[Repair], not_shown: NotShown, derive: Callable[[Conversation], Result]
) -> tuple[Conversation, Result, Counts]:
    """Repair one record until `derive` accepts it, which raises a `RecordError` to refuse."""
    try:
        return conversation, derive(conversation), Counter()
    except RecordError as error:
        case = _Case(conversation, error, repairs, not_shown)
    while (candidate := case.candidate()) is not None:
        try:
            result = derive(candidate[0])
        except RecordError as error:
            case.judge(candidate, error)
        else:
            case.judge(candidate, None)
            return case.conversation, result, case.notes
    raise case.error


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


def _end_earlier(conversation: Conversation) -> tuple[Conversation, Counts] | None:
    """Without its last answer and what comes between that and the answer before."""
    messages = conversation.messages
    answers = [k for k, message in enumerate(messages) if message.role is Role.ASSISTANT]
    end = answers[-1] + 1 if answers and answers[-1] + 1 < len(messages) else answers[-2] + 1 if answers[1:] else 0
    if not end:
        return None
    return conversation._replace(messages=messages[:end]), sum(map(_lost, messages[end:]), Counter())


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
    Repair.END_EARLIER: _end_earlier,
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
