"""No operation of a template takes more memory or time than the limits allow, and real templates are far from them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import jinja2
import pytest

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.errors import ConfigError
from chatmill.render.jinja import kept_values, sandbox
from chatmill.render.jinja.limits import MESSAGE_STEPS, LimitError, measured
from chatmill.render.jinja.operations import FILTERS, OF_TEXTS
from chatmill.render.jinja.record_view import InputForm, RecordView
from chatmill.render.jinja.sandbox import MAX_STEPS, PlainSandbox
from chatmill.render.jinja.tracing_sandbox import TracingSandbox
from chatmill.render.jinja.turn import Turn
from chatmill.render.model_template import ModelTemplate
from chatmill.render.render import Rendered, render
from tests.chats import chat
from tests.render.jinja import greedy
from tests.render.jinja.at_hand import bound, bundled, of_text

FEW_STEPS = MAX_STEPS // 10
"""So many are enough to see that steps are counted; all of them are taken by the slow tests."""
SECONDS, MEGABYTES = 2.0, 300
REFUSED_IN_TRACES = {"format with wide fields of a namespace"}
"""What may hold texts of the record is not put into a format, whatever its size."""


def tried(group: str, kind: str, steps: int) -> list[dict[str, Any]]:
    """What happens to all templates of a group."""
    names = [f"{group}: {name}" for name in greedy.GROUPS[group]]
    if group == "sources":
        steps = MAX_STEPS
    command = [sys.executable, "-m", "tests.render.jinja.greedy", kind, str(steps), *names]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == len(names)
    return [json.loads(line) for line in lines]


def faults(group: str, kind: str, steps: int) -> list[str]:
    """Templates of a group that are not stopped, or too late."""
    found = []
    for row in tried(group, kind, steps):
        is_refused = kind == "traced" and row["name"].removeprefix(f"{group}: ") in REFUSED_IN_TRACES
        is_ended = row["ended"] == ("error" if is_refused else "limit")
        if not is_ended or row["seconds"] > SECONDS or row["megabytes"] > MEGABYTES:
            found.append(str(row))
    return found


@pytest.mark.parametrize("group", greedy.GROUPS)
def test_an_operation_at_its_bound_is_stopped_in_little_memory(group: str) -> None:
    """Each in a process with 1 GB; with a tenth of the steps, which is quicker."""
    assert faults(group, "plain", FEW_STEPS) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "traced"])
@pytest.mark.parametrize("group", greedy.GROUPS)
def test_an_operation_at_its_bound_is_stopped_soon(group: str, kind: str) -> None:
    """With all steps, and on traced values too: within two seconds of the processor's time."""
    assert faults(group, kind, MAX_STEPS) == []


# -- what is refused by name, or by the machine ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "named"),
    [
        ("[1, 2]|random", "random"),
        ("'x'.encode()", "encode"),
        ("(1).to_bytes(9, 'big')", "to_bytes"),
        ("{}.fromkeys('ab')", "fromkeys"),
        ("'x'.maketrans('a', 'b')", "maketrans"),
    ],
)
def test_an_operation_that_is_not_in_the_table_is_refused_with_its_line(use: str, named: str) -> None:
    """Also where it would not run."""
    text = "{% for m in messages %}\n{{ m.content }}<|im_end|>{% if false %}{{ " + use + " }}{% endif %}{% endfor %}"
    with pytest.raises(ConfigError, match=rf"line 2: .*'{named}' is not supported"):
        of_text(text)


@pytest.mark.parametrize(
    "use", ["'x'['encode']()", "('x'|attr('encode'))()", "[1]|map('random')|list", "(1)['to_bytes'](9)"]
)
def test_no_other_way_leads_to_such_an_operation(use: str) -> None:
    for kind in (PlainSandbox, TracingSandbox):
        environment = kind()
        with pytest.raises(jinja2.TemplateError):
            environment.render(environment.template("{{ " + use + " }}"), {})


def test_every_filter_and_every_method_of_texts_is_in_the_table_or_refused() -> None:
    """A new version of Jinja or Python brings no operation without limits."""
    assert set(PlainSandbox().filters) == set(FILTERS)
    assert set(jinja2.Environment().filters) - set(FILTERS) == {"random"}
    others = {name for name in dir(str) if not name.startswith("_")} - set(OF_TEXTS)
    assert others == {"encode", "maketrans"}


