"""Turns that are remembered give what plain Jinja gives, for every record, in any order and any chunks."""

from __future__ import annotations

import gc
import itertools
import json
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.gc_pause import without_collector
from chatmill.errors import ConfigError, RecordError
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import Refusal
from chatmill.render.jinja.turn_run import TurnRun
from chatmill.render.model_template import ModelTemplate
from chatmill.render.plan_store import ENTRIES_OF_KEY
from chatmill.render.render import render
from tests.render.jinja.at_hand import bound, bundled, samples, text_of
from tests.render.jinja.test_random_templates import CONTENTS, SETTINGS, bind, conversations
from tests.render.one_by_one import ids_alone
from tools.template_survey import bind_bytes, survey


def recombined(seed: int, count: int) -> list[Conversation]:
    """Conversations of which no two have the same shape, made of the exchanges of real ones."""
    rng = random.Random(seed)
    exchanges: list[list[Message]] = []
    tools = [one.tools for one in samples(4)]
    for conversation in samples(4):
        for message in conversation.messages:
            if message.role is Role.USER or not exchanges:
                exchanges.append([])
            exchanges[-1].append(message)
    made = []
    for number in range(count):
        chosen = [message for _ in range(rng.randint(1, 5)) for message in rng.choice(exchanges)]
        made.append(Conversation(tuple(chosen), tools=rng.choice(tools), id=f"{seed}-{number}"))
    return made


def differences(template: ModelTemplate, batch: list[Conversation], rng: random.Random) -> list[tuple[str | None, int]]:
    """The renderings of conversations, and of random beginnings of them, that are not plain Jinja's."""
    renderer, found = template._renderer({}), []
    for conversation in batch:
        view = RecordView(conversation, template.form)
        count = len(conversation.messages)
        for upto in sorted({count, *(rng.randint(1, count) for _ in range(3))}):
            for prompt in (False, True):
                try:
                    wanted = renderer.plain_if_any(view, upto, prompt)
                except RecordError:
                    continue
                written = renderer.render(view, upto, prompt)
                if (None if isinstance(written, Refusal) else written.text) != wanted:
                    found.append((conversation.id, upto))
    assert renderer.is_followed, "else it has noticed a difference, and writes every record as a whole"
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if at % 3 else []) for at, name in enumerate(bundled())]
)
def test_published_templates_write_unseen_shapes_from_turns_that_are_remembered(name: str) -> None:
    template = bound(name)
    assert differences(template, recombined(1, 12), random.Random(2)) == []
    renderer = template._renderer({})
    before = renderer.runs
    assert differences(template, recombined(3, 6), random.Random(4)) == []
    assert renderer.runs > 0
    assert renderer.runs - before <= 48, "most renderings of the second batch have nothing new"


def test_what_is_asked_of_texts_does_not_give_them_away() -> None:
    """Nor a length that is handed to a macro or an object; nor is there a message after the last of a beginning."""
    source = (
        "{% macro size(n) %}{{ 'long' if n > 3 else 'short' }}{% endmacro %}{% for m in messages %}[{{ m.role }}]"
        "{% if 'y' in m.content or m.content == messages[0].content %}!{% endif %}"
        "{% set d = dict(n=m.content|length) %}{{ size(m.content|length) }}{{ 'L' if d.n > 3 else 'S' }}"
        "{{ messages[2].role if messages[2] is defined else 'no third' }}{{ m.content }}<|e|>{% endfor %}"
    )
    template = bind(source)
    renderer = template._renderer({})
    roles = (Role.USER, Role.ASSISTANT) * 2
    chats = [Conversation(tuple(Message(role, "x" * n) for role in roles)) for n in range(1, 30)]
    assert differences(template, chats[:6], random.Random(1)) == []
    runs = renderer.runs
    assert differences(template, chats[8:], random.Random(1)) == []
    assert renderer.runs == runs


