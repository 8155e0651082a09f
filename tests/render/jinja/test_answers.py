"""What is trained is what A(i) has after P(i), through its first stop: nothing less, nothing of anything else."""

from __future__ import annotations

import datetime
import random
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.run import run_build
from chatmill.core.conversation import Conversation
from chatmill.core.kinds import RoleCode, kind_name, role_of
from chatmill.core.message_parser import parse_messages
from chatmill.errors import RecordError
from chatmill.label.presets import find_policy
from chatmill.prove.verify import verify
from chatmill.render.jinja.options import Expand, TemplateOptions, Unproved
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind
from chatmill.render.render import render
from chatmill.tokenizer.byte_level import byte_tokenizer
from chatmill.tokenizer.load import load_tokenizer
from tests.chats import chat
from tests.compiler.builds import plain_recipe, write_jsonl
from tests.data.tokenizer_files import unpacked
from tests.render.jinja.at_hand import of_text
from tools.template_survey import survey

Said = dict[str, Any]
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
END = "<|im_end|>\n{% endfor %}"
USER, TOOL = {"role": "user", "content": "q"}, {"role": "tool", "content": "3", "name": "f", "tool_call_id": "c1"}


def asks(content: str) -> Said:
    return {"role": "user", "content": content}


def says(content: str, **more: Any) -> Said:
    return {"role": "assistant", "content": content, **more}


def calls(*names: str, content: str = "", **more: Any) -> Said:
    made = [
        {"type": "function", "id": f"c{number}", "function": {"name": name, "arguments": '{"x": 1}'}}
        for number, name in enumerate(names, start=1)
    ]
    return says(content, tool_calls=made, **more)


def talk(*messages: Said) -> Conversation:
    return Conversation(parse_messages(list(messages)))


def gpt_oss(**given: Any) -> ModelTemplate:
    names = ("start", "end", "message", "channel", "constrain", "return", "call")
    options = TemplateOptions(today=datetime.date(2026, 1, 1), **given)
    return bind("gpt_oss", byte_tokenizer([f"<|{name}|>" for name in names]), options)


def trained(template: ModelTemplate, *messages: Said) -> list[list[str]] | str:
    """Of each row, the stretches that the policy `assistant` trains; or why the record is refused."""
    try:
        rendered = render([talk(*messages)], template)
    except RecordError as error:
        return error.code
    tokens = rendered.tokens
    weights = tokens.per_token(find_policy("assistant").document_weights(tokens, rendered.kept))
    rows = []
    for first, last in zip(tokens.offsets[:-1].tolist(), tokens.offsets[1:].tolist(), strict=True):
        runs = [(is_on, list(places)) for is_on, places in groupby(range(first, last), lambda at: weights[at] > 0)]
        rows.append([template.tokenizer.decode(tokens.ids[places]) for is_on, places in runs if is_on])
    return rows


