"""A close look at one template: what it is, what it wants, and what it does to a small set of conversations."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from chatmill.core.conversation import Conversation, Message, Role
from chatmill.errors import TokenizerError
from chatmill.label.presets import find_policy
from chatmill.look.template_findings import TemplateFinding, findings_of
from chatmill.look.template_probes import (
    EXAMPLE_DAY,
    PAIR,
    PROBES,
    REASONING,
    ProbeLook,
    byte_vocabulary,
    generation_prompt,
    look_at_probe,
    spelled_tokens,
)
from chatmill.render.jinja.options import TemplateOptions, Unproved
from chatmill.render.jinja.rendering import Rendering
from chatmill.render.jinja.stops import families_of
from chatmill.render.model_template import JinjaSource, ModelTemplate
from chatmill.render.registry import HEADER, bind, bundled_names, find_template
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from chatmill.tokenizer.tokenizer import Tokenizer


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

    def as_json(self) -> dict[str, Any]:
        """Return plain values, for scripts."""
        return {
            **self.facts,
            "summary": self.summary._asdict(),
            "findings": [finding._asdict() for finding in self.findings],
            "probes": [probe.as_json() for probe in self.probes],
        }


def look_at_template(
    template: str | os.PathLike[str],
    tokenizer: Tokenizer | str | None = None,
    options: TemplateOptions | None = None,
) -> TemplateLook:
    """Look at a template.

    Without a tokenizer that of the template's folder is used; if there is none, bytes and the special tokens that
    the template spells.
    """
    source = find_template(template)
    options = options or TemplateOptions()
    day = options.today or EXAMPLE_DAY
    options = dataclasses.replace(options, today=day, unproved=Unproved.REFUSE)
    vocabulary, made_up = _bindable_vocabulary(source, tokenizer)
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
        "generation_tags": "endgeneration" in source.text,
        "stops": [{"token": token, "sources": said} for token, said in stop_sources(bound, vocabulary).items()],
    }
    findings = tuple(findings_of(bound, probes, vocabulary, made_up=made_up))
    return TemplateLook(facts=facts, findings=findings, probes=probes, summary=summary_of(probes, bound.asks_for_date))


def bind_for_look(
    template: str | os.PathLike[str], tokenizer: Tokenizer | str | None, options: TemplateOptions
) -> ModelTemplate:
    """Bind a template to a tokenizer, or else to bytes and the special tokens that it spells."""
    source = find_template(template)
    vocabulary, _ = _bindable_vocabulary(source, tokenizer)
    return bind(source, vocabulary, options)


def _bindable_vocabulary(source: JinjaSource, tokenizer: Tokenizer | str | None) -> tuple[Tokenizer, bool]:
    """Return a vocabulary that a template can be bound to, and whether it is made up."""
    vocabulary, made_up = _vocabulary(source, tokenizer)
    return with_control_tokens(vocabulary, source.control_tokens) if made_up else vocabulary, made_up


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


def bundled_facts() -> list[dict[str, Any]]:
    """Describe the templates that come with Chatmill.

    A build with `add_control_tokens` adds the tokens that a template's header names.
    """
    entries = []
    for name in bundled_names():
        source = find_template(name)
        text = HEADER.sub("", source.text, count=1)
        tokens = source.control_tokens or tuple(spelled_tokens(text))
        stops = (*source.stop_tokens, *(stop for family in families_of(text) for stop in family.stops))
        entries.append(
            {
                "name": name,
                "origin": source.origin,
                "licence": source.licence,
                "control_tokens": list(dict.fromkeys(tokens)),
                "stop_tokens": list(dict.fromkeys(stops)),
                "default_policy": source.default_policy,
            }
        )
    return entries


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
