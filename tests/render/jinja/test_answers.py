"""What is trained is what A(i) has after P(i), through its first stop: nothing less, nothing of anything else."""

from __future__ import annotations

import datetime
import random
from collections import Counter
from itertools import groupby
from typing import Any

import pytest

from chatmill.core.conversation import Conversation
from chatmill.core.kinds import RoleCode, kind_name, role_of
from chatmill.core.message_parser import parse_messages
from chatmill.errors import RecordError
from chatmill.label.presets import find_policy
from chatmill.render.jinja.options import Expand, TemplateOptions
from chatmill.render.jinja.rendering import Rendering
from chatmill.render.model_template import JinjaSource, ModelTemplate
from chatmill.render.registry import find_template
from chatmill.render.render import render
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.render.jinja.at_hand import of_text
from tools.template_survey import survey

TODAY = datetime.date(2026, 1, 1)
CHATML = ("<|im_start|>", "<|im_end|>")
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
HARMONY = tuple(f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call"))
USER, TOOL = {"role": "user", "content": "q"}, {"role": "tool", "content": "3", "name": "f", "tool_call_id": "c1"}


def says(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def calls(*names: str, content: str = "") -> dict[str, Any]:
    made = [
        {"type": "function", "id": f"c{number}", "function": {"name": name, "arguments": '{"x": 1}'}}
        for number, name in enumerate(names, start=1)
    ]
    return says(content, tool_calls=made)


def bound(text: str, tokens: tuple[str, ...] = CHATML, stop: str = "<|im_end|>", **given: Any) -> ModelTemplate:
    return of_text(text, (stop,), tokens, **given)


def trained(template: ModelTemplate, *messages: dict[str, Any]) -> list[list[str]]:
    """Of each row, the stretches that the policy `assistant` trains."""
    rendered = render([Conversation(parse_messages(list(messages)))], template)
    tokens = rendered.tokens
    weights = tokens.per_token(find_policy("assistant").document_weights(tokens, rendered.kept))
    rows = []
    for first, last in zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True):
        places = [place for place in range(first, last) if weights[place] > 0]
        starts = [place for place in places if place - 1 not in places]
        ends = [place + 1 for place in places if place + 1 not in places]
        rows.append([template.tokenizer.decode(tokens.ids[start:end]) for start, end in zip(starts, ends, strict=True)])
    return rows


def reason(template: ModelTemplate, *messages: dict[str, Any]) -> str:
    with pytest.raises(RecordError) as caught:
        render([Conversation(parse_messages(list(messages)))], template)
    return caught.value.code


LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n"


@pytest.mark.parametrize(
    ("answer", "says_bob"),
    [
        ("{% if m.name %} ({{ m.name }}){% endif %}{{ m.content }}", " (bob)a1<|im_end|>"),
        ("{% if m.name %}{{ m.name }}: {% endif %}{{ m.content }}", "bob: a1<|im_end|>"),
        ("{{ m.content }}{% if m.name %} -- {{ m.name }}{% endif %}", "a1 -- bob<|im_end|>"),
        ("{{ m|tojson }}", '{"role": "assistant", "content": "a1", "name": "bob"}<|im_end|>'),
    ],
)
def test_an_answer_is_trained_whatever_field_it_comes_from(answer: str, says_bob: str) -> None:
    template = bound(f"{LOOP}{answer}<|im_end|>\n{{% endfor %}}{PROMPT}")
    assert trained(template, USER, says("a1", name="bob")) == [[says_bob]]


QUOTES = {
    "the call before a result": (
        "{% set ns = namespace(n='') %}" + LOOP + "{% if m.tool_calls %}{% for c in m.tool_calls %}"
        "{{ c.function.arguments if c.function.arguments is string else c.function.arguments|tojson }}:"
        "{{ c.function.name }}{% set ns.n = c.function.name %}{% endfor %}{% elif m.role == 'tool' %}"
        "{% if m.content %}{{ m.content }} from {% endif %}{{ ns.n }}{% else %}{{ m.content }}{% endif %}"
        "<|im_end|>\n{% endfor %}" + PROMPT
    ),
    "the answer before a question": (
        "{% for m in messages %}<|im_start|>{{ m.role }}"
        "{% if loop.index0 and m.role == 'user' %} {{ messages[loop.index0 - 1].content }}{% endif %}"
        "{{ '\n' }}{{ m.content or '' }}<|im_end|>\n{% endfor %}" + PROMPT
    ),
}


@pytest.mark.parametrize("expand", [Expand.TURNS, Expand.NONE])
@pytest.mark.parametrize("content", ["3", ""])
def test_a_call_that_a_result_names_again_keeps_its_own_stop(content: str, expand: Expand) -> None:
    template = bound(QUOTES["the call before a result"], expand=expand)
    found = trained(template, USER, calls("f"), {**TOOL, "content": content}, says("done"))
    assert found == [['{"x": 1}:f<|im_end|>', "done<|im_end|>"]]


@pytest.mark.parametrize(
    ("name", "part"), [("the call before a result", "content"), ("the answer before a question", "header")]
)
def test_a_text_that_another_turn_quotes_is_that_turns(name: str, part: str) -> None:
    template = bound(QUOTES[name], expand=Expand.NONE)
    answer, reply = (calls("f"), TOOL) if part == "content" else (says("f"), {"role": "user", "content": "3"})
    tokens = render([Conversation(parse_messages([USER, answer, reply, says("done")]))], template).tokens
    roles = [role_of(int(code)).name.lower() for code in tokens.kinds if role_of(int(code)) is not RoleCode.NONE]
    assert [role for role, _ in groupby(roles)] == ["user", "assistant", reply["role"], "assistant"]
    quoted = max(place for place, token in enumerate(tokens.ids.tolist()) if template.tokenizer.decode([token]) == "f")
    assert kind_name(int(tokens.kinds[quoted])).split("+")[0] == f"{reply['role']}.{part}"


@pytest.mark.parametrize("expand", [Expand.TURNS, Expand.NONE])
@pytest.mark.parametrize("content", ["q2", ""])
def test_an_answer_that_a_header_quotes_keeps_its_own_stop(content: str, expand: Expand) -> None:
    template = bound(QUOTES["the answer before a question"], expand=expand)
    question = {"role": "user", "content": content}
    found = trained(template, USER, says("a1"), question, says("a2"))
    assert found == [["a1<|im_end|>", "a2<|im_end|>"]]


CHANGED_AND_QUOTED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}"
    "{% if loop.index0 and m.role == 'user' %} {{ messages[loop.index0 - 1].content }}{% endif %}"
    "{{ '\n' }}{{ m.content or '' }}{% if loop.last and m.role == 'assistant' %}!{% endif %}<|im_end|>\n{% endfor %}"
    + PROMPT
)


