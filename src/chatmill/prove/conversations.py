"""Which answers of a record are trained, by the slow, obvious path: one message at a time."""

from __future__ import annotations

from chatmill.core.conversation import Conversation, Role
from chatmill.label.errors import ErrorRule


def without_failed(conversation: Conversation, rule: ErrorRule) -> Conversation:
    """Return a record in which no answer is trained that made a call with an error."""
    messages = list(conversation.messages)
    for place, result in enumerate(conversation.messages):
        has_field = any(
            result.extra.get(name) == value and isinstance(result.extra.get(name), bool) == isinstance(value, bool)
            for name, value in rule.fields.items()
        )
        is_error = has_field or any(result.content.startswith(text) for text in rule.begins)
        callers = [k for k in range(place) if messages[k].tool_calls]
        if result.role is not Role.TOOL or not is_error or not callers:
            continue
        named = [k for k in callers if result.tool_call_id in [call.id for call in messages[k].tool_calls]]
        caller = named[-1] if named and result.tool_call_id is not None else callers[-1]
        if messages[caller].weight != 0:
            messages[caller] = messages[caller]._replace(weight=0.0)
    return conversation._replace(messages=tuple(messages))
