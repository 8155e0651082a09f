"""What to know about a template before training with it, in plain words: the table of findings, and who finds them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from chatmill.look.safe_text import visible
from chatmill.look.template_probes import (
    CALL,
    PROBES,
    REASONING,
    SPECIAL_LOOK,
    Probe,
    ProbeLook,
    answers_of,
    generation_prompt,
)
from chatmill.render.jinja.as_sampled import EMPTY_BLOCK
from chatmill.render.jinja.rendering import Rendering, common_start
from chatmill.render.jinja.rules import Answer
from chatmill.render.jinja.stops import THINKING
from chatmill.render.jinja.turns import Turns
from chatmill.render.model_template import JinjaSource, ModelTemplate
from chatmill.tokenizer.tokenizer import Tokenizer

LONGEST = 60
"""Characters of a quoted text."""
MOST_NAMES = 4
"""Probes that a finding names."""
PROMPT_WORDS = {
    "prompt_not_in_history": "the generation prompt is not what the template writes as history",
    "reasoning_not_closed": "the generation prompt opens reasoning that answers never close",
}
TEXTS = {
    "prompt_agrees": "The prompt that a served model is given is the context that is trained, in every probe that has "
    "one.",
    "answers_as_sampled": "The generation prompt {what}. So an answer is trained as a model writes it after its "
    "prompt, in a row of its own{proof}. Message {message} of '{probe}': {answer}.{close}",
    "no_reasoning": "The generation prompt opens reasoning, and an answer without any has no proof: {probes}. "
    "`no_reasoning: close` trains such an answer with its reasoning closed at once; `unproved: untrained` trains "
    "nothing of it.",
    "ambiguous_thinking": "What ends the reasoning is in an answer more than once ({detail}): {probes}.",
    "no_prompt": "An answer has no prompt, because the template refuses to write one ({detail}): {probes}.",
    "not_shown": "The template drops ({detail}): {probes}.",
    "no_stop": "No stop token ends an answer ({detail}): {probes}.",
    "goes_on_after_stop": "The template writes a stop and goes on with the same message ({detail}): {probes}.",
    "origin_lost": "The template changes a text beyond recognition ({detail}): {probes}.",
    "template_refused": "The template refuses a conversation that ends here ({detail}): {probes}.",
    "stop_not_in_config": "Answers end with {stops}, and the model's generation config would not stop there: {said}. "
    "Add {stops} to `eos_token_id` where the model is served.",
    "stop_appended": "The template leaves the stop of a last answer to the header of the next message. It is appended "
    "to the row and counted: {probes}.",
    "history_stable": "History is never rewritten in the probes: one row holds all turns of a conversation.",
    "history_rewritten": "{who} {part}, in '{probe}'. It was {was}; the whole conversation has {now}. `expand: turns` "
    "gives such an answer a document of its own.{others}",
    "results_inside_answers": "Tool results are written inside the assistant's turn: no generation prompt follows "
    "them. What the assistant says before and after a result are two answers, each with its own context.",
    "reasoning_dropped": "Reasoning is not shown at all, not even that of the last answer. It is counted in the "
    "ledger.",
    "tokens_not_in_vocabulary": "The template writes {tokens}, which {vocabulary!r} does not have as {noun}: a model "
    "reads them letter by letter.",
    "asks_for_date": "The template writes today's date. A build needs one in its recipe (`date`, or --set date=), so "
    "that it gives the same bytes on any day.",
    "template_refuses": "Refused, in {probes}: {refused}.",
}
"""Findings by their codes, which are stable."""


FINE = (
    "prompt_agrees",
    "history_stable",
    "stop_appended",
    "results_inside_answers",
)
"""Findings that say how the template is, and cost nothing."""


class TemplateFinding(NamedTuple):
    """Something worth knowing before training with a template."""

    code: str
    """Stable, for scripts."""
    text: str


def _finding(code: str, **words: Any) -> TemplateFinding:
    return TemplateFinding(code, TEXTS.get(code, f"{code} ({{detail}}): {{probes}}.").format(**words))


def findings_of(
    chat: ModelTemplate, probes: Sequence[ProbeLook], vocabulary: Tokenizer, *, made_up: bool
) -> Iterator[TemplateFinding]:
    """Yield all findings, the most important first."""
    yield from _prompts(chat, probes)
    yield from _sampled(probes)
    yield from _unproved(probes)
    yield from _stops(chat.source, chat, probes, vocabulary, made_up)
    yield from _history(probes)
    yield from _results_inside(chat, probes)
    yield from _reasoning(probes)
    if not made_up:
        yield from _missing_tokens(probes, vocabulary)
    if chat.asks_for_date:
        yield _finding("asks_for_date")
    yield from _refusals(probes)


def quoted(text: str) -> str:
    """Quote a text on one line; the middle of a long one is cut."""
    shown = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    return visible(json.dumps(shown, ensure_ascii=False), mark_newlines=False)


def named(options: Mapping[str, Any]) -> str:
    """Write options as on a command line."""
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in options.items()) or "its default options"


def _listed(names: Sequence[str]) -> str:
    unique = list(dict.fromkeys(names))
    if len(unique) > MOST_NAMES:
        return f"{len(unique)} of {len(PROBES)} probes ('{unique[0]}' and others)"
    return ", ".join(f"'{name}'" for name in unique)


def _prompts(chat: ModelTemplate, probes: Sequence[ProbeLook]) -> Iterator[TemplateFinding]:
    """Check that the served prompt and the trained context agree, and under which switch."""
    default = next(chat.choices({}))
    disagrees = False
    for reason, words in PROMPT_WORDS.items():
        details: dict[str, str] = {}
        switches: dict[str, list[str]] = {}
        """Probes by the thinking switch that fixes them; those that none fixes are under the empty text."""
        for look in probes:
            answers = answers_of(chat.turns(look.probe.conversation, default, by_history=True))
            is_fixed = not any(answer.reason in PROMPT_WORDS for answer in look.answers)
            if look.is_opened or (is_fixed and look.options == default):  # another finding says so
                continue
            if detail := next((answer.detail for answer in answers if answer.reason == reason), None):
                details[look.probe.name] = detail
                switches.setdefault(named(look.options) if is_fixed else "", []).append(look.probe.name)
        if not details:
            continue
        disagrees = True
        text = f"With {named(default)} {words}, in {_listed(list(details))}: {next(iter(details.values()))}."
        left = switches.pop("", [])
        for switch, helped in switches.items():
            text += f" With {switch} they agree in {_listed(helped)}; `thinking: auto` chooses that by itself."
        yield TemplateFinding(reason, text + (f" No thinking switch fixes {_listed(left)}." if left else ""))
    is_opened = any(look.is_opened for look in probes)
    if not disagrees and not is_opened and any(look.answers for look in probes):
        yield _finding("prompt_agrees")


def _sampled(probes: Sequence[ProbeLook]) -> Iterator[TemplateFinding]:
    """Say that answers are trained as a model writes them, with the first one."""
    found = [(look, answer) for look in probes for answer in look.answers if look.is_as_sampled(answer)]
    if not found:
        return
    look, answer = found[0]
    said, opener = look.turns.trained(answer.message).text[answer.begin : answer.end], look.turns.opener(answer)
    what = "has other white space than history where an answer begins"
    if opener:
        is_closed = EMPTY_BLOCK.fullmatch(opener) is not None
        what = f"opens reasoning ({quoted(opener)}) that history leaves out"
        if is_closed:
            what = f"ends with an empty block of reasoning ({quoted(opener)}) that history does not have"
    is_declared = look.turns.declares_close and any(mark in said for mark in THINKING.values())
    declared = " What is between reasoning and content is not in the template: a recipe says it (`thinking_close`)."
    yield _finding(
        "answers_as_sampled",
        what=what,
        proof=", and the template itself proves it: given this answer, it writes the same history" if opener else "",
        message=answer.message,
        probe=look.probe.name,
        answer=quoted(said),
        close=declared if is_declared else "",
    )


def _unproved(probes: Sequence[ProbeLook]) -> Iterator[TemplateFinding]:
    """List the reasons why answers have no proof, except for the prompt's, which have a finding of their own."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    without_detail = ("no_reasoning",)
    for look in probes:
        unproved = {
            (answer.reason, "" if answer.reason in without_detail else answer.detail)
            for answer in look.answers
            if answer.reason
        }
        if look.code == "not_shown" and not unproved:
            unproved = {("not_shown", look.refused)}
        for key in sorted(unproved):
            by_reason.setdefault(key, []).append(look.probe.name)
    for (reason, detail), names in by_reason.items():
        if reason not in PROMPT_WORDS:
            yield _finding(reason, detail=detail, probes=_listed(names))