def test_a_changed_answer_that_a_header_quotes_is_trained_where_it_is() -> None:
    template = bound(CHANGED_AND_QUOTED, expand=Expand.NONE)
    found = trained(template, USER, says("a1"), {"role": "user", "content": ""}, says("a2"))
    assert found == [["a1<|im_end|>", "a2!<|im_end|>"]]


TWO_TURNS = (
    LOOP + "{% if m.content %}{{ m.content }}{% if m.tool_calls %}<|im_end|>\n<|im_start|>assistant\n{% endif %}"
    "{% endif %}{% for c in m.tool_calls or [] %}{% if not loop.first %}<|im_end|>\n<|im_start|>assistant\n{% endif %}"
    "<tool_call>{{ c.function.name }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}" + PROMPT
).replace("{{ c.function.name }}", "{{ c.function.name }} {{ c.function.arguments }}")


def test_what_is_behind_a_stop_and_the_prompt_again_is_an_answer_of_its_own() -> None:
    template = bound(TWO_TURNS)
    one, other = ('<tool_call>f {"x": 1}</tool_call><|im_end|>', '<tool_call>g {"x": 1}</tool_call><|im_end|>')
    for messages, wanted in (
        ((USER, calls("f"), TOOL, says("ok")), [one, "ok<|im_end|>"]),
        ((USER, calls("f", content="Look."), TOOL, says("ok")), ["Look.<|im_end|>", one, "ok<|im_end|>"]),
        ((USER, calls("f", "g"), TOOL, says("ok")), [one, other, "ok<|im_end|>"]),
        ((USER, calls("f", "g", content="Look.")), ["Look.<|im_end|>", one, other]),
    ):
        assert trained(template, *messages) == [wanted]
        conversation = Conversation(parse_messages(list(messages)))
        assert survey(template, [conversation]).failures == []
        (document,) = template.text_documents(conversation).documents
        assert sum(span.breaks for span in document.spans) == len(wanted), "no token is cut inside of an answer"
    before = "{% if m.role == 'assistant' and not loop.last %}Earlier: {% endif %}"
    changed = bound(TWO_TURNS.replace("{{ m.content }}", before + "{{ m.content }}"))
    chat = (USER, calls("f", content="Look."), TOOL, says("ok"))
    assert trained(changed, *chat) == [["Look.<|im_end|>", one], ["ok<|im_end|>"]]
    alone = render([Conversation(parse_messages(list(chat)))], changed).tokens.conversation(0)
    assert changed.tokenizer.decode(alone.ids).endswith(one), "a document that ends with an answer ends with its stop"


