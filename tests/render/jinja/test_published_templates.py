"""Published chat templates: the text is that of plain Jinja and of transformers; what is trained is proved; and turns
that are remembered give what plain Jinja gives, for every record, while little is remembered."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Sequence

import pytest

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.gc_pause import without_collector
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.jinja.renderer import Refusal
from chatmill.render.jinja.turn_run import TurnRun
from chatmill.render.model_template import ModelTemplate
from chatmill.render.plan_store import ENTRIES_OF_KEY
from chatmill.render.render import render
from tests.pages import DOCS
from tests.render.jinja.at_hand import bound, bundled, by_transformers, of_text, of_trl, samples, text_of
from tests.render.jinja.test_random_templates import bind, differences, rows_of
from tools.template_survey import DOCUMENTED, NOT_WRITTEN, bind_bytes, probes, survey, texts_of

EVERY = [*bundled(), *of_trl()]
FEW = [
    *("llamacpp/GLM-4.6.jinja", "llamacpp/openai-gpt-oss-120b.jinja", "llamacpp/Qwen3.5-4B.jinja"),
    *("trl/deepseekv3.jinja", "trl/phi3.jinja", "trl/qwen3.jinja", "trl/smolvlm.jinja", "trl/gemma4_v5.jinja"),
    *("trl/cohere2.jinja", "trl/llama3_1.jinja", "vllm/tool_chat_template_mistral3.jinja"),
    *("vllm/tool_chat_template_granite.jinja", "trl/nemotron_3_super.jinja", "axolotl/alpaca.jinja"),
]


def same_text_everywhere(name: str, conversations: Sequence[Conversation]) -> None:
    template = bound(name)
    written = 0
    for conversation in conversations:
        for options in template.choices({}):
            for prompt in (False, True):
                traced, plain = texts_of(template, conversation, options, prompt=prompt)
                assert traced == plain, f"{name}: {conversation.id}"
                assert plain == by_transformers(template, conversation, options, prompt=prompt), conversation.id
                written += plain is not None
    assert written, f"{name} writes none of them"


def proved_or_refused(name: str, conversations: Sequence[Conversation]) -> None:
    template = bound(name)
    found = survey(template, conversations)
    assert found.failures == []
    assert found.records == len(conversations) == found.proved + sum(found.reasons.values())
    assert set(found.reasons) <= DOCUMENTED
    rendered = render(conversations, template, collect_failures=True)
    assert len(rendered.failed) == sum(found.reasons.values())
    assert len(rendered.kept) == found.rows
    assert int(rendered.turns.sum()) == found.answers


SLOWLY = [pytest.param(name, 12, marks=pytest.mark.slow) for name in EVERY]


@pytest.mark.parametrize(("name", "count"), [*((name, 1) for name in FEW), *SLOWLY])
def test_a_template_has_the_text_of_transformers_and_proves_or_refuses_every_record(name: str, count: int) -> None:
    same_text_everywhere(name, [*probes(), *(samples(1)[::4] if count == 1 else samples(4))])
    proved_or_refused(name, [*probes(), *(samples(1)[FEW.index(name) % 4 :: 4] if count == 1 else samples(count))])


def test_there_are_many_of_them_and_every_reason_is_documented() -> None:
    assert len(bundled()) >= 60
    assert len(EVERY) >= 95
    page = (DOCS / "template-table.md").read_text()
    assert all(f"`{reason}`" in page for reason in DOCUMENTED)
    assert NOT_WRITTEN < DOCUMENTED


# -- turns that are remembered ---------------------------------------------------------------------------------------


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


# -- prompts or answers that depend on something far away -----------------------------------------------------------

CHATML = (
    "BEFORE{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}THINK{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments }}</call>"
    "{% endfor %}BEHIND<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\nPROMPT{% endif %}"
)
THINK = "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n"
DEEP = "{% if 'deep' in messages[0].content %}"
FAR = {
    "gth_len16": {"THINK": THINK, "PROMPT": "{% if messages|length > 14 %}<think>\n{% endif %}"},
    "bang_eq16": {"BEHIND": "{% if loop.last and messages|length == 16 %}!{% endif %}"},
    "first_word": {"THINK": THINK, "PROMPT": DEEP + "<think>\n{% endif %}"},
    "before_all": {"BEFORE": DEEP + "<|im_start|>{{ messages[0] | tojson }}<|im_end|>{% endif %}"},
}


def far_away(name: str) -> ModelTemplate:
    text = CHATML
    for place in ("BEFORE", "THINK", "BEHIND", "PROMPT"):
        text = text.replace(place, FAR[name].get(place, ""))
    return of_text(text)


def chat(dice: random.Random, low: int, high: int) -> tuple[Message, ...]:
    size, messages = dice.randint(low, high), list[Message]()
    while len(messages) < size:
        messages.append(Message(Role.USER, dice.choice(["hi", "deep", "how deep", "yes"])))
        for _ in range(dice.randint(0, 2)):
            messages.append(Message(Role.ASSISTANT, "", tool_calls=(ToolCall("f", "{}"),)))
            messages.append(Message(Role.TOOL, dice.choice(["1", "2"])))
        messages.append(Message(Role.ASSISTANT, dice.choice(["a", "b"])))
    return tuple(messages)


@pytest.mark.parametrize("name", FAR)
@pytest.mark.parametrize("seed", range(2))
def test_what_is_far_away_decides_as_in_whole_conversations(name: str, seed: int) -> None:
    """In any order and any chunks; in the reference loops are not followed, and every conversation is one turn."""
    dice = random.Random(seed)
    sizes = [(2, 12)] * 60 + [(14, 22)] * 4 if name != "before_all" else [(2, 4)] * 20
    records = [Conversation(chat(dice, *size), id=str(number)) for number, size in enumerate(sizes)]
    whole = far_away(name)
    whole._renderer({})._give_up()
    assert not whole._renderer({}).is_followed
    theirs = rows_of(whole, [records])
    assert any(isinstance(one, list) for one in theirs.values())
    mixed = dice.sample(records, len(records))
    for chunks in ([records], [records[::-1]], [mixed[::3], mixed[1::3], mixed[2::3]]):
        assert rows_of(far_away(name), chunks) == theirs
