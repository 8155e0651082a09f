"""Record the calls of agents: a proxy in front of a model server, whose file is training data.

URL is an OpenAI- or Anthropic-compatible server, without /v1. The proxy forwards every byte as it comes and adds a line
to the file for each call of chat completions, Responses or Messages: the request, the answer, and how it ended. Headers
are never written. Name a run in the address (http://127.0.0.1:8430/run/NAME/v1) to keep its calls together. It listens
on this machine alone unless --host says otherwise; then the printed address has a token. Ctrl-C stops it.
With --report nothing is served: it says what files of calls hold.

Examples:
    chatmill capture http://127.0.0.1:8000 --out calls.jsonl --token-ids vllm
    chatmill capture https://api.anthropic.com --out calls.jsonl
    chatmill capture --report calls.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chatmill.cli import options
from chatmill.cli.options import argument, flag, option
from chatmill.cli.statuses import show_warning
from chatmill.core.words import counted
from chatmill.errors import ConfigError, member, need

if TYPE_CHECKING:
    from chatmill.capture.proxy import CallCounts
    from chatmill.capture.serve import ProxyAddress

PORT = 8430


def command(
    server: Annotated[str, argument("URL", "The model server; with --report a file of calls.")],
    out: Annotated[Path, option("--out -o", "FILE", "Add calls to this file.")] = Path("calls.jsonl"),
    port: Annotated[int, option("--port", "N", "Port; 0 takes any that is free.", min=0, max=65535)] = PORT,
    host: Annotated[str, option("--host", "NAME", "Listen here.")] = "127.0.0.1",
    token_ids: Annotated[
        str | None,
        option("--token-ids", "NAME", "Ask for token ids, and keep them from the client: vllm or sglang."),
    ] = None,
    logprobs: Annotated[bool, flag("--logprobs", "Ask for log-probabilities, too.")] = False,
    report: Annotated[bool, flag("--report", "Say what a file of calls holds.")] = False,
    as_json: Annotated[bool, options.JSON] = False,
) -> None:
    """Record the calls of agents."""
    if report:
        _report(Path(server), as_json=as_json)
        return
    if logprobs and token_ids is None:
        raise ConfigError("--logprobs needs --token-ids: log-probabilities without ids cannot be trained")
    need("aiohttp", "chatmill capture", "capture")
    from chatmill.capture.serve import capture
    from chatmill.capture.token_ids import Asking, TokenServer

    asked = None if token_ids is None else member(TokenServer, "server with token ids", token_ids)
    asking = Asking(server=asked, logprobs=logprobs)

    def ready(address: ProxyAddress) -> None:
        _print_address(address, server, out, as_json=as_json)

    counts = capture(server, out, host=host, port=port, asking=asking, ready=ready, warn=show_warning)
    _print_counts(counts, out, as_json=as_json)


def _print_address(address: ProxyAddress, server: str, out: Path, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"openai": address.openai, "anthropic": address.anthropic, "out": str(out)}))
    else:
        typer.echo(f"Calls to {server} are added to {out}. Ctrl-C stops the proxy.")
        typer.secho(f"OPENAI_BASE_URL={address.openai}", bold=True)
        typer.secho(f"ANTHROPIC_BASE_URL={address.anthropic}", bold=True)
    sys.stdout.flush()


def _print_counts(counts: CallCounts, out: Path, *, as_json: bool) -> None:
    """Say what was recorded since the start."""
    if as_json:
        numbers = {"calls": counts.calls, "complete": counts.complete, "lost": counts.lost, "faults": counts.faults}
        typer.echo(json.dumps(numbers))
        return
    words = f"{out}: {counted(counts.calls, 'call')}, {counts.complete:,} complete"
    if counts.lost:
        words += f", {counts.lost:,} not recorded"
    typer.echo(f"{words}.")
    for what, count in counts.faults.items():
        typer.secho(f"{count:,} times: {what}", fg="yellow", err=True)


def _report(path: Path, *, as_json: bool) -> None:
    from rich.text import Text

    from chatmill.capture.report import read_report, report_lines
    from chatmill.look.safe_text import visible
    from chatmill.look.terminal import print_labelled, screen

    reports = read_report(path)
    if as_json:
        typer.echo(json.dumps([one.as_json() for one in reports]))
        return
    console = screen()
    for one in reports:
        console.print(Text(visible(one.run), style="bold"))
        for line in report_lines(one):
            print_labelled(console, "", line, gutter=0, indent=2)
