"""Compile files of conversations into a dataset on disk, on all cores, resumable, with a receipt.

Give one recipe (see `chatmill init`), or files and options in place of
its keys. Exit status 3 when a gate of the recipe fails.

Examples:
    chatmill build recipe.yaml --out data/built
    chatmill build chats/*.jsonl -t ./Qwen3-0.6B -T qwen3_training -o built
    chatmill build recipe.yaml --out data/built --resume
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatmill.cli import options
from chatmill.cli.options import argument, flag, option
from chatmill.console import plain_console
from chatmill.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from chatmill.compiler.run import BuildResult


def command(
    inputs: Annotated[list[str], argument("FILES", "One recipe (.yaml), or files of conversations.")],
    out: Annotated[str, option("--out -o", "DIR", "New folder of the dataset.")],
    tokenizer: Annotated[str | None, options.TOKENIZER] = None,
    template: Annotated[str | None, options.TEMPLATE] = None,
    template_option: Annotated[list[str] | None, options.TEMPLATE_OPTION] = None,
    date: Annotated[str | None, options.DATE] = None,
    expand: Annotated[str | None, options.EXPAND] = None,
    unproved: Annotated[str | None, options.UNPROVED] = None,
    strict_text: Annotated[bool, options.STRICT_TEXT] = False,
    policy: Annotated[str | None, options.POLICY] = None,
    max_length: Annotated[int | None, option("--max-length", "N", "Tokens of the longest episode.")] = None,
    overflow: Annotated[str | None, options.OVERFLOW] = None,
    pack: Annotated[str | None, options.PACK] = None,
    pack_length: Annotated[
        int | None, option("--pack-length", "N", "Tokens of a packed row; default: --max-length.")
    ] = None,
    shape: Annotated[str | None, options.SHAPE] = None,
    field_map: Annotated[list[str] | None, options.MAP] = None,
    preferences: Annotated[str | None, options.PREFERENCES] = None,
    val_fraction: Annotated[
        float | None, option("--val-fraction", "X", "Share of the records for the split val.")
    ] = None,
    on_error: Annotated[str | None, options.ON_ERROR] = None,
    gate: Annotated[
        list[str] | None, option("--gate", "NAME=LIMIT", "A limit of the gates; off accepts any number.")
    ] = None,
    add_control_tokens: Annotated[
        bool, flag("--add-control-tokens", "Add control tokens that the tokenizer lacks.")
    ] = False,
    vocab_size: Annotated[
        int | None, option("--vocab-size", "N", "Ids the model has; default: what its files say.", min=1)
    ] = None,
    workers: Annotated[int | None, options.WORKERS] = None,
    engine: Annotated[str, options.ENGINE] = "local",
    ray_address: Annotated[str | None, options.RAY_ADDRESS] = None,
    shard: Annotated[str | None, option("--shard", "I/N", "Build share I (from 0) of N; --resume joins them.")] = None,
    shard_bytes: Annotated[
        int | None, option("--shard-bytes --chunk-bytes", "N", "Input bytes of a shard [default: recipe's].", min=1)
    ] = None,
    resume: Annotated[bool, options.RESUME] = False,
    quiet: Annotated[bool, options.QUIET] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Build a dataset."""
    from chatmill.compiler.engines.named import named_executor
    from chatmill.compiler.progress import shown_progress
    from chatmill.compiler.run import run_build

    keys: dict[str, Any] = {
        "tokenizer": tokenizer, "template": template, "policy": policy, "on_error": on_error,
        "packing.max_length": max_length, "packing.overflow": overflow, "pack.strategy": pack,
        "pack.length": pack_length, "split.val_fraction": val_fraction,
        "add_control_tokens": add_control_tokens or None, "vocab_size": vocab_size, "preferences": preferences,
        "template_options": options.template_options(template_option), "date": date, "expand": expand,
        "unproved": unproved, "strict_text": strict_text or None,
    }  # fmt: skip
    recipe = recipe_of_options(inputs, keys, options.shape_or_map(shape, field_map), _gates(gate))
    with _resume_hint(out), shown_progress(quiet) as on_progress:
        result = run_build(
            recipe,
            out,
            workers=workers,
            executor=named_executor(engine, workers, ray_address),
            resume=resume,
            shard=_share(shard),
            shard_bytes=shard_bytes,
            on_progress=on_progress,
            on_start=lambda: _show_start(recipe, keys, inputs, as_json=as_json),
        )
    show_result(result, as_json=as_json)


