"""Plans hold for every record they are used for, and what is remembered is what the slow, obvious way finds."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.core.kinds import REPEATED
from chatmill.render.fragment_walk import FragmentWalk, StepTable
from chatmill.render.jinja.answers import Answers
from chatmill.render.jinja.expressions import Notes
from chatmill.render.jinja.hidden_fields import HiddenFields, not_shown
from chatmill.render.jinja.options import Expand, TemplateOptions, Unproved
from chatmill.render.jinja.paths import Path as RenderingPath
from chatmill.render.jinja.renderer import AnswerCache
from chatmill.render.jinja.rules import Answer
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind, find_template
from chatmill.render.render import PER_DOCUMENT, Rendered, render
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from tests.render.reference import jinja
from tools.template_survey import bind_bytes

GIVEN = TemplateOptions(today=date(2026, 1, 2))


def of_bytes(template: str | Path, given: TemplateOptions = GIVEN) -> ModelTemplate:
    source = find_template(template)
    return bind(source, with_control_tokens(load_tokenizer("bytes"), source.control_tokens or ("<|eos|>",)), given)


def turns(*texts: str) -> Conversation:
    roles = itertools.cycle((Role.USER, Role.ASSISTANT))
    return Conversation(tuple(Message(role, text) for role, text in zip(roles, texts, strict=False)))


def facts(rendered: Rendered) -> list[list[object]]:
    tokens = rendered.tokens
    columns = (tokens.ids, tokens.offsets, tokens.run_offsets, tokens.run_kinds, tokens.run_messages, rendered.kept)
    counted = [getattr(rendered, name) for name in PER_DOCUMENT]
    return [*(np.asarray(one).tolist() for one in (*columns, *counted)), [index for index, _ in rendered.failed]]


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen3", "qwen3_training", "qwen2_5", "markers", "token_native"])
def test_a_plan_of_empty_texts_is_for_empty_texts(name: str) -> None:
    """Whichever record comes first: an empty text must not hide a later one, nor a full one invent one."""
    conversations = [turns(*texts) for texts in itertools.product(("", "a", " \n"), repeat=3)]
    template = of_bytes(name)
    together = render(conversations, template, collect_failures=True)
    refused = {index for index, _ in together.failed}
    assert len(refused) < len(conversations)
    for index, conversation in enumerate(conversations):
        template.store.forget()
        alone = render([conversation], template, collect_failures=True)
        assert bool(alone.failed) == (index in refused)
        rows = np.flatnonzero(together.kept == index).tolist()
        for row, own in zip(rows, range(len(alone.tokens)), strict=True):
            mine, theirs = together.tokens.conversation(row), alone.tokens.conversation(own)
            assert mine.ids.tolist() == theirs.ids.tolist()
            assert mine.kinds.tolist() == theirs.kinds.tolist()


TRIMMED = (
    "{% for m in messages %}<|{{ m.role[0] }}|>{{ m.content | trim }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}"
)


@pytest.mark.parametrize("place", [0, 1], ids=["learned", "replayed"])
def test_a_text_that_plain_jinja_does_not_write_costs_one_record(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the tracing is found by the comparison with plain Jinja; other records are written as ever."""
    monkeypatch.setattr("chatmill.render.jinja.renderer.COMPARED", 1)
    bound = bind_bytes("trimmed", TRIMMED)
    plain = bound._sandboxes.plain
    trim = plain.filters["trim"]
    plain.filters["trim"] = lambda text: "other" if text == "wrong" else trim(text)
    batch = [turns("one", "two", "three", "four"), turns("a", "b")]
    batch.insert(place, turns("wrong", "two"))
    rendered = render(batch, bound, collect_failures=True)
    assert [(index, error.code) for index, error in rendered.failed] == [(place, "not_followed")]
    texts = [bound.tokenizer.decode(rendered.tokens.conversation(row).ids) for row in range(2)]
    assert texts == ["<|u|>one<|eos|><|a|>two<|eos|><|u|>three<|eos|><|a|>four<|eos|>", "<|u|>a<|eos|><|a|>b<|eos|>"]


