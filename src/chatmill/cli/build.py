"""Compile files of conversations into a dataset on disk, chunk by chunk on all cores, resumable, with a receipt.

Give one recipe (chatmill init writes one, with every key explained), or files. Options replace keys of the recipe;
--set reaches those without an option of their own. Exit status 3 if a gate of the recipe fails.

Examples:
    chatmill build recipe.yaml --out data/built
    chatmill build chats/*.jsonl -t ./Qwen3-0.6B -T qwen3_training -o built
    chatmill build recipe.yaml -o built --set gates.records_left_out=0.1
    chatmill build recipe.yaml --out data/built --resume
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatmill.cli import options
from chatmill.cli.options import argument, flag, option
from chatmill.cli.statuses import Status
from chatmill.console import plain_console
from chatmill.errors import ConfigError

if TYPE_CHECKING:
    from chatmill.compiler.progress import OnProgress
    from chatmill.compiler.recipe import Recipe
    from chatmill.compiler.run import BuildResult

RECORDS, TOKENS, LENGTHS, RUNNING = "Records", "Tokens and what is trained", "Lengths and rows", "Running"
"""Groups of options in the help."""


def command(
    inputs: Annotated[list[str], argument("FILES", "One recipe (.yaml), or files of conversations.")],
    out: Annotated[str, option("--out -o", "DIR", "New folder of the dataset, or a URL.")],
    settings: Annotated[list[str] | None, options.SET] = None,
    quiet: Annotated[bool, options.QUIET] = False,
    as_json: Annotated[bool, options.JSON] = False,
    shape: Annotated[list[str] | None, options.grouped(options.SHAPE, RECORDS)] = None,
    on_error: Annotated[str | None, options.grouped(options.ON_ERROR, RECORDS)] = None,
    val_fraction: Annotated[
        float | None,
        option("--val-fraction", "X", "Share of the records for the split val.", rich_help_panel=RECORDS),
    ] = None,
    images: Annotated[
        str | None,
        option("--images", "DIR", "Folder of the pictures; default: that of the files.", rich_help_panel=RECORDS),
    ] = None,
    store_images: Annotated[
        bool, flag("--store-images", "Put the bytes of pictures into the dataset.", rich_help_panel=RECORDS)
    ] = False,
    tokenizer: Annotated[str | None, options.grouped(options.TOKENIZER, TOKENS)] = None,
    template: Annotated[str | None, options.grouped(options.TEMPLATE, TOKENS)] = None,
    add_control_tokens: Annotated[
        bool,
        flag("--add-control-tokens", "Add control tokens that the tokenizer lacks.", rich_help_panel=TOKENS),
    ] = False,
    expand: Annotated[str | None, options.grouped(options.EXPAND, TOKENS)] = None,
    policy: Annotated[str | None, options.grouped(options.POLICY, TOKENS)] = None,
    max_length: Annotated[
        int | None,
        option("--max-length", "N", "Tokens of the longest episode; default: no limit.", rich_help_panel=LENGTHS),
    ] = None,
    overflow: Annotated[str | None, options.grouped(options.OVERFLOW, LENGTHS)] = None,
    pack: Annotated[str | None, options.grouped(options.PACK, LENGTHS)] = None,
    workers: Annotated[int | None, options.grouped(options.WORKERS, RUNNING)] = None,
    engine: Annotated[str, options.grouped(options.ENGINE, RUNNING)] = "local",
    shard: Annotated[
        str | None,
        option("--shard", "I/N", "Build share I (from 0) of N; --resume joins them.", rich_help_panel=RUNNING),
    ] = None,
    resume: Annotated[bool, options.grouped(options.RESUME, RUNNING)] = False,
    take_over: Annotated[
        bool,
        flag("--take-over", "The build whose lock is at the URL is dead: continue it here.", rich_help_panel=RUNNING),
    ] = False,
    reuse: Annotated[
        str | None,
        option("--reuse", "OLD", "Earlier dataset: link the chunks it has, make the others.", rich_help_panel=RUNNING),
    ] = None,
    rehash: Annotated[
        bool, flag("--rehash", "With --reuse: read inputs that look unchanged, too.", rich_help_panel=RUNNING)
    ] = False,
) -> None:
    """Build a dataset."""
    from chatmill.compiler.engines.ray_engine import named_executor
    from chatmill.compiler.progress import shown_progress
    from chatmill.compiler.recipe import recipe_of
    from chatmill.compiler.run import run_build

    keys: dict[str, Any] = {
        "tokenizer": tokenizer, "template": template, "policy": policy, "on_error": on_error,
        "packing.max_length": max_length, "packing.overflow": overflow, "pack.strategy": pack,
        "split.val_fraction": val_fraction, "add_control_tokens": add_control_tokens or None, "expand": expand,
        "images": images, "store_images": store_images or None,
    }  # fmt: skip
    keys = {key: value for key, value in keys.items() if value is not None} | options.settings(settings)
    recipe = recipe_of_options(inputs, keys, options.shape_of(shape))
    if options.name_url(out):
        # Else the lock would stay, and whoever continues would have to know that its owner is dead.
        signal.signal(signal.SIGTERM, _terminate)
    with _resume_hint(out), shown_progress(quiet) as on_progress:
        result = run_build(
            recipe,
            out,
            workers=workers,
            executor=named_executor(engine, workers),
            resume=resume,
            shard=_share(shard),
            on_progress=on_progress,
            reuse=reuse,
            rehash=rehash,
            take_over=take_over,
            on_start=lambda: _show_start(recipe_of(recipe), keys, inputs, on_progress, as_json=as_json),
        )
    show_result(result, as_json=as_json, reuse=reuse)
    if not as_json:
        _show_sampled(result, recipe)


def _terminate(number: int, frame: object) -> None:
    """End as after Ctrl-C, with the status of SIGTERM."""
    raise SystemExit(Status.TERMINATED)


@contextmanager
def _resume_hint(out: str) -> Iterator[None]:
    """After Ctrl-C, or SIGTERM where the output is in a store, say how to continue."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if "://" in out or (Path(out) / ".build").is_dir():
            typer.echo(f"What is done is kept in {out}: the same command with --resume continues.", err=True)
        raise