def _stops(
    source: JinjaSource, chat: ModelTemplate, probes: Sequence[ProbeLook], vocabulary: Tokenizer, made_up: bool
) -> Iterator[TemplateFinding]:
    used = list(dict.fromkeys(answer.stop for look in probes for answer in look.answers if answer.stop))
    names = {token: name for name, token in vocabulary.control_ids.items()}
    configured = [names[token] for token in source.stop_ids if token in names]
    eos = chat.named_tokens.get("eos_token")
    expected = [*configured, *([eos] if eos else []), *source.stop_tokens]
    strange = [stop for stop in used if stop not in expected]
    says_nothing = made_up and not configured and "eos_token" not in source.named_tokens
    if strange and not says_nothing:
        said = f"its generation config names {', '.join(configured)}" if configured else f"its eos is {eos or 'unset'}"
        yield _finding("stop_not_in_config", stops=", ".join(strange), said=said)
    appended = [look.probe.name for look in probes if any(answer.is_appended for answer in look.answers)]
    if appended:
        yield _finding("stop_appended", probes=_listed(appended))


def _history(probes: Sequence[ProbeLook]) -> Iterator[TemplateFinding]:
    changed: dict[str, tuple[Turns, Answer[int]]] = {}
    """The first answer of each probe that later messages change."""
    for look in probes:
        for answer in look.answers:
            if not look.is_stable(answer) and not look.is_as_sampled(answer):
                changed.setdefault(look.probe.name, (look.turns, answer))
    if not changed:
        proved = [[answer for answer in look.answers if not answer.reason] for look in probes]
        if any(len(answers) > 1 for answers in proved) and not any(look.is_opened for look in probes):
            yield _finding("history_stable")
        return
    more = [name for name in changed if name != next(iter(changed))]
    for name, (turns, answer) in islice(changed.items(), 1):
        trained, whole, begin = turns.trained(answer.message), turns.whole, answer.begin
        assert isinstance(trained, Rendering)
        same = trained.text[:begin] == whole.text[:begin]
        at = begin if same else _first_difference(trained.text, whole.text)
        part = f"the {'answer' if same else 'context'} of message {answer.message}"
        who = "The answer itself changes" if answer.message == len(turns.messages) - 1 else "Later messages change"
        was, now = (quoted(text[at : at + LONGEST]) for text in (trained.text, whole.text))
        others = f" So it is in {_listed(more)}." if more else ""
        yield _finding("history_rewritten", who=who, part=part, probe=name, was=was, now=now, others=others)


