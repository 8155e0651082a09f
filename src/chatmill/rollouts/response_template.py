"""The grammar of a template as a `response_template` of transformers, which parses answers without Chatmill.

Such a template says by which text each field of a message opens and closes. It is derived from the grammar, and then
tried: transformers parses the answers of all probes with it, and has to find the messages that they were written from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import ConfigError, MissingExtraError, RecordError
from chatmill.render.jinja.stops import BLOCKS
from chatmill.rollouts.grammar import START, Edge, Grammar, Slot, SlotKind
from chatmill.rollouts.probes import ASKED, TOOLS, AnswerProbe, after_result, call_id, probe_conversations
from chatmill.rollouts.template import RolloutTemplate

NAME_PATTERN = r"[^\s\"'<>{}()\[\],|]+"
"""The name of a tool, or an id."""
ARGUMENT_KINDS = (SlotKind.ARGUMENTS, SlotKind.ARGUMENTS_TEXT)
MARK_START = re.compile(r"[<\[]")
NAME_MARK, ID_MARK, ARGUMENTS_MARK = "@name", "@id", "@arguments"
"""Values that show where a JSON text has the parts of a call."""
CALL = {"type": "function"}
MOST_NAMES = 3
"""Probes that an error names."""


class _CallSpan(NamedTuple):
    """The text of one call: what comes before its first slot, its slots with what follows each."""

    opening: str
    slots: tuple[tuple[SlotKind, str], ...]


class _NotExpressedError(Exception):
    """The format has no words for what a template writes."""


def response_template(template: RolloutTemplate, grammar: Grammar) -> dict[str, Any]:
    """Derive a `response_template`, and try it with transformers on everything that the grammar was derived from.

    Raises:
        ConfigError: The format cannot express what the template writes.
    """
    try:
        found = _derive(template, grammar)
    except _NotExpressedError as error:
        raise ConfigError(f"the template {template.name!r} has no response template: {error}") from None
    wrong = _wrong_probes(template, found)
    if wrong:
        names = ", ".join(wrong[:MOST_NAMES])
        raise ConfigError(
            f"the template {template.name!r} has no response template: transformers reads {len(wrong)} of its small "
            f"answers in another way, such as {names}. chatmill.Renderer parses them"
        )
    return found


def _derive(template: RolloutTemplate, grammar: Grammar) -> dict[str, Any]:
    """Put the fields together."""
    opened, anchors = _prompt_ends(template)
    content_open = _content_opening(grammar)
    fields: dict[str, Any] = {}
    if grammar.has_reasoning:
        fields["reasoning_content"] = _reasoning_field(grammar, opened, content_open)
    if grammar.has_calls:
        fields["tool_calls"] = _calls_field(template, grammar)
    fields["content"] = _content_field(template, grammar, content_open)
    anchor: Any = anchors[0] if len(anchors) == 1 else anchors
    return {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields}


# ---- prompts


def _prompt_ends(template: RolloutTemplate) -> tuple[str, list[str]]:
    """Return the mark of reasoning that prompts end with, and what opens the assistant's turn before it."""
    opened = ""
    anchors: list[str] = []
    for messages in (ASKED, after_result()):
        conversation = Conversation(messages, id="probe", tools=TOOLS)
        prompt = template.plain(conversation, prompt=True) or ""
        before = template.plain(conversation, prompt=False) or prompt
        added = prompt[len(before) :] if prompt.startswith(before) else ""
        if not added.strip():  # the turn of the message before opens the answer
            added = _last_mark(template, prompt, messages[-1])
        mark = next((mark for mark in BLOCKS if mark in added), "")
        if mark:
            opened = opened or mark
            added = added[: added.index(mark)]
        if added.strip() and added not in anchors:
            anchors.append(added)
    if not anchors:
        raise _NotExpressedError("no text of its own opens the assistant's turn")
    return opened, anchors


def _any_of(texts: Sequence[str]) -> str:
    """Return a pattern of any of some texts, and the white space after it."""
    return f"(?:{'|'.join(map(re.escape, texts))})\\s*" if texts else "$"


def _last_mark(template: RolloutTemplate, prompt: str, last: Message) -> str:
    """Return what a prompt ends with, from its last special token or the last text of the record on."""
    start = 0
    for text in (last.content, last.tool_call_id or "", last.name or ""):
        if text and text in prompt:
            start = max(start, prompt.rindex(text) + len(text))
    marks = [match.start() for match in template.specials.finditer(prompt, start)]
    return prompt[marks[-1] if marks else start :]