def test_too_little_memory_is_an_error_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> str:
        raise MemoryError

    environment = PlainSandbox()
    monkeypatch.setattr(environment, "concat", fails)
    with pytest.raises(LimitError, match="more memory than there is"):
        environment.render(environment.template("x"), {})


# -- plain and traced --------------------------------------------------------------------------------------------------

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.content }}{% if m.content == 'now' %}USED{% endif %}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize("name", ["memory: indent of many lines", "lists: written", "time: map", "memory: translate"])
def test_a_record_on_which_a_template_is_stopped_is_refused_and_no_other(name: str) -> None:
    """It is the template's own verdict, whatever was remembered of records before."""
    template = of_text(CHAT.replace("USED", greedy.ALL[name]))
    good, bad = chat(("user", "hi"), ("assistant", "a")), chat(("user", "now"), ("assistant", "a"))
    for records in ([good, bad, good], [bad, good, bad]):
        rendered = written(records, template)
        assert [records[index] for index, _ in rendered.failed] == [bad] * records.count(bad)
        assert all("the template was stopped: it" in str(error) for _, error in rendered.failed)


def written(records: list[Conversation], template: ModelTemplate) -> Rendered:
    return render(records, template, collect_failures=True)


def test_a_list_that_is_shared_and_only_kept_is_no_fault() -> None:
    """A loop over messages hands on what it keeps; this is not written anywhere."""
    text = "{% set ns = namespace(l=['a']) %}" + CHAT.replace("USED", "").replace(
        "<|im_end|>", "{% for i in range(40) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}<|im_end|>"
    )
    rendered = written([chat(("user", "hi"), ("assistant", "a"))], of_text(text))
    assert not rendered.failed


def test_what_is_kept_for_later_turns_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that grows in a loop is remembered after each of its turns, with all that is in it."""
    remembered = [0]
    remember = kept_values._recipe_of

    def counted(value: Any, turn: Turn) -> Any:
        remembered[0] += 1
        return remember(value, turn)

    monkeypatch.setattr(kept_values, "_recipe_of", counted)
    monkeypatch.setattr(sandbox, "MAX_STEPS", 20_000)
    growing = "{% set ns = namespace(l=[]) %}" + greedy.repeated("{% set ns.l = ns.l + [messages[0].content] %}")
    template = of_text(CHAT.replace("USED", growing))
    (failed,) = written([chat(("user", "now"), ("assistant", "a"))], template).failed
    assert "the template was stopped: it takes more than" in str(failed[1])
    assert remembered[0] < 6 * 20_000


def test_values_inside_of_values_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    levels, counts = 200, [0]
    count = measured

    def counted(values: Any) -> Any:
        counts[0] += 1
        return count(values)

    monkeypatch.setattr(kept_values, "measured", counted)
    deep = f"{{% for i in range({levels}) %}}{{% set ns.l = [ns.l] %}}{{% endfor %}}"
    text = "{% set ns = namespace(l=[]) %}" + CHAT.replace("USED", deep)
    assert not written([chat(("user", "now"), ("assistant", "a"))], of_text(text)).failed
    assert levels < counts[0] < 20 * levels


@pytest.mark.parametrize("name", bundled()[::8])
def test_published_templates_are_far_from_the_limits(name: str) -> None:
    """A long chat takes less than a quarter of the steps that its messages alone bring."""
    count = 400
    messages = tuple(Message((Role.USER, Role.ASSISTANT)[n % 2], f"Text {n}. " * 20) for n in range(count))
    template = bound(name)
    renderer = template._new_renderer({}, None)
    view = RecordView(Conversation(messages), InputForm())
    try:
        renderer.plain(view, count, False)
    except jinja2.TemplateError as error:
        assert not isinstance(error, LimitError)  # noqa: PT017 (most templates take the messages)
    budget = renderer._sandboxes.plain.budget
    assert budget.steps - budget.steps_left < count * MESSAGE_STEPS / 4
