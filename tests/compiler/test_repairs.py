"""Repairs of records that a template refuses."""

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
Q, ANSWER, HELLO, DONE = Message(U, "q"), Message(A, "a"), Message(A, "Hello!"), Message(A, "done")
SYSTEM = Message(Role.SYSTEM, "Be kind.")
RESULTS = Message(T, "r2", tool_call_id="call_2"), Message(T, "r1", tool_call_id=ONE.id)
BESIDE = Message(A, "I look.", reasoning="Hm.", tool_calls=(ONE,))
NINE = Message(A, "I look.", tool_calls=(ONE._replace(id="abcdefghi"),))
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
HIDES = SINGLE.replace("in messages %}", "in messages if message.role != 'system' %}")
ENDLESS = SINGLE.replace("<|im_end|>\n{% endfor", "{% if not message.tool_calls %}<|im_end|>{% endif %}\n{% endfor")


def talk(*messages: Message, tools: Any = ()) -> Conversation:
    return Conversation(tuple(messages), id="r", source="s", tools=tools)


def silent(message: Message, **changes: Any) -> Message:
    return message._replace(content="", has_content=False, **changes)


CALLING = talk(Q, silent(Message(A, "", tool_calls=(ONE, TWO))), *RESULTS, DONE)


def bound(template: str, home: Path) -> Any:
    """A template of a name, or of a text."""
    if "\n" in template:
        (home / "own.jinja").write_text(template)
        template = str(home / "own.jinja")
    date = {"date": "2026-01-01"} if template == "gpt_oss" else {}
    return Pipeline(recipe_of(plain_recipe(Path("none.jsonl"), template=template, **date))).template


def mended(
    template: Any, talks: list[Conversation], repairs: list[Repair], not_shown: NotShown = NotShown.REFUSE
) -> list[tuple[Conversation | str, dict[str, int]]]:
    """Each record as it is rendered, or the code of its error, with its notes; by itself it is as in the batch."""
    batch, rendered, notes = render_repaired(Conversations.of(talks), template, repairs, not_shown)
    failed, found = dict(rendered.failed), list[tuple[Any, Any]]()
    for index, one in enumerate(talks):
        by_itself = partial(derived_repaired, one, useful_repairs(repairs, template), not_shown)
        counts = notes.get(index, {})
        if index in failed:
            with pytest.raises(RecordError, match=re.escape(failed[index].message)):
                by_itself(lambda record: render([record], template))
            found.append((failed[index].code, counts))
            continue
        alone, _, counts_alone = by_itself(lambda record: render([record], template))
        assert (alone.messages, alone.tools, counts_alone) == (batch[index].messages, batch[index].tools, counts)
        found.append((batch[index], counts))
    return found


def test_call_ids_have_nine_letters_and_results_those_of_their_calls() -> None:
    found = REPAIRS[Repair.CALL_IDS](CALLING)
    assert found is not None
    ids = [call.id or "" for call in found[0].messages[1].tool_calls]
    assert all(re.fullmatch("[A-Za-z0-9]{9}", one) for one in ids)
    assert len(set(ids)) == 2
    assert [message.tool_call_id for message in found[0].messages[2:4]] == [ids[1], ids[0]]
    assert REPAIRS[Repair.CALL_IDS](found[0]) is None, "ids that fit are left alone"
    other = REPAIRS[Repair.CALL_IDS](CALLING._replace(id="another"))
    assert other is not None
    assert other[0].messages[1].tool_calls[0].id != ids[0], "no two records share an id"
    calls = CALLING.messages[1]._replace(tool_calls=(ONE._replace(id=None), TWO._replace(id=None)))
    results = [message._replace(tool_call_id=None) for message in RESULTS]
    bare = REPAIRS[Repair.CALL_IDS](talk(Q, calls, *results, DONE))
    assert bare is not None
    assert [message.tool_call_id for message in bare[0].messages[2:4]] == ids, "in the order of the calls"


@pytest.mark.parametrize(
    ("repair", "before", "after", "lost"),
    [
        (
            Repair.PARALLEL_CALLS,
            [Q, BESIDE._replace(tool_calls=(ONE, TWO)), *RESULTS, DONE],
            [Q, BESIDE, RESULTS[1], silent(BESIDE, reasoning=None, tool_calls=(TWO,)), RESULTS[0], DONE],
            {},
        ),
        (Repair.LEADING_ANSWER, [SYSTEM, HELLO, Q, ANSWER], [SYSTEM, Q, ANSWER], {"lost_content": 6}),
        (Repair.TEXT_WITH_CALL, [Q, BESIDE], [Q, silent(BESIDE, reasoning="Hm.\n\nI look.")], {}),
    ],
)
def test_what_a_repair_makes_of_a_record(repair: Repair, before: Any, after: Any, lost: dict[str, int]) -> None:
    assert REPAIRS[repair](talk(*before)) == (talk(*after), lost)
    assert REPAIRS[repair](talk(*after)) is None