# ---- reasoning and content


def _content_opening(grammar: Grammar) -> str:
    """Return the mark in front of every content, if there is one."""
    literals = {edge.literal for edge in grammar.edges.get(START, ()) if edge.target.kind is SlotKind.CONTENT}
    shortest = min(literals, key=len, default="")
    mark = shortest.strip()
    if not mark or any(block in mark or end in mark for block, end in BLOCKS.items()):
        return ""
    return mark


def _content_field(template: RolloutTemplate, grammar: Grammar, opening: str) -> dict[str, Any]:
    """Describe content; without a mark of its own it is all that belongs to no other field."""
    ends = [template.token_name(stop) for stop in template.stops]
    if not opening:
        return {"close_pattern": _any_of(ends), "content": "text"}
    mark = _call_opening(grammar)
    for edge in grammar.edges.get(Slot(SlotKind.CONTENT), ()):
        before = edge.literal.removesuffix(mark).strip() if edge.opens_call else ""
        if before and before not in ends:
            ends.append(before)
    return {"open": opening, "close_pattern": _any_of(ends), "content": "text"}


def _reasoning_field(grammar: Grammar, opened: str, content_open: str) -> dict[str, Any]:
    """Describe reasoning by the marks around it."""
    opens = [edge.literal for edge in grammar.edges[START] if edge.target.kind is SlotKind.REASONING]
    mark = opens[0].strip() or opened
    if not mark:
        raise _NotExpressedError("its prompts open reasoning without a mark")
    edges = grammar.edges.get(Slot(SlotKind.REASONING), ())
    known = next((close for block, close in BLOCKS.items() if block in mark), "")
    if known and all(known in edge.literal for edge in edges):
        return {"open": mark, "close_pattern": f"{re.escape(known)}\\s*", "content": "text"}
    literals = [edge.literal for edge in edges if edge.target.kind is SlotKind.CONTENT]
    if not literals:
        raise _NotExpressedError("no content follows its reasoning")
    close = literals[0]
    if content_open and content_open in close:
        close = close[: close.index(content_open)]
    close = close.strip()
    if not close:
        raise _NotExpressedError("nothing closes its reasoning")
    return {"open": mark, "close_pattern": f"{re.escape(close)}\\s*", "content": "text"}


# ---- calls


def _calls_field(template: RolloutTemplate, grammar: Grammar) -> dict[str, Any]:
    """Describe calls: as JSON, as marked keys and values, or as a name with arguments."""
    spans = list(_call_spans(grammar))
    if not spans:
        raise _NotExpressedError("its calls have no end")
    ends = [template.token_name(stop) for stop in template.stops]
    kinds = {kind for span in spans for kind, _ in span.slots}
    if SlotKind.ARGUMENTS_TEXT in kinds or SlotKind.ARGUMENTS in kinds:
        full = [span for span in spans if _is_full(span)]
        whole = _whole_json(full, ends)
        return whole if whole is not None else _named_json(full, ends)
    return _named_keys(grammar, spans, ends)


def _is_full(span: _CallSpan) -> bool:
    """Tell whether a call has a name and arguments."""
    kinds = {kind for kind, _ in span.slots}
    return SlotKind.NAME in kinds and not kinds.isdisjoint(ARGUMENT_KINDS)


def _call_opening(grammar: Grammar) -> str:
    """Return the text that every call opens with, without what closes the field before it."""
    openings = [
        _after_reasoning(edge.literal)
        for source in (START, Slot(SlotKind.CONTENT), Slot(SlotKind.REASONING))
        for edge in grammar.edges.get(source, ())
        if edge.opens_call
    ]
    return min(openings, key=lambda text: len(text.strip()), default="")


def _call_spans(grammar: Grammar) -> Iterator[_CallSpan]:
    """Yield the ways to write one call alone, from the text that opens it to the end of the answer."""
    mark = _call_opening(grammar).strip()
    for source in (START, Slot(SlotKind.CONTENT)):
        for edge in grammar.edges.get(source, ()):
            if edge.opens_call:
                opening = _after_reasoning(edge.literal)
                if mark and opening.strip().endswith(mark):
                    opening = opening[opening.rindex(mark) :]
                yield from _walks(grammar, edge, (), opening)