QUOTING_RESULT = (
    "{% set ns = namespace(n='') %}" + LOOP + "{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments|tojson }}:"
    "{{ c.function.name }}{% set ns.n = c.function.name %}{% endfor %}{% elif m.role == 'tool' %}"
    "{% if m.content %}{{ m.content }} from {% endif %}{{ ns.n }}{% else %}{{ m.content }}{% endif %}" + END + PROMPT
)
QUOTING_HEADER = (
    "{% for m in messages %}<|im_start|>{{ m.role }}"
    "{% if loop.index0 and m.role == 'user' %} {{ messages[loop.index0 - 1].content }}{% endif %}"
    "{{ '\n' }}{{ m.content or '' }}CHANGED" + END + PROMPT
)
CHANGED = "{% if loop.last and m.role == 'assistant' %}!{% endif %}"
TWO_TURNS = (
    LOOP + "{% if m.content %}{{ m.content }}{% if m.tool_calls %}<|im_end|>\n<|im_start|>assistant\n{% endif %}"
    "{% endif %}{% for c in m.tool_calls or [] %}{% if not loop.first %}<|im_end|>\n<|im_start|>assistant\n{% endif %}"
    "<tool_call>{{ c.function.name }} {{ c.function.arguments }}</tool_call>{% endfor %}" + END + PROMPT
)
THINKS = TWO_TURNS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}").replace(
    "{{ m.content }}{% if m.tool", "{{ '<think>\n</think>' if m.role == 'assistant' }}{{ m.content }}{% if m.tool"
)
AFTER_STOP = (
    LOOP + "{{ m.content }}<|im_end|>\n{% for c in m.tool_calls or [] %}<|im_start|>call\n"
    "{{ c.function.name }}{{ c.function.arguments }}<|im_end|>\n{% endfor %}{% endfor %}" + PROMPT
)
SWITCHED = (
    LOOP + "{% if m.role == 'assistant' %}<think>\n"
    "{% if m.reasoning_content %}{{ m.reasoning_content }}\n</think>\n{% elif enable_thinking is false %}</think>\n"
    "{% endif %}{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "<think>\n{% if enable_thinking is false %}</think>\n{% endif %}{% endif %}"
)
THINKING_PROMPT = (
    LOOP + "{{ m.content }}" + END + "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is not false %}<think>\n{% endif %}{% endif %}"
)
OPENED = SWITCHED.replace("enable_thinking is false", "false")
ONE_BY_ONE = "{% for name, value in c.function.arguments|items %}<{{ name }}>{{ value }}{% endfor %}"
EACH = LOOP + "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}SHOWN{% endfor %}" + END + PROMPT
FIELDS = {
    "{% if m.name %} ({{ m.name }}){% endif %}{{ m.content }}": " (bob)a1<|im_end|>",
    "{% if m.name %}{{ m.name }}: {% endif %}{{ m.content }}": "bob: a1<|im_end|>",
    "{{ m.content }}{% if m.name %} -- {{ m.name }}{% endif %}": "a1 -- bob<|im_end|>",
}
QUOTED = [['{"x": 1}:f<|im_end|>', "done<|im_end|>"]]
BOTH = [["a1<|im_end|>", "a2<|im_end|>"]]


@pytest.mark.parametrize(
    ("text", "expands", "messages", "wanted"),
    [
        *((LOOP + field + END + PROMPT, (Expand.TURNS,), (USER, says("a1", name="bob")), [[bob]])
          for field, bob in FIELDS.items()),
        *((QUOTING_RESULT, (Expand.TURNS, Expand.NONE), (USER, calls("f"), {**TOOL, "content": text}, says("done")),
           QUOTED) for text in ("3", "")),
        *((QUOTING_HEADER.replace("CHANGED", ""), (Expand.TURNS, Expand.NONE),
           (USER, says("a1"), asks(text), says("a2")), BOTH) for text in ("q2", "")),
        (QUOTING_HEADER.replace("CHANGED", CHANGED), (Expand.NONE,), (USER, says("a1"), asks(""), says("a2")),
         [["a1<|im_end|>", "a2!<|im_end|>"]]),
        (THINKS, (Expand.TURNS,), (USER, calls("f", content="Look.")), "reasoning_not_closed"),
        (THINKS, (Expand.TURNS,), (USER, says("ok")), [["</think>ok<|im_end|>"]]),
        (AFTER_STOP, (Expand.TURNS,), (USER, calls("f"), TOOL, says("ok")), "goes_on_after_stop"),
        (OPENED, (Expand.TURNS,), (USER, says("a1")), "reasoning_not_closed"),
        (OPENED, (Expand.TURNS,), (USER, says("a1", reasoning_content="Hm.")), [["Hm.\n</think>\na1<|im_end|>"]]),
        (OPENED, (Expand.TURNS,), (USER, says("Hm.</think>a1")), [["Hm.</think>a1<|im_end|>"]]),
        (SWITCHED, (Expand.TURNS,), (USER, says("a1")), [["a1<|im_end|>"]]),
        (EACH.replace("SHOWN", ONE_BY_ONE), (Expand.TURNS,), (USER, calls("f")), [["f<x>1<|im_end|>"]]),
        (EACH.replace("SHOWN", ""), (Expand.TURNS,), (USER, calls("f")), "not_shown"),
    ],
)  # fmt: skip
def test_an_answer_is_trained_through_its_own_stop_whatever_it_comes_from(
    text: str, expands: tuple[Expand, ...], messages: tuple[Said, ...], wanted: Any
) -> None:
    """And whatever quotes it later; a prompt that opens reasoning needs an answer that closes it."""
    for expand in expands:
        assert trained(of_text(text, expand=expand), *messages) == wanted


