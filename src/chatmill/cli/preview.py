"""Show conversations as coloured tokens, with exactly what would be trained.

Examples:
    chatmill preview chats.jsonl
    chatmill preview chats.jsonl -t ./Qwen3-0.6B -T qwen3 -n 2
    chatmill preview chats.jsonl --policy last_turn --skip 10 -n 1 --json
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.rule import Rule
from rich.text import Text

from chatmill.cli import options
from chatmill.cli.inspect import LINES
from chatmill.cli.options import argument, flag, option
from chatmill.console import plain_console
from chatmill.errors import ConfigError
from chatmill.look.safe_text import visible

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from chatmill.core.conversation import Conversation
    from chatmill.errors import RecordError
    from chatmill.look.item_view import ItemView
    from chatmill.read.conversations import ConversationFile
    from chatmill.render.bound import BoundTemplate
    from chatmill.render.render import Rendered
    from chatmill.tokenizer.tokenizer import Tokenizer

TOKENIZER = "o200k"


def command(
    file: Annotated[
        str, argument("FILE", "A file, folder or URL of conversations, - for standard input; or a built dataset.")
    ],
    tokenizer: Annotated[str, options.TOKENIZER] = TOKENIZER,
    template: Annotated[str | None, options.TEMPLATE] = None,
    template_option: Annotated[list[str] | None, options.TEMPLATE_OPTION] = None,
    date: Annotated[str | None, options.DATE] = None,
    expand: Annotated[str | None, options.EXPAND] = None,
    unproved: Annotated[str | None, options.UNPROVED] = None,
    strict_text: Annotated[bool, options.STRICT_TEXT] = False,
    policy: Annotated[str | None, options.POLICY] = None,
    count: Annotated[int, option("--count -n", "N", "How many conversations to show.", min=1)] = 3,
    skip: Annotated[int, option("--skip", "N", "How many conversations to skip first.", min=0)] = 0,
    shape: Annotated[str | None, options.SHAPE] = None,
    field_map: Annotated[list[str] | None, options.MAP] = None,
    preferences: Annotated[str | None, options.PREFERENCES] = None,
    pattern: Annotated[str | None, options.PATTERN] = None,
    ids: Annotated[bool, flag("--ids", "Show the token ids too.")] = False,
    full: Annotated[bool, options.FULL] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Read, render, label and show the first conversations of a file; of a built dataset, its first items."""
    if _is_dataset(Path(file)):  # which is rendered already
        from chatmill.cli import inspect

        idle = {
            "--template": template, "--template-option": template_option, "--date": date, "--expand": expand,
            "--unproved": unproved, "--strict-text": strict_text, "--policy": policy, "--shape": shape,
            "--map": field_map, "--preferences": preferences, "--pattern": pattern,
        }  # fmt: skip
        _refuse_idle(file, [name for name, given in idle.items() if given])
        own = None if tokenizer == TOKENIZER else tokenizer
        how: dict[str, Any] = {"ids": ids, "lines": 0 if full else LINES, "no_pager": True, "as_json": as_json}
        inspect.command(Path(file), examples=count, start=skip, tokenizer=own, **how)
        return
    from chatmill.label.policy import Scope
    from chatmill.label.presets import find_policy
    from chatmill.read.conversations import ConversationFile
    from chatmill.render.registry import bind, find_template, given_options, own_template
    from chatmill.render.render import render
    from chatmill.tokenizer.load import load_tokenizer, with_control_tokens

    errors: list[RecordError] = []
    named = options.shape_or_map(shape, field_map)
    source = ConversationFile(file, shape=named, on_error=errors.append, preferences=preferences)
    kind = find_template(template or own_template(tokenizer) or "chatml")
    chosen = find_policy(policy or kind.default_policy)
    conversations = list(itertools.islice(source, skip, skip + count))
    options.report_not_read([file])
    if not conversations:  # said at once, before a tokenizer is loaded
        _finish(errors, 0)
    loaded = load_tokenizer(tokenizer, pattern=pattern, strict_text=strict_text)
    given = given_options(options.template_options(template_option), date, expand, unproved)
    only = chosen.trains_assistant_only
    given = replace(given, last_turn_only=chosen.scope is Scope.LAST_TURN, whole_sequence=not only)
    bound = bind(kind, with_control_tokens(loaded, kind.control_tokens), given)
    rendered = render(conversations, bound, collect_failures=True)
    errors += [error for _, error in rendered.failed]
    weights = chosen.sequence_weights(rendered.tokens, rendered.kept)
    kept = [conversations[index] for index in rendered.kept]
    if as_json:
        _print_json(kept, rendered, weights, bound)
    else:
        _print_heading(source, bound, chosen.name, loaded)
        _print_unused(conversations)
        _print_conversations(kept, rendered, weights, bound, show_ids=ids, most_lines=0 if full else LINES)
    _finish(errors, len(kept))


