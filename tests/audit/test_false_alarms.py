"""Clean sets of conversations that the checks were not made with: nothing may be found.

`python -m tools.audit_clean` does the same for all bundled conversations, more templates and real vocabularies.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from chatmill import Conversation, Message, Role, audit, load_tokenizer
from chatmill.read.conversations import read_conversations
from chatmill.render.jinja.options import Unproved
from chatmill.render.registry import bind, find_template, given_options
from tests.audit.sets import DAY, bound_template, clean_rows, conversations, joined, said
from tests.data.tokenizer_files import loaded

DATA = Path(__file__).parents[1] / "data" / "conversations"
FILES = (
    "bfcl_parallel",
    "crosswoz_zh",
    "gpteacher_toolformer",
    "gsm8k",
    "korean_chatbot",
    "oasst_en100",
    "tau_airline",
)
OTHERS = ("chatml", "granite", "phi4", "qwen2_5", "qwen3_2507", "qwen3, real")
TEMPLATES = (
    *("glm4_5", "gpt_oss", "llama3", "mistral_nemo", "qwen3", "chatml, real"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS),
)


@cache
def sample() -> tuple[Conversation, ...]:
    """Two conversations of each file, long ones left out."""
    found: list[Conversation] = []
    for name in FILES:
        chats = read_conversations(DATA / f"{name}.jsonl.gz", on_error=lambda error: None)
        short = (one for one in chats if sum(len(message.content) for message in one.messages) < 4_000)
        found += islice(short, 2)
    return tuple(found)


@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_is_found_in_real_conversations(name: str) -> None:
    bound = bound_template(name)
    rows = [row for row in clean_rows(bound, sample()) if max(row["labels"]) >= 0]
    assert len(rows) >= 6
    assert audit(rows, bound).findings == ()
    assert audit(rows, bound, source=sample()).findings == ()


def test_transformers_own_masks_are_right_where_the_tags_are() -> None:
    """The mask of `apply_chat_template` under a template whose tags agree with the proof."""
    pytest.importorskip("transformers")
    from tools.mask_differences import byte_tokenizer

    tagged = (
        "{{- bos_token }}{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
        "{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}"
        "{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    peer = byte_tokenizer(tagged)
    bound = bind(peer, load_tokenizer(peer), given_options(None, DAY))
    plain = [one for one in sample() if not one.tools and not any(m.tool_calls or m.name for m in one.messages)]
    rows = []
    for one in plain:
        messages = [{"role": str(m.role.value), "content": m.content} for m in one.messages]
        made = peer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        rows.append({name: made[name] for name in ("input_ids", "assistant_masks")})
    for source in (None, plain):
        report = audit(rows, bound, source=source)
        assert report.findings == ()
        assert report.trained


SURE = ("user: Now?", "assistant: Yes.", "user: Sure?")
ODD = {
    "answers of one size, a few tokens apart": (
        "mistral_nemo",
        [said("user: ?", "assistant: Yes", "user: !", "assistant: Why", weight=weight) for weight in (None, 0.0)],
    ),
    "answers in a row where the next message is the stop": (
        "glm4_5",
        [said("user: Now?", "assistant: Yes.", "assistant: Or later.")],
    ),
    "a developer": ("llama3", [said("developer: Be kind.", "user: Now?", "assistant: Yes, now.")]),
    "a last question, with nothing written after it": ("mistral_nemo", [said(*SURE)]),
    "a last answer that is not trained": (
        "glm4_5",
        [said(*SURE, f"assistant: {word}", weight=0.0) for word in ("Yes", "Not")],
    ),
    "an answer that is context and merges with its prompt": (
        "qwen3, real",
        [said("user: Now?", "assistant: \nYes.", "user: Sure?", "assistant: Quite sure.")],
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_nothing_is_found_in_odd_conversations(name: str) -> None:
    template, chats = ODD[name]
    bound = bound_template(template)
    rows = clean_rows(bound, chats)
    assert audit(rows, bound).findings == ()
    assert audit(rows, bound, source=chats).findings == ()
    assert audit(joined(rows, 2, boundaries="seq_lengths"), bound).findings == ()


def test_tools_that_a_template_writes_between_messages_are_not_spelled() -> None:
    bound = bound_template("granite")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    chat = Conversation(said("user: Now?", "assistant: Yes, now.").messages, tools=(tool,))
    report = audit(clean_rows(bound, [chat]), bound)
    assert report.findings == ()
    assert any("special tokens" in sentence for sentence in report.unknown)


PARTS = {"truncated", "stop_missing", "mask_empty"}
"""What is true of conversations that are cut."""


@pytest.mark.parametrize("name", ["llama3", "glm4_5", "mistral_nemo", "qwen3"])
def test_rows_that_are_cut_anywhere_are_cut_and_nothing_else(name: str) -> None:
    bound = bound_template(name)
    rows = [row for number, row in enumerate(clean_rows(bound)) if number in (0, 1, 4)]
    sizes = [(row, n) for row in rows for n in range(1, len(row["input_ids"]), 1 if len(row["input_ids"]) < 150 else 3)]
    heads = [{key: values[:n] for key, values in row.items()} for row, n in sizes]
    tails = [{key: values[n:] for key, values in row.items()} for row, n in sizes]
    assert {one.code for one in audit(heads, bound).findings} <= PARTS
    assert {one.code for one in audit(heads, bound, source=conversations()).findings} <= PARTS
    assert {one.code for one in audit(tails, bound).findings} <= {*PARTS, "bos_wrong"}


@pytest.mark.parametrize("limit", [40, 64])
def test_rows_that_are_cut_at_one_length_have_no_answers_without_a_stop(limit: int) -> None:
    """Wherever the limit falls: in a question, in a header, or in the white space after it."""
    bound = bound_template("llama3")
    rows = [{key: values[:limit] for key, values in row.items()} for row in clean_rows(bound)]
    assert {one.code for one in audit(rows, bound).findings} <= {"truncated", "mask_empty"}


def test_turns_are_known_where_answers_without_proof_are_left_untrained() -> None:
    """A probe whose answer has no proof says nothing about where answers begin."""
    strict = bound_template("qwen2_5")
    untrained = replace(given_options(None, DAY), unproved=Unproved.UNTRAINED)
    report = audit(clean_rows(strict), bind(find_template("qwen2_5"), strict.tokenizer, untrained))
    assert (report.findings, report.unknown) == ((), ())
    assert report.answers


def talk(number: int, size: int, system: str = "") -> Conversation:
    """A conversation of numbers; two of the same number share a beginning."""
    turns = [Message(Role.SYSTEM, system)] if system else []
    for k in range(size):
        text = " ".join(str((number * 8 + k) * 97 + step * 31 + 1000) for step in range(30))
        turns.append(Message((Role.USER, Role.ASSISTANT)[k % 2], text))
    return Conversation(tuple(turns))


def test_rows_that_begin_like_other_records_are_not_packed() -> None:
    """Another template shows every record's answers as the last answer of a shorter record is shown."""
    bound, other = bound_template("qwen3, real"), bind("qwen3_training", loaded("qwen3"), given_options(None, DAY))
    chats = [talk(number, size) for number in range(4) for size in (2, 4, 6, 8)]
    rows = clean_rows(other, chats)
    assert [one.code for one in audit(rows, bound, source=chats).findings] == ["template_differs"]
    codes = [one.code for one in audit(joined(rows, 4), bound, source=chats).findings]
    assert codes == ["unbounded"], "where each of them is there, they are"


def test_a_system_text_that_comes_again_after_an_answer_is_another_document() -> None:
    bound = bound_template("chatml")
    alike = clean_rows(bound, [talk(n, 2, "Be brief.") for n in range(6)])
    report = audit(joined(alike, 3), bound)
    assert [(one.code, one.count) for one in report.findings] == [("unbounded", 2)]
    assert audit(alike, bound).findings == ()
    assert audit(joined(alike, 3, boundaries="seq_lengths"), bound).findings == (), "with boundaries they are apart"
    other = clean_rows(bound, [talk(n, 2, f"Be brief, {n}.") for n in range(3)])
    report = audit(joined(other, 3), bound)
    assert report.findings == ()
    assert any("system message after an answer" in one for one in report.unknown)


def test_rows_that_are_all_full_may_be_packed() -> None:
    bound = bound_template("chatml")
    rows = clean_rows(bound, [talk(n, 2) for n in range(20, 44)])
    report = audit(joined(rows, 3), bound)
    assert report.findings == ()
    assert any("as packed rows are" in one for one in report.unknown)
    assert audit(rows, bound).unknown == ()