def _first_difference(text: str, other: str) -> int:
    """Find the first difference of two texts; the start of the special token if it is inside one."""
    at = common_start(text, other)
    opened = max(text.rfind("<", max(0, at - 20), at), text.rfind("[", max(0, at - 20), at))
    return at if opened < 0 else opened


def _turns_of(probe: Probe, probes: Sequence[ProbeLook]) -> Turns:
    """Find the renderings of a probe."""
    return next(look.turns for look in probes if look.probe is probe)


def _results_inside(chat: ModelTemplate, probes: Sequence[ProbeLook]) -> Iterator[TemplateFinding]:
    turns = _turns_of(CALL, probes)
    result, prompt = turns.until(2), turns.prompt(3)
    if not isinstance(result, Rendering) or not isinstance(prompt, Rendering):
        return
    if result.text == prompt.text and generation_prompt(chat):
        yield _finding("results_inside_answers")


def _reasoning(probes: Sequence[ProbeLook]) -> Iterator[TemplateFinding]:
    turns, last = _turns_of(REASONING, probes), len(REASONING.conversation.messages) - 1
    ended = turns.until(last)
    is_sampled = any(turns.is_as_sampled(answer) for answer in answers_of(turns))
    if isinstance(ended, Rendering) and "R-two." not in ended.text and not is_sampled:
        yield _finding("reasoning_dropped")


def _missing_tokens(probes: Sequence[ProbeLook], vocabulary: Tokenizer) -> Iterator[TemplateFinding]:
    written: dict[str, None] = {}
    for turns in (look.turns for look in probes):
        for rendering in (turns.until(len(turns.messages) - 1), turns.prompt(1)):
            if isinstance(rendering, Rendering):
                literals = [rendering.text[p.start : p.stop] for p in rendering.pieces if p.expression is None]
                written |= {match.group(): None for text in literals for match in SPECIAL_LOOK.finditer(text)}
    missing = [name for name in written if name not in vocabulary.control_ids]
    if missing:
        noun = "a token" if len(missing) == 1 else "tokens"
        yield _finding("tokens_not_in_vocabulary", tokens=", ".join(missing), vocabulary=vocabulary.name, noun=noun)


def _refusals(probes: Sequence[ProbeLook]) -> Iterator[TemplateFinding]:
    by_refusal: dict[str, list[str]] = {}
    for look in probes:
        if look.code and look.code not in (*PROMPT_WORDS, "not_shown") and not look.answers:
            by_refusal.setdefault(look.refused, []).append(look.probe.name)
    for refused, names in by_refusal.items():
        yield _finding("template_refuses", probes=_listed(names), refused=refused)
