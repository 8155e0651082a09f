"""A model server and proxies in front of it, each a process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.pages import ROOT

SRC = str(ROOT / "src")


@dataclass
class Running:
    """A proxy, and the file it writes."""

    process: subprocess.Popen[str]
    openai: str
    anthropic: str
    out: Path

    @property
    def root(self) -> str:
        return self.anthropic

    def stop(self, number: int = signal.SIGINT) -> str:
        """Stop it, and return what it printed after the address."""
        self.process.send_signal(number)
        said, _ = self.process.communicate(timeout=60)
        return said

    def calls(self) -> list[dict[str, Any]]:
        """The calls that are in the file now."""
        return [json.loads(line) for line in self.out.read_bytes().splitlines()]


@pytest.fixture(scope="session")
def model_server() -> Iterator[str]:
    """The address of a model server."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.capture.model_server"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    process.communicate()


@contextlib.contextmanager
def capturing(server: str, out: Path, *options: str, **environment: str) -> Iterator[Running]:
    """Run `chatmill capture` in front of a server."""
    command = [sys.executable, "-m", "chatmill", "capture", server, "--out", str(out), "--port", "0", "--json"]
    process = subprocess.Popen(
        [*command, *options],
        env={**os.environ, "PYTHONPATH": SRC, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        address = json.loads(process.stdout.readline())
        yield Running(process, address["openai"], address["anthropic"], out)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def proxy(model_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A proxy that asks for nothing."""
    with capturing(model_server, tmp_path_factory.mktemp("capture") / "calls.jsonl") as running:
        yield running


@pytest.fixture(scope="module")
def asking_proxy(model_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A proxy that asks vLLM for ids and log-probabilities."""
    out = tmp_path_factory.mktemp("capture") / "calls.jsonl"
    with capturing(model_server, out, "--token-ids", "vllm", "--logprobs") as running:
        yield running
