"""Answers as they are sampled: what a model writes after a prompt that opens reasoning which history leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from chatmill.compiler.run import run_build
from chatmill.core.conversation import Conversation, Message, Role
from chatmill.core.ledger import AS_SAMPLED, Ledger
from chatmill.errors import ConfigError, RecordError
from chatmill.prove.verify import verify
from chatmill.read.conversations import ConversationFile
from chatmill.render.jinja.as_sampled import SampledAnswers
from chatmill.render.jinja.options import AnswerText, Expand, NoReasoning, TemplateOptions, Unproved
from chatmill.render.jinja.sandbox import PlainSandbox
from chatmill.render.model_template import ModelTemplate
from chatmill.render.render import render
from tests.compiler.builds import OPEN_GATES, write_jsonl
from tests.render.jinja.at_hand import CONVERSATIONS, bundled, of_text, of_trl, text_of
from tools.template_survey import TODAY, bind_bytes, survey

OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set c = m.content %}"
END = "<|im_end|>\n{% endfor %}"
CUTS = LOOP + "{% if '</think>' in c %}{% set c = c.split('</think>')[-1] %}{% endif %}{{ c }}" + END + OPENING
VERBATIM = LOOP + "{{ c }}" + END + OPENING
CUTS_OTHERWISE = CUTS.replace("{{ c }}", "{{ c }}{% if '</think>' in m.content %} (cut){% endif %}")
SWITCHED = CUTS.replace("{{ c }}", "{% if m.role == 'assistant' %}</think>{% endif %}{{ c }}").replace(
    "<think>\n{% endif %}", "{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
)
"""As DeepSeek V3.1's: history has the closing mark alone."""
ASKED = Message(Role.USER, "q")
OWN = Message(Role.ASSISTANT, "a", reasoning="r")
FORMS = {
    "own": (OWN, "r\n</think>\n\na<|im_end|>"),
    "tags": (Message(Role.ASSISTANT, "<think>\nr\n</think>\n\na"), "r\n</think>\n\na<|im_end|>"),
    "tight": (Message(Role.ASSISTANT, "<think>r</think>a"), "r</think>a<|im_end|>"),
    "white space": (Message(Role.ASSISTANT, "\n<think>\n\n r\n</think> a"), "\n r\n</think> a<|im_end|>"),
    "completion": (Message(Role.ASSISTANT, "r</think>a"), "r</think>a<|im_end|>"),
}


def talk(*messages: Message) -> Conversation:
    return Conversation(messages)


def rows(template: ModelTemplate, conversation: Conversation) -> list[tuple[str, str]]:
    """Of each document, the text up to where a model begins to write, and what is after it."""
    found = []
    for document in template.text_documents(conversation).documents:
        begin = max(number for number, span in enumerate(document.spans) if span.breaks)
        texts = [span.text for span in document.spans]
        found.append(("".join(texts[:begin]), "".join(texts[begin:])))
    return found


def reason(template: ModelTemplate, conversation: Conversation) -> str:
    with pytest.raises(RecordError) as refused:
        template.text_documents(conversation)
    return refused.value.code


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", [CUTS, VERBATIM], ids=["cuts", "verbatim"])
def test_an_answer_is_what_a_model_writes_after_its_prompt(text: str, form: str) -> None:
    message, wanted = FORMS[form]
    assert rows(of_text(text), talk(ASKED, message)) == [
        ("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n", wanted)
    ]


def test_later_turns_have_history_as_the_template_writes_it() -> None:
    prompt = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    again = f"{prompt}a<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n"
    answer = "r\n</think>\n\na<|im_end|>"
    conversation = talk(ASKED, OWN, ASKED, OWN)
    assert rows(of_text(CUTS), conversation) == [(f"{prompt}<think>\n", answer), (again, answer)]
    assert rows(of_text(CUTS, expand=Expand.LAST), conversation) == [(again, answer)]


