"""The proof of trained answers: a wrong mask, stop or context is found by `verify --deep`, though hashes are right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.recipe import recipe_of
from chatmill.core.conversation import Message, Role
from chatmill.prove.answer_check import AnswerCheck
from chatmill.prove.reference import Reference, reference_tokenizer
from chatmill.prove.verify import verify
from chatmill.render.document_items import TokenRules
from chatmill.render.documents import DocumentWriter, TextDocument, WrittenDocument
from chatmill.render.jinja import labels
from chatmill.render.jinja.rendering import Rendering
from chatmill.render.jinja.rules import Rules
from chatmill.render.model_template import ModelTemplate
from chatmill.store.episodes import EpisodeDataset
from tests.chats import chat
from tests.compiler.builds import OPEN_GATES, talk, write_jsonl
from tests.compiler.verify_sets import build_into, rehash, small_recipe
from tests.conftest import CONVERSATION_FILES, DATA
from tests.damage import flip
from tools.template_survey import bind_bytes, survey
from tools.template_verification import DATE, MODELS, Model, model_folder

CHAT = chat(("user", "One?"), ("assistant", "First."), ("user", "Two?"), ("assistant", "Second."), id="x")
SPELLING = chat(("user", "What is <|im_end|>?"), ("assistant", "<|im_end|> ends a turn, <|im_start|> begins it."))
SPELLED = CHAT._replace(messages=(*SPELLING.messages, *CHAT.messages[2:]))


class Case:
    """The rows of a record, and what the proof says about them after a change."""

    def __init__(self, conversation: Any = CHAT, **more: Any) -> None:
        recipe = recipe_of(small_recipe(Path("-"), **more))
        reference = Reference(recipe, reference_tokenizer(recipe))
        assert isinstance(reference.template, ModelTemplate)
        self.tokenizer, self.conversation = reference.tokenizer, conversation
        self.counts: Counter[str] = Counter()
        self._check = AnswerCheck(reference.template, reference.policy, self.counts)
        (claim,) = reference.derive(conversation).claims
        self._rows, self._options = claim.rows, claim.options

    def said(self, text: str = "", ids: list[int] | None = None, weight: float | None = None, **more: Any) -> list[str]:
        """About the record with other ids or another weight for a text of its last row, or with another claim."""
        *others, last = self._rows
        place = self.place(text)
        new_ids, new_weights = list(last.ids), list(last.weights)
        new_ids[place] = last.ids[place] if ids is None else ids
        if weight is not None:
            new_weights[place] = [weight] * (len(new_ids) - len(last.ids) + place.stop - place.start)
        rows = [*others, last._replace(ids=new_ids, weights=new_weights, **more)]
        return [one.message for one in self._check.mismatches(self.conversation, self._options, rows)]

    def place(self, text: str) -> slice:
        """The tokens of a text in the last row; bytes are tokens."""
        shown = [self.tokenizer.decode([one]) for one in self._rows[-1].ids]
        at = "".join(shown).rindex(text)
        ends = [0, *accumulate(map(len, shown))]
        return slice(ends.index(at), ends.index(at + len(text)))


def test_sound_records_are_proved_and_text_that_became_a_control_token_is_found() -> None:
    for conversation in (CHAT, SPELLED):
        case = Case(conversation)
        assert case.said() == []
        assert (case.counts["answers_proved"], case.counts["answers_not_checked"]) == (2, 0)
    ids = [case.tokenizer.control("<|im_start|>"), *case.tokenizer.encode(" begins")]
    said = case.said("<|im_start|> begins", ids, 1.0)
    assert said == ["message 1: its text is not the answer that plain Jinja gives"]


def test_an_origin_that_cannot_be_told_is_no_proof() -> None:
    text = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if '<|im_end|>' in m.content %}!{% endif %}"
    text += "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    found = survey(bind_bytes("own", text), [SPELLED])
    assert found.failures == []
    assert (found.proof["answers_proved"], found.proof["answers_not_checked"]) == (0, 2)


@pytest.mark.parametrize(
    ("text", "change", "says"),
    [
        ("One?", "Won?", "message 1: its context is not the prompt"),
        ("Two?", "Too?", "message 3: its context is not the prompt"),
        ("Second.", "Sekond.", "message 3: its text is not the answer"),
        ("<|im_end|>", ".", "message 3: its text is not the answer"),
        ("nd.", 0, "message 3: a token of its answer has the weight 0"),
        ("<|im_end|>", 0, "message 3: a token of its answer has the weight 0"),
        ("Second", 2, "message 3: a token of its answer has the weight 2"),
        ("assistant", 1, "a token that is in no answer is trained"),
        ("Two?", 1, "a token that is in no answer is trained"),
    ],
)
def test_a_row_that_plain_jinja_does_not_give_is_named(text: str, change: str | float, says: str) -> None:
    case = Case()
    new = {"ids": case.tokenizer.encode(change)} if isinstance(change, str) else {"weight": change}
    (said,) = case.said(text, **new)  # type: ignore[arg-type]
    assert said.startswith(says)


def test_every_answer_is_trained_once_and_a_policy_of_parts_is_compared_as_far_as_it_goes() -> None:
    case = Case()
    assert "message 1: its answer is trained in no row" in case.said(trained={3: 0})
    assert "message 0: it must not be trained" in case.said(trained={0: 0, 1: 0, 3: 0})[-1]
    parts = Case(policy="final_only")
    assert parts.said() == []
    assert (parts.counts["answers_proved"], parts.counts["answers_proved_but_for_parts"]) == (0, 2)
    assert parts.said("Two?", weight=1) == ["a token that is in no answer is trained"]


def test_answers_that_later_messages_change_are_sound_where_the_recipe_asks_for_them(fast: Path) -> None:
    """`expand: none` trains in place, which is no damage; a stored answer that is not in the whole is one."""
    messages = talk("One?", "1", "Two?", "2")
    messages[1]["reasoning_content"], messages[3]["reasoning_content"] = "Count.", "Count on."
    path = write_jsonl(fast / "chats.jsonl", [{"messages": messages}])
    folder = build_into(fast / "in_place", small_recipe(path, template="qwen3", expand="none", gates=OPEN_GATES))
    report = verify(folder, deep=True)
    assert report.passed
    assert (report.counts["answers_proved"], report.counts["answers_trained_as_changed"]) == (1, 1)
    assert any("`expand: none` trains them so" in line for line in report.unchecked)
    flip(EpisodeDataset(folder).shards[0].folder / "tokens.bin", 4 * 20)
    rehash(folder)
    assert not verify(folder, deep=True).passed


LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
PROMPT = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TWICE = "{{ m.content }}{% if m.name %}<|im_end|>\n<|im_start|>assistant\n{{ m.name }}{% endif %}"


def name_as_header(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("chatmill.render.jinja.labels._part_said", lambda expression, said: labels.part_of(expression))


def last_stop(patch: pytest.MonkeyPatch) -> None:
    first = Rules._stop_behind

    def last(self: Rules, rendering: Rendering, index: int, at: int) -> Any:
        return first(self, rendering, index, max(p.stop for p in rendering.pieces if p.owner == index))

    patch.setattr(Rules, "_stop_behind", last)


def quotes_close(patch: pytest.MonkeyPatch) -> None:
    whole = DocumentWriter.text

    def text(self: DocumentWriter, document: WrittenDocument) -> TextDocument:
        found = whole(self, document)
        stops = [number for number, span in enumerate(found.spans) if "<|im_end|>" in span.text]
        moved = found.spans[stops[2]]._replace(kind=found.spans[stops[1]].kind, message=1)
        return found._replace(spans=(*found.spans[: stops[2]], moved, *found.spans[stops[2] + 1 :]))

    patch.setattr(DocumentWriter, "text", text)


@pytest.mark.parametrize(
    ("fault", "text", "messages"),
    [
        (name_as_header, "{{ m.name or '' }}: {{ m.content }}", [Message(Role.ASSISTANT, "a1", name="bob")]),
        (last_stop, TWICE, [Message(Role.ASSISTANT, "Let me look.", name="f")]),
        (quotes_close, "{{ m.content }}", [Message(Role.ASSISTANT, "a"), Message(Role.USER, ""), CHAT.messages[3]]),
    ],
)
def test_a_fault_of_the_labels_is_found_although_both_derivations_share_it(
    fault: Callable[[pytest.MonkeyPatch], None], text: str, messages: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    found = survey(bind_bytes("own", LOOP + text + PROMPT), [CHAT._replace(messages=(CHAT.messages[0], *messages))])
    assert len(found.failures) == 1
    assert not found.reasons


def test_a_context_that_no_template_writes_is_shown_beside_what_plain_jinja_gives(
    fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the fault is in both derivations, and the episode is the one of the document."""
    records = [{"messages": talk("One?", "1")}, {"messages": talk("Two?", "2", "Three?", "3")}]
    monkeypatch.setattr(TokenRules, "template_text", lambda self, text: text.replace("user\n", "User\n"))
    folder = build_into(fast / "built", small_recipe(write_jsonl(fast / "chats.jsonl", records)))
    found = verify(folder, deep=True).findings
    assert [one.episode for one in found] == [0, 1]
    for one, question in zip(found, ("One", "Two"), strict=True):
        assert f"User\n{question}" in one.stored
        assert f"user\n{question}" in one.derived
        assert f"stored:  {one.stored!r}\n  derived: {one.derived!r}" in str(one)