def test_a_prompt_again_that_opens_reasoning_needs_an_answer_that_closes_it() -> None:
    thinks = TWO_TURNS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}").replace(
        "{{ m.content }}{% if m.tool", "{{ '<think>\n</think>' if m.role == 'assistant' }}{{ m.content }}{% if m.tool"
    )
    assert reason(bound(thinks), USER, calls("f", content="Look.")) == "reasoning_not_closed"
    assert trained(bound(thinks), USER, says("ok")) == [["</think>ok<|im_end|>"]]


def test_a_header_behind_the_stop_of_an_empty_answer_is_refused() -> None:
    template = bound(
        LOOP + "{{ m.content }}<|im_end|>\n{% for c in m.tool_calls or [] %}<|im_start|>call\n"
        "{{ c.function.name }}{{ c.function.arguments }}<|im_end|>\n{% endfor %}{% endfor %}" + PROMPT
    )
    assert reason(template, USER, calls("f"), TOOL, says("ok")) == "goes_on_after_stop"


def gpt_oss(expand: Expand) -> ModelTemplate:
    source = find_template("gpt_oss")
    assert isinstance(source, JinjaSource)
    return ModelTemplate(source, byte_tokenizer(HARMONY), TemplateOptions(today=TODAY, expand=expand))


def test_gpt_oss_answers_end_where_a_server_stops() -> None:
    chat = (USER, says("a1"), {"role": "user", "content": "q2"}, says("a2"))
    final = "<|channel|>final<|message|>"
    assert trained(gpt_oss(Expand.TURNS), *chat) == [[f"{final}a1<|return|>"], [f"{final}a2<|return|>"]]
    assert trained(gpt_oss(Expand.NONE), *chat) == [[f"{final}a1<|end|>", f"{final}a2<|return|>"]]
    assert gpt_oss(Expand.TURNS).stops.names == ("<|return|>", "<|call|>")
    call = ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>'
    called = trained(gpt_oss(Expand.TURNS), USER, calls("f"), TOOL, says("ok"))
    assert called == [[call, f"{final}ok<|return|>"]], "and not the name that the header of the result repeats"


def test_gpt_oss_writes_reasoning_and_answer_in_one_go() -> None:
    chat = (
        USER,
        says("a1", reasoning_content="Hm."),
        {"role": "user", "content": "q2"},
        says("", reasoning_content="r"),
    )
    thinks, final = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert trained(gpt_oss(Expand.TURNS), *chat) == [
        [f"{thinks}Hm.{final}a1<|return|>"],
        [f"{thinks}r{final}<|return|>"],
    ]


OPENED = (
    LOOP + "{% if m.role == 'assistant' %}<think>\n"
    "{% if m.reasoning_content %}{{ m.reasoning_content }}\n</think>\n{% elif enable_thinking is false %}</think>\n"
    "{% endif %}{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "<think>\n{% if enable_thinking is false %}</think>\n{% endif %}{% endif %}"
)


def test_a_prompt_that_opens_reasoning_needs_an_answer_that_closes_it() -> None:
    without_switch = bound(OPENED.replace("enable_thinking is false", "false"))
    assert reason(without_switch, USER, says("a1")) == "reasoning_not_closed"
    assert trained(without_switch, USER, says("a1", reasoning_content="Hm.")) == [["Hm.\n</think>\na1<|im_end|>"]]
    assert trained(without_switch, USER, says("Hm.</think>a1")) == [["Hm.</think>a1<|im_end|>"]]


def test_the_switch_for_thinking_closes_it() -> None:
    template = bound(OPENED)
    conversation = Conversation(parse_messages([USER, says("a1")]))
    assert template.write(conversation).options == (("enable_thinking", False),)
    assert trained(template, USER, says("a1")) == [["a1<|im_end|>"]]


def test_records_of_one_shape_are_refused_each_for_itself() -> None:
    """What closes the reasoning, or stands after the stop, may be a text of the record: it is asked again."""
    template = bound(OPENED.replace("enable_thinking is false", "false"))
    texts = ["a1", "Hm.</think>a1", "a2", "b</think>c"]
    rendered = render(
        [Conversation(parse_messages([USER, says(text)])) for text in texts], template, collect_failures=True
    )
    assert rendered.kept.tolist() == [1, 3]
    behind = bound(LOOP + "{{ m.content }}<|im_end|>{{ m.name or '' }}\n{% endfor %}" + PROMPT)
    named = [Conversation(parse_messages([USER, says("a", name=name)])) for name in ("x", "", "y", "")]
    rendered = render(named, behind, collect_failures=True)
    assert [error.code for _, error in rendered.failed] == ["goes_on_after_stop"] * 2
    assert rendered.kept.tolist() == [1, 3]


