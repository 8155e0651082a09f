"""Templates: golden renderings, what they declare, what they refuse, and how a user's own is found."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.kinds import MARK, kind_name
from chatmill.errors import ConfigError, RecordError, TokenizerError, UnknownNameError
from chatmill.label.presets import find_policy
from chatmill.render.registry import bind, bundled_names, find_template
from chatmill.render.render import render
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.chats import chat


def tokenizer_for(name: str) -> Any:
    return byte_tokenizer().with_added(find_template(name).control_tokens)


def shown(conversation: Conversation, template: str, policy: str) -> tuple[str, str]:
    """(whole text, trained text) of a rendering."""
    tokenizer = tokenizer_for(template)
    tokens = render([conversation], template, tokenizer).tokens
    weights = tokens.per_token(find_policy(policy).run_weights(tokens))
    return tokenizer.decode(tokens.ids), tokenizer.decode(tokens.ids[np.flatnonzero(weights)])


PAIR = chat(("system", "S"), ("user", "q"), ("assistant", "a"))
GOLDEN = {
    "qwen3": (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\na<|im_end|>\n",
        "<think>\n\n</think>\n\na<|im_end|>",
    ),
    "markers": ("<|SYSTEM|>S<|END|><|USER|>q<|END|><|ASSISTANT|>a<|END|><|EOS|>", "a<|END|>"),
}


@pytest.mark.parametrize("template", GOLDEN)
def test_golden(template: str) -> None:
    assert shown(PAIR, template, "assistant") == GOLDEN[template]
    if template == "markers":
        assert shown(PAIR, template, "post_training")[1] == "<|ASSISTANT|>a<|END|>", "the opening marker, too"


def test_every_template_says_what_it_is() -> None:
    for name in bundled_names():
        template = find_template(name)
        assert template.name == name
        assert template.origin


def test_the_context_of_every_answer_is_its_generation_prompt(qwen3: Any) -> None:
    """For a prefix-stable template: up to the first trained token, a rendering is the prompt of that turn.

    The last answer alone begins with line breaks: a prompt is encoded as `apply_chat_template` does it, so an earlier
    one would share a token with the header before it.
    """
    conversation = chat(("system", "S"), ("user", " q\n"), ("assistant", "a"), ("user", "q2"), ("assistant", "\n\nb"))
    for name in ("chatml", "qwen3_training", "llama3", "markers", "token_native"):
        template = bind(name, qwen3.with_added(find_template(name).control_tokens))
        tokens = render([conversation], template).tokens
        weights = tokens.per_token(find_policy("assistant").run_weights(tokens))
        for turn in (2, 4):
            first = int(np.flatnonzero((tokens.messages == turn) & (weights > 0))[0])
            prefix = conversation._replace(messages=conversation.messages[:turn])
            prompt = render([prefix], template, add_generation_prompt=True).tokens.ids.tolist()
            assert tokens.ids[:first].tolist() == prompt, name


def test_harmony_writes_tools_wherever_the_conversation_ends(o200k: Any) -> None:
    for messages in ([("system", "S")], [("system", "S"), ("user", "q")], [("developer", "D")]):
        made = render([chat(*messages)._replace(tools=({"name": "f"},))], "harmony", o200k).tokens
        assert o200k.decode(made.ids).count("namespace functions {") == 1


def test_kinds_of_a_tool_exchange() -> None:
    calls = (ToolCall("f", '{"a": 1}'), ToolCall("g", "{}"))
    asked, answer = chat(("user", "q"), ("assistant", "done")).messages
    called = Message(Role.ASSISTANT, "look", reasoning="r", tool_calls=calls)
    results = (Message(Role.TOOL, "1"), Message(Role.TOOL, "2"))
    conversation = Conversation((asked, called, *results, answer), tools=({"name": "f"},))
    tokenizer = tokenizer_for("qwen3_training")
    tokens = render([conversation], "qwen3_training", tokenizer).tokens
    by_kind: dict[str, str] = defaultdict(str)
    by_part: dict[str, str] = defaultdict(str)
    for index, kind in enumerate(tokens.run_kinds.tolist()):
        text = tokenizer.decode(tokens.ids[tokens.run_offsets[index] : tokens.run_offsets[index + 1]])
        by_kind[kind_name(kind)] += text
        by_part[kind_name(kind & ~MARK)] += text
    assert by_part["assistant.tool_call"] == (
        '\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    )
    assert by_kind["assistant.tool_call"] == 'f{"a": 1}g{}', "what the template adds is marked"
    assert by_part["assistant.reasoning"] == "<think>\nr\n</think>\n\n<think>\n\n</think>\n\n"
    assert by_kind["assistant.reasoning"] == "r"
    assert by_kind["assistant.content"] == "lookdone"
    assert by_kind["tool.content"] == "12"
    assert '{"name": "f"}' in by_kind["system.content"]
    assert by_kind["assistant.terminator"] == "<|im_end|><|im_end|>"


# -- refusals -------------------------------------------------------------------------------------------------------

STRUCTURED = Message(Role.SYSTEM, "", structured={"type": "system_content"})
CALL = Message(Role.ASSISTANT, "", tool_calls=(ToolCall("f", "{}"),))
REFUSED = [
    ("token_native", chat(("user", "q"), ("system", "late")), "late_system", "messages[1].role"),
    ("token_native", chat(("tool", "x")), "role_not_in_template", "messages[0].role"),
    ("qwen3", chat(("developer", "x"), ("user", "q")), "not_shown", "messages[0].content"),
    ("chatml", Conversation((Message(Role.USER, "q"), CALL)), "template_refused", ""),
    ("chatml", chat(("user", "q"))._replace(tools=({"name": "f"},)), "not_shown", "tools"),
    ("qwen3", Conversation((CALL._replace(role=Role.USER),)), "not_shown", "messages[0].tool_calls[0].name"),
    ("llama3", Conversation((Message(Role.USER, "q", channel="final"),)), "channel_not_in_template", "messages[0]"),
    ("llama3", Conversation((STRUCTURED,)), "structured_not_in_template", "messages[0].content"),
]


@pytest.mark.parametrize(("template", "conversation", "code", "path"), REFUSED)
def test_what_a_template_cannot_write_is_refused(
    template: str, conversation: Conversation, code: str, path: str
) -> None:
    named = conversation._replace(id="r7", where="file.jsonl:3")
    tokenizer = tokenizer_for(template)
    with pytest.raises(RecordError) as caught:
        render([named], template, tokenizer)
    assert (caught.value.code, caught.value.path) == (code, path)
    assert str(caught.value).startswith("file.jsonl:3, record 'r7'")
    good = chat(("user", "fine"))
    rendered = render([good, named, good], template, tokenizer, collect_failures=True)
    assert rendered.kept.tolist() == [0, 2]
    assert [(index, error.code) for index, error in rendered.failed] == [(1, code)]
    alone = render([good, good], template, tokenizer).tokens
    assert rendered.tokens.ids.tolist() == alone.ids.tolist()
    assert rendered.tokens.messages.tolist() == alone.messages.tolist()


@pytest.mark.parametrize("template", sorted({*bundled_names()} - {"harmony", "gpt_oss"}))
def test_a_conversation_without_messages_is_written_or_refused(template: str) -> None:
    bound = bind(template, tokenizer_for(template))
    for batch in ([Conversation(())], [PAIR, Conversation(())]):
        rendered = render(batch, bound, collect_failures=True)
        assert all(isinstance(error, RecordError) for _, error in rendered.failed)


def test_text_without_a_form_in_utf8_is_one_short_error() -> None:
    said = r"conversation 1 holds the lone surrogate U\+D800: .*repair the source"
    with pytest.raises(RecordError, match=said) as caught:
        render([PAIR, chat(("user", "well\ud800"))], "chatml", tokenizer_for("chatml"))
    assert caught.value.code == "lone_surrogate"


def test_harmony_refuses_what_it_cannot_say(o200k: Any) -> None:
    aside = Conversation((Message(Role.ASSISTANT, "x", channel="sidebar"),))
    for conversation, said in ((aside, "unknown channel 'sidebar'"), (chat(("tool", "x")), "needs a 'name'")):
        with pytest.raises(RecordError, match=said):
            render([conversation], "harmony", o200k)


# -- look-up --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("qwen33", UnknownNameError, r"Did you mean 'qwen3'\? Known: chatml, glm4_5"),
        ("nowhere.jinja", ConfigError, "no template file"),
        ("own.py", UnknownNameError, r"own is the folder of a model, or the path of a \.jinja file"),
        ("chatml", TokenizerError, r"(?s)'chatml' needs control tokens.*<\|im_start\|>, <\|im_end\|>"),
    ],
)
def test_a_template_that_is_not_found_or_lacks_its_tokens_is_said(name: str, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        bind(name, byte_tokenizer())
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        render([PAIR], "chatml")


def test_a_comment_is_a_header_where_it_says_so(tmp_path: Path) -> None:
    header = "{#-\nlicence: MIT\ntokens: <|im_start|> <|im_end|>\nstops: <|im_end|>\n-#}\n"
    file = tmp_path / "mine.jinja"
    file.write_text(f"{header}{{{{ messages[0].content }}}}")
    assert not find_template(file).control_tokens, "a comment that somebody wrote for people"
    file.write_text(file.read_text().replace("licence: MIT", "chatmill: template\nlicence: MIT\neos: <|im_end|>"))
    found = find_template(file)
    assert found.control_tokens == ("<|im_start|>", "<|im_end|>")
    assert found.stop_tokens == ("<|im_end|>",)
    assert (found.licence, found.named_tokens) == ("MIT", {"eos_token": "<|im_end|>"})
