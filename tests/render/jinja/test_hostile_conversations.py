"""Text that spells special tokens, in every field of a record: it stays text, in bulk and one by one."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import RecordError
from chatmill.render.document_items import Ids
from chatmill.render.jinja.turn_documents import TextDocument
from chatmill.render.model_template import ModelTemplate
from chatmill.render.render import render
from tests.render.jinja.at_hand import bound, items_alone

NAMES = [
    *("trl/qwen3.jinja", "axolotl/qwen_25.jinja", "llamacpp/GLM-4.6.jinja", "llamacpp/openai-gpt-oss-120b.jinja"),
    *("trl/llama3_1.jinja", "trl/gemma4_v5.jinja", "trl/cohere2.jinja", "vllm/tool_chat_template_mistral3.jinja"),
    *("llamacpp/deepseek-ai-DeepSeek-V3.2.jinja", "llamacpp/MiniMax-M1.jinja", "vllm/tool_chat_template_granite.jinja"),
]


def hostile(template: ModelTemplate, text: str) -> list[Conversation]:
    """Conversations that have a text in every field they can have it in."""
    arguments = json.dumps({text: text, "list": [text, {text: [text]}], "n": 1}, ensure_ascii=False)
    parameters = {"type": "object", "properties": {text: {"type": "string", "description": text, "enum": [text]}},
                  "required": [text]}  # fmt: skip
    tools = ({"type": "function", "function": {"name": text, "description": text, "parameters": parameters}},)
    call = ToolCall(text, arguments, "callid001")
    system, user = Message(Role.SYSTEM, text), Message(Role.USER, f"a {text} b", name=text)
    plain, thinks = Message(Role.ASSISTANT, text), Message(Role.ASSISTANT, text, reasoning=f"{text} c {text}")
    calls = Message(Role.ASSISTANT, "", tool_calls=(call,), has_content=False)
    named = Message(Role.TOOL, text, tool_call_id="callid001", name=text)
    odd = call._replace(id=text)
    return [
        Conversation((user, plain), id="pair"),
        Conversation((system, user, thinks, user, plain), id="reasoning"),
        Conversation((user, calls, named, plain), id="calls", tools=tools),
        Conversation((system, user, calls._replace(reasoning=text), named, thinks), id="reasoned calls", tools=tools),
        Conversation(
            (user, calls._replace(tool_calls=(odd,)), named._replace(tool_call_id=text), plain), id="ids", tools=tools
        ),
    ]


def written_by_template(document: TextDocument, template: ModelTemplate) -> Counter[int]:
    """Special ids that template text alone spells."""
    pattern = template.rules.pattern
    assert pattern is not None
    texts, run = [], ""
    for span in document.spans:
        if span.expression is None and not span.breaks:
            run += span.text
        else:
            texts.append(run)
            run = span.text if span.expression is None else ""
    names = [name for text in [*texts, run] for name in pattern.findall(text)]
    return Counter(template.tokenizer.control(name) for name in names)


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_come_from_the_template_alone(name: str) -> None:
    template = bound(name)
    accepted = 0
    for special in (" ".join(template.tokenizer.control_ids), *list(template.tokenizer.control_ids)[:3]):
        conversations = hostile(template, special)
        rendered = render(conversations, template, collect_failures=True)
        failed = {index for index, _ in rendered.failed}
        at = 0
        for index, conversation in enumerate(conversations):
            try:
                written = template.text_documents(conversation)
            except RecordError:
                assert index in failed
                continue
            accepted += 1
            for document, items in zip(written.documents, items_alone(written, template), strict=True):
                wanted = written_by_template(document, template)
                ids = [int(i) for i in rendered.tokens.conversation(at).ids if i >= 256]
                assert Counter(ids) == wanted, f"{conversation.id} in bulk"
                alone = [i for item in items if isinstance(item, Ids) for i in item.ids if i >= 256]
                assert Counter(alone) == wanted, f"{conversation.id} one by one"
                at += 1
        assert at == len(rendered.kept)
    assert accepted >= 4
