"""Ask a trained model: decode from a checkpoint until the template's terminator.

CHECKPOINT is a checkpoint folder, the folder of a run (its newest one), or a model folder of transformers.
Tokenizer and template are those that the run was trained with, unless others are given.

Several prompts are turns of one conversation, each after the model's answer to the one before; without any, lines
of standard input are.

Examples:
    chatmill sample runs/tiny "What is 2 + 2?" "And twice that?"
    chatmill sample runs/tiny "Tell me a story." --temperature 0.8 --json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatmill.cli import options
from chatmill.cli.options import argument, option
from chatmill.core.conversation import parse_messages
from chatmill.errors import ConfigError

if TYPE_CHECKING:
    from chatmill.render.bound import BoundTemplate
    from chatmill.train.prompt import Reply


def command(
    checkpoint: Annotated[Path, argument("CHECKPOINT", "Folder of a checkpoint, run or model.")],
    prompts: Annotated[
        list[str] | None, argument("[PROMPT]...", "What the user says; several are turns of one conversation.")
    ] = None,
    conversation: Annotated[
        Path | None, option("--messages", "FILE", 'A conversation to continue: JSON, {"messages": [...]}.')
    ] = None,
    system: Annotated[str | None, option("--system", "TEXT", "A system message before it.")] = None,
    tokenizer: Annotated[str | None, options.TOKENIZER] = None,
    template: Annotated[str | None, options.TEMPLATE] = None,
    trust_template: Annotated[str | None, options.TRUST_TEMPLATE] = None,
    temperature: Annotated[
        float, option("--temperature", "X", "0 takes the likeliest token each time.", min=0.0)
    ] = 0.0,
    top_p: Annotated[float, option("--top-p", "X", "Draw from the likeliest tokens of this much probability.")] = 1.0,
    seed: Annotated[int, option("--seed", "N", "Seed of the draws; no effect at temperature 0.")] = 0,
    max_new_tokens: Annotated[
        int, option("--max-new-tokens", "N", "Give up when there is no terminator by then.", min=1)
    ] = 256,
    device: Annotated[str, option("--device", "NAME", "Where to run: cpu, cuda, ...")] = "cpu",
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Open, ask, print."""
    from chatmill.load.placement import named_device
    from chatmill.train.checkpoint import STATE, checkpoints, find_checkpoint, read_state
    from chatmill.train.generate import Sampling
    from chatmill.train.open_model import open_model
    from chatmill.train.prompt import ask

    notes: dict[str, Any] = {}
    if not checkpoint.is_dir():
        raise ConfigError(f"there is no folder {checkpoint}: give the folder of a checkpoint, a run or a model")
    if (checkpoint / STATE).is_file() or checkpoints(checkpoint):
        checkpoint = find_checkpoint(checkpoint)
        notes = read_state(checkpoint).notes
    bound = bound_template(notes, tokenizer, template, trust_template)
    messages = _earlier(conversation, system)
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed, max_new_tokens=max_new_tokens)
    model = open_model(checkpoint).to(named_device(device))
    for prompt in _turns(prompts, messages):
        if prompt is not None:
            messages.append({"role": "user", "content": prompt})
        answer = ask(model, bound, messages, sampling=sampling)
        messages.append({"role": "assistant", "content": answer.content})
        _say(messages[-2]["content"], answer, checkpoint, as_json=as_json)


def _earlier(conversation: Path | None, system: str | None) -> list[dict[str, Any]]:
    """The messages before the first prompt."""
    messages: list[dict[str, Any]] = []
    if conversation is not None:
        try:
            given = json.loads(conversation.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{conversation} cannot be read as JSON: {error}") from None
        found = given.get("messages") if isinstance(given, dict) else given
        parse_messages(found)
        messages = list(found or ())
    if system is None:
        return list(messages)
    if messages and messages[0]["role"] == "system":
        raise ConfigError(f"{conversation} has a system message already: leave --system out")
    return [{"role": "system", "content": system}, *messages]


def _turns(prompts: list[str] | None, messages: list[dict[str, Any]]) -> Iterator[str | None]:
    """What the user says, turn by turn; None: the conversation already ends with the user's words."""
    if messages and messages[-1]["role"] == "user":
        if prompts:
            raise ConfigError("the conversation ends with a user's message, which is to be answered: give no PROMPT")
        yield None
    elif prompts:
        yield from prompts
    else:
        yield from (line.rstrip("\n") for line in sys.stdin if line.strip())


def _say(prompt: str, answer: Reply, checkpoint: Path, *, as_json: bool) -> None:
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
    from chatmill.cli.vocabulary import load_for
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
