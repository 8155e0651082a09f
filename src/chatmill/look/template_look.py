"""A close look at one template: what it is, what it wants, and what it does to a small set of conversations."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.errors import RecordError, TokenizerError
from chatmill.label.presets import find_policy
from chatmill.look.generation_tags import has_tags
from chatmill.look.template_findings import TemplateFinding, findings_of
from chatmill.look.template_probes import (
    EXAMPLE_DAY,
    PAIR,
    PROBES,
    REASONING,
    ProbeLook,
    answers_of,
    byte_vocabulary,
    generation_prompt,
    look_at_probe,
)
from chatmill.render.jinja.options import TemplateOptions, Unproved
from chatmill.render.jinja.rendering import Rendering
from chatmill.render.jinja.stops import families_of
from chatmill.render.model_template import JinjaSource, ModelTemplate
from chatmill.render.registry import bind, find_template
from chatmill.render.render import render
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from chatmill.tokenizer.tokenizer import Tokenizer

BATCH = 1_000
"""Conversations of a data file that are rendered at once."""


@dataclass(slots=True, kw_only=True)
class DataShare:
    """Counts of what is proved in a file."""

    records: int = 0
    proved: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Records by reason."""
    turns: int = 0
    turns_proved: int = 0
    turns_unproved: Counter[str] = field(default_factory=Counter)
    turns_changed: int = 0
    """Proved answers that later messages change."""
    rows: int = 0


