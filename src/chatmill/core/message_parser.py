"""Parses decoded messages, with an error that names the field of whatever is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from chatmill.core.conversation import NOTHING, Message, Role, ToolCall, call_order
from chatmill.core.part_training import (
    DETAIL,
    PartWeight,
    part_error,
    refuse_part_training,
    spans_of_detail,
    spans_of_parts,
)
from chatmill.core.pictures import PICTURE_PARTS, Picture, picture_of_part
from chatmill.core.sampled import SAMPLED_FIELDS, sampled_fields
from chatmill.core.weight_spans import ARGUMENTS, CONTENT, REASONING, WeightSpan
from chatmill.errors import RecordError

ROLE_ALIASES: Mapping[str, Role] = {
    **{role.value: role for role in Role},
    "human": Role.USER,
    "prompter": Role.USER,
    "gpt": Role.ASSISTANT,
    "bot": Role.ASSISTANT,
    "model": Role.ASSISTANT,
    "chatgpt": Role.ASSISTANT,
    "function": Role.TOOL,
    "ipython": Role.TOOL,
    "observation": Role.TOOL,
    "function_response": Role.TOOL,
}
"""Spellings of roles, matched after trimming white space and lowering case."""
MESSAGE_FIELDS = frozenset(
    {"role", "content", "reasoning_content", "reasoning", "thinking", "tool_calls", "function_call", "tool_call_id"}
    | {"name", "recipient", "channel", "content_type", "weight", "train", DETAIL}
    | SAMPLED_FIELDS
)
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
MEDIA_FIELDS = ("images", "image", "videos", "audios")
"""Fields of records and messages that hold something other than text."""
MIN_WEIGHT, MAX_WEIGHT = 1e-30, 1e30
"""Weights and margins are kept as float32, which ends not far beyond."""
MAX_CHARACTERS = 64 << 20
"""Characters of the longest text that a template writes (`render/jinja/limits.py`), and so of any text of a record."""
PART_FIELDS = frozenset({"type", "text", "train", "weight"})
"""Keys of text parts that mean something."""
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
OTHER_FORMATS = {
    "from": " (this looks like ShareGPT: --shape sharegpt reads such files, --shape each those that mix formats)",
    "role": " (this looks like OpenAI's form: --shape openai reads such files, --shape each those that mix formats)",
}
"""Advice for a message without a role, by a field that it has instead."""
HARMONY_PARTS = {"system_content": Role.SYSTEM, "developer_content": Role.DEVELOPER}


def parse_messages(
    items: object,
    *,
    path: str = "messages",
    role_key: str = "role",
    content_key: str = "content",
    aliases: Mapping[str, Role] = ROLE_ALIASES,
) -> tuple[Message, ...]:
    """Parse a decoded list of message objects.

    Raise `RecordError` with a field path such as `messages[2].content`.
    """
    if not isinstance(items, list | tuple):
        raise mistyped("expected a list of messages", items, code="messages_type", path=path)
    if not items:
        raise RecordError("the record has no messages", code="no_messages", path=path)
    messages: list[Message] = []
    for index, item in enumerate(items):
        try:
            if len(item) == 2:  # the common case: exactly a known role and a text
                role, content = aliases.get(item[role_key]), item[content_key]
                is_text = type(content) is str and len(content) <= MAX_CHARACTERS
                if role is not None and is_text and (content.isascii() or is_encodable(content)):
                    messages.append(Message(role, content))
                    continue
        except (TypeError, KeyError, LookupError):
            pass
        messages.append(parse_message(item, f"{path}[{index}]", role_key, content_key, aliases))
    return tuple(messages)


@cache
def _fields_of(role_key: str, content_key: str) -> frozenset[str]:
    """Return the fields of a message that mean something."""
    return frozenset({*MESSAGE_FIELDS, role_key, content_key})


def parse_message(
    item: object,
    path: str,
    role_key: str = "role",
    content_key: str = "content",
    aliases: Mapping[str, Role] = ROLE_ALIASES,
) -> Message:
    """Parse one decoded message object; `path` is its place in the record."""
    if not isinstance(item, dict):
        raise mistyped("a message must be an object", item, code="message_type", path=path)
    refuse_media(item, path)
    fields = _fields_of(role_key, content_key)
    refuse_part_training(item, path, fields)
    role = _role(item, path, role_key, aliases)
    calls = _tool_calls(item, path)
    texts = _PartTexts()
    reasoning = texts.reasoning(item, path)
    content, structured, parts = _content(item, path, content_key, role, texts, optional=bool(calls))
    sampled = sampled_fields(item, path, is_assistant=role is Role.ASSISTANT)
    if "logprobs" not in sampled and item.get("logprobs") is not None:  # which nobody reads
        fields -= {"logprobs"} - {role_key, content_key}
    texts.read_details(item, path, content if structured is None and not parts else None, reasoning, calls)
    weight, spans = texts.weights(
        _weight(item, path, code="bad_weight"), path, is_sampled="token_ids" in sampled, has_images=bool(parts)
    )
    return Message(
        role=role,
        content=content,
        reasoning=reasoning,
        tool_calls=calls,
        tool_call_id=_optional_text(item, "tool_call_id", path),
        name=_optional_text(item, "name", path),
        recipient=_optional_text(item, "recipient", path),
        channel=_optional_text(item, "channel", path),
        content_type=_optional_text(item, "content_type", path),
        weight=weight,
        structured=structured,
        extra={k: v for k, v in item.items() if k not in fields} | texts.unused or NOTHING,
        has_content=item.get(content_key) is not None,
        parts=parts,
        spans=spans,
        **sampled,
    )


def refuse_media(item: Mapping[str, Any], path: str = "") -> None:
    """Refuse images in a message, and sound or video in a record: the text alone would say less."""
    for name in MEDIA_FIELDS:
        if item.get(name):
            raise RecordError(
                f"{name!r} does not hold text, and only text can be rendered. Leave such records out (on_error: "
                f"quarantine), or take {name!r} away to train on the text alone",
                code="non_text_part",
                path=f"{path}.{name}" if path else name,
            )


def _role(item: Mapping[str, Any], path: str, role_key: str, aliases: Mapping[str, Role]) -> Role:
    if role_key not in item:
        other = "role" if "role" in item else "from"
        hint = OTHER_FORMATS[other] if other in item else ""
        raise RecordError(f"the message has no {role_key!r}{hint}", code="missing_role", path=f"{path}.{role_key}")
    raw = item[role_key]
    if not isinstance(raw, str):
        raise mistyped("a role must be a string", raw, code="role_type", path=f"{path}.{role_key}")
    role = aliases.get(raw) or aliases.get(raw.strip().lower())
    if role is None:
        raise RecordError(
            f"unknown role {raw!r}; known roles: {', '.join(sorted(set(aliases)))}",
            code="unknown_role",
            path=f"{path}.{role_key}",
        )
    return role


def _content(
    item: Mapping[str, Any], path: str, key: str, role: Role, texts: _PartTexts, *, optional: bool
) -> tuple[str, Mapping[str, Any] | None, tuple[str | Picture, ...]]:
    """Parse a content as one of three: text, structured Harmony system or developer content, parts with pictures."""
    content, path = item.get(key), f"{path}.{key}"
    if isinstance(content, str):
        return checked_text(content, path), None, ()
    if content is None:
        if optional:
            return "", None, ()
        raise RecordError(
            "the content is null or missing, which is allowed only next to tool calls",
            code="null_content",
            path=path,
        )
    if not isinstance(content, list):
        raise mistyped("content must be a string or a list of text parts", content, code="content_type", path=path)
    if len(content) == 1 and isinstance(content[0], dict) and content[0].get("type") in list(HARMONY_PARTS):
        part = content[0]
        if HARMONY_PARTS[part["type"]] is not role:
            raise RecordError(
                f"a part of type {part['type']!r} in a {role.value} message",
                code="bad_part",
                path=f"{path}[0].type",
            )
        refuse_part_training(part, f"{path}[0]")
        check_json(part, path=f"{path}[0]", code="bad_part")
        return "", part, ()
    parts = [texts.part(part, f"{path}[{i}]", key) for i, part in enumerate(content)]
    strings = [part.text for part in parts if isinstance(part, PartWeight)]
    if len(strings) < len(parts):
        texts.refuse_beside_images(parts, path)
        return "", None, tuple(part.text if isinstance(part, PartWeight) else part for part in parts)
    texts.add(CONTENT, [part for part in parts if isinstance(part, PartWeight)])
    return "".join(strings), None, ()


def check_json(value: object, *, path: str, code: str) -> str:
    """Return a value as JSON; refuse lone surrogates and what has no form there, such as dates of Parquet."""
    _refuse_not_finite(value, path)
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise RecordError(f"a value has no form in JSON: {error}", code=code, path=path) from None
    return checked_text(text, path)


def _refuse_not_finite(value: object, path: str) -> None:
    """Refuse infinity and NaN in a value, which Parquet may hold: in JSON they would be no numbers."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise RecordError(f"{value} is not a number that JSON knows", code="number_range", path=path)
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value


