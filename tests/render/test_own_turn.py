"""Answers that change what comes before them: the prompt and the answer are trained together, in their own document."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.run import run_build
from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.errors import RecordError
from chatmill.prove.verify import verify
from chatmill.render.jinja.options import Expand, TemplateOptions, Unproved
from chatmill.render.registry import bind
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.compiler.builds import plain_recipe, write_jsonl
from tests.data.tokenizer_files import unpacked

NAMES = ("start", "end", "message", "channel", "constrain", "return", "call")
CALL = ToolCall("look_up", '{"city": "Oslo"}', "c1")
STANDARD = (
    Message(Role.USER, "Weather?"),
    Message(Role.ASSISTANT, "", "I look it up.", (CALL,), has_content=False),
    Message(Role.TOOL, "Rain.", tool_call_id="c1", name="look_up"),
    Message(Role.ASSISTANT, "It rains.", "So it is."),
)
"""Reasoning, a call, its result, and the final answer."""
LATER = (*STANDARD, Message(Role.USER, "And then?"), Message(Role.ASSISTANT, "Sun."))
ROW = (
    "<|start|>user<|message|>Weather?<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>I look it up.<|end|>"
    '<|start|>assistant to=functions.look_up<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>'
    '<|start|>functions.look_up to=assistant<|channel|>commentary<|message|>"Rain."<|end|>'
    "<|start|>assistant<|channel|>analysis<|message|>So it is.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It rains.<|return|>"
)
"""What a server of gpt-oss has seen and written when the final answer is there."""


def rows(messages: tuple[Message, ...], **options: Any) -> list[tuple[tuple[int, ...], str]]:
    tokenizer = byte_tokenizer().with_added([f"<|{name}|>" for name in NAMES])
    given = TemplateOptions(today=datetime.date(2026, 1, 1), **options)
    found = bind("gpt_oss", tokenizer, given).text_documents(Conversation(messages)).documents
    texts = ["".join(span.text for span in one.spans) for one in found]
    return [(one.trained, text.partition("<|end|>")[2]) for one, text in zip(found, texts, strict=True)]


@pytest.mark.parametrize("expand", [Expand.TURNS, Expand.TREE])
def test_the_standard_record_of_an_agent_is_one_row_under_gpt_oss(expand: Expand) -> None:
    assert rows(STANDARD, expand=expand) == [((1, 3), ROW)]
    first, second = rows(LATER, expand=expand)
    assert first == ((1, 3), ROW)
    assert second[0] == (5,)
    assert "analysis" not in second[1]
    assert second[1].endswith("final<|message|>Sun.<|return|>")


def test_the_last_answer_alone_has_the_same_context() -> None:
    assert rows(STANDARD, expand=Expand.LAST) == [((3,), ROW)]


def test_in_place_there_is_no_such_answer_and_the_error_says_what_has_it() -> None:
    with pytest.raises(RecordError, match=r"`expand: turns` and `expand: tree` train it after its prompt") as caught:
        rows(STANDARD, expand=Expand.NONE)
    assert caught.value.code == "prompt_not_in_history"
    kept = rows(STANDARD, expand=Expand.NONE, unproved=Unproved.UNTRAINED)
    assert [trained for trained, _ in kept] == [(1,)], "the other advice works, too"


def test_the_system_text_of_mistral_is_before_every_answer() -> None:
    from chatmill.tokenizer.load import load_tokenizer

    bound = bind("mistral_nemo", load_tokenizer(str(unpacked("mistral_nemo"))), TemplateOptions())
    one, two = (
        (Message(Role.USER, "one"), Message(Role.ASSISTANT, "1")),
        (Message(Role.USER, "two"), Message(Role.ASSISTANT, "2")),
    )
    found = bound.text_documents(Conversation((Message(Role.SYSTEM, "Be kind."), *one, *two))).documents
    assert [(row.trained, "".join(span.text for span in row.spans)) for row in found] == [
        ((2,), "<s>[INST]Be kind.\n\none[/INST]1</s>"),
        ((4,), "<s>[INST]one[/INST]1</s>[INST]Be kind.\n\ntwo[/INST]2</s>"),
    ]


OTHER_WORDS = """{#-
chatmill: template
tokens: <|im_start|> <|im_end|>
stops: <|im_end|>
-#}
{%- for message in messages %}{% if message.role == 'user' %}U{{ message.content }}
{%- if loop.last %}<|im_start|>{% endif %}
{%- else %}{{ message.content }}<|im_end|>{% endif %}{% endfor %}
"""


def test_other_words_right_before_the_answer_are_refused(tmp_path: Path) -> None:
    """The end of the question is written in prompts alone: what history has there was never seen by a server."""
    (tmp_path / "other.jinja").write_text(OTHER_WORDS)
    tokenizer = byte_tokenizer().with_added(["<|im_start|>", "<|im_end|>"])
    bound = bind(str(tmp_path / "other.jinja"), tokenizer, TemplateOptions())
    with pytest.raises(RecordError) as caught:
        bound.text_documents(Conversation((Message(Role.USER, "q"), Message(Role.ASSISTANT, "a"))))
    assert caught.value.code == "prompt_not_in_history"
    assert "unproved: untrained" in str(caught.value)


@pytest.mark.parametrize("expand", ["turns", "tree", "last"])
def test_deep_verify_proves_such_rows(tmp_path: Path, expand: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Oslo"}'}}
    agent = [
        {"role": "user", "content": "Weather? <|call|>"},
        {"role": "assistant", "content": None, "reasoning_content": "I look it up.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain. \n"},
        {"role": "assistant", "reasoning_content": "So it is.", "content": "It rains."},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": "Sun."},
    ]
    records = [{"id": str(size), "messages": agent[:size]} for size in (2, 4, 6)] * 3
    path = write_jsonl(tmp_path / "agents.jsonl", records)
    recipe = plain_recipe(path, template="gpt_oss", date="2026-01-01", expand=expand)
    run_build(recipe, tmp_path / "out", workers=0)
    report = verify(tmp_path / "out", deep=True)
    assert report.passed, report.findings
