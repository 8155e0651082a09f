"""Records of whole calls: the ids of a prompt, and the ids that a model sampled after it.

A record is one call, lists several under `calls`, or is the response of a server with one or more `choices`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from chatmill.core.conversation import Message, Role
from chatmill.core.message_parser import mistyped
from chatmill.core.part_training import refuse_part_training
from chatmill.core.sampled import SAMPLED_FIELDS, sampled_fields
from chatmill.errors import RecordError

CALL_LISTS = ("calls", "choices")
CALL_FIELDS = (*SAMPLED_FIELDS, *CALL_LISTS)
PROMPT, TOKENS = "prompt_token_ids", "token_ids"


def is_call(record: Mapping[str, Any]) -> bool:
    """Return whether a record looks like one of calls."""
    first = next((record[key][0] for key in CALL_LISTS if isinstance(record.get(key), list) and record[key]), record)
    return isinstance(first, Mapping) and TOKENS in first and (PROMPT in first or PROMPT in record)


def call_messages(record: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return one message for each call; it has no text, and all that is trained is in its tokens."""
    return tuple(_message(call, path) for call, path in _calls(record))


def _calls(record: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the calls of a record and where they are; a prompt next to a list is that of all of them."""
    key = next((key for key in CALL_LISTS if record.get(key) is not None), None)
    if key is None:
        # Of a whole record such a key may be about a training run; a list is one of masks or weights of tokens.
        refuse_part_training({name: value for name, value in record.items() if isinstance(value, list)}, "")
        yield record, ""
        return
    if not isinstance(record[key], list) or not record[key]:
        raise mistyped("expected a list of calls that is not empty", record[key], code="messages_type", path=key)
    shared = {PROMPT: record[PROMPT]} if record.get(PROMPT) is not None else {}
    for number, call in enumerate(record[key]):
        if not isinstance(call, Mapping):
            raise mistyped("a call must be an object", call, code="message_type", path=f"{key}[{number}]")
        refuse_part_training(call, f"{key}[{number}]")
        yield {**shared, **{name: value for name, value in call.items() if value is not None}}, f"{key}[{number}]"


def _message(call: Mapping[str, Any], path: str) -> Message:
    for name in (PROMPT, TOKENS):
        if call.get(name) is None:
            raise RecordError(
                f"the call has no {name!r}: a record of this shape holds the ids of a prompt and those that were "
                "sampled",
                code="missing_field",
                path=f"{path}.{name}" if path else name,
            )
    return Message(Role.ASSISTANT, "", has_content=False, **sampled_fields(call, path, is_assistant=True))