class _PartTexts:
    """The parts of one message's texts: what they say about their training, and keys without a meaning."""

    def __init__(self) -> None:
        self.unused: dict[str, Any] = {}
        """Keys of parts that mean nothing here, by what they are called in a sentence."""
        self._spans: list[WeightSpan] = []
        self._fields: set[str] = set()
        """The fields of which something is said."""

    def part(self, part: object, path: str, key: str) -> PartWeight | Picture:
        """Parse one part of a text: a text or an image. `key` is the field that it is in."""
        if not isinstance(part, dict):
            raise mistyped("a content part must be an object", part, code="bad_part", path=path)
        kind = part.get("type", "text")
        if isinstance(kind, str) and kind in PICTURE_PARTS:
            refuse_part_training(part, path)
            return picture_of_part(part, path)
        refuse_part_training(part, path, ("train", "weight"))
        text = _text_of_part(part, kind, path)
        others = {name: value for name, value in part.items() if name not in PART_FIELDS and value is not None}
        self.unused |= {f"{key}[].{name}": value for name, value in others.items()}
        said = {key: part[key] for key in ("train", "weight") if part.get(key) not in (None, "", [], {})}
        own = _weight(said, path, code="part_training")
        is_plain = "weight" not in said  # `train: true` says no more than that it is trained
        return PartWeight(text, None if is_plain and own else own, own is not None)

    def reasoning(self, item: Mapping[str, Any], path: str) -> str | None:
        """Read the reasoning of a message, a text or a list of text parts."""
        whole = dict(item)
        for key in REASONING_FIELDS:
            value = item.get(key)
            if not isinstance(value, list):
                continue
            place = f"{path}.{key}"
            parts = [self.part(part, f"{place}[{i}]", key) for i, part in enumerate(value)]
            texts = [part for part in parts if isinstance(part, PartWeight)]
            if len(texts) < len(parts):
                raise RecordError("reasoning has no images", code="non_text_part", path=place)
            self.add(REASONING, texts)
            whole[key] = "".join(part.text for part in texts)
        return reasoning_of(whole, path)

    def add(self, field: str, parts: Sequence[PartWeight]) -> None:
        """Keep what the parts of a field say."""
        if any(part.says_something for part in parts) and field not in self._fields:
            self._fields.add(field)
            self._spans += spans_of_parts(parts, field)

    def refuse_beside_images(self, parts: Sequence[PartWeight | Picture], path: str) -> None:
        """Refuse weights of parts in a message that has images."""
        for i, part in enumerate(parts):
            if isinstance(part, PartWeight) and part.says_something:
                raise part_error(
                    "parts of a message with images have no weights of their own: give the message a 'weight', or put "
                    "the images into a message of their own",
                    f"{path}[{i}]",
                )

    def read_details(
        self,
        item: Mapping[str, Any],
        path: str,
        content: str | None,
        reasoning: str | None,
        calls: Sequence[ToolCall],
    ) -> None:
        """Read the `train_detail` of a message and of its calls."""
        texts = {} if content is None else {CONTENT: content}
        if reasoning is not None:
            texts |= dict.fromkeys((REASONING, *REASONING_FIELDS), reasoning)
        self._read_detail(item.get(DETAIL), f"{path}.{DETAIL}", texts, CONTENT)
        legacy = item.get("function_call")
        given = item.get("tool_calls") or [] if legacy is None else [legacy]
        for number, (raw, call) in enumerate(zip(given, calls, strict=True)):
            place = f"{path}.tool_calls[{number}]" if legacy is None else f"{path}.function_call"
            function, inner = (raw["function"], f"{place}.function") if "function" in raw else (raw, place)
            if function.get(DETAIL) and not isinstance(function.get("arguments"), str):
                raise part_error("'arguments' must be a text, of which characters are counted", f"{inner}.{DETAIL}")
            texts = {ARGUMENTS: call.arguments}
            self._read_detail(function.get(DETAIL), f"{inner}.{DETAIL}", texts, ARGUMENTS, number)

    def _read_detail(self, detail: object, path: str, texts: Mapping[str, str], field: str, call: int = 0) -> None:
        if detail is None or detail in ([], "", {}):
            return
        for name, spans in spans_of_detail(detail, texts, field, path, call).items():
            of = REASONING if name in REASONING_FIELDS else name
            known = f"{of}[{call}]" if of == ARGUMENTS else of
            if known in self._fields:
                raise part_error(f"the {of} says twice how it is trained: keep one of its parts and {DETAIL!r}", path)
            self._fields.add(known)
            self._spans += [span._replace(field=of) for span in spans]

    def weights(
        self, weight: float | None, path: str, *, is_sampled: bool, has_images: bool
    ) -> tuple[float | None, tuple[WeightSpan, ...]]:
        """Return the weight of a message, and of the characters that have one of their own.

        A message of weight 0 has it for all its text. One that says something of a part has weight 1 elsewhere.
        """
        if not self._fields:
            return weight, ()
        if weight == 0:
            return weight, ()
        spans = tuple(sorted(self._spans))
        if spans and is_sampled:
            raise part_error(
                "parts of an answer have weights, and it has the tokens that were sampled: which of these are meant is "
                "not known. Take token_ids away",
                path,
            )
        if spans and has_images:
            raise part_error("parts of a message with images have no weights of their own", path)
        return 1.0 if weight is None else weight, spans


