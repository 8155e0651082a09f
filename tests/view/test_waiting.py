"""What takes long is shown while it runs: a search that streams and is cancelled, and labels that are being counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from chatmill.look.viewer import app
from chatmill.look.viewer.background import Background
from chatmill.look.viewer.scan import SplitScan
from chatmill.look.viewer.search import Hit, SearchPart
from tests.view.sets import Running, Sets, running

Page = Any


def test_hits_are_shown_while_the_search_goes_on_and_it_can_be_cancelled(
    page: Page, pair: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def slow(*_: Any, **__: Any) -> Iterator[SearchPart]:
        """One hit at once, then nothing until it is cancelled."""
        try:
            yield SearchPart(hits=[Hit(number=3, at=0, tokens_hit=1, before="a ", match="word", after=" b")], items=4)
            for items in range(5, 6005):
                time.sleep(0.1)
                yield SearchPart(items=items)
        finally:
            ended.set()

    monkeypatch.setattr(app, "search", slow)
    page.goto(f"{pair.url}#/a/train/browse")
    page.wait_for_selector("#list tbody tr")
    page.locator("#search").fill("word")
    page.keyboard.press("Enter")
    page.wait_for_selector("#list mark:text-is('word')")
    page.wait_for_selector("text=/1 hit in the first \\d+ of/")
    assert not ended.is_set()
    assert page.locator("#search-status progress").is_visible()
    page.locator("#cancel").click()
    page.wait_for_selector("text=/Cancelled: 1 hit in the first \\d+ of/")
    assert page.locator("#list tbody tr").count() == 1
    deadline = time.monotonic() + 300
    while pair.viewer.searches and time.monotonic() < deadline:
        time.sleep(0.02)
    assert pair.viewer.searches == 0
    assert pair.viewer.last_searched < 6004
    page.get_by_role("button", name="Back to the list").click()
    page.wait_for_selector("#matched")
    page.watch.check(pair.url)


def test_pages_work_while_labels_are_counted_and_say_so(
    page: Page, sets: Sets, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    add = SplitScan._add

    def held(self: SplitScan, batch: Any) -> None:
        go_on.wait(60)
        add(self, batch)

    monkeypatch.setattr(SplitScan, "_add", held)
    with running(sets.hostile, tokenizer="bytes") as found:
        page.goto(f"{found.url}#/a/train/overview")
        page.wait_for_selector("text=Reading the labels once")
        assert page.locator("progress.scan").is_visible()
        assert page.get_by_role("heading", name="Length").is_visible()
        assert page.get_by_role("heading", name="Who speaks").count() == 0
        page.goto(f"{found.url}#/a/train/browse")
        page.wait_for_selector("#scan-note")
        assert page.locator("#list tbody tr").count() == 10
        page.goto(f"{found.url}#/a/train/browse?role=user")
        page.wait_for_selector("text=the roles are still being read")
        page.goto(f"{found.url}#/a/train/overview")
        page.wait_for_selector("text=Reading the labels once")
        go_on.set()
        page.wait_for_selector("text=Who speaks")
        page.wait_for_selector("text=Reading the labels once", state="detached")


def test_work_that_another_request_is_about_to_start_can_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, starting = threading.Event(), threading.Event()
    start = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        if thread.name == "late":
            starting.set()
            time.sleep(0.2)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    work = Background(begun.set, "late")
    first = threading.Thread(target=work.start)
    first.start()
    assert starting.wait(10)
    work.wait()
    assert begun.is_set()
    first.join()
