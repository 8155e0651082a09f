"""Field maps: `user=question assistant=answer` says what the fields of records are called."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from chatmill.core.conversation import Role
from chatmill.core.message_parser import MESSAGE_FIELDS, ROLE_ALIASES
from chatmill.errors import ConfigError, UnknownNameError
from chatmill.read.record_shape import Shape, Turn

FieldMap = Mapping[str, str | Sequence[str]]
ROLES = ("system", "developer", "user", "assistant", "tool")
IN_MESSAGES = ("role", "content")
LABELS = ("reasoning", "id", "source", "tools")
NAMES = (*ROLES, "messages", *IN_MESSAGES, *LABELS)
JOIN = "+"
"""Between two fields that make one message: `user=instruction+input`."""

_ASKS = ("user", "question", "query", "prompt", "instruction", "problem", "human", "request", "task", "input", "source")
_ANSWERS = ("assistant", "answer", "response", "completion", "output", "reply", "solution", "gpt", "bot", "target")
_SYSTEMS = ("system", "persona")
_SPEAKERS = ("role", "from", "speaker", "author", "sender", "who", "name", "type")


def parse_map(pairs: Iterable[str]) -> dict[str, str | list[str]]:
    """`NAME=FIELD` words of a command line; a name that is given twice has both fields, in this order."""
    fields: dict[str, list[str]] = {}
    for pair in pairs:
        name, equals, field = pair.partition("=")
        if not equals or not name.strip() or not field:
            raise ConfigError(f"a field map is NAME=FIELD, such as user=question, not {pair!r}")
        fields.setdefault(name.strip().lower(), []).append(field)
    return {name: listed[0] if len(listed) == 1 else listed for name, listed in fields.items()}


def map_text(fields: FieldMap) -> str:
    """Return a field map as one line of JSON, which `mapped_shape` takes; a `ConfigError` if it cannot be one."""
    if not isinstance(fields, Mapping) or not fields:
        raise ConfigError("a map has a field for each name, such as {user: question, assistant: answer}")
    for name, field in fields.items():
        if name not in NAMES:
            raise UnknownNameError("name in a map", name, list(NAMES))
        listed = [field] if isinstance(field, str) else field
        if not isinstance(listed, list | tuple) or not listed or not all(isinstance(f, str) and f for f in listed):
            raise ConfigError(f"{name!r} in a map must be the name of a field, found {field!r}")
        if len(listed) > 1 and name not in ROLES:
            raise ConfigError(f"{name!r} in a map is one field, found {', '.join(listed)}")
    text = json.dumps(fields, ensure_ascii=False)
    mapped_shape(text)
    return text


def map_of(text: str) -> dict[str, str | list[str]]:
    """Return the field map of a text that `map_text` wrote."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"a shape that begins with a brace must be a field map in JSON: {error}") from None
    return dict(fields)


@lru_cache(maxsize=64)
def mapped_shape(text: str) -> Shape:
    """Return the shape of a field map, given as `map_text` writes it; equal maps give one shape."""
    fields = map_of(text)
    keys_of = {name: [field] if isinstance(field, str) else field for name, field in fields.items()}
    labels: dict[str, Any] = {name: keys_of[name][0] for name in LABELS if name in keys_of}
    if "reasoning" in labels:
        labels["reasoning"] = (labels["reasoning"],)
    form = _listed(keys_of) if "messages" in keys_of else _turns(keys_of)
    shape = Shape(name=f"map {map_words(fields)}", definition=text, **form, **labels)
    turns = [key for _, keys in shape.turns for key in keys]
    outside = [
        *shape.lists,
        *shape.system,
        *turns,
        *shape.reasoning,
        shape.id,
        shape.source,
        shape.tools,
        shape.options,
    ]
    for keys in (outside, [shape.role, shape.content]):
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise ConfigError(f"the field {twice[0]!r} has two meanings")
    for name in IN_MESSAGES:
        if getattr(shape, name) in MESSAGE_FIELDS - {name}:
            raise ConfigError(f"{name!r} cannot be {getattr(shape, name)!r}, which means something else in a message")
    return shape


def _listed(keys_of: Mapping[str, list[str]]) -> dict[str, Any]:
    """Records with a list of messages; roles in the map are spellings there, but for `system`, which is a field."""
    if "reasoning" in keys_of:
        raise ConfigError("'reasoning' is a field next to question and answer; messages of a list have theirs inside")
    spelled = {field.strip().lower(): Role(role) for role in ROLES[1:] for field in keys_of.get(role, ())}
    return {
        "lists": (keys_of["messages"][0],),
        "system": tuple(keys_of.get("system", ())[:1]),
        "roles": {**spelled, **ROLE_ALIASES, **spelled},  # looked for in this order
        **{name: keys_of[name][0] for name in IN_MESSAGES if name in keys_of},
    }


