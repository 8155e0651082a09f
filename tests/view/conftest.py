"""One set of datasets, one browser and one viewer for each dataset, shared by all tests of a process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.view.sets import Running, Sets, make_sets, running

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
EMPTY = "about:blank"


@pytest.fixture(scope="session")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Sets:
    return make_sets(tmp_path_factory.mktemp("view"))


@pytest.fixture(scope="session")
def pair(sets: Sets) -> Iterator[Running]:
    """Episodes, and the changed ones next to them."""
    with running(sets.episodes, sets.other) as found:
        for look in found.viewer.looks.values():
            assert look.decoder is not None
        yield found


@pytest.fixture(scope="session")
def rows(sets: Sets) -> Iterator[Running]:
    with running(sets.rows) as found:
        yield found


@pytest.fixture(scope="session")
def hostile(sets: Sets) -> Iterator[Running]:
    with running(sets.hostile, tokenizer="bytes") as found:
        yield found


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium. Where it is missing tests are skipped; under CI that is a failure."""
    must = os.environ.get("CI") == "true"
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        if must:
            raise
        pytest.skip("playwright is not installed")
    if not Path(CHROMIUM).exists():
        message = f"no browser at {CHROMIUM}: `make browser` installs one, CHROMIUM names another"
        pytest.fail(message) if must else pytest.skip(message)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


class Watch:
    """What a page does besides showing, from here on: errors, dialogs, requests to other places."""

    def __init__(self, page: Any) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._page = page
        self._heard: dict[str, Callable[[Any], object]] = {
            "pageerror": lambda error: self.problems.append(f"error: {error}"),
            "console": self._said,
            "dialog": self._asked,
            "request": lambda request: self.requests.append(request.url),
        }
        for event, hear in self._heard.items():
            page.on(event, hear)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"console {message.type}: {message.text}")

    def _asked(self, dialog: Any) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def check(self, url: str) -> None:
        assert not self.problems, self.problems
        assert self.requests
        foreign = [asked for asked in self.requests if not asked.startswith(url)]
        assert not foreign, foreign

    def end(self) -> None:
        for event, hear in self._heard.items():
            self._page.remove_listener(event, hear)


@pytest.fixture(scope="session")
def tab(browser: Any) -> Iterator[Any]:
    """One for all tests: the process that a new one starts would cost more than most pages do."""
    size: Any = {"width": 1200, "height": 900}
    context = browser.new_context(viewport=size, color_scheme="light", reduced_motion="reduce")
    context.set_default_timeout(300_000)  # for machines that are busy with other things
    yield context.new_page()
    context.close()


@pytest.fixture
def page(tab: Any) -> Iterator[Any]:
    """An empty page; `page.watch` knows what happened on it."""
    tab.watch = Watch(tab)
    yield tab
    tab.watch.end()
    tab.goto(EMPTY)
    tab.context.clear_cookies()