def _walks(grammar: Grammar, edge: Edge, slots: tuple[tuple[SlotKind, str], ...], opening: str) -> Iterator[_CallSpan]:
    """Yield all paths of a call that visit no slot twice."""
    for following in grammar.edges.get(edge.target, ()):
        walked = (*slots, (edge.target.kind, following.literal))
        if following.target.kind in (SlotKind.END, SlotKind.CONTENT, SlotKind.REASONING):
            yield _CallSpan(opening, walked)
        elif not following.opens_call and all(kind is not following.target.kind for kind, _ in walked):
            yield from _walks(grammar, following, walked, opening)


def _after_reasoning(opening: str) -> str:
    """Take marks of reasoning off the text that opens a call."""
    for mark, close in BLOCKS.items():
        for word in (close, mark):
            if word in opening:
                opening = opening[opening.rindex(word) + len(word) :]
    return opening


def _whole_json(spans: Sequence[_CallSpan], ends: Sequence[str]) -> dict[str, Any] | None:
    """Describe calls that are whole JSON texts between marks."""
    marks = {
        SlotKind.NAME: NAME_MARK,
        SlotKind.ID: ID_MARK,
        SlotKind.ARGUMENTS: json.dumps(ARGUMENTS_MARK),
        SlotKind.ARGUMENTS_TEXT: ARGUMENTS_MARK,
    }
    fields: list[dict[str, Any]] = []
    for opening, slots in spans:
        text = opening
        for kind, literal in slots:
            text += marks[kind] + literal
        field = _json_field(text, ends)
        if field is not None and field not in fields:
            fields.append(field)
    return fields[0] if len(fields) == 1 else None


def _json_field(text: str, ends: Sequence[str]) -> dict[str, Any] | None:
    """Describe a call, or a list of calls, in a text that shows the places of its parts."""
    start = min((place for place in (text.find("{"), text.find("[{"), text.find("[\n")) if place >= 0), default=-1)
    if start < 0:
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return None
    mark = text[:start].strip()
    is_list = isinstance(value, list)
    transform = _json_places(value[0] if is_list else value)
    if transform is None or not mark:
        return None
    field: dict[str, Any] = {"open": mark, "close_pattern": _closing(text[end:], ends), "content": "json"}
    if is_list:
        return field | {"transform": transform, "transform_each": True}
    return field | {"repeats": True, "transform": _inside(transform, "content")}


def _closing(literal: str, ends: Sequence[str]) -> str:
    """Return a pattern of what closes a call: the text after it, or else a stop token."""
    close = literal.strip()
    return f"{_loose(close)}\\s*" if close else _any_of(ends)


def _json_places(call: Any) -> dict[str, Any] | None:
    """Return the places of a call's parts in a JSON object, as placeholders."""
    places: dict[str, str] = {}

    def visit(value: Any, path: str) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                visit(inner, f"{path}.{key}" if path else key)
        elif value in (NAME_MARK, ID_MARK, ARGUMENTS_MARK):
            places.setdefault(value, path)

    visit(call, "")
    if NAME_MARK not in places or ARGUMENTS_MARK not in places:
        return None
    function = {"name": f"{{{places[NAME_MARK]}}}", "arguments": f"{{{places[ARGUMENTS_MARK]}}}"}
    found: dict[str, Any] = {**CALL, "function": function}
    if ID_MARK in places:
        found["id"] = f"{{{places[ID_MARK]}}}"
    return found


def _inside(transform: Any, root: str) -> Any:
    """Return placeholders that begin with another name."""
    if isinstance(transform, Mapping):
        return {key: _inside(value, root) for key, value in transform.items()}
    if isinstance(transform, str) and transform.startswith("{"):
        return f"{{{root}.{transform[1:-1]}}}"
    return transform


def _named_json(spans: Sequence[_CallSpan], ends: Sequence[str]) -> dict[str, Any]:
    """Describe calls whose name comes before a JSON object."""
    found: list[dict[str, Any]] = []
    for opening, slots in spans:
        kinds = [kind for kind, _ in slots]
        if kinds[-1] is not SlotKind.ARGUMENTS or SlotKind.NAME not in kinds:
            raise _NotExpressedError("the name of a call follows its arguments")
        pattern, groups = _head_pattern(opening, slots[:-1])
        close = _closing(slots[-1][1], ends)
        function = {"name": "{name}", "arguments": "{content}"}
        transform: dict[str, Any] = {**CALL, "function": function}
        if "id" in groups:
            transform["id"] = "{id}"
        found.append(_pattern_field(pattern, close, "json", {}, transform))
    return _same(found)