def _turns(keys_of: Mapping[str, list[str]]) -> dict[str, Any]:
    """Records whose messages are fields of their own, in the order of the map."""
    if wrong := [name for name in IN_MESSAGES if name in keys_of]:
        raise ConfigError(f"{wrong[0]!r} in a map is a field of each message, so it needs messages=FIELD next to it")
    if "assistant" not in keys_of:
        raise ConfigError(
            f"a map needs assistant=FIELD (and user=FIELD), or messages=FIELD; found {', '.join(keys_of) or 'nothing'}"
        )
    system = keys_of.get("system", [])
    if len(system) > 1:
        raise ConfigError(f"'system' in a map is one message; two fields of it are joined: system={JOIN.join(system)}")
    spoken = _in_turn({name: keys_of[name] for name in keys_of if name in ROLES[1:]})
    turns: list[Turn] = [(Role(name), tuple(field.split(JOIN))) for name, field in spoken]
    return {"turns": tuple(turns), "system": tuple(system[0].split(JOIN)) if system else ()}


def _in_turn(keys_of: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    """Return the fields in the order of their messages, questions and answers by turns."""
    questions, answers = keys_of.get("user", []), keys_of["assistant"]
    if len(answers) > 1 and len(questions) != len(answers):
        raise ConfigError(
            f"a map with {len(answers)} fields for the assistant needs as many for the user, found {len(questions)}"
        )
    first = [name for name in keys_of if name not in ("user", "assistant")]
    if len(answers) > 1:
        pairs = zip(questions, answers, strict=True)
        talk = [turn for ask, answer in pairs for turn in (("user", ask), ("assistant", answer))]
    else:
        talk = [(name, field) for name in keys_of if name not in first for field in keys_of[name]]
    return [*((name, field) for name in first for field in keys_of[name]), *talk]


def map_words(fields: FieldMap) -> str:
    """Return a field map as it is written after `--shape`."""
    pairs = [(name, [field] if isinstance(field, str) else field) for name, field in fields.items()]
    return " ".join(shlex.quote(f"{name}={field}") for name, listed in pairs for field in listed)


def suggestion(records: Sequence[object]) -> str:
    """Return what the first record has, and a map that may read it."""
    record = next((record for record in records if isinstance(record, Mapping)), None)
    if record is None:
        lists = bool(records) and all(map(_is_listed, records))
        return "none of them is an object" + (
            ". If each is a list of messages: jq -c '{messages: .}' FILE > NEW-FILE" if lists else ""
        )
    keys = ", ".join(map(str, list(record)[:12])) or "nothing"
    fields = guessed_map(record)
    inner = next((key for key, value in record.items() if _is_listed(value)), None)
    if fields is None and inner is not None and len(records) == 1:
        return f"the first record has: {keys}. If {inner!r} is the list of records: jq .{inner} FILE > NEW-FILE.json"
    if fields is None:
        return f"the first record has: {keys}. Say which fields are what: --shape user=FIELD --shape assistant=FIELD"
    words = " ".join(f"--shape {shlex.quote(f'{name}={field}')}" for name, field in fields.items())
    return f"the first record has: {keys}. This may read it: {words}"


def guessed_map(record: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the map that the names of a record's fields suggest; None where nothing does."""
    for key, value in record.items():
        if _is_listed(value):
            messages = _guessed_messages(value)
            if messages is not None:
                return {"messages": str(key), **messages}
    texts = [str(key) for key, value in record.items() if isinstance(value, str)]
    asks, answers = _named(texts, _ASKS), _named(texts, _ANSWERS)
    asks = [key for key in asks if key not in answers[:1]]
    if len(texts) == 2 and (asks or answers):  # the one next to a known one
        asks = asks or [key for key in texts if key not in answers[:1]]
        answers = answers or [key for key in texts if key not in asks[:1]]
    if not asks or not answers:
        return None
    systems = [key for key in _named(texts, _SYSTEMS) if key not in (asks[0], answers[0])]
    return {**({"system": systems[0]} if systems else {}), "user": asks[0], "assistant": answers[0]}


def _is_listed(value: object) -> bool:
    """Return whether a value is a list of objects."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _guessed_messages(items: Sequence[Mapping[str, Any]]) -> dict[str, str] | None:
    texts = [str(key) for key, value in items[0].items() if isinstance(value, str)]
    role = next((key for key in _named(texts, _SPEAKERS)), None)
    content = max((key for key in texts if key != role), key=lambda key: len(items[0][key]), default=None)
    if role is None or content is None:
        return None
    spoken = list(dict.fromkeys(str(item.get(role)) for item in items))
    unknown = [name for name in spoken if name.strip().lower() not in ROLE_ALIASES]
    roles = {ROLE_ALIASES.get(name.strip().lower()) for name in spoken}
    free = [name for name in ("user", "assistant") if Role(name) not in roles]
    return {"role": role, "content": content, **dict(zip(free, unknown, strict=False))}


def _named(keys: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the keys that are one of these words, or hold one; earlier words and whole ones first."""
    whole = [key for word in words for key in keys if key.lower() == word]
    return list(dict.fromkeys([*whole, *(key for word in words for key in keys if word in key.lower())]))
