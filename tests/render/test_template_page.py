"""What docs/internals/template.md shows is what happens to its conversation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from chatmill.core.conversation import Conversation
from chatmill.read.record_shape import conversation_of
from chatmill.read.shapes import find_shape
from chatmill.render.jinja.answers import Answers
from chatmill.render.jinja.options import Expand
from chatmill.render.jinja.paths import Path as RenderingPath
from chatmill.render.model_template import ModelTemplate
from tests.render.jinja.at_hand import of_text

PAGE = (Path(__file__).parents[2] / "docs" / "internals" / "template.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found.group(1)


def rows(title: str) -> list[list[str]]:
    """The cells of a table of the page, by the first cell of its head."""
    lines = PAGE.split(f"\n| {title} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r" \| ", line.strip("| "))] for line in lines]


def written() -> tuple[ModelTemplate, Conversation, Answers]:
    template = of_text(block("jinja"), expand=Expand.TURNS)
    conversation = conversation_of({"messages": json.loads(block("json"))}, find_shape("openai"))
    return template, conversation, template.turns(conversation)._answers


def listed(outputs: list[Any]) -> str:
    return " · ".join(f"{fragment},{message}" for fragment, message in outputs)


def test_fragments_are_those_of_the_page() -> None:
    _, _, answers = written()
    names = {"reasoning": "reasoning", "content": "content"}
    shown = rows("fragment")
    facts = answers.renderer.segments.facts
    assert len(shown) == len(facts)
    for (number, text, _), fact in zip(shown, facts, strict=True):
        parts = [
            f"`{literal}`".replace("\n", "⏎") if expression is None else names[expression[1][1]]
            for literal, expression in fact.parts
        ]
        assert text.replace(", the generation prompt", "") == " ".join(parts), number


def test_paths_are_those_of_the_page() -> None:
    _, _, answers = written()
    drawn = dict(re.findall(r"^(F|P\(\d\))\s+(0,0.*)$", PAGE, re.MULTILINE))
    assert re.split(r" [─┬]+ ?─? ?", drawn["F"]) == listed(answers.paths.whole).split(" · ")
    for name, shared, own in rows("rendering"):
        index = int(name[2])
        path = answers.prompt(index) if name[0] == "P" else answers.until(index)
        assert isinstance(path, RenderingPath)
        assert (path.shared, listed(path.own) or "none: it is F") == (int(shared), own)


def test_answers_and_documents_are_those_of_the_page() -> None:
    template, conversation, answers = written()
    whole = answers.whole()
    assert [answers.answer(index, whole).is_there for index in (1, 3)] == [False, True]
    documents = template.write(conversation).writer.documents
    table = rows("document")
    assert len(table) == len(documents)
    for (name, trained, fragments), document in zip(table, documents, strict=True):
        assert trained == "message " + ", ".join(map(str, document.trained))
        path = whole if name == "F" else answers.until(document.trained[0])
        assert listed(answers.paths.listed(path)) == fragments