def _text_of_part(part: Mapping[str, Any], kind: object, path: str) -> str:
    """Return the text of a part of a content."""
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise RecordError(
            f"a content part of type {kind!r} is not text; only {', '.join(sorted(TEXT_PARTS))} can be rendered. Leave "
            "such records out (on_error: quarantine), or take the part away",
            code="non_text_part",
            path=f"{path}.type",
        )
    return checked_string(part.get("text"), "the text of a part", code="bad_part", path=f"{path}.text")


def reasoning_of(item: Mapping[str, Any], path: str, fields: Sequence[str] = REASONING_FIELDS) -> str | None:
    """Read the reasoning of a message or record from the first of `fields` that it has."""
    keys = [key for key in fields if item.get(key) is not None]
    if not keys:
        return None
    for other in keys[1:]:
        if item[other] != item[keys[0]]:
            raise RecordError(
                f"{keys[0]!r} and {other!r} are both given and differ; keep one",
                code="reasoning_twice",
                path=f"{path}.{other}".lstrip("."),
            )
    return checked_string(item[keys[0]], "reasoning", code="reasoning_type", path=f"{path}.{keys[0]}".lstrip("."))


def _tool_calls(item: Mapping[str, Any], path: str) -> tuple[ToolCall, ...]:
    calls, legacy = item.get("tool_calls"), item.get("function_call")
    if legacy is not None:
        if calls:
            raise RecordError(
                "'tool_calls' and 'function_call' are both given; keep one", code="bad_tool_call", path=path
            )
        return (_tool_call(legacy, f"{path}.function_call"),)
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise mistyped("tool_calls must be a list", calls, code="bad_tool_call", path=f"{path}.tool_calls")
    return tuple(_tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls))