def test_what_closes_reasoning_is_what_the_recipe_says_where_the_template_never_writes_both() -> None:
    template = of_text(CUTS, thinking_close="</think>")
    assert rows(template, talk(ASKED, OWN))[0][1] == "r</think>a<|im_end|>"
    with pytest.raises(ConfigError, match="'</think>'"):
        rows(of_text(CUTS, thinking_close="</thought>"), talk(ASKED, OWN))


def test_an_answer_without_reasoning_has_it_closed_if_the_recipe_says_so() -> None:
    plain = talk(ASKED, Message(Role.ASSISTANT, "a"))
    assert reason(of_text(CUTS), plain) == "no_reasoning"
    closed = of_text(CUTS, no_reasoning=NoReasoning.CLOSE)
    assert rows(closed, plain)[0][1] == "\n</think>\n\na<|im_end|>"


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (OWN._replace(content="a</think>b"), "ambiguous_thinking"),
        (OWN._replace(reasoning="r</think>b"), "ambiguous_thinking"),
        (Message(Role.ASSISTANT, "<think>r</think>a</think>"), "ambiguous_thinking"),
        (Message(Role.ASSISTANT, "<think>r"), "reasoning_not_closed"),
    ],
)
def test_a_mark_that_is_not_there_once_refuses_the_record(message: Message, wanted: str) -> None:
    assert reason(of_text(CUTS), talk(ASKED, message)) == wanted


def test_a_template_that_makes_another_history_of_it_proves_nothing() -> None:
    assert reason(of_text(CUTS_OTHERWISE), talk(ASKED, OWN)) == "prompt_not_in_history"


def test_a_prompt_that_ends_with_other_words_is_no_opener() -> None:
    header = VERBATIM.replace("<think>\n{% endif %}", "answer: {% endif %}")
    assert reason(of_text(header), talk(ASKED, OWN)) == "prompt_not_in_history"


def test_an_empty_block_of_reasoning_in_the_prompt_stays_there() -> None:
    """Gemma 4's own prompt has one where thinking is off, and its history none."""
    block = "<|channel>thought\n<channel|>"
    template = of_text(VERBATIM.replace("<think>\n", block))
    (prompt, answer), *_ = rows(
        template, talk(ASKED, Message(Role.ASSISTANT, "a"), ASKED, Message(Role.ASSISTANT, "a"))
    )
    assert (prompt[-len(block) :], answer) == (block, "a<|im_end|>")
    assert survey(template, [talk(ASKED, Message(Role.ASSISTANT, "a"))]).failures == []
    assert reason(template, talk(ASKED, OWN)) == "prompt_not_in_history"  # the template would lose the reasoning


@pytest.mark.parametrize("content", ["a", "\n a", ""])
def test_other_white_space_in_the_prompt_is_that_of_the_prompt(content: str) -> None:
    """Llama 4's prompt begins with a line break that its history does not have."""
    template = of_text(
        VERBATIM.replace("%}<|im_start|>assistant\n<think>\n{% endif", "%}\n\n<|im_start|>assistant\n\n{% endif")
    )
    conversation = talk(ASKED, Message(Role.ASSISTANT, content))
    assert rows(template, conversation) == [
        ("<|im_start|>user\nq<|im_end|>\n\n<|im_start|>assistant\n\n", f"{content}<|im_end|>")
    ]
    assert survey(template, [conversation]).failures == []


def test_history_refuses_such_answers_as_before() -> None:
    assert reason(of_text(CUTS, answers=AnswerText.HISTORY), talk(ASKED, OWN)) == "prompt_not_in_history"