def test_a_turn_that_compares_messages_is_remembered_for_longer_conversations() -> None:
    """What two messages ask of each other is asked of a beginning; what one is asked holds in the whole as well."""
    source = (
        "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{%- for m in messages %}[{{ m.role }}]{{ m.content }}{% if m == users[-1] %}!{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    template = bind_bytes("compares", source)
    roles = (Role.USER, Role.ASSISTANT)
    words = ("a", "b")
    alike = [Conversation(tuple(Message(roles[k % 2], f"{word}{k}") for k in range(9)), id=word) for word in words]
    assert differences(template, alike[:1], random.Random(1)) == []
    renderer = template._renderer({})
    view, requests = RecordView(alike[1], template.form), [(upto, False, -1) for upto in range(1, 10)]
    renderer.many(view, requests)
    before = renderer.runs
    renderer.tries.replayer.forget_classes()  # as new questions do
    written = renderer.many(view, requests)
    assert renderer.runs == before
    for (upto, _, _), outputs in zip(requests, written, strict=True):
        assert not isinstance(outputs, Refusal)
        assert renderer.segments.window(outputs, 0, view).rendering.text == renderer.plain(view, upto, False)


def test_turns_that_are_known_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither if the tools are new, nor if one turn of many is; state is handed over in both directions."""
    source = (
        "{% set ns = namespace(last='', at=0) %}{% if tools %}{% for key in tools[0].function.parameters %}"
        "{{ key }}{% endfor %}{% endif %}{% for m in messages %}[{{ m.role }}]{% if m.role == 'tool' %}{{ ns.last }}"
        "{% endif %}{% if m.role == 'user' %}{% set ns.at = loop.index0 %}{% endif %}"
        "{{ m.content }}{{ 'late' if loop.index0 > ns.at + 1 }}{% set ns.last = m.content %}{% endfor %}"
        "{{ ns.last }}{{ 'long' if ns.at > 3 }}"
    )
    template = bind_bytes("known turns", source)
    renderer = template._renderer({})
    roles, ran = (Role.USER, Role.ASSISTANT, Role.TOOL, Role.TOOL), list[int]()

    def chat(count: int, keys: int, other: int = -1) -> RecordView:
        tool = {"type": "function", "function": {"name": "f", "parameters": {f"k{n}": n for n in range(keys)}}}
        messages = [Message(Role.SYSTEM if k == other else roles[k % 4], f"text {k}") for k in range(count)]
        return RecordView(Conversation(tuple(messages), tools=(tool,)), template.form)

    learned = TurnRun._learned
    monkeypatch.setattr(TurnRun, "_learned", lambda *given: (ran.append(1), learned(*given))[1])
    for view, most in ((chat(8, 1), 9), (chat(40, 2), 1), (chat(60, 2, other=30), 3), (chat(60, 3, other=20), 3)):
        ran.clear()
        count = len(view.roles)
        written = renderer.render(view, count, False)
        assert not isinstance(written, Refusal)
        assert written.text == renderer.plain(view, count, False)
        assert 0 < len(ran) <= most
    assert renderer.is_followed


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "openai-gpt-oss-120b"])
def test_memory_is_bounded_and_what_is_forgotten_is_learned_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On chats that never repeat, no more is remembered than the limit and what one batch brings."""
    limit, source = 1500, text_of(f"llamacpp/{name}.jinja")
    batches = [recombined(seed, 3) for seed in range(12)]
    template, sizes, alone_sizes = bind_bytes(name, source), [0], []
    monkeypatch.setattr("chatmill.render.plan_store.MAX_REMEMBERED", limit)
    monkeypatch.setattr("chatmill.render.plan_store.MAX_ENTRIES", 100)
    for batch in batches:
        alone = bind_bytes(name, source)
        wanted, found = (render(batch, one, collect_failures=True) for one in (alone, template))
        for column in ("ids", "offsets", "run_offsets", "run_kinds", "run_messages"):
            assert getattr(found.tokens, column).tolist() == getattr(wanted.tokens, column).tolist()
        assert [(at, error.code) for at, error in found.failed] == [(at, error.code) for at, error in wanted.failed]
        sizes.append(template.store.size)
        alone_sizes.append(alone.store.size)
        assert len(template.store.plans) <= 100 // ENTRIES_OF_KEY + 1
    assert any(after < before for before, after in itertools.pairwise(sizes)), "it forgets"
    assert max(sizes) <= limit + max(alone_sizes)
    assert all(renderer.is_followed for renderer in template.store.renderers.values())


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "openai-gpt-oss-120b"])
def test_no_cycle_holds_a_batch(name: str) -> None:
    """Builds switch the collector off: what is learned, asked or refused must not keep conversations until it runs."""
    template = bind_bytes(name, text_of(f"llamacpp/{name}.jinja"))
    with without_collector():
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for seed in range(3):
                render(
                    [*recombined(seed, 4), Conversation((Message(Role.TOOL, "x"),))], template, collect_failures=True
                )
            gc.collect()
            left = {type(one).__name__ for one in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
    assert not left & {"Conversations", "RecordView"}


SCANS = st.sampled_from(
    [
        "",
        "{% for s in messages[::-1] %}{% set i = (messages|length - 1) - loop.index0 %}{% if ns.search and "
        "s.role == 'user' %}{% set ns.search = false %}{% set ns.last = i %}{% endif %}{% endfor %}",
        "{% for s in messages %}{% if s.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}",
        "{% for s in messages if s.role == 'tool' %}{% set ns.n = ns.n + 1 %}{% endfor %}",
    ]
)
ITEMS = (
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};"
)
STEPS = [
    "{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}[{{ ns.n }}]{% endif %}",
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}!{% endif %}",
    "{% if loop.previtem is defined and loop.previtem.role == m.role %}+{% endif %}",
    "{% if loop.nextitem is defined and loop.nextitem.role == 'tool' %}>{% endif %}",
    "{% if loop.index0 > 0 and messages[loop.index0 - 1].role == 'tool' %}~{% endif %}",
    "{% if loop.index0 > ns.last %}R{% endif %}",
    "{% if loop.last %}L{% elif loop.first %}F{% endif %}",
    "{% set ns.t = m.content %}{% set ns.t = ns.t ~ '.' %}{{ ns.t }}",
    "{{ ns.t }}{% set ns.t = m.role %}",
    "{{ ns.t }}{% set ns.t = m.content | trim %}",
    "{% set ns.seen = -1 %}{% for k in range(loop.index0 + 1, messages|length) %}{% if messages[k].role == "
    "'assistant' %}{% set ns.seen = k %}{% endif %}{% endfor %}{% if ns.seen > loop.index0 %}x{% endif %}",
    "{% set here = loop.index0 %}{% for e in messages %}{% if loop.index0 < here and e.role == 'user' %}"
    "{{ e.content | trim }},{% endif %}{% endfor %}",
    "{% for k in range(loop.index0) %}{{ messages[k].role[0] }}{% endfor %}",
    "{% if messages[0].role == 'system' %}S{% endif %}",
    "{% if messages[-1].role == m.role %}E{% endif %}",
    "{{ f(m.content) }}",
    "{% if m.role == 'tool' %}{% continue %}{% endif %}",
    "{% if loop.index0 > 5 %}{% break %}{% endif %}",
    "{% set ns.roles = ns.roles + [m.role] %}{{ ns.roles | length }}",
    "{% if m == messages[-1] %}={% endif %}",
    "{% if loop.previtem is defined and loop.previtem.name is defined %}N{% endif %}",
    "{% if loop.previtem is defined and loop.previtem.tool_calls %}{{ loop.previtem.tool_calls | length }}{% endif %}",
    "{% if messages[loop.index0 + 2:] | length > 0 %}M{% endif %}",
    "{% if messages[1:] | length > 4 %}M{% endif %}{% for e in messages[:2] %}{{ e.role[0] }}{% endfor %}",
    "{% if messages[1:-1] | length > 4 %}M{% endif %}{{ messages[1:][loop.index0].role }}",
    "{% if ns.none is undefined %}U{% endif %}{{ ns.u }}{% set ns.u = m.nothing %}",
    "{{ m.content[0] }}{{ m.content[-2] }}",
    "{% for k in ns.roles %}{{ messages[k].role[0] }}{% endfor %}"
    "{% set ns.roles = range(0, loop.index0, 2 if m.content == 'a' else 1) %}",
    "{{ ns.t }}" + ITEMS + "{% set ns.t = v %}{% endfor %}{% endfor %}",
    "{{ messages[-1].content }}",
    "{% if messages[0].content in m.content %}B{% endif %}",
    ITEMS + "{% if v is true %}!{% endif %}{% endfor %}{% endfor %}",
    "{% if m.tool_calls and m.tool_calls | length > 1 and m.tool_calls[1].function.name == 'g' %}G{% endif %}",
]
WALKS = st.sampled_from(
    [
        "{% for m in messages %}",
        "{% for m in messages[1:] %}",
        "{% for m in messages | reverse %}",
        "{% for m in messages if m.role != 'system' %}",
        "{% for k in range(messages | length) %}{% set m = messages[k] %}",
    ]
)
HEAD = (
    "{{ bos_token }}{% set ns = namespace(search=true, last=0, n=0, t='', seen=-1, roles=[]) %}"
    "{% set outer = 'o' %}{% macro f(x) %}{{ outer }}{{ x | trim }}{{ ns.n }}{% endmacro %}"
)
BODY_END = "{{ m.content }}<|eos|>{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"


