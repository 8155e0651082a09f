"""Weights of parts of messages by the slow, obvious path: one for every character that a template shows."""

from __future__ import annotations

from collections.abc import Sequence

from chatmill.core.conversation import Conversation, Message
from chatmill.core.kinds import REPEATED, RoleCode, role_of
from chatmill.core.part_training import part_error
from chatmill.core.weight_spans import ARGUMENTS, CONTENT, REASONING
from chatmill.errors import RecordError
from chatmill.prove.rows import PlainRow
from chatmill.render.document_items import TextPart
from chatmill.render.jinja.expressions import Expression, Path

Field = tuple[int, str, int]
"""A message, the name of its field, and a tool call."""
PIECES = ("strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "part", "between", "cut")
"""String operations that give a piece of a text."""


class CharacterWeights:
    """What every character of a conversation's texts weighs."""

    def __init__(self, conversation: Conversation) -> None:
        """Nothing is shown yet."""
        self._messages = conversation.messages
        self._weights: dict[Field, list[float]] = {}
        """For each text of which a part has a weight, one for each of its characters."""
        self._unseen: dict[Field, set[int]] = {}
        """Characters with a weight of their own that no document has shown."""
        for k, message in enumerate(conversation.messages):
            for span in () if message.weight == 0 else message.spans:
                key = (k, span.field, span.call)
                text = _text_of(message, span.field, span.call)
                weights = self._weights.setdefault(key, [_default(message)] * len(text))
                if span.end > len(text):
                    raise self._error(key)
                weights[span.begin : span.end] = [span.weight] * (span.end - span.begin)
                places = range(span.begin, span.end)
                self._unseen.setdefault(key, set()).update(n for n in places if not text[n].isspace())

    @property
    def is_empty(self) -> bool:
        """Whether no part of any message has a weight of its own."""
        return not self._weights

    def of_piece(self, parts: Sequence[TextPart]) -> list[float] | None:
        """Return what the characters of a piece weigh; None where it shows no text of which a part has a weight."""
        if not any(part.text and _field_of(part.expression) in self._weights for part in parts):
            return None
        weights: list[float] = []
        for part in parts:
            key = _field_of(part.expression)
            if part.text and key in self._weights:
                place = self._place(key, part)
                weights += self._weights[key][place : place + len(part.text)]
                self._unseen[key] -= set(range(place, place + len(part.text)))
            else:
                weights += [_default(self._messages[part.message]) if part.message >= 0 else 1.0] * len(part.text)
        return weights

    def check_shown(self) -> None:
        """Raise the error of a record of which a part with a weight is in no document."""
        for key, places in self._unseen.items():
            if places:
                raise self._error(key)

    def _place(self, key: Field, part: TextPart) -> int:
        """Return where a text begins in its field, in which it must be once."""
        expression = part.expression
        names: list[str] = []
        while expression is not None and expression[0] == "apply":
            names.append(expression[1])
            expression = expression[3]
        text = _text_of(self._messages[key[0]], key[1], key[2])
        starts = [n for n in range(len(text)) if text.startswith(part.text, n)]
        if expression is None or expression[0] != "field" or len(starts) != 1 or not set(names) <= set(PIECES):
            raise self._error(key)
        return starts[0]

    def _error(self, key: Field) -> RecordError:
        name = f"tool_calls[{key[2]}].function.arguments" if key[1] == ARGUMENTS else key[1]
        return part_error(
            "the template does not show a text of which a part has a weight", f"messages[{key[0]}].{name}"
        )


def flag_context(row: PlainRow) -> None:
    """Flag parts of answers that have weight 0."""
    for place, code in enumerate(row.kinds):
        if row.stated[place] == 0 and role_of(code) is RoleCode.ASSISTANT:
            row.kinds[place] = code | REPEATED


def mixed_tokens(items: Sequence[PlainRow]) -> int:
    """Count tokens that cover parts of different weights, those of context apart."""
    return sum(
        is_mixed and not code & REPEATED for row in items for is_mixed, code in zip(row.mixed, row.kinds, strict=True)
    )


def _default(message: Message) -> float:
    """Return what text of a message weighs of which no part says anything."""
    return 1.0 if message.weight is None else message.weight


def _text_of(message: Message, name: str, call: int) -> str:
    if name == ARGUMENTS:
        return message.tool_calls[call].arguments if call < len(message.tool_calls) else ""
    return message.content if name == CONTENT else message.reasoning or ""


def _field_of(expression: Expression | None) -> Field:
    """Return the field that a text is from."""
    while expression is not None and expression[0] == "apply":
        expression = expression[3]
    path: Path = () if expression is None else expression[-1]
    if len(path) > 1 and isinstance(path[0], int):
        if path[1] in (CONTENT, REASONING):
            return path[0], path[1], 0
        if path[1] == "call" and path[3] == ARGUMENTS:
            return path[0], ARGUMENTS, path[2]
    return -1, "", 0
