"""Templates whose prompts or answers depend on something far away, on random conversations in several orders."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from chatmill.core.conversation import Conversation, Message, Role, ToolCall
from chatmill.render.model_template import ModelTemplate
from chatmill.render.render import Rendered, render
from tests.render.jinja.at_hand import of_text

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}THINK{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments }}</call>"
    "{% endfor %}BEHIND<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\nPROMPT{% endif %}"
)
THINK = "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n"
FAR = {
    "gth_len16": (THINK, "", "{% if messages|length > 14 %}<think>\n{% endif %}"),
    "bang_eq16": ("", "{% if loop.last and messages|length == 16 %}!{% endif %}", ""),
    "first_word": (THINK, "", "{% if 'deep' in messages[0].content %}<think>\n{% endif %}"),
}


def bound(name: str, *, as_a_whole: bool = False) -> ModelTemplate:
    """A template; its loops are not followed where every conversation is to be one turn."""
    think, behind, prompt = FAR[name]
    text = CHATML.replace("THINK", think).replace("BEHIND", behind).replace("PROMPT", prompt)
    template = of_text(text)
    if as_a_whole:
        template._renderer({})._give_up()
        assert not template._renderer({}).is_followed
    return template


def chat(dice: random.Random, low: int, high: int) -> Conversation:
    size, messages = dice.randint(low, high), list[Message]()
    while len(messages) < size:
        messages.append(Message(Role.USER, dice.choice(["hi", "deep", "how deep", "yes"])))
        for _ in range(dice.randint(0, 2)):
            messages.append(Message(Role.ASSISTANT, "", tool_calls=(ToolCall("f", "{}"),)))
            messages.append(Message(Role.TOOL, dice.choice(["1", "2"])))
        messages.append(Message(Role.ASSISTANT, dice.choice(["a", "b"])))
    return Conversation(tuple(messages))


def rows_of(order: Sequence[int], rendered: Rendered) -> dict[int, list[list[list[int]]]]:
    """The rows of each record that is not refused."""
    found: dict[int, list[list[list[int]]]] = {}
    for place, index in enumerate(rendered.kept.tolist()):
        row = rendered.tokens.conversation(place)
        found.setdefault(order[index], []).append([row.ids.tolist(), row.kinds.tolist(), row.messages.tolist()])
    return found


@pytest.mark.parametrize("name", FAR)
@pytest.mark.parametrize("seed", range(2))
def test_what_is_far_away_decides_as_in_whole_conversations(name: str, seed: int) -> None:
    dice = random.Random(seed)
    records = [chat(dice, 2, 12) for _ in range(60)] + [chat(dice, 14, 22) for _ in range(4)]
    theirs = rows_of(range(len(records)), render(records, bound(name, as_a_whole=True), collect_failures=True))
    assert theirs
    numbers = list(range(len(records)))
    for order in (numbers, numbers[::-1], dice.sample(numbers, len(numbers))):
        ours = render([records[number] for number in order], bound(name), collect_failures=True)
        assert rows_of(order, ours) == theirs
