"""Conversations of a raw file as tokens, with what would be trained: what `chatmill inspect FILE` prints."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from chatmill.cli import options
from chatmill.cli.build import recipe_of_options
from chatmill.compiler.agent_sources import agent_options
from chatmill.compiler.pipeline import template_options
from chatmill.compiler.recipe import recipe_of
from chatmill.compiler.repairs import render_repaired
from chatmill.console import plain_console
from chatmill.core.conversation import Conversation
from chatmill.core.conversations import LACKS, Conversations, unused_fields, unused_sentence
from chatmill.core.kinds import REPEATED
from chatmill.core.tokens import common_length
from chatmill.core.words import counted
from chatmill.errors import RecordError
from chatmill.label.presets import find_policy
from chatmill.look.decoder import Decoder
from chatmill.look.item_lines import document_lines
from chatmill.look.item_view import ItemView, view_item
from chatmill.look.items import item_of_tokens
from chatmill.look.safe_text import visible
from chatmill.look.stats_view import role_table
from chatmill.look.terminal import screen, show
from chatmill.prove.rows import PlainRow
from chatmill.read.agents.branches import AgentOptions
from chatmill.read.agents.lacking import lacking_lines
from chatmill.read.conversations import ConversationFile
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind, find_template
from chatmill.render.render import render_batch
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from chatmill.tokenizer.tokenizer import Tokenizer

SHOWN = 6
"""Tokens that are shown from the first difference on."""
MOST = 5
"""Examples that are shown."""


def show_conversations(
    file: str,
    keys: dict[str, Any],
    shape: str | None,
    *,
    examples: int,
    start: int,
    most_lines: int,
    ids: bool,
    as_json: bool,
) -> None:
    """Read, render, label and show some conversations of a file; `keys` are those of a recipe."""
    errors: list[RecordError] = []
    recipe = recipe_of(recipe_of_options([file], keys, shape, needs_model=False))
    agent = agent_options(recipe.sources[0])
    source = ConversationFile(
        file, shape=shape, on_error=errors.append, preferences=keys.get("preferences"), agent=agent
    )
    kind = find_template(recipe.template)
    chosen = find_policy(recipe.policy or kind.default_policy)
    conversations = list(itertools.islice(source, start, start + examples))
    options.report_not_read([file])
    if not conversations:  # said at once, before a tokenizer is loaded
        _finish(errors, 0)
    loaded = load_tokenizer(recipe.tokenizer, strict_text=recipe.strict_text)
    bound = bind(kind, with_control_tokens(loaded, kind.control_tokens), template_options(recipe, chosen))
    read = Conversations.of(conversations)
    if chosen.errors is not None:
        read, _ = chosen.errors.without_failed(read)
    repaired, rendered, changes = render_repaired(read, bound, recipe.repairs, recipe.not_shown)
    errors += [error for _, error in rendered.failed]
    weights = chosen.document_weights(rendered.tokens, rendered.kept)
    decoder = Decoder(bound.tokenizer)
    views = [
        view_item(item_of_tokens(rendered.tokens, place, weights, rendered.pictures), decoder, "conversation")
        for place in range(len(rendered.kept))
    ]
    kept = rendered.kept.tolist()
    shown = list(zip((repaired[index] for index in kept), views, rendered.stripped, strict=True))
    if as_json:
        _print_json(shown)
    else:
        _print_heading(source, bound, chosen.name, loaded)
        if keys.get("tokenizer") is None:
            sentence = f"No --model is named: these are the tokens of {loaded.name} with {bound.name}, no model's own."
            plain_console(soft_wrap=True).print(sentence, style="yellow")
        _print_missing(source, conversations, agent)
        _print_changes(conversations, changes)
        for line in drift_lines(read, bound):
            plain_console(soft_wrap=True).print(visible(line), style="yellow")
        console = screen()
        _print_documents(console, shown, _places(kept), show_ids=ids, most_lines=most_lines)
        if shown:
            title = counted(len(set(kept)), "conversation")
            if len(kept) > len(set(kept)):
                title += f" in {counted(len(kept), 'document')}"
            show(console, [Text(), role_table(title, rendered.tokens, weights, width=console.width)])
    _finish(errors, len(shown))


def _print_missing(source: ConversationFile, conversations: list[Conversation], agent: AgentOptions) -> None:
    """Say which fields are not used, and what the file of an agent does not hold."""
    unused = unused_fields(conversations)
    lacking = list(lacking_lines(source.path, source.shape.name, agent))
    for name in [name for name in unused if name.startswith(LACKS)]:
        del unused[name]
    sentence = unused_sentence(unused)
    for line in [*lacking, sentence] if sentence else lacking:
        plain_console(soft_wrap=True).print(visible(line), style="yellow")


def _print_changes(conversations: list[Conversation], changes: dict[int, Counter[str]]) -> None:
    for place, notes in changes.items():
        words = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in notes.items())
        plain_console().print(
            visible(f"{conversations[place].where}: changed as the recipe says: {words}"), style="yellow"
        )


def _print_json(shown: list[tuple[Conversation, ItemView, int]]) -> None:
    for conversation, view, stripped in shown:
        record = {
            "id": conversation.id,
            "where": conversation.where,
            "tokens": len(view.item),
            "trained": view.item.trained,
            "stripped": int(stripped),
            "runs": [view.run_json(run) for run in view.runs],
        }
        typer.echo(json.dumps(record))


def _print_heading(source: ConversationFile, template: ModelTemplate, policy: str, loaded: Tokenizer) -> None:
    console = plain_console()
    console.print(
        f"{source.path} \u00b7 shape {source.shape.name} \u00b7 template {template.name} \u00b7 policy {policy} "
        f"\u00b7 tokenizer {loaded.name}",
        style="bold",
    )
    console.print("\u258c marks trained lines, \u00ab\u00bb control tokens, \u23ce a newline.", style="dim")
    named = template.tokenizer.control_ids.items()
    if added := ", ".join(f"{name} = {number}" for name, number in named if name not in loaded.control_ids):
        size = template.tokenizer.vocab_size
        console.print(
            f"Control tokens added above the vocabulary: {added}. A model needs {size:,} embedding rows for them.",
            style="yellow",
        )


def _places(kept: list[int]) -> list[str]:
    """Say which document of its conversation each is, where there are several; else nothing."""
    counts, passed = Counter(kept), Counter[int]()
    places = []
    for conversation in kept:
        passed[conversation] += 1
        is_one_of_many = counts[conversation] > 1
        places.append(f", document {passed[conversation]} of {counts[conversation]}" if is_one_of_many else "")
    return places


def _print_documents(
    console: Console,
    shown: list[tuple[Conversation, ItemView, int]],
    places: list[str],
    *,
    show_ids: bool,
    most_lines: int,
) -> None:
    """Print documents; `places` say which of their conversation they are."""
    for (conversation, view, stripped), place in zip(shown, places, strict=True):
        total, trained = len(view.item), view.item.trained
        name = visible(conversation.id or conversation.where) + place
        title = f"{name} \u00b7 {total:,} tokens \u00b7 {trained:,} trained ({trained / max(1, total):.1%})"
        show(console, [Text(), Rule(Text(title), align="left")])
        show(console, document_lines(view, width=console.width, most_lines=most_lines, show_ids=show_ids))
        if stripped:
            show(console, [Text(f"{stripped:,} characters are not shown by this template.", style="yellow")])


def _finish(errors: list[RecordError], shown: int) -> None:
    """Say what was left out; nothing shown at all is a failure."""
    for error in errors[:5]:
        typer.secho(f"left out [{error.code}] {error}", fg="red", err=True)
    if len(errors) > 5:
        typer.secho(f"... and {len(errors) - 5} more records left out", fg="red", err=True)
    if not shown:
        typer.secho("no conversation to show", fg="red", err=True)
        raise typer.Exit(2)


def drift_lines(batch: Conversations, bound: ModelTemplate) -> list[str]:
    """Return counts and examples; nothing for conversations without sampled tokens."""
    if not batch.messages.token_ids.present.any():
        return []
    chat = bind(bound.source, bound.tokenizer, replace(bound.given, only_drift=True))
    rendering = render_batch(batch, chat)
    counts: Counter[str] = Counter()
    examples: list[str] = []
    for number, index in enumerate(rendering.kept.tolist()):
        tokens, conversation = rendering.tokens.conversation(number), batch[index]
        row = PlainRow(tokens.ids.tolist(), tokens.kinds.tolist(), tokens.messages.tolist())
        for k, message in enumerate(conversation.messages):
            place = row.answer_of(k) if message.token_ids is not None else None
            if message.token_ids is None or place is None or row.kinds[place[0]] & REPEATED:
                continue
            sent, begin = message.prompt_token_ids, place[0]
            pairs = [("sampled answers", "sampled", list(message.token_ids), row.ids[begin : place[2]])]
            if sent is not None:
                pairs.append(("prompts that were sent", "sent", list(sent), row.ids[:begin]))
            for kind, verb, actual, rendered in pairs:
                counts[kind] += 1
                if actual not in (rendered, rendered[: place[1] - begin] if verb == "sampled" else rendered):
                    counts[f"{kind} differ"] += 1
                    where = f"{conversation.where}, messages[{k}]"
                    examples.append(f"{where}: {_difference(actual, rendered, verb, chat)}")
    heads = [
        f"{counts[f'{kind} differ']:,} of {counts[kind]:,} {kind} have other tokens than are rendered"
        for kind in ("sampled answers", "prompts that were sent")
        if counts[kind]
    ]
    return [*heads, *examples[:MOST]]


def _difference(actual: Sequence[int], rendered: Sequence[int], verb: str, chat: ModelTemplate) -> str:
    at = common_length(np.array(actual), np.array(rendered))
    left, right = (_pieces(ids[at : at + SHOWN], chat) for ids in (actual, rendered))
    return f"from token {at:,} on {verb} {left}, rendered {right}"


def _pieces(ids: Sequence[int], chat: ModelTemplate) -> str:
    return "|".join(chat.tokenizer.decode([number]).replace("\n", "\u23ce") for number in ids) or "nothing"