TRIMMED = (
    LOOP + "{% if loop.index0 < messages|length - back %}{{ m.content | trim }}{% else %}{{ m.content }}{% endif %}"
    "{% if m.role != 'assistant' or not late %}<|im_end|>\n{% elif loop.last %}{% else %}"
    "<|im_end|>\n{% endif %}{% endfor %}" + PROMPT
)


@pytest.mark.parametrize("back", [1, 3, 6])
@pytest.mark.parametrize("late", [False, True])
def test_an_answer_is_stable_if_f_begins_with_its_prompt_and_itself(back: int, late: bool) -> None:
    """Outputs part long before the answer, and only texts say whether the renderings do; stops may be appended."""
    template = bound(TRIMMED.replace("back", str(back)).replace("late", str(late).lower()))
    rng, seen = random.Random(back), Counter[tuple[bool, bool]]()
    for _ in range(60):
        texts = [rng.choice(("x", "xy", "x ", "") if rng.random() < 0.3 else "xyz") for _ in range(rng.randint(2, 12))]
        chat = Conversation(
            parse_messages([{**USER, "content": t} if n % 2 == 0 else says(t) for n, t in enumerate(texts)])
        )
        turns = template.turns(chat)
        for answer in turns.answers():
            assert answer.reason in ("", "prompt_not_in_history")
            if not answer.reason:
                written = turns.trained(answer.message).text[: answer.end] + answer.stop * answer.is_appended
                prompt = turns.prompt(answer.message)
                assert isinstance(prompt, Rendering)
                assert written[: answer.begin] == prompt.text
                assert written[answer.begin :] == texts[answer.message] + "<|im_end|>"
                lacks_stop = answer.is_appended and answer.message == len(texts) - 1
                assert turns.is_stable(answer) == (turns.whole.text + answer.stop * lacks_stop).startswith(written)
                seen[turns.is_stable(answer), answer.is_appended] += 1
    assert len(seen) == 2, seen


def test_system_text_of_the_template_in_the_first_turn_is_no_header() -> None:
    system = "{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    template = bound(
        "{% for m in messages %}" + system + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    tokens = render([Conversation(parse_messages([USER, says("a")]))], template).tokens
    is_system = tokens.kinds == tokens.kinds[0]
    assert (kind_name(int(tokens.kinds[0])), tokens.messages[0]) == ("system.content", -1)
    assert template.tokenizer.decode(tokens.ids[is_system]) == "<|im_start|>system\nBe kind.<|im_end|>\n"


def test_the_appended_stop_is_a_terminator_and_arguments_may_be_shown_one_by_one() -> None:
    late = bound(TRIMMED.replace("back", "9").replace("late", "true"))
    tokens = render([Conversation(parse_messages([USER, says("a")]))], late).tokens
    assert kind_name(int(tokens.run_kinds[-1])) == "assistant.terminator"
    assert late.tokenizer.decode(tokens.ids[tokens.run_offsets[-2] :]) == "<|im_end|>"
    each = "{% for c in m.tool_calls or [] %}{{ c.function.name }}SHOWN{% endfor %}"
    shown = LOOP + "{{ m.content }}" + each + "<|im_end|>\n{% endfor %}"
    one_by_one = "{% for name, value in c.function.arguments|items %}<{{ name }}>{{ value }}{% endfor %}"
    assert trained(bound(shown.replace("SHOWN", one_by_one) + PROMPT), USER, calls("f")) == [["f<x>1<|im_end|>"]]
    assert reason(bound(shown.replace("SHOWN", "") + PROMPT), USER, calls("f")) == "not_shown"


def test_characters_that_are_lost_are_counted_by_their_message() -> None:
    """The template has no loop: one segment shows texts of several messages."""
    turn = "<|im_start|>{{ messages[N].role }}\n{{ messages[N].content | trim }}<|im_end|>\n"
    second = "{% if messages|length > 1 %}" + turn.replace("N", "1") + "{% endif %}"
    template = bound(turn.replace("N", "0") + second + PROMPT)
    chats = [[{**USER, "content": a}, says(b)] for a in ("q", " q", "  q ") for b in ("a", "why  ", "so ")]
    rendered = render([Conversation(parse_messages(chat)) for chat in chats], template)
    assert rendered.stripped.tolist() == [sum(m["content"].count(" ") for m in chat) for chat in chats]