class TemplateSummary(NamedTuple):
    """What a person wants to know first."""

    given: str
    """The end of what a model is given to answer a question."""
    answer: str
    """What it then has to write, which is trained."""
    stops: tuple[str, ...]
    """The tokens that end answers."""
    proved: int
    """Probes of which every answer is proved."""
    unproved: tuple[str, ...]
    """The others, each with its code."""
    rows: str
    """How many rows a conversation needs."""
    needs: tuple[str, ...]
    """What a recipe has to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLook:
    """All that is known about a template."""

    facts: Mapping[str, Any]
    """What it is and wants, by name, in plain values."""
    findings: tuple[TemplateFinding, ...]
    probes: tuple[ProbeLook, ...]
    summary: TemplateSummary
    data: DataShare | None = None

    def as_json(self) -> dict[str, Any]:
        """Return plain values, for scripts."""
        return {
            **self.facts,
            "summary": self.summary._asdict(),
            "findings": [finding._asdict() for finding in self.findings],
            "probes": [probe.as_json() for probe in self.probes],
            "data": msgspec.to_builtins(self.data),
        }


def look_at_template(
    template: str | os.PathLike[str],
    tokenizer: Tokenizer | str | None = None,
    options: TemplateOptions | None = None,
    data: Iterable[Conversation | RecordError] | None = None,
) -> TemplateLook:
    """Look at a template.

    Without a tokenizer that of the template's folder is used; if there is none, bytes and the special tokens that
    the template spells. `data` are conversations, and the errors of records that could not be read.
    """
    source = find_template(template)
    options = options or TemplateOptions()
    day = options.today or EXAMPLE_DAY
    options = dataclasses.replace(options, today=day, unproved=Unproved.REFUSE)
    vocabulary, made_up = _vocabulary(source, tokenizer)
    vocabulary = with_control_tokens(vocabulary, source.control_tokens) if made_up else vocabulary
    bound = bind(source, vocabulary, options)
    lenient = bind(source, vocabulary, dataclasses.replace(options, unproved=Unproved.UNTRAINED))
    policy = find_policy(source.default_policy)
    probes = tuple(look_at_probe(probe, bound, lenient, policy) for probe in PROBES)
    facts = {
        "name": source.name,
        "origin": source.origin,
        "licence": source.licence,
        "sha256": hashlib.sha256(source.text.encode()).hexdigest(),
        "tokenizer": vocabulary.name,
        "vocab_size": vocabulary.vocab_size,
        "made_up_vocabulary": made_up,  # bytes, and the tokens that the template spells
        "options": list(bound.option_names),
        "roles": roles_accepted(bound),
        "tool_definitions": _shows(probes, "Current weather", calls=False),
        "tool_calls": _shows(probes, "Oslo", calls=True),
        "asks_for_date": bound.asks_for_date,
        "date": str(day),  # that of the probes
        "arguments": str(bound.form.arguments),
        "content": str(bound.form.content),
        "default_policy": source.default_policy,
        "prompt": generation_prompt(bound),
        "generation_tags": has_tags(source.text),
        "stops": [{"token": token, "sources": said} for token, said in stop_sources(bound, vocabulary).items()],
    }
    findings = tuple(findings_of(bound, probes, vocabulary, made_up=made_up))
    share = None if data is None else data_share(bound, data)
    return TemplateLook(
        facts=facts, findings=findings, probes=probes, summary=summary_of(probes, bound.asks_for_date), data=share
    )


def summary_of(probes: Sequence[ProbeLook], asks_for_date: bool) -> TemplateSummary:
    """Return what a person wants to know first, from the probes."""
    by_name = {look.probe.name: look for look in probes}
    shown = [by_name[probe.name] for probe in (REASONING, PAIR)]
    proved = [(look, answer) for look in shown for answer in look.answers if not answer.reason]
    given = written = ""
    if proved:
        look, answer = proved[0]
        rendering = look.turns.trained(answer.message)
        question = max((p.start for p in rendering.pieces if p.owner == 0 and p.stop <= answer.begin), default=0)
        given, written = rendering.text[question : answer.begin], rendering.text[answer.begin : answer.end]
        written += answer.before_stop + answer.stop if answer.is_appended else ""
    answers = [(look, answer) for look in probes for answer in look.answers if not answer.reason]
    is_sampled = any(look.is_as_sampled(answer) for look, answer in answers)
    is_changed = any(not look.is_stable(answer) for look, answer in answers)
    rows = "one for a conversation"
    if is_sampled:
        rows = "one for each answer whose prompt history does not have (`expand`)"
    elif is_changed:
        rows += ", and one more for each answer that later messages change (`expand`)"
    return TemplateSummary(
        given=given,
        answer=written,
        stops=tuple(dict.fromkeys(answer.stop for _, answer in answers)),
        proved=sum(not look.code for look in probes),
        unproved=tuple(f"{look.probe.name} ({look.code})" for look in probes if look.code),
        rows=rows,
        needs=("date",) if asks_for_date else (),
    )


def _vocabulary(source: JinjaSource, tokenizer: Tokenizer | str | None) -> tuple[Any, bool]:
    """Choose the vocabulary, and say whether it is synthetic."""
    if tokenizer is not None:
        return with_control_tokens(load_tokenizer(tokenizer), source.control_tokens), False
    path = Path(source.path)
    folder = path if path.is_dir() else path.parent
    if not source.licence:  # a bundled template has no vocabulary next to it
        try:
            return load_tokenizer(folder), False
        except TokenizerError:
            if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.json.xz")):
                raise
    return byte_vocabulary(source.text, *source.named_tokens.values(), *source.stop_tokens), True


def _shows(probes: Sequence[ProbeLook], word: str, *, calls: bool) -> bool:
    """Return whether the rendering of a probe has a word in its tool calls, or in tool definitions."""
    return any(
        word in run["text"] and (".tool_call" in run["kind"]) == calls
        for look in probes
        for row in (look.rows if calls or look.probe.conversation.tools else ())
        for run in map(row.run_json, row.runs)
    )


def roles_accepted(bound: ModelTemplate) -> list[str]:
    """List the roles that a template writes, each tried with a small conversation."""
    user, answer = PAIR.conversation.messages
    call = next(probe for probe in PROBES if probe.conversation.tools).conversation
    conversations = {
        Role.SYSTEM: Conversation((Message(Role.SYSTEM, "S-zero."), user, answer)),
        Role.DEVELOPER: Conversation((Message(Role.DEVELOPER, "D-zero."), user, answer)),
        Role.USER: PAIR.conversation,
        Role.ASSISTANT: PAIR.conversation,
        Role.TOOL: call._replace(messages=call.messages[:3]),
    }
    return [str(role) for role, conversation in conversations.items() if _accepts(bound, conversation, role)]


def _accepts(bound: ModelTemplate, conversation: Conversation, role: Role) -> bool:
    wanted = next(message.content for message in conversation.messages if message.role is role)
    turns, last = bound.turns(conversation), len(conversation.messages) - 1
    renderings = (turns.until(last), turns.prompt(last))  # Mistral's show the system text in a last question only
    return any(isinstance(rendering, Rendering) and wanted in rendering.text for rendering in renderings)


def stop_sources(chat: ModelTemplate, vocabulary: Tokenizer) -> dict[str, list[str]]:
    """List the stop tokens, each with everything that names it."""
    source = chat.source
    configured = {name for name, token in vocabulary.control_ids.items() if token in source.stop_ids}
    by_token = {}
    for token in chat.stops.names:
        sources = ["generation config"] * (token in configured)
        sources += ["the tokenizer's eos"] * (chat.named_tokens.get("eos_token") == token)
        sources += ["the header of the bundled template"] * (token in source.stop_tokens)
        sources += [
            f"the table of families ({family.name})"
            for family in families_of(chat.source.text)
            if token in family.stops
        ]
        by_token[token] = sources or ["habit: the template writes it everywhere"]
    return by_token


def data_share(bound: ModelTemplate, data: Iterable[Conversation | RecordError]) -> DataShare:
    """Count the proved records and turns of a file, and the reasons of the others."""
    share = DataShare()
    records = iter(data)
    while batch := list(islice(records, BATCH)):
        conversations = [record for record in batch if not isinstance(record, RecordError)]
        rendered = render(conversations, bound, collect_failures=True)
        share.records += len(batch)
        share.proved += len(conversations) - len(rendered.failed)
        share.rows += len(rendered.kept)
        share.turns_proved += int(rendered.turns.sum())
        share.turns += int(rendered.turns.sum())
        share.turns_changed += int(rendered.unstable.sum())
        share.refused.update(record.code for record in batch if isinstance(record, RecordError))
        for index, error in rendered.failed:
            share.refused[error.code] += 1
            reasons = _reasons(bound, conversations[index], error)
            share.turns += len(reasons)
            share.turns_proved += reasons.count("")
            share.turns_unproved.update(filter(None, reasons))
    return share


def _reasons(bound: ModelTemplate, conversation: Conversation, error: RecordError) -> list[str]:
    """List why each turn of a refused record is not proved; some may be proved all the same."""
    refused = [error.code] * sum(message.role is Role.ASSISTANT for message in conversation.messages)
    return [answer.reason for answer in answers_of(bound.turns(conversation))] or refused
