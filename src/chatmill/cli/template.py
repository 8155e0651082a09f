"""Look at a chat template: what it needs, what it does to conversations, what is trained and what is proved.

Without TEMPLATE, list the ones that come with Chatmill.

Examples:
    chatmill template
    chatmill template ./Qwen3-0.6B
    chatmill template chat_template.jinja --tokenizer ./my-model
    chatmill template ./my-model#tool_use
    chatmill template qwen3 --set template_options.enable_thinking=false --json
    chatmill template ./Qwen3-0.6B --response-template
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.rule import Rule
from rich.text import Text

from chatmill.cli import options
from chatmill.cli.options import argument, flag
from chatmill.console import plain_console
from chatmill.core.words import counted
from chatmill.look.safe_text import visible
from chatmill.look.terminal import print_labelled

if TYPE_CHECKING:
    from rich.console import Console

    from chatmill.look.template_look import TemplateLook
    from chatmill.look.template_probes import ProbeLook
    from chatmill.render.jinja.options import TemplateOptions

LINES = 6
"""Lines of a message that are shown, unless all are asked for."""


def command(
    template: Annotated[
        str | None,
        argument(
            "TEMPLATE", "A model folder (FOLDER#NAME for one of several), a .jinja file, or a name.", show_default=False
        ),
    ] = None,
    tokenizer: Annotated[str | None, options.TOKENIZER] = None,
    settings: Annotated[list[str] | None, options.TEMPLATE_SET] = None,
    full: Annotated[bool, options.FULL] = False,
    as_json: Annotated[bool, options.JSON] = False,
    as_response_template: Annotated[
        bool, flag("--response-template", "Print how transformers can parse answers (`response_template`), as JSON.")
    ] = False,
) -> None:
    """Render probe conversations with a template, and say in plain words what there is to know."""
    if template is None:
        _list_bundled(as_json=as_json)
        return
    from chatmill.look.template_look import look_at_template
    from chatmill.render.registry import given_options

    chosen, keys = options.template_settings(settings)
    date = keys.pop("date", None)
    template_options = given_options(chosen, date, **keys)
    if as_response_template:
        _print_response_template(template, tokenizer, template_options)
        return
    look = look_at_template(template, tokenizer, template_options)
    if as_json:
        typer.echo(json.dumps(look.as_json()))
        return

    console = plain_console()
    _print_summary(console, look)
    _print_findings(console, look)
    console.print("\nFacts", style="bold")
    _print_facts(console, look.facts, date)
    console.print("\n\u258c marks trained lines, \u00ab\u00bb control tokens, \u23ce a newline.", style="dim")
    for probe in look.probes:
        if probe.probe.shown:
            _print_probe(console, look, probe, full)


def _list_bundled(*, as_json: bool) -> None:
    from chatmill.look.template_look import bundled_facts

    entries = bundled_facts()
    if as_json:
        typer.echo(json.dumps(entries))
        return
    console = plain_console()
    for entry in entries:
        print_labelled(console, entry["name"], "", gutter=0)
        for label, value in (
            ("origin", f"{entry['origin']} ({entry['licence']})" if entry["licence"] else entry["origin"]),
            ("tokens", " ".join(entry["control_tokens"]) or "none"),
            ("stops", " ".join(entry["stop_tokens"])),
            ("policy", entry["default_policy"]),
        ):
            print_labelled(console, label, value, style="bright_black", indent=2, gutter=9)
    console.print()
    closing = "Use one with --template NAME. A model's own template needs no name: give the model's folder."
    print_labelled(console, "", closing, gutter=0)


def _print_response_template(template: str, tokenizer: str | None, given: TemplateOptions) -> None:
    """Print the response template of a template under some options."""
    from chatmill.look.template_look import bind_for_look
    from chatmill.look.template_probes import EXAMPLE_DAY
    from chatmill.render.jinja.options import Expand, Thinking
    from chatmill.rollouts.renderer import Renderer
    from chatmill.rollouts.template import RolloutTemplate

    given = replace(given, today=given.today or EXAMPLE_DAY, expand=Expand.LAST, thinking=Thinking.AS_GIVEN)
    bound = bind_for_look(template, tokenizer, given)
    typer.echo(json.dumps(Renderer(RolloutTemplate(bound)).response_template(), ensure_ascii=False, indent=1))


def _print_summary(console: Console, look: TemplateLook) -> None:
    """Print what a person wants to know first: what is given and trained, how much is proved, and what it takes."""
    facts, summary = look.facts, look.summary
    probes = len(look.probes)
    unproved = f"; not: {', '.join(summary.unproved)}" if summary.unproved else ""
    tools = [name for name in ("definitions", "calls") if facts[f"tool_{name}"]]
    takes = [role for role in facts["roles"] if role != "tool"] + ([f"tool {' and '.join(tools)}"] if tools else [])
    console.print(f"{visible(facts['name'])}, in short", style="bold")
    for label, value in (
        ("given", _quoted(summary.given)),
        ("trained", _quoted(summary.answer)),
        ("stops at", ", ".join(summary.stops) or "nothing"),
        ("takes", ", ".join(takes)),
        ("options", ", ".join(facts["options"]) or "none"),
        ("rows", summary.rows),
        ("proved", f"{summary.proved} of {probes} small conversations{unproved}"),
        ("needs", ", ".join(f"`{name}` in the recipe" for name in summary.needs) or "nothing"),
    ):
        print_labelled(console, label, value)


def _quoted(text: str) -> str:
    return visible(json.dumps(text, ensure_ascii=False), mark_newlines=False) if text else "nothing that is proved"


def _print_facts(console: Console, look: Mapping[str, Any], date: str | None) -> None:
    made_up = "made up of bytes and the special tokens that the template spells; --tokenizer names a real one"
    vocabulary = made_up if look["made_up_vocabulary"] else f"{look['tokenizer']}, {look['vocab_size']:,} ids"
    day = f"asked for; the probes below have {look['date']}" + ("" if date else ", because none was given")
    tools = [name for name in ("definitions", "calls") if look[f"tool_{name}"]]
    arguments = "JSON objects" if look["arguments"] == "object" else "JSON text"
    stops = (f"{stop['token']} ({', '.join(stop['sources'])})" for stop in look["stops"])
    prompt = json.dumps(look["prompt"], ensure_ascii=False) if look["prompt"] else "none: nothing follows a question"
    for label, value in (
        ("template", look["name"]),
        ("origin", look["origin"] + (f" ({look['licence']})" if look["licence"] else "")),
        ("sha256", look["sha256"]),
        ("vocabulary", vocabulary),
        ("roles", ", ".join(look["roles"])),
        ("tools", " and ".join(tools) or "no place for tools"),
        ("input", f"contents as {look['content']}; arguments of calls as {arguments}"),
        ("options", ", ".join(look["options"]) or "reads none"),
        ("date", day if look["asks_for_date"] else "not asked for"),
        ("tags", f"has {'' if look['generation_tags'] else 'no '}{{% generation %}} tags"),
        ("prompt", prompt),
        ("stops", "; ".join(stops) or "none"),
        ("policy", look["default_policy"]),
    ):
        print_labelled(console, label, value)


def _print_findings(console: Console, look: TemplateLook) -> None:
    from chatmill.look.template_findings import FINE

    for title, is_fine in (("To know before training", False), ("Also so", True)):
        findings = [finding for finding in look.findings if (finding.code in FINE) is is_fine]
        if findings:
            console.print(f"\n{title}", style="bold")
        for finding in findings:
            print_labelled(console, "", finding.code, indent=2, gutter=0)
            print_labelled(console, "", finding.text, indent=4, gutter=0)


def _print_probe(console: Console, look: TemplateLook, probe: ProbeLook, full: bool) -> None:
    from chatmill.look.item_lines import document_lines
    from chatmill.look.template_findings import named

    title = f"{probe.probe.name} \u00b7 {counted(len(probe.rows), 'row')}"
    if probe.options:
        title += f" \u00b7 {named(probe.options)}"
    console.print()
    console.print(Rule(Text(visible(title)), align="left"))
    if probe.refused:
        print_labelled(console, "refused", probe.refused, style="bold red")
    for number, row in enumerate(probe.rows):
        if number:
            console.print("-- next row --", style="bright_black")
        for line in document_lines(row, width=console.width, most_lines=0 if full else LINES):
            console.print(line, soft_wrap=True)