@pytest.mark.parametrize("unproved", list(Unproved))
@pytest.mark.parametrize("text", [SWITCHED, THINKING_PROMPT])
def test_auto_finds_the_switch_under_which_an_answer_is_proved(text: str, unproved: Unproved) -> None:
    """The switch is chosen per record, whatever happens to answers without a proof."""
    template, record = of_text(text, unproved=unproved), talk(USER, says("a1"))
    assert template.write(record).options == (("enable_thinking", False),)
    rendered = render([record], template)
    assert (rendered.turns.tolist(), rendered.untrained.tolist()) == ([1], [0])


@pytest.mark.parametrize(("text", "part"), [(QUOTING_RESULT, "content"), (QUOTING_HEADER, "header")])
def test_a_text_that_another_turn_quotes_is_that_turns(text: str, part: str) -> None:
    template = of_text(text.replace("CHANGED", ""), expand=Expand.NONE)
    answer, reply = (calls("f"), TOOL) if part == "content" else (says("f"), asks("3"))
    tokens = render([talk(USER, answer, reply, says("done"))], template).tokens
    roles = [role_of(int(code)).name.lower() for code in tokens.kinds if role_of(int(code)) is not RoleCode.NONE]
    assert [role for role, _ in groupby(roles)] == ["user", "assistant", reply["role"], "assistant"]
    quoted = max(place for place, token in enumerate(tokens.ids.tolist()) if template.tokenizer.decode([token]) == "f")
    assert kind_name(int(tokens.kinds[quoted])).split("+")[0] == f"{reply['role']}.{part}"


def test_what_is_behind_a_stop_and_the_prompt_again_is_an_answer_of_its_own() -> None:
    template = of_text(TWO_TURNS)
    one, other = ('<tool_call>f {"x": 1}</tool_call><|im_end|>', '<tool_call>g {"x": 1}</tool_call><|im_end|>')
    looks = calls("f", content="Look.")
    for messages, wanted in (
        ((USER, calls("f"), TOOL, says("ok")), [one, "ok<|im_end|>"]),
        ((USER, looks, TOOL, says("ok")), ["Look.<|im_end|>", one, "ok<|im_end|>"]),
        ((USER, calls("f", "g"), TOOL, says("ok")), [one, other, "ok<|im_end|>"]),
        ((USER, calls("f", "g", content="Look.")), ["Look.<|im_end|>", one, other]),
    ):
        assert trained(template, *messages) == [wanted]
        assert survey(template, [talk(*messages)]).failures == []
        (document,) = template.text_documents(talk(*messages)).documents
        assert sum(span.breaks for span in document.spans) == len(wanted), "no token is cut inside of an answer"
    before = "{% if m.role == 'assistant' and not loop.last %}Earlier: {% endif %}"
    changed = of_text(TWO_TURNS.replace("{{ m.content }}", before + "{{ m.content }}"))
    assert trained(changed, USER, looks, TOOL, says("ok")) == [["Look.<|im_end|>", one], ["ok<|im_end|>"]]
    alone = render([talk(USER, looks, TOOL, says("ok"))], changed).tokens.conversation(0)
    assert changed.tokenizer.decode(alone.ids).endswith(one), "a document that ends with an answer ends with its stop"