def test_sampled_goes_before_a_history_that_leaves_the_reasoning_out() -> None:
    """DeepSeek V3.1's own history follows its prompt where thinking is off, and has no reasoning."""
    auto, sampled = of_text(SWITCHED), of_text(SWITCHED, answers=AnswerText.SAMPLED)
    assert rows(auto, talk(ASKED, OWN))[0][1] == "a<|im_end|>\n"
    before, answer = rows(sampled, talk(ASKED, OWN))[0]
    assert before.endswith("assistant\n<think>")
    assert answer == "r\n</think>\n\na<|im_end|>"
    plain = talk(ASKED, Message(Role.ASSISTANT, "a"))
    assert rows(sampled, plain) == rows(auto, plain)


@pytest.mark.parametrize("tags", [False, True])
def test_reasoning_whose_words_the_answer_repeats_is_not_taken_for_shown(tags: bool) -> None:
    """DeepSeek V3.1's history has the answer alone, in which the words of the reasoning stand as well."""
    message = Message(Role.ASSISTANT, "<think>yes</think>yes, it is") if tags else OWN._replace(content="r, it is")
    template = of_text(SWITCHED, answers=AnswerText.SAMPLED)
    (_, answer), *_ = rows(template, talk(ASKED, message))
    assert answer.startswith("yes</think>yes" if tags else "r\n</think>\n\nr")
    assert survey(template, [talk(ASKED, message)]).failures == []


@pytest.mark.parametrize("content", ["A", "A\n", "A\n\n"])
def test_white_space_before_a_stop_that_the_next_header_writes_is_both(content: str) -> None:
    """Apriel's header begins with a line break, and a content may end with some."""
    template = of_text(text_of("llamacpp/Apriel-1.6-15b-Thinker-fixed.jinja"), ("<|end|>",), ())
    conversation = talk(ASKED, Message(Role.ASSISTANT, content, reasoning="R"))
    assert rows(template, conversation)[0][1] == f"R\n[BEGIN FINAL RESPONSE]\n{content}\n<|end|>"
    assert survey(template, [conversation]).failures == []


@pytest.mark.parametrize("content", ["A ", "A\n"])
def test_reasoning_closed_at_once_has_the_content_as_the_template_shows_it(content: str) -> None:
    template = of_text(VERBATIM.replace("{{ c }}", "{{ c | trim }}"), no_reasoning=NoReasoning.CLOSE)
    assert rows(template, talk(ASKED, Message(Role.ASSISTANT, content)))[0][1] == "\n</think>\n\nA<|im_end|>"
    assert survey(template, [talk(ASKED, Message(Role.ASSISTANT, content))]).failures == []


# ---- what an error says to do is tried


NO_STOP = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
REOPENED = VERBATIM.replace(
    "<|im_start|>{{ m.role }}\n",
    "{% if loop.first or m.role != messages[loop.index0 - 1].role %}<|im_start|>{{ m.role }}\n{% endif %}",
).replace("<think>\n", "")


def hint(template: ModelTemplate, conversation: Conversation) -> str:
    with pytest.raises(RecordError) as refused:
        template.text_documents(conversation)
    return str(refused.value)


def test_closing_the_reasoning_at_once_is_what_an_answer_without_any_is_told() -> None:
    plain = talk(ASKED, Message(Role.ASSISTANT, "a"))
    assert "`no_reasoning: close`" in hint(of_text(CUTS), plain)
    assert survey(of_text(CUTS, no_reasoning=NoReasoning.CLOSE), [plain]).proved == 1


def test_a_template_without_a_stop_is_told_to_write_its_eos() -> None:
    plain = talk(ASKED, Message(Role.ASSISTANT, "a"), ASKED)
    assert "`{{ eos_token }}`" in hint(of_text(NO_STOP), plain)
    with_eos = NO_STOP.replace("content }}", "content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}")
    assert survey(of_text(with_eos), [plain]).proved == 1


def test_an_answer_after_an_answer_is_told_to_be_one_message() -> None:
    said = Message(Role.ASSISTANT, "a")
    assert "one message that says both" in hint(of_text(REOPENED), talk(ASKED, said, said))
    assert survey(of_text(REOPENED), [talk(ASKED, said._replace(content="aa"))]).proved == 1