def test_threads_that_share_a_template_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are not for two threads at once."""
    inside: list[int] = []
    most: list[int] = []
    write = ModelTemplate.write

    def slow(*arguments: Any, **options: Any) -> Any:
        inside.append(1)
        time.sleep(0.005)
        most.append(len(inside))
        written = write(*arguments, **options)
        inside.pop()
        return written

    monkeypatch.setattr(ModelTemplate, "write", slow)
    template = of_bytes("chatml")
    shapes = [turns(*"abcdefgh"[:count]) for count in range(1, 9)]
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda one: render([one], template).tokens.ids.tolist(), shapes))
    assert max(most) == 1
    assert made == [render([one], template).tokens.ids.tolist() for one in shapes]


def test_a_template_that_asks_much_about_tools_keeps_little() -> None:
    """gpt-oss writes tools out as TypeScript: what it asks of tools that no other record has is not kept for all."""
    conversations = []
    for number in range(12):
        properties = {f"p{k}": {"type": "string", "enum": [f"{number}-{k}"]} for k in range(number % 5 + 1)}
        parameters = {"type": "object", "properties": properties}
        function = {"name": f"f{number}", "description": f"does {number}", "parameters": parameters}
        tools = ({"type": "function", "function": function},)
        conversations += [turns("q", text)._replace(tools=tools) for text in ("a", "b")]
    bound = bind_bytes("gptoss", jinja("gptoss"), GIVEN)
    together = render(conversations, bound)
    assert bound.store.keys._tools_by_value
    assert not bound.store.keys._tool_questions
    # five kinds of tools, with a prompt and without; the rest by replay
    assert bound._renderer({}).runs == 10
    for index, conversation in enumerate(conversations):
        alone = render([conversation], bind_bytes("gptoss", jinja("gptoss"), GIVEN)).tokens
        assert together.tokens.conversation(index).ids.tolist() == alone.ids.tolist()


@pytest.mark.parametrize("weights", list(itertools.product((None, 0.0, 1.0), repeat=2)))
def test_an_answer_of_weight_0_is_marked_wherever_it_is(weights: tuple[float | None, float | None]) -> None:
    """Also if it is the first message of all."""
    said = [Message(Role.ASSISTANT, "a", weight=weights[0]), Message(Role.USER, "q", weight=0.0)]
    said.append(Message(Role.ASSISTANT, "b", weight=weights[1]))
    rendered = render([Conversation(tuple(said))], of_bytes("chatml"))
    tokens = rendered.tokens
    assert rendered.turns.tolist() == [sum(weight != 0 for weight in weights)]
    owners = [said[number] if number >= 0 else None for number in tokens.run_messages.tolist()]
    unwanted = [one is not None and one.role is Role.ASSISTANT and one.weight == 0 for one in owners]
    assert ((tokens.run_kinds & REPEATED) > 0).tolist() == unwanted


# -- what is remembered ----------------------------------------------------------------------------------------------

NAMES = ("chatml", "qwen3", "qwen3_training", "glm4_5", "granite", "gpt_oss")
OWN = {
    "recap": "{% set asked = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' and loop.index0 < asked.last %}{{ m.content }};{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "ended": "{% for m in messages %}{% if loop.previtem is defined %}<|eos|>{% endif %}{{ m.role }}: "
    "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% if loop.last %}<|eos|>{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
    "trimmed": "{% for m in messages %}{{ m.role }}: {{ m.content | trim if "
    "m.role == 'assistant' and not loop.last else m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
}
"""Templates that write a changed answer again after texts of others, that end it in the next message's turn, and in
which texts alone say whether an answer is changed."""
QUESTIONS = [Message(Role.USER, text) for text in ("why?", "", " x \n", "<|im_end|>", "a</think>b")]
ANSWERS = [
    *(Message(Role.ASSISTANT, text) for text in ("so", "", "\n so ", "<think>a</think>b")),
    *(Message(Role.ASSISTANT, text, reasoning=why) for text, why in (("so", "as"), ("x ", ""), ("", " why\n"))),
    Message(Role.ASSISTANT, "no", weight=0.0),
]
CALLS = [
    Message(Role.ASSISTANT, "", tool_calls=(ToolCall("find", arguments),), reasoning=why)
    for arguments, why in (('{"a": 1}', None), ('{"a": "x"}', "so"), ('{"a": "", "b": {}}', "so"), ("{}", None))
]
RESULT = Message(Role.TOOL, "found", name="find")
TOOL = {"type": "function", "function": {"name": "find", "description": "", "parameters": {"type": "object"}}}


def conversations(count: int, rng: random.Random, *, calls: bool) -> list[Conversation]:
    """Chats of which hardly two are alike."""
    made = []
    for _ in range(count):
        messages = [Message(Role.SYSTEM, "be kind")] if rng.random() < 0.5 else []
        for _ in range(rng.randint(1, 6)):
            messages.append(rng.choice(QUESTIONS))
            for _ in range(rng.randint(0, 3) if calls else 0):
                messages += (rng.choice(CALLS), RESULT)
            messages.append(rng.choice(ANSWERS))
        made.append(Conversation(tuple(messages), tools=(TOOL,) if calls and rng.random() < 0.5 else ()))
    return made


class Forgetful(dict[Any, Any]):
    """Finds nothing again."""

    def get(self, key: Any, default: Any = None) -> Any:
        return default

    def __contains__(self, key: object) -> bool:
        return False


def inside_one_by_one(self: Answers, indices: Sequence[int], last: int) -> list[Answer[Any]]:
    """Look for every answer in the whole of a later one's rendering."""
    found = [self.answer(index, self.trained(last)) for index in indices]
    return [answer for answer in found if answer.is_there]