def _head_pattern(opening: str, slots: Sequence[tuple[SlotKind, str]]) -> tuple[str, set[str]]:
    """Return a pattern of a call's head, and the names of its groups."""
    pattern = _loose(opening.lstrip())
    groups: set[str] = set()
    for kind, literal in slots:
        group = kind.value
        pattern += f"(?P={group})" if group in groups else f"(?P<{group}>{NAME_PATTERN})"
        groups.add(group)
        pattern += _loose(literal)
    return pattern, groups


def _loose(literal: str) -> str:
    """Return a pattern of a literal, with any white space for its own."""
    return r"\s*".join(re.escape(word) for word in re.split(r"\s+", literal))


def _exact(literal: str) -> str:
    """Return a pattern of a literal, with its own white space."""
    return re.escape(literal).replace("\\\n", "\\n").replace("\\ ", " ")


def _named_keys(grammar: Grammar, spans: Sequence[_CallSpan], ends: Sequence[str]) -> dict[str, Any]:
    """Describe calls whose arguments come key by key."""
    if grammar.quote:
        return _quoted_object(grammar, spans, ends)
    keyed = [span for span in spans if any(kind is SlotKind.KEY for kind, _ in span.slots)]
    if not keyed:
        raise _NotExpressedError("its calls have no form for arguments")
    found: list[dict[str, Any]] = []
    for opening, slots in keyed:
        kinds = [kind for kind, _ in slots]
        first = kinds.index(SlotKind.KEY)
        if SlotKind.NAME not in kinds[:first]:
            raise _NotExpressedError("the name of a call follows its arguments")
        between, after = slots[first][1], slots[first + 1][1]
        before = slots[first - 1][1]
        separators = {
            edge.literal
            for kind in (SlotKind.TEXT, SlotKind.VALUE)
            for edge in grammar.edges.get(Slot(kind), ())
            if edge.target.kind is SlotKind.KEY
        }
        value_end, key_start, head, tail = _around_values(before, after, separators)
        if not value_end.strip() or not key_start.strip():
            raise _NotExpressedError("its arguments come key by key without marks")
        pattern, _ = _head_pattern(opening, (*slots[: first - 1], (kinds[first - 1], head)))
        tag = f"{_loose(key_start.lstrip())}(?P<key>.+?){_exact(between)}(?P<value>.*?){_exact(value_end)}"
        arguments = {"tag_pattern": tag, "value_parser": {"name": "text", "args": {"strip": False}}}
        transform = {**CALL, "function": {"name": "{name}", "arguments": "{content}"}}
        found.append(_pattern_field(pattern, _closing(tail, ends), "xml-inline", arguments, transform))
    return _same(found)


def _around_values(before: str, after: str, separators: set[str]) -> tuple[str, str, str, str]:
    """Cut the literals around arguments.

    Args:
        before: From the call's head to its first key.
        after: From its last value to the end.
        separators: From a value to the next key.

    Returns:
        What ends a value, what begins a key, the rest of the head, and the rest of the end.
    """
    if len(separators) != 1:
        raise _NotExpressedError("its arguments are separated in several ways")
    (separator,) = separators
    size = 0
    while size < min(len(before), len(separator)) and before[-1 - size] == separator[-1 - size]:
        size += 1
    mark = MARK_START.search(separator, len(separator) - size)
    cut = len(separator) - size if mark is None else mark.start()
    size = len(separator) - cut
    value_end, key_start = separator[:cut], separator[cut:]
    if not after.startswith(value_end.rstrip()):
        raise _NotExpressedError("the last argument ends in another way than the others")
    ended = value_end.rstrip()
    return ended, key_start, before[: len(before) - size], after[len(ended) :]


