"""Whether later messages change what a template writes for earlier ones."""

from __future__ import annotations

import json

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.rollouts.probes import ASKED, CONTENT, NAMES, REASONING, TOOLS, call_id
from chatmill.rollouts.template import RolloutTemplate


def unstable_probes(template: RolloutTemplate) -> list[str]:
    """Name the kinds of answers whose next prompt does not begin with prompt and answer."""
    call = ToolCall(NAMES[0], json.dumps({"ka_q0zz": "v"}), id=call_id(0))
    result = Message(Role.TOOL, "Result-q0zz.", tool_call_id=call.id, name=call.name)
    question = Message(Role.USER, "Another-q0zz?")
    probes = (
        ("content before a question", Message(Role.ASSISTANT, CONTENT), question),
        ("reasoning before a question", Message(Role.ASSISTANT, CONTENT, reasoning=REASONING), question),
        ("a call before its result", Message(Role.ASSISTANT, "", tool_calls=(call,)), result),
        (
            "reasoning and a call before its result",
            Message(Role.ASSISTANT, "", reasoning=REASONING, tool_calls=(call,)),
            result,
        ),
    )
    found: list[str] = []
    for name, answer, following in probes:
        tools = TOOLS if answer.tool_calls else ()
        conversation = Conversation((*ASKED, answer), id="probe", tools=tools)
        written = template.labelled(conversation)
        longer = template.plain(conversation._replace(messages=(*ASKED, answer, following)), prompt=True)
        if written is None or longer is None:
            continue
        if not longer.startswith(written.text.rstrip()):
            found.append(name)
    return found