def hidden_message_by_message(self: HiddenFields, path: RenderingPath, last: int) -> str:
    """Look at all fragments that show a message, for each message."""
    outputs = self._paths.listed(path)
    for message in range(last + 1):
        own = [(number, base) for number, base in outputs if message - base in self._facts[number].owners]
        pieces = self._renderer.segments.window(own, 0, self._view).rendering.pieces
        field = not_shown([piece for piece in pieces if piece.owner == message], self._view, message, Notes())
        if field:
            return f"messages[{message}].{field}"
    return ""


def forget_everything(patch: pytest.MonkeyPatch) -> None:
    """Have nothing be remembered of rules, labels and beginnings of documents."""
    patch.setattr(AnswerCache, "found_by_key", lambda self, version: Forgetful())
    patch.setattr(Answers, "inside", inside_one_by_one)
    patch.setattr(HiddenFields, "find", hidden_message_by_message)
    patch.setattr(FragmentWalk, "_begin", lambda *about: 0)
    make = StepTable.__init__

    def made(self: StepTable, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self.known = Forgetful()

    patch.setattr(StepTable, "__init__", made)


@pytest.mark.parametrize("name", [*NAMES, *OWN])
@pytest.mark.parametrize("expand", [Expand.NONE, Expand.TURNS])
def test_what_is_remembered_is_what_is_found_without_memory(
    name: str, expand: Expand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(OWN.get(name, ""))
    chats = conversations(40, random.Random(f"{name} {expand}"), calls=name not in ("chatml", *OWN))
    unproved = Unproved.UNTRAINED if name == "gpt_oss" else Unproved.REFUSE
    given = TemplateOptions(expand=expand, today=GIVEN.today, unproved=unproved)
    made: list[list[list[list[object]]]] = []
    for remembers in (True, False):
        if not remembers:
            forget_everything(monkeypatch)
        bound = of_bytes(path if name in OWN else name, given)
        parts = [render(chats[first : first + 10], bound, collect_failures=True) for first in range(0, 40, 10)]
        made.append([facts(one) for one in parts])
    assert made[0] == made[1]
    assert sum(len(part[0]) for part in made[0]) > 0


@pytest.mark.parametrize("asks_more", [False, True])
def test_keys_of_older_classes_find_no_answer(asks_more: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of another version have other numbers: a key of older ones may be that of other messages."""
    bound = of_bytes("qwen3_training")
    render([turns(*"qa" * count) for count in range(1, 6)], bound)
    looked = HiddenFields.in_whole

    def asked(self: HiddenFields) -> dict[int, str]:
        if asks_more:
            self._lookup.version += 1
        return looked(self)

    monkeypatch.setattr(HiddenFields, "in_whole", asked)
    answers = bound._answers(bound.view(turns(*"qa" * 6)), next(bound.choices({})))
    assert bool(answers._found) == (not asks_more)


def test_fragments_with_texts_of_many_messages_are_written_right(tmp_path: Path) -> None:
    """Whatever the company of a record."""
    path = tmp_path / "many.jinja"
    path.write_text(
        "{% for m in messages %}{{ m.role }}: {% for o in messages[:4] %}{{ o.content }},{% endfor %}{{ m.content }}"
        "<|eos|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    chats = conversations(30, random.Random(3), calls=False)
    together = render(chats, of_bytes(path), collect_failures=True)
    alone = [render([one], of_bytes(path), collect_failures=True) for one in chats]
    assert together.tokens.ids.tolist() == np.concatenate([one.tokens.ids for one in alone]).tolist()


@pytest.mark.parametrize("name", ["glm4_5", "gpt_oss"])
def test_arguments_that_are_no_object_are_refused_whatever_is_known(name: str) -> None:
    bound = of_bytes(name)
    calls = [
        Message(Role.ASSISTANT, "", tool_calls=(ToolCall("find", arguments),))
        for arguments in ('{"a": 1}', '{"a": 2}', "[1]", '{"a": 3}', "no")
    ]
    chats = [Conversation((QUESTIONS[0], call, RESULT, ANSWERS[0])) for call in calls]
    for _ in range(2):
        refused = [(index, error.code) for index, error in render(chats, bound, collect_failures=True).failed]
        assert refused == [(2, "arguments_not_an_object"), (4, "arguments_not_an_object")]