AFTER_CALL = [Message(T, "r", tool_call_id=ONE.id), ANSWER, Message(U, "q2"), Message(A, "b")]
HELPED: list[Any] = [
    # an empty system message would still be written
    (HIDES, [SYSTEM, Q, ANSWER], [], NotShown.DROP, [Q, ANSWER], {"lost_content": len("Be kind.")}),
    # gpt-oss writes both as analysis, and takes the contents of calls away once a final answer follows
    (
        *("gpt_oss", [Q, BESIDE._replace(reasoning=None), *AFTER_CALL], [Repair.TEXT_WITH_CALL], NotShown.REFUSE),
        [Q, silent(BESIDE, reasoning="I look."), *AFTER_CALL],
        {"repaired_text_with_call": 1},
    ),
    # as reasoning it would be lost where a template shows none
    ("mistral_nemo", [Q, NINE], [Repair.TEXT_WITH_CALL], NotShown.REFUSE, "not_shown", {}),
    # a record that stays refused has the error that nothing helped against: no tools are shown, and no call ends
    (ENDLESS, [Q, silent(NINE)], [], NotShown.REFUSE, "not_shown", {}),
    (ENDLESS, [Q, silent(NINE)], [], NotShown.DROP, "no_stop", {}),
]


@pytest.mark.parametrize(("template", "given", "repairs", "not_shown", "after", "notes"), HELPED)
def test_what_helps_against_the_refusal_of_a_template(
    tmp_path: Path, template: str, given: Any, repairs: Any, not_shown: NotShown, after: Any, notes: Any
) -> None:
    tools = TOOLS if template == ENDLESS else ()
    [(found, counted)] = mended(bound(template, tmp_path), [talk(*given, tools=tools)], repairs, not_shown)
    assert (found if isinstance(found, str) else list(found.messages)) == after
    assert counted == notes


def test_only_repairs_that_help_are_kept(tmp_path: Path) -> None:
    """Nemo wants ids of nine characters and takes parallel calls; gpt-oss wants descriptions of tools."""
    nemo = bound("mistral_nemo", tmp_path)
    [(found, notes), unchanged] = mended(nemo, [CALLING, talk(Q, ANSWER)], list(Repair))
    assert notes == {"repaired_call_ids": 1}
    assert [len(message.tool_calls) for message in found.messages] == [0, 2, 0, 0, 0]  # type: ignore[union-attr]
    assert unchanged == (talk(Q, ANSWER), {})
    assert isinstance(mended(nemo, [CALLING], [Repair.PARALLEL_CALLS])[0][0], str)
    bare = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    [(found, notes)] = mended(bound("gpt_oss", tmp_path), [talk(Q, ANSWER, tools=(bare,))], list(Repair))
    described = {**bare, "function": {**bare["function"], "description": ""}}  # type: ignore[dict-item]
    assert (found, notes) == (talk(Q, ANSWER, tools=(described,)), {"repaired_tool_descriptions": 1})


@pytest.mark.parametrize("not_shown", list(NotShown))
@pytest.mark.parametrize("repairs", [[], list(Repair)], ids=["none", "all"])
def test_one_by_one_is_as_in_a_batch(tmp_path: Path, repairs: list[Repair], not_shown: NotShown) -> None:
    talks = [
        CALLING,
        talk(HELLO, *CALLING.messages, tools=TOOLS),
        talk(Q, ANSWER),
        talk(Q, BESIDE._replace(reasoning=None), RESULTS[1], ANSWER, tools=TOOLS),
    ]
    found = mended(bound(SINGLE, tmp_path), talks, repairs, not_shown)
    failed = sum(isinstance(one, str) for one, _ in found)
    assert failed == {"refuse": (3, 2), "drop": (2, 0)}[not_shown][bool(repairs)]


def test_a_build_counts_what_it_repairs_and_verify_derives_it_again(tmp_path: Path) -> None:
    (tmp_path / "single.jinja").write_text(SINGLE)
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked, done = {"role": "user", "content": "q"}, {"role": "assistant", "content": "done"}
    results = [{"role": "tool", "content": str(k), "tool_call_id": f"c{k}"} for k in (1, 2)]
    calls = [{**call, "id": f"c{k}"} for k in (1, 2)]
    two = {"role": "assistant", "content": None, "tool_calls": calls}
    beside = {"role": "assistant", "content": "I look.", "tool_calls": calls[:1]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    records = [
        {"id": "plain", "messages": [asked, done]},
        {"id": "two", "messages": [asked, two, *results, done]},
        {"id": "beside", "messages": [asked, beside, results[0], done]},
        {"id": "tools", "messages": [asked, done], "tools": tools},
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