def _quoted_object(grammar: Grammar, spans: Sequence[_CallSpan], ends: Sequence[str]) -> dict[str, Any]:
    """Describe calls with an object in a form of its own: bare keys, and marks around texts."""
    found: list[dict[str, Any]] = []
    for opening, slots in spans:
        kinds = [kind for kind, _ in slots]
        if kinds[0] is not SlotKind.NAME:
            raise _NotExpressedError("the name of a call follows its arguments")
        literal, last = slots[0][1], slots[-1][1]
        if "{" not in literal or "}" not in last:
            raise _NotExpressedError("its arguments are no object")
        pattern, _ = _head_pattern(opening, ((SlotKind.NAME, literal[: literal.index("{")]),))
        arguments = {"string_delims": [[grammar.quote, grammar.quote]], "unquoted_keys": True}
        transform = {**CALL, "function": {"name": "{name}", "arguments": "{content}"}}
        close = _closing(last[last.rindex("}") + 1 :], ends)
        found.append(_pattern_field(pattern, close, "json", arguments, transform))
    return _same(found)


def _pattern_field(
    pattern: str, close: str, content: str, arguments: Mapping[str, Any], transform: Mapping[str, Any]
) -> dict[str, Any]:
    field = {"open_pattern": pattern, "close_pattern": close, "repeats": True, "content": content}
    if arguments:
        field["content_args"] = dict(arguments)
    return field | {"transform": dict(transform)}


def _same(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the one description of calls."""
    different = [one for one in found if one != found[0]]
    if different:
        raise _NotExpressedError("its calls are written in several ways")
    return found[0]


# ---- the check


def _wrong_probes(template: RolloutTemplate, derived: Mapping[str, Any]) -> list[str]:
    """Name the probes whose answers transformers reads in another way."""
    try:
        from transformers.utils.chat_parsing import parse_response
    except ImportError:
        raise MissingExtraError("transformers>=5.15", "hf", "a response template") from None
    wrong: list[str] = []
    for probe in probe_conversations():
        try:
            answer = template.answer(probe.conversation)
        except RecordError:
            continue
        text = "".join(span.text for span in answer.spans) + answer.stop
        prompt = template.plain(probe.conversation._replace(messages=probe.conversation.messages[:-1]), prompt=True)
        try:
            found = parse_response(text, dict(derived), prefix=prompt or "", tools=_typed_tools(probe))
        except (ValueError, KeyError):
            wrong.append(probe.name)
            continue
        is_same = _said(found) == _wanted(probe.conversation.messages[-1])
        if not is_same and _written_back(template, probe.conversation, found) != text:
            wrong.append(probe.name)
    return wrong


def _written_back(template: RolloutTemplate, conversation: Conversation, found: Mapping[str, Any]) -> str | None:
    """Return the answer that the template writes for what transformers read."""
    own = conversation.messages[-1].tool_calls
    order = own[0].order if own else 0
    calls = [
        ToolCall(
            call["function"]["name"],
            _json_text(call["function"]["arguments"]),
            id=call.get("id") or call_id(index),
            order=order,
        )
        for index, call in enumerate(found.get("tool_calls") or ())
    ]
    reasoning = found.get("reasoning_content")
    message = Message(Role.ASSISTANT, found.get("content") or "", reasoning=reasoning, tool_calls=tuple(calls))
    try:
        answer = template.answer(conversation._replace(messages=(*conversation.messages[:-1], message)))
    except RecordError:
        return None
    return "".join(span.text for span in answer.spans) + answer.stop


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _typed_tools(probe: AnswerProbe) -> list[Any]:
    """Return the definitions of a probe's tools, with the types of its arguments."""
    tools: dict[str, Any] = {}
    for call in probe.conversation.messages[-1].tool_calls:
        types = {key: {"type": _type_of(value)} for key, value in json.loads(call.arguments).items()}
        properties = tools.setdefault(call.name, {})
        properties |= types
    return [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
        for name, properties in tools.items()
    ]


def _type_of(value: Any) -> str:
    names = {str: "string", int: "integer", dict: "object", list: "array"}
    return names[type(value)]


def _said(found: Mapping[str, Any]) -> tuple[Any, ...]:
    calls = [call["function"] for call in found.get("tool_calls") or ()]
    return (
        (found.get("content") or "").strip(),
        (found.get("reasoning_content") or "").strip(),
        [(call["name"], _arguments(call["arguments"])) for call in calls],
    )


def _arguments(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value.startswith("{") else value


def _wanted(message: Message) -> tuple[Any, ...]:
    return (
        message.content.strip(),
        (message.reasoning or "").strip(),
        [(call.name, json.loads(call.arguments)) for call in message.tool_calls],
    )
