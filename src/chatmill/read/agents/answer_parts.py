"""Build a message in OpenAI's form from parts of an answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from chatmill.read.agents.branches import Lacking, PlainMessage

REASONING, TEXT, CALL = range(3)


@dataclass(slots=True)
class AnswerParts:
    """Reasoning, texts and tool calls of an answer, in order."""

    lacks: Lacking
    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    doubt: str = ""
    """Why a template cannot write the answer as the model wrote it; empty where it can."""
    _step: int = REASONING
    _texts_are_closed: bool = False

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.texts or self.calls)

    def add_reasoning(self, text: str) -> None:
        """Add a piece of reasoning.

        An empty piece is counted as missing.
        """
        self.lacks.see("thinking text", is_missing=not text)
        if text:
            self._advance(REASONING)
            self.reasoning.append(text)

    def add_text(self, text: str, *, is_own_message: bool = False) -> None:
        """Add a text.

        Args:
            text: The text.
            is_own_message: Whether it was a whole message, not a part.
        """
        if not text:
            return
        self._advance(TEXT)
        if is_own_message and self.texts:
            self.doubt = self.doubt or "several messages in one answer"
        self.texts.append(text)

    def add_call(self, call_id: Any, name: Any, arguments: Any) -> None:
        """Add a tool call.

        Arguments given as an object have lost the text of the model.
        """
        self._advance(CALL)
        is_text = isinstance(arguments, str)
        self.lacks.see("text of arguments", is_missing=not is_text)
        function = {"name": name, "arguments": {} if arguments is None else arguments}
        self.calls.append({"id": call_id, "type": "function", "function": function})

    def add_custom_call(self, call_id: Any, name: Any, text: Any) -> None:
        """Add a call with free text as its input.

        A function call has no place for such a text.
        """
        self.add_call(call_id, name, json.dumps({"input": text}, ensure_ascii=False))
        self.lacks.add("form of custom calls")
        self.doubt = self.doubt or "a custom tool call, whose input is no JSON"

    def message(self) -> PlainMessage:
        """Return the answer as one message."""
        text = "".join(self.texts)
        message: PlainMessage = {"role": "assistant", "content": text if text or not self.calls else None}
        if self.reasoning:
            message["reasoning_content"] = "\n\n".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def _advance(self, step: int) -> None:
        # Chat templates write reasoning, text and calls in this order.
        if step < self._step:
            self.doubt = self.doubt or "reasoning or text after a later part of the same answer"
        self._step = max(step, self._step)
        if step == REASONING and len(self.reasoning) > 0 and not self.doubt:
            self.lacks.add("borders of thinking blocks")