def test_answers_without_a_proof_stay_context_and_the_others_are_trained() -> None:
    template = of_text(CUTS, unproved=Unproved.UNTRAINED)
    written = template.text_documents(talk(ASKED, OWN, ASKED, Message(Role.ASSISTANT, "a")))
    assert (written.counts.turns, written.counts.untrained, written.counts.as_sampled) == (1, 1, 1)


def test_the_proof_finds_an_answer_that_no_model_would_write(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [talk(ASKED, OWN), talk(ASKED, OWN, ASKED, OWN)]
    assert survey(of_text(CUTS), records).failures == []
    monkeypatch.setattr(SampledAnswers, "_close_text", lambda self, close: f" {close} ")
    assert len(survey(of_text(CUTS), records).failures) == 3


# ---- published templates

OWN_AND_TAGS = [
    "llamacpp/Apriel-1.6-15b-Thinker-fixed.jinja",
    "llamacpp/llama-cpp-deepseek-r1.jinja",
    *("trl/deepseek_r1_distill.jinja", "trl/deepseek_r1_distill_training.jinja"),
    *("trl/deepseekv3.jinja", "trl/deepseekv3_training.jinja", "vllm/tool_chat_template_deepseekv31.jinja"),
    *("axolotl/qwen3.jinja", "axolotl/qwen3_5.jinja"),
]
TAGS = [
    "llamacpp/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja",
    *("trl/nemotron_3_5_lightning.jinja", "trl/nemotron_3_5_lightning_training.jinja"),
    *("trl/nemotron_3_nano_training.jinja", "trl/nemotron_3_super.jinja", "trl/nemotron_3_super_training.jinja"),
    *("trl/nemotron_3_ultra.jinja", "trl/nemotron_3_ultra_training.jinja"),
]
AT_HAND = {*bundled(), *of_trl()}
CASES = [(name, form) for name in (*OWN_AND_TAGS, *TAGS) for form in ("own", "tags") if name in AT_HAND]
QUICK = [("trl/deepseek_r1_distill.jinja", "own"), ("trl/deepseekv3.jinja", "tags"), ("axolotl/qwen3.jinja", "tags")]


def with_reasoning(count: int) -> list[Conversation]:
    """Bundled conversations with reasoning, the same number of every source."""
    found: list[Conversation] = []
    for path in CONVERSATIONS:
        read = [record for record in ConversationFile(path) if any(one.reasoning for one in record.messages)]
        found += read[:: max(1, len(read) // count)][:count]
    return found


def in_tags(record: Conversation, begin: str, end: str) -> Conversation:
    """A conversation whose reasoning is in the contents."""
    messages = [
        one._replace(content=f"{begin}{one.reasoning}{end}{one.content}", reasoning=None) if one.reasoning else one
        for one in record.messages
    ]
    return record._replace(messages=tuple(messages))


def proved_after_their_prompts(name: str, form: str, records: Sequence[Conversation]) -> None:
    marks = ("Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n")
    if form == "tags":
        records = [in_tags(one, *(marks if "Apriel" in name else ("<think>\n", "\n</think>\n\n"))) for one in records]
    template = bind_bytes(name, text_of(name))
    found = survey(template, records)
    assert found.failures == []
    assert found.reasons["prompt_not_in_history"] <= 0.05 * len(records)
    assert found.reasons.keys() <= {"not_shown", "template_refused", "ambiguous_thinking"}
    assert found.proof["answers_not_checked"] == 0
    history = survey(bind_bytes(name, text_of(name), TemplateOptions(today=TODAY, answers=AnswerText.HISTORY)), records)
    assert history.proved == (found.proved if (name, form) in [(one, "own") for one in TAGS] else 0)


@pytest.mark.parametrize(("name", "form"), [case for case in CASES if case in QUICK])
def test_records_with_reasoning_are_proved(name: str, form: str) -> None:
    proved_after_their_prompts(name, form, with_reasoning(2))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), CASES)
def test_more_records_with_reasoning_are_proved(name: str, form: str) -> None:
    proved_after_their_prompts(name, form, with_reasoning(10))


def test_rows_are_those_of_trls_copy_of_r1_and_its_mask_has_the_prompt_besides() -> None:
    """TRL's copy leaves the reasoning in history; for one answer that is the same row."""
    template = bind_bytes("r1", text_of("trl/deepseek_r1_distill.jinja"))
    sandbox = PlainSandbox(TODAY)
    text = text_of("trl/deepseek_r1_distill_training.jinja")
    marked = text.replace("{%- generation %}", "{{- '\ue000' }}").replace("{%- endgeneration %}", "{{- '\ue001' }}")
    copy = sandbox.template(marked)
    compared = 0
    for record in with_reasoning(8):
        tagged = in_tags(record, "<think>\n", "\n</think>\n\n")
        if record.tools or any(message.tool_calls for message in record.messages):
            continue
        (prompt, answer), *_ = rows(template, tagged)
        messages = [{"role": one.role.value, "content": one.content} for one in tagged.messages]
        values = {**template.named_tokens, "messages": messages, "add_generation_prompt": False}
        theirs = sandbox.render(copy, values)
        assert theirs.replace("\ue000", "").replace("\ue001", "") == prompt + answer
        assert theirs.split("\ue000")[1].split("\ue001")[0] == f"<｜Assistant｜><think>\n{answer}"
        compared += 1
    assert compared >= 8


# ---- builds

HEADER = "{#-\nchatmill: template\ntokens: <|im_start|> <|im_end|>\nstops: <|im_end|>\n-#}\n"
SAID = {"role": "user", "content": "1+1?"}
THOUGHT = {"role": "assistant", "content": "Two.", "reasoning_content": "One and one."}
TAGGED = {"role": "assistant", "content": "<think>\nOne and one.\n</think>\n\nTwo."}


def built(path: Path, records: Sequence[dict[str, Any]], **more: Any) -> Ledger:
    """Build records, prove what was built, and return the ledger."""
    (path / "own.jinja").write_text(HEADER + CUTS)
    write_jsonl(path / "in.jsonl", list(records))
    recipe = {"sources": [{"path": str(path / "in.jsonl")}], "tokenizer": "bytes", "template": str(path / "own.jinja")}
    result = run_build({**recipe, "add_control_tokens": True, "gates": OPEN_GATES, **more}, path / "out", workers=0)
    ledger = Ledger.from_json(result.manifest["ledger"])
    report = verify(path / "out", deep=True)
    assert report.differences == 0
    assert report.counts["answers_proved"] == ledger.total_notes(AS_SAMPLED)
    return ledger


@pytest.mark.parametrize("expand", ["turns", "tree", "last"])
def test_builds_of_such_answers_are_counted_and_proved(tmp_path: Path, expand: str) -> None:
    records = [{"messages": [SAID, THOUGHT]}, {"messages": [SAID, TAGGED, SAID, THOUGHT]}]
    ledger = built(tmp_path, records, expand=expand)
    assert ledger.total_notes(AS_SAMPLED) == (2 if expand == "last" else 3)


def test_both_sides_of_a_pair_may_be_such_answers(tmp_path: Path) -> None:
    pair = {"prompt": [SAID], "chosen": [THOUGHT], "rejected": [{**TAGGED, "content": f"{TAGGED['content']} Or 3."}]}
    assert built(tmp_path, [pair], preferences="pairs").total_notes(AS_SAMPLED) == 2


def test_sampled_tokens_stand_where_such_an_answer_does(tmp_path: Path) -> None:
    ids = list(b"One and one.\n</think>\n\nTwo.")
    ledger = built(tmp_path, [{"messages": [SAID, {**THOUGHT, "token_ids": ids}]}])
    assert (ledger.total_notes("sampled_messages"), ledger.total_notes("sampled_otherwise")) == (1, 0)


def test_a_batch_gives_the_same_rows_as_records_one_by_one() -> None:
    template = of_text(CUTS)
    records = [
        talk(ASKED, OWN),
        talk(ASKED, OWN, ASKED, OWN),
        talk(ASKED, Message(Role.ASSISTANT, "<think>r</think>a")),
    ]
    together = render(records * 3, template)
    alone = [render([record], of_text(CUTS)).tokens.ids.tolist() for record in records * 3]
    assert together.tokens.ids.tolist() == [token for ids in alone for token in ids]
    assert together.as_sampled.tolist() == [1, 2, 0, 1] * 3


@pytest.mark.parametrize(
    ("name", "message", "wanted"),
    [
        ("axolotl/qwen3", Message(Role.ASSISTANT, "a", reasoning=" "), "a<|im_end|>"),
        (
            "llamacpp/Apriel-1.6-15b-Thinker-fixed",
            Message(Role.ASSISTANT, " ", reasoning="r"),
            "r\n[BEGIN FINAL RESPONSE]\n \n<|end|>",
        ),
    ],
)
def test_reasoning_and_content_of_white_space_alone_are_proved(name: str, message: Message, wanted: str) -> None:
    given = TemplateOptions(today=TODAY, no_reasoning=NoReasoning.CLOSE)
    template = bind_bytes(name, text_of(f"{name}.jinja"), given)
    conversation = talk(ASKED, message)
    (row,) = rows(template, conversation)
    assert row[1] == wanted
    found = survey(template, [conversation])
    assert (found.proved, found.failures) == (1, [])


def test_the_white_space_before_an_appended_stop_is_the_templates_whatever_records_came_before() -> None:
    template = bind_bytes("apriel", text_of("llamacpp/Apriel-1.6-15b-Thinker-fixed.jinja"))
    for content in (" ", "a", "a\n", "a\n\n ", "", "a"):
        if content:
            (row,) = rows(template, talk(ASKED, Message(Role.ASSISTANT, content, reasoning="r")))
            assert row[1] == f"r\n[BEGIN FINAL RESPONSE]\n{content}\n<|end|>"


@pytest.mark.parametrize("content", [" a ", "\na", "a\n", " a"])
@pytest.mark.parametrize("trims", [True, False])
def test_closed_reasoning_is_proved_with_the_content_that_the_template_shows(content: str, trims: bool) -> None:
    text = CUTS.replace("{{ c }}", "{{ c|trim }}") if trims else CUTS
    given = TemplateOptions(no_reasoning=NoReasoning.CLOSE)
    template = bind_bytes("cuts", text, given)
    for message in (Message(Role.ASSISTANT, content), Message(Role.ASSISTANT, content, reasoning="r")):
        conversation = talk(ASKED, message, ASKED, OWN)
        found = survey(template, [conversation])
        assert (found.proved, found.failures) == (1, [])
        shown = content.strip() if trims else content
        assert rows(template, conversation)[0][1] == f"{message.reasoning or ''}\n</think>\n\n{shown}<|im_end|>"


@pytest.mark.parametrize("reads", [True, False])
def test_reasoning_that_a_template_has_no_place_for_is_left_out_as_everywhere(reads: bool) -> None:
    """Where only the white space before the answer differs, as under Llama 4's template."""
    text = """{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}{{ '\n' }}<|im_start|>assistant{% endif %}"""
    template = bind_bytes("spaced", text + ("{# m.reasoning #}" if reads else ""))
    conversation = talk(ASKED, OWN)
    if reads:
        assert reason(template, conversation) == "prompt_not_in_history"
        return
    assert rows(template, conversation) == [("<|im_start|>userq<|im_end|>\n<|im_start|>assistant", "a<|im_end|>")]
    found = survey(template, [conversation])
    assert (found.proved, found.failures) == (1, [])
    assert int(render([conversation], template).lost.sum()) == 1