def test_records_of_one_shape_are_refused_each_for_itself() -> None:
    """What closes the reasoning, or stands after the stop, may be a text of the record: it is asked again."""
    texts = ["a1", "Hm.</think>a1", "a2", "b</think>c"]
    rendered = render([talk(USER, says(text)) for text in texts], of_text(OPENED), collect_failures=True)
    assert rendered.kept.tolist() == [1, 3]
    behind = of_text(LOOP + "{{ m.content }}<|im_end|>{{ m.name or '' }}\n{% endfor %}" + PROMPT)
    named = [talk(USER, says("a", name=name)) for name in ("x", "", "y", "")]
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
    template = of_text(TRIMMED.replace("back", str(back)).replace("late", str(late).lower()))
    rng, seen = random.Random(back), Counter[tuple[bool, bool]]()
    for _ in range(60):
        texts = [rng.choice(("x", "xy", "x ", "") if rng.random() < 0.3 else "xyz") for _ in range(rng.randint(2, 12))]
        turns = template.turns(talk(*(asks(t) if n % 2 == 0 else says(t) for n, t in enumerate(texts))))
        for answer in turns.answers():
            assert answer.reason in ("", "prompt_not_in_history")
            if not answer.reason:
                written = turns.trained(answer.message).text[: answer.end] + answer.stop * answer.is_appended
                prompt = turns.prompt(answer.message)
                assert written[: answer.begin] == prompt.text
                assert written[answer.begin :] == texts[answer.message] + "<|im_end|>"
                lacks_stop = answer.is_appended and answer.message == len(texts) - 1
                assert turns.is_stable(answer) == (turns.whole.text + answer.stop * lacks_stop).startswith(written)
                seen[turns.is_stable(answer), answer.is_appended] += 1
    assert len(seen) == 2, seen


def test_the_appended_stop_is_a_terminator() -> None:
    late = of_text(TRIMMED.replace("back", "9").replace("late", "true"))
    tokens = render([talk(USER, says("a"))], late).tokens
    assert kind_name(int(tokens.run_kinds[-1])) == "assistant.terminator"
    assert late.tokenizer.decode(tokens.ids[tokens.run_offsets[-2] :]) == "<|im_end|>"


def test_system_text_of_the_template_in_the_first_turn_is_no_header() -> None:
    system = "{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    template = of_text("{% for m in messages %}" + system + "<|im_start|>{{ m.role }}\n{{ m.content }}" + END)
    tokens = render([talk(USER, says("a"))], template).tokens
    is_system = tokens.kinds == tokens.kinds[0]
    assert (kind_name(int(tokens.kinds[0])), tokens.messages[0]) == ("system.content", -1)
    assert template.tokenizer.decode(tokens.ids[is_system]) == "<|im_start|>system\nBe kind.<|im_end|>\n"


def test_characters_that_are_lost_are_counted_by_their_message() -> None:
    """The template has no loop: one segment shows texts of several messages."""
    turn = "<|im_start|>{{ messages[N].role }}\n{{ messages[N].content | trim }}<|im_end|>\n"
    second = "{% if messages|length > 1 %}" + turn.replace("N", "1") + "{% endif %}"
    chats = [(a, b) for a in ("q", " q", "  q ") for b in ("a", "why  ", "so ")]
    rendered = render([talk(asks(a), says(b)) for a, b in chats], of_text(turn.replace("N", "0") + second + PROMPT))
    assert rendered.stripped.tolist() == [(a + b).count(" ") for a, b in chats]


# -- answers that change what comes before them: prompt and answer are trained together, in their own document ------

AGENT = (
    asks("Weather?"),
    calls("look_up", reasoning_content="I look it up."),
    {"role": "tool", "content": "Rain.", "tool_call_id": "c1", "name": "look_up"},
    says("It rains.", reasoning_content="So it is."),
)
"""Reasoning, a call, its result, and the final answer."""
ROW = (
    "<|start|>user<|message|>Weather?<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>I look it up.<|end|>"
    '<|start|>assistant to=functions.look_up<|channel|>commentary json<|message|>{"x": 1}<|call|>'
    '<|start|>functions.look_up to=assistant<|channel|>commentary<|message|>"Rain."<|end|>'
    "<|start|>assistant<|channel|>analysis<|message|>So it is.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It rains.<|return|>"
)
"""What a server of gpt-oss has seen and written when the final answer is there."""


def rows(template: ModelTemplate, *messages: Said) -> list[tuple[tuple[int, ...], str]]:
    """Which messages each document trains, and its text."""
    found = template.text_documents(talk(*messages)).documents
    return [(one.trained, "".join(span.text for span in one.spans)) for one in found]


def agent_rows(*messages: Said, **given: Any) -> list[tuple[tuple[int, ...], str]]:
    """The same under gpt-oss, without its system text."""
    return [(trained, text.partition("<|end|>")[2]) for trained, text in rows(gpt_oss(**given), *messages)]