@st.composite
def looping_templates(draw: st.DrawFn) -> str:
    """A chat template with scans, state, neighbours and counters."""
    body = (
        "".join(draw(st.lists(st.sampled_from(STEPS), max_size=3)))
        + "{{ "
        + draw(CONTENTS.filter(lambda one: "ns.last" not in one))
    )
    body += " }}" + "".join(draw(st.lists(st.sampled_from(STEPS), max_size=2)))
    walk = draw(WALKS)
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}={{ c.function.arguments | tojson }}{% endfor %}"
    loop = walk + "<|{{ m.role[0] }}|>" + body + calls + "<|eos|>{% endfor %}"
    return HEAD + draw(SCANS) + loop + "{% if add_generation_prompt %}<|a|>{% endif %}"


@SETTINGS
@given(source=looping_templates(), batch=st.lists(conversations(), min_size=2, max_size=6), seed=st.integers(0, 9))
def test_random_loops_have_the_text_of_plain_jinja(source: str, batch: list[Conversation], seed: int) -> None:
    try:
        template = bind(source)
    except ConfigError:
        assume(False)
    rng = random.Random(seed)
    order = [*batch, *batch]
    rng.shuffle(order)
    assert differences(template, order, rng) == []


@cache
def chats_for_steps() -> list[Conversation]:
    """Chats that differ in all that the steps read."""
    rng, chats = random.Random(1), list[Conversation]()
    for number in range(16):
        messages = []
        for _ in range(rng.randint(1, 3)):
            name, texts = rng.choice([None, "n"]), [rng.choice(["a", "ab", "b", "hi"]) for _ in range(3)]
            arguments = [json.dumps({"a": rng.choice([True, False, None, 1, "x"])}) for _ in range(rng.randint(0, 2))]
            calls = tuple(ToolCall(rng.choice(["f", "g"]), one, "i") for one in arguments)
            messages += [Message(Role.USER, texts[0], name=name), Message(Role.ASSISTANT, texts[1], tool_calls=calls)]
            messages += [Message(Role.TOOL, texts[2], tool_call_id="i")] * len(calls)
        chats.append(Conversation((*messages, Message(Role.ASSISTANT, "end")), id=str(number)))
    return chats


