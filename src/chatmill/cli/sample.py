"""Ask a trained model: decode from a checkpoint until the template's terminator.

CHECKPOINT is a checkpoint folder, the folder of a run (its newest one), or a model folder of transformers.
Tokenizer and template are those that the run was trained with, unless others are given.

Example: chatmill sample runs/tiny "What is 2 + 2?"

Example: chatmill sample runs/tiny "Tell me a story." --temperature 0.8 --top-p 0.95 --seed 1 --json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatmill.cli import options
from chatmill.errors import ConfigError

if TYPE_CHECKING:
    from chatmill.render.bound import BoundTemplate


def command(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Folder of a checkpoint, run or model.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What the user says.")],
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="A system message before it.")] = None,
    tokenizer: Annotated[str | None, options.TOKENIZER] = None,
    template: Annotated[str | None, options.TEMPLATE] = None,
    trust_template: Annotated[str | None, options.TRUST_TEMPLATE] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of this much probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws; no effect at temperature 0.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Give up when there is no terminator by then.")] = 256,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cpu",
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Open, ask, print."""
    from chatmill.load.device import named_device
    from chatmill.train.checkpoint import STATE, checkpoints, find_checkpoint, read_state
    from chatmill.train.generate import Sampling
    from chatmill.train.open_model import open_model
    from chatmill.train.prompt import ask

    notes: dict[str, Any] = {}
    if (checkpoint / STATE).is_file() or checkpoints(checkpoint):
        checkpoint = find_checkpoint(checkpoint)
        notes = read_state(checkpoint).notes
    bound = bound_template(notes, tokenizer, template, trust_template)
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed, max_new_tokens=max_new_tokens)
    answer = ask(open_model(checkpoint).to(named_device(device)), bound, messages, sampling=sampling)
    made = answer.generated
    if as_json:
        said = {"prompt": prompt, "text": answer.text, "ids": list(made.ids), "finish": str(made.finish)}
        typer.echo(json.dumps(said | {"stop": answer.stop, "checkpoint": str(checkpoint)}))
        return
    typer.echo(answer.text)
    ending = "no terminator yet: raise --max-new-tokens" if answer.stop is None else f"stopped at {answer.stop}"
    typer.echo(f"({len(made.ids)} tokens, {ending})", err=True)


def bound_template(
    notes: dict[str, Any], tokenizer: str | None, template: str | None, trust_template: str | None = None
) -> BoundTemplate:
    """The template a checkpoint's notes name, or the one given, with its tokenizer.

    A Python file that the notes name is run only when the user trusts it.
    """
    from chatmill.cli.train_data import load_for
    from chatmill.render.registry import bind
    from chatmill.render.trust import TemplateTrust, allowed_template

    name, form = tokenizer or notes.get("tokenizer"), template or notes.get("template")
    if name is None or form is None:
        missing = "tokenizer" if name is None else "template"
        raise ConfigError(f"the checkpoint does not say with which {missing} it was trained: give --{missing}")
    form = allowed_template(str(form), TemplateTrust(template=template, sha256=trust_template), "the checkpoint")
    added = bool(notes.get("add_control_tokens", False))
    loaded = load_for(name, form, add_control_tokens=added, pattern=notes.get("pattern"))
    return bind(form, loaded)