def test_gpt_oss_answers_end_where_a_server_stops() -> None:
    two = (USER, says("a1"), asks("q2"), says("a2"))
    thinks, final = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
    turns, in_place = (gpt_oss(expand=expand) for expand in (Expand.TURNS, Expand.NONE))
    assert turns.stops.names == ("<|return|>", "<|call|>")
    assert trained(turns, *two) == [[f"{final}a1<|return|>"], [f"{final}a2<|return|>"]]
    assert trained(in_place, *two) == [[f"{final}a1<|end|>", f"{final}a2<|return|>"]]
    call = ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>'
    called = trained(turns, USER, calls("f"), TOOL, says("ok"))
    assert called == [[call, f"{final}ok<|return|>"]], "and not the name that the header of the result repeats"
    reasoned = (USER, says("a1", reasoning_content="Hm."), asks("q2"), says("", reasoning_content="r"))
    final = f"<|end|><|start|>assistant{final}"
    assert trained(turns, *reasoned) == [[f"{thinks}Hm.{final}a1<|return|>"], [f"{thinks}r{final}<|return|>"]]


@pytest.mark.parametrize("expand", [Expand.TURNS, Expand.TREE])
def test_the_standard_record_of_an_agent_is_one_row_under_gpt_oss(expand: Expand) -> None:
    assert agent_rows(*AGENT, expand=expand) == [((1, 3), ROW)]
    first, second = agent_rows(*AGENT, asks("And then?"), says("Sun."), expand=expand)
    assert first == ((1, 3), ROW)
    assert second[0] == (5,)
    assert "analysis" not in second[1]
    assert second[1].endswith("final<|message|>Sun.<|return|>")
    assert agent_rows(*AGENT, expand=Expand.LAST) == [((3,), ROW)], "the last answer alone has the same context"


def test_in_place_there_is_no_such_answer_and_the_error_says_what_has_it() -> None:
    with pytest.raises(RecordError, match=r"`expand: turns` and `expand: tree` train it after its prompt") as caught:
        agent_rows(*AGENT, expand=Expand.NONE)
    assert caught.value.code == "prompt_not_in_history"
    kept = agent_rows(*AGENT, expand=Expand.NONE, unproved=Unproved.UNTRAINED)
    assert [trained for trained, _ in kept] == [(1,)], "the other advice works, too"


def test_the_system_text_of_mistral_is_before_every_answer() -> None:
    bound: Any = bind("mistral_nemo", load_tokenizer(str(unpacked("mistral_nemo"))), TemplateOptions())
    said = {"role": "system", "content": "Be kind."}
    assert rows(bound, said, asks("one"), says("1"), asks("two"), says("2")) == [
        ((2,), "<s>[INST]Be kind.\n\none[/INST]1</s>"),
        ((4,), "<s>[INST]one[/INST]1</s>[INST]Be kind.\n\ntwo[/INST]2</s>"),
    ]


def test_other_words_right_before_the_answer_are_refused() -> None:
    """The end of the question is written in prompts alone: what history has there was never seen by a server."""
    template = of_text(
        "{%- for message in messages %}{% if message.role == 'user' %}U{{ message.content }}"
        "{%- if loop.last %}<|im_start|>{% endif %}{%- else %}{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    with pytest.raises(RecordError, match="unproved: untrained") as caught:
        template.text_documents(chat(("user", "q"), ("assistant", "a")))
    assert caught.value.code == "prompt_not_in_history"


@pytest.mark.parametrize("expand", ["turns", "tree", "last"])
def test_deep_verify_proves_such_rows(tmp_path: Path, expand: str) -> None:
    asked, call, result, answer = AGENT
    agent = [{**asked, "content": "Weather? <|call|>"}, {**call, "content": None}, {**result, "content": "Rain. \n"}]
    agent += [answer, asks("And then?"), says("Sun.")]
    records = [{"id": str(size), "messages": agent[:size]} for size in (2, 4, 6)] * 3
    path = write_jsonl(tmp_path / "agents.jsonl", records)
    recipe = plain_recipe(path, template="gpt_oss", date="2026-01-01", expand=expand)
    run_build(recipe, tmp_path / "out", workers=0)
    report = verify(tmp_path / "out", deep=True)
    assert report.passed, report.findings