def _is_recipe(inputs: list[str]) -> bool:
    return len(inputs) == 1 and inputs[0].endswith((".yaml", ".yml"))


def recipe_of_options(
    inputs: list[str], keys: dict[str, Any], shape: str | None, *, needs_model: bool = True
) -> dict[str, Any] | str:
    """Read a recipe, or make one for files, and set the keys of the command line.

    Args:
        inputs: One recipe, or files of conversations.
        keys: Keys of the recipe that the command line sets; None where it does not.
        shape: Record format of the files.
        needs_model: Whether files without a model are an error. Otherwise a common vocabulary stands in.
    """
    from chatmill.compiler.recipe import recipe_of
    from chatmill.render.registry import own_template

    chosen = {key: value for key, value in keys.items() if key.startswith("gates.") or value is not None}
    if _is_recipe(inputs):
        if shape:
            raise ConfigError(f"{inputs[0]} names its sources: give the shape of one there, or --set sources.0.shape=")
        if not chosen:
            return inputs[0]
        recipe: dict[str, Any] = recipe_of(inputs[0]).as_json()
    else:
        if needs_model and not chosen.keys() & {"tokenizer", "model"}:
            options.refuse_no_model(inputs)
        recipe = {
            "sources": [{"path": inputs, "shape": shape}],
            "tokenizer": "o200k",
            "template": "" if own_template(chosen.get("tokenizer", "")) else "chatml",
            # the defaults fit each other: o200k gets ChatML's control tokens; a named tokenizer is left as it is
            "add_control_tokens": "tokenizer" not in chosen and "template" not in chosen,
        }
    for key, value in chosen.items():
        _put(recipe, key, value)
    return recipe


def _put(recipe: dict[str, Any], key: str, value: Any) -> None:
    """Set a key of a recipe; `packing.max_length` and `sources.0.weight` are inside others."""
    *outer, name = key.split(".")
    place: Any = recipe
    for part in outer:
        if isinstance(place, list) and part.isdigit() and int(part) < len(place):
            place = place[int(part)]
        elif isinstance(place, dict):
            place[part] = place.get(part) or {}
            place = place[part]
        else:
            raise ConfigError(f"the recipe has nothing under {key!r}: {part!r} is not there")
    if not isinstance(place, dict):
        raise ConfigError(f"the recipe has nothing under {key!r}: {'.'.join(outer)} holds {place!r}")
    place[name] = value


