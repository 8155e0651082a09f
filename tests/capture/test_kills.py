"""A proxy that is killed at any moment loses at most the answers that were in flight."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from chatmill.json_values import decoded
from tests.capture.conftest import Running, capturing

CLIENTS = 8


def talk(address: str, name: str, seen: list[str], stopped: threading.Event) -> None:
    """Ask until the connection breaks, and keep the names of calls whose answers came whole."""
    with openai.OpenAI(base_url=address, api_key="sk-none", max_retries=0) as client:
        for number in range(10_000):
            text = f"{name} {number}"
            given: Any = {"model": "m", "messages": [{"role": "user", "content": text}], "stream": number % 2 == 0}
            try:
                answer = client.chat.completions.create(**given)
                if given["stream"]:
                    list(answer)
            except (openai.APIError, OSError):
                return
            seen.append(text)
            if stopped.is_set():
                return


def kill_once(model_server: str, out: Path, number: int, choose: random.Random) -> list[str]:
    """Run a proxy with clients, kill it after some answers, and return the calls that clients saw whole."""
    answers = choose.randrange(40)
    moment = choose.uniform(0, 0.03)
    seen: list[str] = []
    stopped = threading.Event()
    options = ("--token-ids", "vllm") if number % 2 else ()
    running: Running
    with capturing(model_server, out, *options) as running:
        threads = [
            threading.Thread(target=talk, args=(running.openai, f"{number}.{index}", seen, stopped))
            for index in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        while len(seen) < answers:
            time.sleep(0.001)
        time.sleep(moment)
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()
        whole = list(seen)
        stopped.set()
        for thread in threads:
            thread.join()
    return whole


def check_kills(model_server: str, out: Path, kills: int) -> None:
    choose = random.Random(7)
    seen: list[str] = []
    for number in range(kills):
        seen += kill_once(model_server, out, number, choose)
    written: list[str] = []
    torn = 0
    for line in out.read_bytes().splitlines():
        if line.strip():
            try:
                call = decoded(line)
            except ValueError:
                torn += 1
                continue
            if call["complete"]:
                written.append(call["request"]["messages"][0]["content"])
    assert len(seen) > kills
    assert set(seen) <= set(written)
    assert len(written) == len(set(written)), "each call is there once"
    assert torn <= kills


def test_killed_at_random_moments(model_server: str, tmp_path: Path) -> None:
    check_kills(model_server, tmp_path / "calls.jsonl", 3)


@pytest.mark.slow
def test_killed_at_thirty_random_moments(model_server: str, tmp_path: Path) -> None:
    check_kills(model_server, tmp_path / "calls.jsonl", 30)