def _tool_call(call: object, path: str) -> ToolCall:
    if not isinstance(call, dict):
        raise mistyped("a tool call must be an object", call, code="bad_tool_call", path=path)
    function, inner = (call["function"], f"{path}.function") if "function" in call else (call, path)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RecordError(
            "a tool call needs a function with a 'name' (a string) and 'arguments'",
            code="bad_tool_call",
            path=path,
        )
    refuse_part_training(call, path, (DETAIL,) if function is call else ())
    refuse_part_training(function, inner, (DETAIL,))
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, dict | list):
        arguments = check_json(arguments, path=f"{inner}.arguments", code="bad_tool_call")
    if not isinstance(arguments, str):
        rule = "arguments must be a string or an object"
        raise mistyped(rule, arguments, code="bad_tool_call", path=f"{inner}.arguments")
    return ToolCall(
        checked_text(function["name"], f"{inner}.name"),
        checked_text(arguments, f"{inner}.arguments"),
        _optional_text(call, "id", path),
        call_order(call if "function" in call else (), function),
    )


def _weight(item: Mapping[str, Any], path: str, *, code: str) -> float | None:
    """`train: false` is 0 whatever the weight; `train: true` alone is 1."""
    train, weight = item.get("train"), item.get("weight")
    if train is not None and not isinstance(train, bool):
        raise mistyped("'train' must be true or false", train, code=code, path=f"{path}.train")
    if weight is not None and not (is_number(weight) and weight >= 0 and fits_float32(weight)):
        raise RecordError(
            f"'weight' must be a number from 0 to {MAX_WEIGHT:g}, above 0 from {MIN_WEIGHT:g} on, found "
            f"{str(weight)[:40]}",
            code=code,
            path=f"{path}.weight",
        )
    if train is False:
        return 0.0
    if weight is not None:
        return float(weight)
    return 1.0 if train else None


