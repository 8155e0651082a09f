"""What a template asked about a record while it ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatmill.render.jinja.expressions import Question


class Notes:
    """What one run of a template asked, in order."""

    __slots__ = ("answers",)

    def __init__(self) -> None:
        """Nothing asked yet."""
        self.answers: dict[Question, Any] = {}

    def note(self, question: Question, answer: Any) -> Any:
        """Keep an answer, and give it back."""
        self.answers.setdefault(question, answer)
        return answer

    def add(self, answers: Mapping[Question, Any]) -> None:
        """Keep the answers of another run; those that are known stay."""
        for question, answer in answers.items():
            self.answers.setdefault(question, answer)