@pytest.mark.parametrize("step", STEPS)
def test_each_step_alone_has_the_text_of_plain_jinja(step: str) -> None:
    """In one batch, and in beginnings, of which none is run twice."""
    chats, source = chats_for_steps(), HEAD + "{% for m in messages %}<|{{ m.role[0] }}|>" + step + BODY_END
    template = bind(source)
    renderer = template._renderer({})
    assert differences(template, chats[:6], random.Random(2)) == []
    runs = renderer.runs
    assert differences(template, chats[:6], random.Random(2)) == []
    assert renderer.runs == runs
    rows = rows_of(source, [chats])
    for one in chats:
        found = rows[one.id]
        assert alone(one, template) == (found if isinstance(found, str) else [ids for ids, _, _ in found])


def test_conversations_that_are_written_as_a_whole_change_no_others() -> None:
    source = (
        "{% if 'odd' in messages[0].content %}<|s|>{{ messages[0] | tojson }}<|eos|>{% endif %}{% for m in messages %}"
        "<|{{ m.role[0] }}|>{{ m.content }}<|eos|>{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
    )
    said = [Message(Role.ASSISTANT, "Yes."), Message(Role.USER, "More?"), Message(Role.ASSISTANT, "No.")]
    batch = [
        Conversation((Message(Role.USER, f"{number} {'even' if number % 3 else 'odd'}"), *said[: 1 + number % 2 * 2]))
        for number in range(60)
    ]
    batch = [one._replace(id=str(number)) for number, one in enumerate(batch)]
    together = rows_of(source, [batch])
    assert rows_of(source, [batch[::-1]]) == together
    assert rows_of(source, [batch[::3], batch[1::3], batch[2::3]]) == together
    assert all(isinstance(one, list) for one in together.values())


def alone(conversation: Conversation, template: ModelTemplate) -> list[list[int]] | str:
    """The ids of a record without plans, or the code of its refusal."""
    try:
        return ids_alone(conversation, template)
    except RecordError as error:
        return error.code


def rows_of(source: str, chunks: list[list[Conversation]]) -> dict[str, Any]:
    """What every record becomes, by its id: its rows, or why it is refused."""
    template = bind(source)
    found: dict[str, Any] = {}
    for chunk in chunks:
        rendered = render(chunk, template, collect_failures=True)
        found |= {chunk[index].id: error.code for index, error in rendered.failed}
        for place, index in enumerate(rendered.kept.tolist()):
            row = rendered.tokens.conversation(place)
            found.setdefault(chunk[index].id, []).append((row.ids.tolist(), row.kinds.tolist(), row.messages.tolist()))
    assert all(one.unnoted == 0 and one.is_followed for one in template.store.renderers.values())
    return found


@SETTINGS
@given(source=looping_templates(), batch=st.lists(conversations(), min_size=3, max_size=6), seed=st.integers(0, 9))
def test_rows_are_the_same_in_any_order_and_any_chunks(source: str, batch: list[Conversation], seed: int) -> None:
    batch = [one._replace(id=str(number)) for number, one in enumerate(batch)]
    try:
        together = rows_of(source, [batch])
    except ConfigError:
        assume(False)
    shuffled = list(batch)
    random.Random(seed).shuffle(shuffled)
    cut = seed % len(batch)
    assert rows_of(source, [shuffled]) == together
    assert rows_of(source, [batch[:cut], batch[cut:]]) == together
    template = bind(source)
    for one in batch:
        found = together[one.id]
        assert alone(one, template) == (found if isinstance(found, str) else [ids for ids, _, _ in found])
    assert survey(template, batch).failures == []
