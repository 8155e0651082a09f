"""Repairs of records that a template refuses: each only where it helps, counted, and derived again by `verify`."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.recipe import NotShown, Repair, recipe_of
from chatmill.compiler.repairs import REPAIRS, derived_repaired, render_repaired, useful_repairs
from chatmill.compiler.run import run_build
from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.conversations import Conversations
from chatmill.errors import RecordError
from chatmill.render.render import render
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import plain_recipe, proved, write_jsonl

U, A, T = Role.USER, Role.ASSISTANT, Role.TOOL
TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {}}},)
ONE = ToolCall("f", '{"a": 1}', "call_abcdefghij")
TWO = ToolCall("g", '{"b": 2}', "call_2")
SINGLE = """{#-
chatmill: template
tokens: <|im_start|> <|im_end|>
stops: <|im_end|>
-#}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.tool_calls %}{% if message.tool_calls|length > 1 %}{{ raise_exception('one call at once') }}{% endif %}
{{- message.tool_calls[0].function.name }} {{ message.tool_calls[0].function.arguments|tojson }}
{%- else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}
"""
"""Takes one call, shows no text next to it, and no tools."""


def talk(*messages: Message, tools: Any = ()) -> Conversation:
    return Conversation(tuple(messages), id="r", source="s", tools=tools)


def bound(template: str) -> Any:
    return Pipeline(recipe_of(plain_recipe(Path("none.jsonl"), template=template))).template


CALLING = talk(
    Message(U, "q"),
    Message(A, "", tool_calls=(ONE, TWO), has_content=False),
    Message(T, "r2", tool_call_id="call_2"),
    Message(T, "r1", tool_call_id=ONE.id),
    Message(A, "done"),
)


def test_call_ids_have_nine_letters_and_results_those_of_their_calls() -> None:
    found = REPAIRS[Repair.CALL_IDS](CALLING)
    assert found is not None
    changed = found[0]
    ids = [call.id or "" for call in changed.messages[1].tool_calls]
    assert all(re.fullmatch("[A-Za-z0-9]{9}", one) for one in ids)
    assert len(set(ids)) == 2
    assert [message.tool_call_id for message in changed.messages[2:4]] == [ids[1], ids[0]]
    assert REPAIRS[Repair.CALL_IDS](changed) is None, "ids that fit are left alone"
    other = REPAIRS[Repair.CALL_IDS](CALLING._replace(id="another"))
    assert other is not None
    assert other[0].messages[1].tool_calls[0].id != ids[0], "no two records share an id"


def test_results_without_ids_take_those_of_the_calls_in_order() -> None:
    bare = [message._replace(tool_call_id=None) for message in CALLING.messages]
    bare[1] = bare[1]._replace(tool_calls=(ONE._replace(id=None), TWO._replace(id=None)))
    found = REPAIRS[Repair.CALL_IDS](CALLING._replace(messages=tuple(bare)))
    assert found is not None
    ids = [call.id for call in found[0].messages[1].tool_calls]
    assert [message.tool_call_id for message in found[0].messages[2:4]] == ids


def test_parallel_calls_become_one_message_each_with_their_results() -> None:
    messages = list(CALLING.messages)
    messages[1] = messages[1]._replace(content="I look.", reasoning="Hm.", has_content=True)
    found = REPAIRS[Repair.PARALLEL_CALLS](talk(*messages))
    assert found is not None
    shown = [(m.role, [c.name for c in m.tool_calls], m.content) for m in found[0].messages]
    assert shown == [(U, [], "q"), (A, ["f"], "I look."), (T, [], "r1"), (A, ["g"], ""), (T, [], "r2"), (A, [], "done")]
    assert [message.reasoning for message in found[0].messages] == [None, "Hm.", None, None, None, None]
    assert REPAIRS[Repair.PARALLEL_CALLS](found[0]) is None


def test_an_answer_before_the_first_question_is_left_out_and_counted() -> None:
    greeted = talk(Message(Role.SYSTEM, "s"), Message(A, "Hello!"), Message(U, "q"), Message(A, "a"))
    found = REPAIRS[Repair.LEADING_ANSWER](greeted)
    assert found is not None
    assert [message.content for message in found[0].messages] == ["s", "q", "a"]
    assert found[1] == {"lost_content": 6}
    assert REPAIRS[Repair.LEADING_ANSWER](found[0]) is None


def test_text_beside_a_call_joins_the_reasoning_and_records_end_with_an_earlier_answer() -> None:
    beside = Message(A, "I look.", reasoning="Hm.", tool_calls=(ONE,))
    result = Message(T, "r", tool_call_id=ONE.id)
    found = REPAIRS[Repair.TEXT_BESIDE_CALL](talk(Message(U, "q"), beside, result))
    assert found is not None
    assert found[0].messages[1] == beside._replace(reasoning="Hm.\n\nI look.", content="", has_content=False)
    assert found[1] == {}
    assert REPAIRS[Repair.TEXT_BESIDE_CALL](found[0]) is None
    calls = [Message(U, "one"), Message(A, "", tool_calls=(ONE._replace(id="abcdefghi"),), has_content=False)]
    nemo, batch = bound("mistral_nemo"), Conversations.of([talk(*calls, *calls, *calls, Message(U, "four"))])
    repaired, rendered, notes = render_repaired(batch, nemo, [Repair.END_EARLIER], NotShown.REFUSE)
    assert rendered.failed == ()
    assert list(repaired[0].messages) == calls, "users must take turns with answers"
    left_out = 2 * len("f" + ONE.arguments)
    assert notes == {0: {"repaired_end_earlier": 1, "lost_content": len("oneonefour"), "lost_calls": left_out}}
    one = derived_repaired(batch[0], [Repair.END_EARLIER], NotShown.REFUSE, lambda given: render([given], nemo))
    assert (one[0].messages, one[2]) == (repaired[0].messages, notes[0])


def test_tools_without_a_description_get_an_empty_one() -> None:
    bare = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    given = talk(Message(U, "q"), Message(A, "a"), tools=(bare,))
    oss = Pipeline(recipe_of(plain_recipe(Path("none.jsonl"), template="gpt_oss", date="2026-01-01"))).template
    repaired, rendered, notes = render_repaired(Conversations.of([given]), oss, list(Repair), NotShown.REFUSE)
    assert rendered.failed == ()
    assert repaired[0].tools == ({**bare, "function": {**bare["function"], "description": ""}},)  # type: ignore[dict-item]
    assert notes == {0: {"repaired_tool_descriptions": 1}}


def test_only_repairs_that_help_are_kept() -> None:
    """Nemo wants ids of nine characters and takes parallel calls: those stay as they are."""
    nemo = bound("mistral_nemo")
    batch = Conversations.of([CALLING, talk(Message(U, "q"), Message(A, "a"))])
    repaired, rendered, notes = render_repaired(batch, nemo, list(Repair), NotShown.REFUSE)
    assert rendered.failed == ()
    assert notes == {0: {"repaired_call_ids": 1}}
    assert [len(message.tool_calls) for message in repaired[0].messages] == [0, 2, 0, 0, 0]
    assert repaired[1] == batch[1]
    _, refused, _ = render_repaired(batch, nemo, [Repair.PARALLEL_CALLS], NotShown.REFUSE)
    assert [index for index, _ in refused.failed] == [0]


def test_a_system_message_that_is_not_shown_goes_as_a_whole(tmp_path: Path) -> None:
    """A template may write something for an empty one."""
    hides = SINGLE.replace("in messages %}", "in messages if message.role != 'system' %}")
    (tmp_path / "hides.jinja").write_text(hides)
    batch = Conversations.of([talk(Message(Role.SYSTEM, "Be kind."), Message(U, "q"), Message(A, "a"))])
    repaired, rendered, notes = render_repaired(batch, bound(str(tmp_path / "hides.jinja")), [], NotShown.DROP)
    assert rendered.failed == ()
    assert [message.role for message in repaired[0].messages] == [U, A]
    assert notes == {0: {"lost_content": len("Be kind.")}}


def test_text_before_a_call_that_a_later_answer_hides_becomes_reasoning() -> None:
    """gpt-oss writes both as analysis, and takes the contents of calls away once a final answer follows."""
    oss = Pipeline(recipe_of(plain_recipe(Path("none.jsonl"), template="gpt_oss", date="2026-01-01"))).template
    call = Message(A, "I look.", tool_calls=(ONE,))
    given = talk(
        Message(U, "q"), call, Message(T, "r", tool_call_id=ONE.id), Message(A, "a"), Message(U, "q2"), Message(A, "b")
    )
    batch = Conversations.of([given])
    assert [error.path for _, error in render(batch, oss, collect_failures=True).failed] == ["messages[1].content"]
    repaired, rendered, notes = render_repaired(batch, oss, [Repair.TEXT_BESIDE_CALL], NotShown.REFUSE)
    assert rendered.failed == ()
    assert repaired[0].messages[1] == call._replace(reasoning="I look.", content="", has_content=False)
    assert notes == {0: {"repaired_text_beside_call": 1}}
    text = oss.tokenizer.decode(rendered.tokens.ids)
    assert "<|channel|>analysis<|message|>I look.<|end|>" in text


def test_text_before_a_call_is_not_lost_as_reasoning_that_a_template_does_not_show() -> None:
    call = Message(A, "I look.", tool_calls=(ONE._replace(id="abcdefghi"),))
    batch = Conversations.of([talk(Message(U, "q"), call)])
    _, rendered, notes = render_repaired(batch, bound("mistral_nemo"), [Repair.TEXT_BESIDE_CALL], NotShown.REFUSE)
    assert [error.code for _, error in rendered.failed] == ["not_shown"]
    assert notes == {}


@pytest.mark.parametrize("not_shown", list(NotShown))
@pytest.mark.parametrize("repairs", [[], list(Repair)], ids=["none", "all"])
def test_one_by_one_is_as_in_a_batch(tmp_path: Path, repairs: list[Repair], not_shown: NotShown) -> None:
    (tmp_path / "single.jinja").write_text(SINGLE)
    single = bound(str(tmp_path / "single.jinja"))
    beside = Message(A, "I will look.", tool_calls=(ONE,))
    talks = [
        CALLING,
        talk(Message(A, "hi"), *CALLING.messages, tools=TOOLS),
        talk(Message(U, "q"), Message(A, "a")),
        talk(Message(U, "q"), beside, Message(T, "r", tool_call_id=ONE.id), Message(A, "a"), tools=TOOLS),
    ]
    batch, rendered, notes = render_repaired(Conversations.of(talks), single, repairs, not_shown)
    failed = dict(rendered.failed)
    assert len(failed) == {"refuse": (3, 2), "drop": (2, 0)}[not_shown][bool(repairs)]
    for index, one in enumerate(talks):
        by_itself = partial(derived_repaired, one, useful_repairs(repairs, single), not_shown)
        if index in failed:
            with pytest.raises(RecordError, match=re.escape(failed[index].message)):
                by_itself(lambda given: render([given], single))
            continue
        found, _, counts = by_itself(lambda given: render([given], single))
        assert (found.messages, found.tools) == (batch[index].messages, batch[index].tools)
        assert counts == notes.get(index, {})


def record(name: str, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": name, "messages": list(messages), **more}


def test_a_build_counts_what_it_repairs_and_verify_derives_it_again(tmp_path: Path) -> None:
    (tmp_path / "single.jinja").write_text(SINGLE)
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked, done = {"role": "user", "content": "q"}, {"role": "assistant", "content": "done"}
    results = [{"role": "tool", "content": str(k), "tool_call_id": f"c{k}"} for k in (1, 2)]
    calls = [{**call, "id": f"c{k}"} for k in (1, 2)]
    records = [
        record("plain", asked, done),
        record("two", asked, {"role": "assistant", "content": None, "tool_calls": calls}, *results, done),
        record("beside", asked, {"role": "assistant", "content": "I look.", "tool_calls": calls[:1]}, results[0], done),
        record("tools", asked, done, tools=[{"type": "function", "function": {"name": "f"}}]),
    ]
    path = write_jsonl(tmp_path / "chats.jsonl", records)
    recipe = plain_recipe(path, template=str(tmp_path / "single.jinja"))
    with pytest.raises(RecordError, match=r"one call at once"):
        run_build(recipe, tmp_path / "out", workers=0)
    quarantined = run_build({**recipe, "on_error": "quarantine"}, tmp_path / "quarantined", workers=0)
    rejected = [json.loads(line) for line in (tmp_path / "quarantined" / "rejected.jsonl").read_text().splitlines()]
    assert [one["id"] for one in rejected] == ["two", "beside", "tools"]
    assert all("`not_shown: drop` takes it out of the record" in one["message"] for one in rejected[1:])
    assert all("unproved" not in one["message"] for one in rejected[1:]), "which would change nothing"
    assert quarantined.manifest["splits"]["train"]["episodes"] == 1
    chosen = {**recipe, "repairs": ["parallel_calls"], "not_shown": "drop"}
    ledger = proved(chosen, tmp_path / "kept")
    assert ledger.total_records("built") == 4
    notes = ledger.all_notes()
    assert notes["repaired_parallel_calls"] == 1
    assert notes["lost_content"] == len("I look.")
    assert notes["lost_tools"] > 20
    assert len(EpisodeDataset(tmp_path / "kept")) == 4


def test_a_record_that_stays_refused_has_the_error_that_nothing_helped_against(tmp_path: Path) -> None:
    """The template shows no tools, and ends no call."""
    endless = SINGLE.replace("<|im_end|>\n{% endfor", "{% if not message.tool_calls %}<|im_end|>{% endif %}\n{% endfor")
    (tmp_path / "endless.jinja").write_text(endless)
    template = bound(str(tmp_path / "endless.jinja"))
    given = talk(Message(U, "q"), Message(A, "", tool_calls=(ONE,), has_content=False), tools=TOOLS)

    def reasons(not_shown: NotShown) -> list[str]:
        return [
            error.code for _, error in render_repaired(Conversations.of([given]), template, [], not_shown)[1].failed
        ]

    assert (reasons(NotShown.REFUSE), reasons(NotShown.DROP)) == (["not_shown"], ["no_stop"])
    with pytest.raises(RecordError) as refused:
        derived_repaired(given, [], NotShown.DROP, lambda one: render([one], template))
    assert refused.value.code == "no_stop"
