"""Why the mask of an answer cannot be proved, and what a recipe can do about it."""

from __future__ import annotations

from typing import Any

from chatmill.errors import RecordError
from chatmill.render.jinja.rules import Answer

REASONS = {
    "no_prompt": "the template cannot write the prompt of this answer",
    "template_refused": "the template refuses the conversation up to this message",
    "prompt_not_in_history": "what a model would be given is not what the template writes as history",
    "no_reasoning": "the prompt opens reasoning, and the message has none",
    "ambiguous_thinking": "what ends the reasoning is in the answer more than once",
    "reasoning_not_closed": "the prompt opens reasoning that the answer never closes",
    "goes_on_after_stop": "a stop comes before the end of the message, and what is after it has no prompt of its own",
    "no_stop": "no stop token ends this answer",
    "not_shown": "the template leaves something out",
    "content_after_result": "the answer goes on after another message's text",
}
"""Why the mask of an answer cannot be proved, by code."""
HINTS = {
    "no_reasoning": "`no_reasoning: close` in the recipe trains it with its reasoning closed at once",
    "ambiguous_thinking": "Take it out of the reasoning or the answer",
    "no_stop": "A copy of the template that writes `{{ eos_token }}` after what an assistant says has one",
}
"""What makes such an answer provable, where that is known."""
AFTER_ANSWER = "It follows another answer: one message that says both has a prompt of its own"
WAYS_OUT = dict.fromkeys(REASONS, "; `unproved: untrained` keeps the record and trains nothing of such a turn") | {
    "not_shown": "; `not_shown: drop` takes it out of the record and counts it",
}
"""What a recipe can do about it."""


def refuse(answer: Answer[Any], *, follows_answer: bool = False) -> RecordError:
    """Make the error of a record that has an answer without a proof.

    `follows_answer`: the message before it is an answer too.
    """
    hint = HINTS.get(answer.reason, "Another template or option may prove it")
    if follows_answer and answer.reason in ("prompt_not_in_history", "no_prompt"):
        hint = AFTER_ANSWER
    return RecordError(
        f"{REASONS[answer.reason]}: {answer.detail}. {hint}{WAYS_OUT[answer.reason]}",
        code=answer.reason,
        path=answer.detail if answer.reason == "not_shown" else f"messages[{answer.message}]",
    )
