"""What is derived from a template, in plain words."""

from __future__ import annotations

import json

from chatmill.core.words import counted
from chatmill.rollouts.grammar import END, START, Grammar, Slot, SlotKind
from chatmill.rollouts.template import RolloutTemplate


def report(template: RolloutTemplate, grammar: Grammar) -> str:
    """Describe stops, reasoning, calls, and what is refused."""
    lines = [f"template {template.name}"]
    stops = [f"{template.token_name(stop)} ({stop})" for stop in template.stops]
    written = sorted(grammar.stops)
    lines.append(f"stops: {', '.join(stops)}; the template writes {', '.join(written) or 'none'} after answers")
    lines.append(f"reasoning: {_reasoning(grammar)}")
    lines.append(f"calls: {_calls(grammar)}")
    lines.append(f"earlier answers: {_stability(template)}")
    if grammar.refused:
        reasons: dict[str, list[str]] = {}
        for name, code in grammar.refused.items():
            reasons.setdefault(code, []).append(name)
        for code, names in sorted(reasons.items()):
            lines.append(f"not derived ({code}): {counted(len(names), 'probe')}, such as {names[0]}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _reasoning(grammar: Grammar) -> str:
    if not grammar.has_reasoning:
        return "the template writes none"
    opens = [edge.literal for edge in grammar.edges[START] if edge.target.kind is SlotKind.REASONING]
    closes = [
        edge.literal for edge in grammar.edges.get(Slot(SlotKind.REASONING), ()) if edge.target.kind is SlotKind.CONTENT
    ]
    opened = f"between {_quoted(opens[0])}" if opens[0] else "from the prompt on, up to"
    closed = _quoted(closes[0]) if closes else "the stop"
    return f"{opened} and {closed}" if opens[0] else f"{opened} {closed}"


def _calls(grammar: Grammar) -> str:
    if not grammar.has_calls:
        return "the template writes none; an answer with the mark of one has no proof"
    slots = {edge.target.kind for edges in grammar.edges.values() for edge in edges}
    form = "key by key"
    if SlotKind.ARGUMENTS in slots:
        form = "as JSON"
    if SlotKind.ARGUMENTS_TEXT in slots:
        form = "as JSON inside a JSON string"
    several = any(
        edge.opens_call
        for slot, edges in grammar.edges.items()
        if slot not in (START, Slot(SlotKind.CONTENT), Slot(SlotKind.REASONING))
        for edge in edges
    )
    beside = any(edge.opens_call for edge in grammar.edges.get(Slot(SlotKind.CONTENT), ()))
    marks = ", ".join(map(_quoted, grammar.call_marks)) or "no mark of its own"
    return (
        f"after {marks}, arguments {form}, "
        f"{'several in an answer' if several else 'one in an answer'}, "
        f"{'beside content' if beside else 'without content'}"
        f"{', with ids' if SlotKind.ID in slots else ''}"
    )


def _stability(template: RolloutTemplate) -> str:
    from chatmill.rollouts.stability import unstable_probes

    unstable = unstable_probes(template)
    if not unstable:
        return "every next prompt begins with the one before and its answer"
    return f"the template changes them: {', '.join(unstable)}; history='sampled' keeps what was sampled"


__all__ = ["END", "report"]