def _show_start(
    recipe: Recipe, keys: dict[str, Any], inputs: list[str], on_progress: OnProgress | None, *, as_json: bool
) -> None:
    """Say what is not read, which tokenizer, template and policy are used and why, and what a sample shows."""
    from chatmill.compiler.progress import BuildProgress
    from chatmill.compiler.sample import other_template_line, trial_lines
    from chatmill.render.registry import find_template, own_template

    for source in recipe.sources:
        options.report_not_read(source.patterns)
    if as_json:
        return
    if on_progress is not None:
        on_progress(BuildProgress(stage="try a sample"))
    console = plain_console(soft_wrap=True)
    in_recipe = f"as {Path(inputs[0]).name} says" if _is_recipe(inputs) else ""

    def why(key: str, default: str) -> str:
        return "as asked for" if keys.get(key) else in_recipe or default

    is_own = own_template(recipe.tokenizer) == recipe.template
    template = "the model's own" if is_own else why("template", "the default: this tokenizer brings none")
    policy = recipe.policy or find_template(recipe.template).default_policy
    console.print(f"tokenizer {recipe.tokenizer} ({why('tokenizer', 'as the recipe says')})")
    console.print(f"template {recipe.template} ({template})")
    console.print(f"policy {policy} ({why('policy', '') if recipe.policy else 'that of the template'})")
    if recipe.add_control_tokens:
        console.print("Control tokens that the tokenizer lacks are added above its vocabulary.", style="yellow")
    for line in (other_template_line(recipe), *trial_lines(recipe)):
        if line:
            console.print(line, style="yellow")


def _show_sampled(result: BuildResult, recipe: dict[str, Any] | str) -> None:
    """Show an answer that is trained as a model writes it, if there is one."""
    from chatmill.compiler.recipe import recipe_of
    from chatmill.compiler.sample import sampled_example
    from chatmill.core.ledger import AS_SAMPLED, Ledger
    from chatmill.look.safe_text import visible

    ledger = result.manifest.get("ledger")
    if ledger is None or not Ledger.from_json(ledger).total_notes(AS_SAMPLED):
        return
    if example := sampled_example(recipe_of(recipe)):
        plain_console().print(f"Answers as a model writes them, for example {visible(example)}", soft_wrap=True)


def _share(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, count = text.partition("/")
    if not (first.isdigit() and count.isdigit() and int(first) < int(count)):
        raise ConfigError(f"--shard is i/N with i from 0 to N-1, not {text!r}")
    return int(first), int(count)


def show_result(result: BuildResult, *, as_json: bool, reuse: str | None = None) -> None:
    """Print the manifest as JSON, or one summary table."""
    from chatmill.compiler.progress import rate_words
    from chatmill.compiler.run import Outcome
    from chatmill.core.ledger import Ledger
    from chatmill.look.ledger import accounts_table, build_lines

    if as_json:
        typer.echo(json.dumps(result.manifest))
        return
    console = plain_console()
    if result.outcome is Outcome.SHARD_DONE:
        console.print(f"This share is done. When all are: --resume in place of --shard makes {result.directory}.")
        return
    if result.outcome is Outcome.ALREADY_BUILT:
        console.print(f"{result.directory} already holds exactly this build; nothing to do.")
    console.print(accounts_table(Ledger.from_json(result.manifest["ledger"])))
    for line, is_warning in build_lines(result.manifest, str(result.directory)):
        console.print(line, style="yellow" if is_warning else None, soft_wrap=True)
    if result.outcome is Outcome.ALREADY_BUILT:
        return
    if added := result.manifest["tokenizer"].get("control_tokens"):
        size = result.manifest["tokenizer"]["vocab_size"]
        console.print(f"A model needs {size:,} embeddings for these ids ({', '.join(added)}).", style="yellow")
    tokens = sum(split["tokens"] for split in result.manifest["splits"].values())
    if result.present:
        console.print(f"{result.present:,} of {result.chunks:,} chunks were there already, from an earlier run")
    if reuse:
        console.print(f"{result.reused:,} of {result.chunks:,} chunks reused from {reuse}")
    console.print(f"{result.directory} in {result.seconds:.1f} s ({rate_words(tokens, result.seconds)})")