@contextmanager
def _resume_hint(out: str) -> Iterator[None]:
    """After Ctrl-C, say how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        if (Path(out) / ".build").is_dir():
            typer.echo(f"What is done is kept in {out}: the same command with --resume continues.", err=True)
        raise


def _is_recipe(inputs: list[str]) -> bool:
    return len(inputs) == 1 and inputs[0].endswith((".yaml", ".yml"))


def _gates(given: list[str] | None) -> dict[str, Any]:
    """`NAME=LIMIT` pairs; `off` is no limit."""
    from chatmill.compiler.recipe import Gates

    found: dict[str, Any] = {}
    for pair in given or ():
        name, equals, limit = pair.partition("=")
        if name not in Gates.__struct_fields__:
            raise UnknownNameError("gate", name, list(Gates.__struct_fields__))
        try:
            found[name] = None if limit == "off" else float(limit)
        except ValueError:
            equals = ""
        if not equals:
            raise ConfigError(f"--gate is NAME=LIMIT, with a number or off, not {pair!r}")
    return found


def recipe_of_options(
    inputs: list[str], options: dict[str, Any], shape: str | None, gates: dict[str, Any] | None = None
) -> dict[str, Any] | str:
    """A recipe file's path, or a recipe made of files and options; gates go with both, since they change no byte."""
    from chatmill.render.registry import own_template

    given = {key: value for key, value in options.items() if value is not None}
    if _is_recipe(inputs):
        if given or shape:
            raise ConfigError(f"{inputs[0]} is a recipe, which holds all options; remove {', '.join(given) or 'shape'}")
        if not gates:
            return inputs[0]
        from chatmill.compiler.recipe import recipe_of

        read = recipe_of(inputs[0]).as_json()
        return {**read, "gates": {**read["gates"], **gates}}
    recipe: dict[str, Any] = {
        "sources": [{"path": inputs, "shape": shape}],
        "tokenizer": "o200k",
        "template": "" if own_template(given.get("tokenizer", "")) else "chatml",
        # the defaults fit each other: o200k gets ChatML's control tokens; a tokenizer that is named is left as it is
        "add_control_tokens": "tokenizer" not in given and "template" not in given,
    }
    for key, value in given.items():
        *outer, name = key.split(".")
        place = recipe.setdefault(outer[0], {}) if outer else recipe
        place[name] = value
    return {**recipe, "gates": gates} if gates else recipe


def _show_start(given: dict[str, Any] | str, keys: dict[str, Any], inputs: list[str], *, as_json: bool) -> None:
    from chatmill.compiler.recipe import recipe_of

    options.report_missing_library()
    for source in recipe_of(given).sources:
        options.report_not_read(source.patterns)
    if not as_json:
        show_choices(given, keys, inputs)


def show_choices(given: dict[str, Any] | str, options: dict[str, Any], inputs: list[str]) -> None:
    """Which tokenizer, template and policy are used and why, and how the template differs from the model's own."""
    from chatmill.compiler.recipe import recipe_of
    from chatmill.compiler.template_comparison import compare_with_own, other_own, sampled
    from chatmill.render.registry import find_template, own_template

    recipe = recipe_of(given)
    console = plain_console(soft_wrap=True)
    in_recipe = f"as {Path(inputs[0]).name} says" if _is_recipe(inputs) else ""
    own = own_template(recipe.tokenizer) == recipe.template
    tokenizer = in_recipe or ("as asked for" if options["tokenizer"] else "the default; -t names that of your model")
    template = in_recipe or ("as asked for" if options["template"] else "the default: this tokenizer brings none")
    template = "the model's own" if own else template
    policy = recipe.policy or find_template(recipe.template).default_policy
    console.print(f"tokenizer {recipe.tokenizer} ({tokenizer})")
    console.print(f"template {recipe.template} ({template})")
    console.print(f"policy {policy} ({(in_recipe or 'as asked for') if recipe.policy else 'that of the template'})")
    if recipe.add_control_tokens:
        console.print("Control tokens that the tokenizer lacks are added above its vocabulary.", style="yellow")
    if other_own(recipe) is not None and (found := compare_with_own(recipe, sampled(recipe))) is not None:
        for sentence in found.sentences():
            console.print(sentence, style="yellow" if found.differs else None)


def _share(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, count = text.partition("/")
    if not (first.isdigit() and count.isdigit() and int(first) < int(count)):
        raise ConfigError(f"--shard is i/N with i from 0 to N-1, not {text!r}")
    return int(first), int(count)


def show_result(result: BuildResult, *, as_json: bool) -> None:
    """The manifest as JSON, or one summary table."""
    from chatmill.compiler.run import Outcome
    from chatmill.look.ledger import ledger_table, rows_lines, unused_line

    if as_json:
        typer.echo(json.dumps(result.manifest))
        return
    console = plain_console()
    if result.outcome is Outcome.SHARD_DONE:
        console.print(f"This share is done. When all are: --resume in place of --shard makes {result.directory}.")
        return
    if result.outcome is Outcome.ALREADY_BUILT:
        console.print(f"{result.directory} already holds exactly this build; nothing to do.")
    console.print(ledger_table(result.manifest))
    for line in rows_lines(result.manifest):
        console.print(line)
    if unused := unused_line(result.manifest):
        console.print(unused, style="yellow")
    if result.outcome is Outcome.ALREADY_BUILT:
        return
    if added := result.manifest["tokenizer"].get("control_tokens"):
        size = result.manifest["tokenizer"]["vocab_size"]
        console.print(f"A model needs {size:,} embeddings for these ids ({', '.join(added)}).", style="yellow")
    rate = sum(split["tokens"] for split in result.manifest["splits"].values()) / max(result.seconds, 1e-9)
    console.print(f"{result.directory} in {result.seconds:.1f} s ({rate / 1e6:.1f} M tokens/s)")
