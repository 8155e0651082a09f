"""What adapters share: prompts that are found by their ids, and messages of other packages."""

from __future__ import annotations

import pytest

from chatmill.errors import RecordError
from chatmill.rollouts.adapters.messages import plain_message
from chatmill.rollouts.adapters.prompt_memory import PromptMemory


def test_the_prompts_that_were_used_last_are_kept() -> None:
    memory: PromptMemory[str] = PromptMemory(2)
    memory.keep([1, 2], "first")
    memory.keep([1, 3], "second")
    assert memory.find([1, 2]) == "first"
    memory.keep([1, 4], "third")
    assert [memory.find(ids) for ids in ([1, 2], [1, 3], [1, 4], [1])] == ["first", None, "third", None]


def test_reasoning_leaves_the_parts_of_a_content() -> None:
    thinking = {"type": "thinking", "thinking": "Hm."}
    text = {"type": "text", "text": "Yes."}
    image = {"type": "image", "image": "a.png"}
    assert plain_message({"role": "assistant", "content": [thinking, text, text]}) == {
        "role": "assistant",
        "content": "Yes.Yes.",
        "reasoning_content": "Hm.",
    }
    assert plain_message({"role": "user", "content": [text, image]})["content"] == [text, image]
    assert plain_message({"role": "assistant", "content": [thinking, image]})["content"] == [image]
    assert plain_message({"role": "user", "content": "Yes."}) == {"role": "user", "content": "Yes."}
    with pytest.raises(RecordError, match="reasoning follows text") as refused:
        plain_message({"role": "assistant", "content": [text, thinking]})
    assert refused.value.code == "bad_part"
