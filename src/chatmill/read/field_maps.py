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
_SYSTEMS = ("system", "system_prompt", "persona")
_SPEAKERS = ("role", "from", "speaker", "author", "sender", "who", "name", "type")
_CONTENTS = ("content", "text", "value", "message", "body", "utterance")


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
    shape = Shape(name=f"map {map_words(fields)}", definition=text, hint=_close_field, **form, **labels)
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


def _close_field(record: Mapping[str, Any], field: str) -> str:
    """Name the field of a record that was meant, for the error about a field that is missing."""
    import difflib

    close = difflib.get_close_matches(field, list(map(str, record)), n=1)
    return f". Did you mean {close[0]!r}?" if close else ""


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
    roles = _unknown_roles(record, fields)
    whose = f"; its roles are {', '.join(roles)}: add --shape user=ROLE --shape assistant=ROLE" if roles else ""
    return f"the first record has: {keys}. This may read it: {words}{whose}"


def guessed_map(record: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the map that the names of a record's fields say; None where they say nothing."""
    for key, value in record.items():
        if _is_listed(value):
            role = _named(value[0], _SPEAKERS)
            content = _named(value[0], _CONTENTS)
            if role is not None and content is not None:
                return {"messages": str(key), "role": role, "content": content}
    named = {"system": _named(record, _SYSTEMS), "user": _named(record, _ASKS), "assistant": _named(record, _ANSWERS)}
    if named["user"] is None or named["assistant"] is None:
        return None
    return {name: key for name, key in named.items() if key is not None}


def _is_listed(value: object) -> bool:
    """Return whether a value is a list of objects."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _unknown_roles(record: Mapping[str, Any], fields: Mapping[str, str]) -> list[str]:
    """List the spellings of roles in a list of messages that are not known."""
    if "role" not in fields:
        return []
    spelled = dict.fromkeys(str(message.get(fields["role"])) for message in record[fields["messages"]])
    return [name for name in spelled if name.strip().lower() not in ROLE_ALIASES]


def _named(record: Mapping[str, Any], words: Sequence[str]) -> str | None:
    """Find the first field of text that is one of these words; earlier words first."""
    by_name = {str(key).lower(): str(key) for key, value in record.items() if isinstance(value, str)}
    return next((by_name[word] for word in words if word in by_name), None)