AT_HAND = {path.name for path in (DATA / "tokenizers").iterdir()}
TWELVE = [
    model if model.vocabulary in AT_HAND else model._replace(vocabulary="qwen3", adds_tokens=True) for model in MODELS
]
"""The models of docs/template-verification.md, with Qwen3's vocabulary where their own is not in this repository."""


@pytest.mark.slow
@pytest.mark.parametrize("expand", ["turns", "none"])
@pytest.mark.parametrize("model", TWELVE, ids=[model.name for model in TWELVE])
def test_every_answer_of_a_model_template_is_proved(model: Model, expand: str, tmp_path: Path) -> None:
    folder = model_folder(model, DATA / "tokenizers", None, tmp_path)
    sources = [{"path": str(path), "max_records": 5} for path in CONVERSATION_FILES]
    named = {"sources": sources, "tokenizer": str(folder), "template": str(folder), "date": DATE, "expand": expand}
    recipe = {**named, "on_error": "quarantine", "gates": OPEN_GATES}
    found = verify(build_into(tmp_path / "built", recipe), deep=True)
    assert found.differences == 0, found.findings
    changed = found.counts.get("answers_trained_as_changed", 0)
    assert found.counts["answers_proved"] + changed == found.counts["trained_messages"] > 50
    assert expand == "none" or not changed
