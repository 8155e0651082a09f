"""Long chats, prompts and names: ways through them, on a desk and on a phone; and a comparison that counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.compiler.run import run_build
from chatmill.look.viewer.comparison import Comparison
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import plain_recipe, write_jsonl
from tests.view.sets import Running, running

Page = Any
SOURCE = "a-very-long-source-name/with-parts-of-a-path/and-more-2026-11"
TURNS = 12


def long_chat(number: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": "You are a careful miller. " * 20}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Question {turn}"})
        messages.append({"role": "assistant", "content": f"Answer {turn}"})
    return {"id": f"long-{number}", "source": SOURCE if number else "short", "messages": messages}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    write_jsonl(folder / "in.jsonl", [long_chat(number) for number in range(3)])
    run_build(plain_recipe(folder / "in.jsonl"), folder / "built", workers=0)
    return folder / "built"


@pytest.fixture(scope="module")
def long(built: Path) -> Iterator[Running]:
    with running(built) as found:
        yield found


def test_a_long_chat_has_ways_through_it(page: Page, long: Running, built: Path) -> None:
    page.goto(f"{long.url}a/train/0")
    page.wait_for_selector("#turns")
    assert page.locator("#turns li").count() == 2 * TURNS + 1
    first = int(np.flatnonzero(EpisodeDataset(built, "train")[0].weights > 0)[0])
    page.keyboard.press("f")
    assert page.url.endswith(f"#t{first}")
    line = page.locator("#turns li a", has_text="Answer 11")
    line.click()
    assert page.url.endswith(f"#t{line.get_attribute('data-start')}")
    assert page.locator(".message.long").count() == 1, "a long prompt does not push the chat off the screen"
    assert page.locator(".message.long").evaluate("node => node.offsetHeight") < 300


def test_a_comparison_says_how_far_it_is() -> None:
    seen, go_on = threading.Event(), threading.Event()

    def compare(note: Any) -> dict[str, Any]:
        note(3, 10)
        seen.set()
        assert go_on.wait(60)
        return {"changed": []}

    comparison = Comparison(compare, {})
    comparison.values(0)  # begins it
    assert seen.wait(60)
    found = comparison.values(0)
    assert (found["done"], found["records"], found["refresh"]) == (3, 10, 1)
    go_on.set()