def is_number(value: object) -> bool:
    """Return whether a decoded value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def fits_float32(number: float) -> bool:
    """Return whether a number is still there as float32: it becomes neither 0 nor infinite."""
    return number == 0 or MIN_WEIGHT <= abs(number) <= MAX_WEIGHT


def _optional_text(item: Mapping[str, Any], key: str, path: str) -> str | None:
    value = item.get(key)
    return None if value is None else checked_string(value, repr(key), code="field_type", path=f"{path}.{key}")


def is_encodable(text: str) -> bool:
    """Return whether a text has a UTF-8 form: it holds no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def checked_text(text: str, path: str) -> str:
    """Return the text, or raise a `RecordError`: it is too long for a template, or has a lone surrogate."""
    if len(text) > MAX_CHARACTERS:
        raise RecordError(
            f"the text has {len(text):,} characters; a template writes at most {MAX_CHARACTERS:,}. Split it",
            code="text_too_long",
            path=path,
        )
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RecordError(
                f"lone surrogate U+{ord(text[error.start]):04X} at character {error.start}: such text has no UTF-8 "
                "form; repair the source",
                code="lone_surrogate",
                path=path,
            ) from None
    return text


def checked_string(value: object, name: str, *, code: str, path: str) -> str:
    """Return a value that must be a string; `name` says in the error what it is."""
    if not isinstance(value, str):
        raise mistyped(f"{name} must be a string", value, code=code, path=path)
    return checked_text(value, path)


def field_text(record: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """Return the text in a field of a record; `default` stands for null and a missing field."""
    value = record.get(key)
    if value is None and default is not None:
        return default
    if key not in record:
        raise RecordError(f"{key!r} must be a string, found nothing", code="missing_field", path=key)
    return checked_string(value, repr(key), code="missing_field", path=key)


def mistyped(rule: str, value: object, *, code: str, path: str) -> RecordError:
    """Make the error for a value of the wrong type."""
    return RecordError(f"{rule}, found {json_type(value)}", code=code, path=path)


def json_type(value: object) -> str:
    """Name the JSON type of a decoded value."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value)) or ("a list" if isinstance(value, Sequence) else "an object")