def _is_dataset(folder: Path) -> bool:
    """Whether a name is a folder, and not one of conversations."""
    if not folder.is_dir():
        return False
    from chatmill.read.folders import holds_records

    return not holds_records(folder)


def _refuse_idle(file: str, idle: list[str]) -> None:
    if idle:
        raise ConfigError(
            f"{file} is a built dataset, which is shown as it is stored: remove {', '.join(idle)}, or give the "
            "conversations it was built from"
        )


def _print_unused(conversations: list[Conversation]) -> None:
    from chatmill.core.conversations import unused_fields, unused_sentence

    if sentence := unused_sentence(unused_fields(conversations)):
        plain_console().print(visible(sentence), style="yellow")


def _print_json(
    conversations: list[Conversation], rendered: Rendered, weights: NDArray[np.float32], template: BoundTemplate
) -> None:
    for position, conversation in enumerate(conversations):
        view = _view(rendered, weights, position, template)
        record = {
            "id": conversation.id,
            "where": conversation.where,
            "tokens": len(view.item),
            "trained": view.item.trained,
            "stripped": int(rendered.stripped[position]),
            "runs": [view.run_json(run) for run in view.runs],
        }
        typer.echo(json.dumps(record))


def _view(rendered: Rendered, weights: NDArray[np.float32], position: int, template: BoundTemplate) -> ItemView:
    from chatmill.look.decoder import Decoder
    from chatmill.look.item_view import view_item
    from chatmill.look.items import item_of_tokens

    item = item_of_tokens(rendered.tokens, position, weights)
    return view_item(item, Decoder(template.tokenizer), "conversation")


def _print_heading(source: ConversationFile, template: BoundTemplate, policy: str, loaded: Tokenizer) -> None:
    from chatmill.tokenizer.load import added_tokens

    console = plain_console()
    console.print(
        f"{source.path} \u00b7 shape {source.shape.name} \u00b7 template {template.name} \u00b7 policy {policy} "
        f"\u00b7 tokenizer {loaded.name}",
        style="bold",
    )
    console.print("\u258c marks trained lines, \u00ab\u00bb control tokens, \u23ce a newline.", style="dim")
    added = added_tokens(loaded, template.tokenizer)
    if added.added:
        listed = ", ".join(f"{name} = {token_id}" for name, token_id in added.added.items())
        console.print(
            f"Control tokens added above the vocabulary: {listed}. A model needs {added.vocab_size:,} embedding rows "
            f"for them ({added.padded_vocab_size:,} padded to a multiple of 128).",
            style="yellow",
        )


def _print_conversations(
    conversations: list[Conversation],
    rendered: Rendered,
    weights: NDArray[np.float32],
    template: BoundTemplate,
    *,
    show_ids: bool,
    most_lines: int,
) -> None:
    from chatmill.look.item_lines import document_lines
    from chatmill.look.stats_view import role_table
    from chatmill.look.terminal import Screen

    screen = Screen()
    console = screen.console
    for position, conversation in enumerate(conversations):
        view = _view(rendered, weights, position, template)
        total, trained = len(view.item), view.item.trained
        name = visible(conversation.id or conversation.where)
        title = f"{name} \u00b7 {total:,} tokens \u00b7 {trained:,} trained ({trained / max(1, total):.1%})"
        console.print()
        console.print(Rule(Text(title), align="left"))
        screen.show(
            document_lines(
                view, width=screen.width, most_lines=most_lines, show_ids=show_ids, ascii_only=screen.ascii_only
            )
        )
        if rendered.stripped[position]:
            console.print(
                f"{rendered.stripped[position]:,} characters are not shown by this template. {template.declares}",
                style="yellow",
            )
    if conversations:
        plural = "" if len(conversations) == 1 else "s"
        title = f"{len(conversations)} conversation{plural}"
        console.print()
        console.print(role_table(title, rendered.tokens, weights, width=screen.width, ascii_only=screen.ascii_only))


def _finish(errors: list[RecordError], shown: int) -> None:
    """Say what was left out; nothing shown at all is a failure."""
    for error in errors[:5]:
        typer.secho(f"left out [{error.code}] {error}", fg="red", err=True)
    if len(errors) > 5:
        typer.secho(f"... and {len(errors) - 5} more records left out", fg="red", err=True)
    if not shown:
        typer.secho("no conversation to show", fg="red", err=True)
        raise typer.Exit(2)
