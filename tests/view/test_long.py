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
from chatmill.prove.compare.diff import diff_datasets
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.store.episodes import EpisodeDataset
from tests.compiler.builds import write_jsonl
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
    recipe = {"sources": [{"path": str(folder / "in.jsonl")}], "tokenizer": "bytes", "template": "chatml"}
    run_build({**recipe, "add_control_tokens": True}, folder / "built", workers=0)
    return folder / "built"


@pytest.fixture(scope="module")
def long(built: Path) -> Iterator[Running]:
    with running(built) as found:
        yield found


def here(page: Page) -> int:
    """The place of the chosen token among those on the page."""
    return int(page.locator(".token.here").get_attribute("data-n"))


def test_the_first_trained_token_is_one_key_away(page: Page, long: Running, built: Path) -> None:
    page.goto(f"{long.url}#/a/train/item/0")
    page.wait_for_selector("#runs .token")
    episode = EpisodeDataset(built)[0]
    wanted = int(np.flatnonzero(episode.weights)[0])  # a byte is a token, and each has its own place on the page
    page.keyboard.press("f")
    page.wait_for_selector(".token.here")
    assert here(page) == wanted
    assert "trained" in page.evaluate("document.querySelector('.token.here').closest('.run').className").split()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="First trained token").click()
    page.wait_for_selector(".token.here")
    assert here(page) == wanted
    page.watch.check(long.url)


def test_a_long_chat_has_a_list_of_its_messages(page: Page, long: Running) -> None:
    page.goto(f"{long.url}#/a/train/item/0")
    page.wait_for_selector("#turns")
    buttons = page.locator("#turns button")
    assert buttons.count() == 1 + 2 * TURNS
    assert "Question 5" in buttons.nth(11).inner_text()
    buttons.nth(2 * TURNS).click()
    page.wait_for_selector(".token.here")
    box = page.locator(".token.here").locator("xpath=ancestor::article")
    assert f"Answer {TURNS - 1}" in box.inner_text()
    top = page.evaluate("document.querySelector('.token.here').getBoundingClientRect().top")
    assert 0 < top < 900


def test_a_long_prompt_is_folded_until_it_is_asked_for(page: Page, long: Running) -> None:
    page.goto(f"{long.url}#/a/train/item/0")
    page.wait_for_selector(".message.folded")
    assert page.locator(".message.folded").count() == 1
    height = "document.querySelector('.message .body').getBoundingClientRect().height"
    folded = page.evaluate(height)
    page.get_by_role("button", name="Show all").click()
    assert page.locator(".message.folded").count() == 0
    assert page.evaluate(height) > folded
    page.goto(f"{long.url}#/a/train/item/1?at=400&hit=3")  # what was searched for is never folded away
    page.wait_for_selector("#runs mark")
    assert page.locator(".message.folded").count() == 0


def test_names_numbers_and_columns_have_room_on_a_phone(page: Page, long: Running) -> None:
    page.set_viewport_size({"width": 360, "height": 800})
    page.goto(f"{long.url}#/a/train/overview")
    page.wait_for_selector("text=Provenance")
    page.wait_for_selector(f".shares .name:has-text('{SOURCE}')")
    boxes = page.evaluate(
        """[...document.querySelectorAll('.shares')].flatMap(one => [...one.children].map(node => {
            const { left, right, top, bottom } = node.getBoundingClientRect();
            return [node.className, left, right, top, bottom];
        }))"""
    )
    assert len(boxes) >= 6
    for name, track, figure in zip(boxes[::3], boxes[1::3], boxes[2::3], strict=True):
        assert [name[0], track[0], figure[0]] == ["name", "track", "figure"]
        assert name[2] <= figure[1]  # side by side
        assert max(name[4], figure[4]) <= track[3]  # and above their bar
        assert figure[3] >= name[3] - 1
    narrow = page.evaluate(
        """[...document.querySelectorAll('.wide td:not(.n), .wide th:not(.n)')].filter(node => node.checkVisibility()
            && node.textContent.trim().length > 1 && node.getBoundingClientRect().width < 40).map(n => n.textContent)"""
    )
    assert narrow == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_comparison_says_how_far_it_is() -> None:
    seen, go_on = threading.Event(), threading.Event()

    def compare(note: Any) -> dict[str, Any]:
        note(3, 10)
        seen.set()
        assert go_on.wait(60)
        return {"changed": []}

    comparison = Comparison(compare)
    comparison.as_json()  # begins it
    assert seen.wait(60)
    found = comparison.as_json()
    assert (found["done"], found["done_records"], found["records"]) == (False, 3, 10)
    go_on.set()


def test_the_page_shows_the_progress_of_a_comparison(page: Page, pair: Running) -> None:
    answer = '{"done": false, "problem": "", "seconds": 2.4, "done_records": 300, "records": 1200}'
    page.route("**/compare", lambda route: route.fulfill(body=answer, content_type="application/json"))
    page.goto(f"{pair.url}#/compare")
    page.wait_for_selector("#comparing:has-text('300 of 1,200')")
    assert page.locator("progress").get_attribute("value") == "300"
    page.unroute("**/compare")
    page.wait_for_selector("#sides")


def test_a_comparison_counts_all_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from chatmill.store import split

    monkeypatch.setattr(split, "BATCH_TOKENS", 4)
    for name, count in (("a", 5), ("b", 6)):
        with EpisodeWriter(tmp_path / name, "train") as writer:
            for number in range(count):
                writer.append([number, 1, 2], [0, 1, 1])
    steps: list[tuple[int, int]] = []
    diff_datasets(tmp_path / "a", tmp_path / "b", on_progress=lambda done, of: steps.append((done, of)))
    assert steps[0] == (0, 6)
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})
    assert steps[-1][0] == 5
