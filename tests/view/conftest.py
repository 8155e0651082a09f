"""One set of datasets, one browser and one viewer for each dataset, shared by all tests of a process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.view.sets import Running, Sets, make_sets, make_trees, running

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")


@pytest.fixture(scope="session")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Sets:
    return make_sets(tmp_path_factory.mktemp("view"))


def counted(path: Path, tokenizer: Any = None) -> Iterator[Running]:
    """A viewer whose pages wait for nothing."""
    with running(path, tokenizer=tokenizer) as found:
        for opened in found.viewer.splits.values():
            opened.wait()
        yield found


@pytest.fixture(scope="session")
def chats_set(sets: Sets) -> Iterator[Running]:
    yield from counted(sets.episodes)


@pytest.fixture(scope="session")
def rows(sets: Sets) -> Iterator[Running]:
    yield from counted(sets.rows)


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from counted(make_trees(tmp_path_factory.mktemp("trees")))


@pytest.fixture(scope="session")
def hostile(sets: Sets) -> Iterator[Running]:
    yield from counted(sets.hostile, tokenizer="bytes")


@pytest.fixture(scope="session")
def tab() -> Iterator[Any]:
    """A tab of Chromium, which lists problems and requests. Where it is missing tests are skipped, but not in CI."""
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
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page: Any = browser.new_page(viewport={"width": 1200, "height": 900}, reduced_motion="reduce")
        page.set_default_timeout(300_000)  # for machines that are busy with other things
        page.problems, page.requests = [], []
        page.on("pageerror", lambda error: page.problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (page.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: page.requests.append(request.url))

        def said(message: Any) -> None:
            if message.type in ("error", "warning"):
                page.problems.append(f"console {message.type}: {message.text}")

        page.on("console", said)
        yield page
        browser.close()


@pytest.fixture
def page(tab: Any) -> Iterator[Any]:
    """The tab; after the test nothing may have failed, asked, or been requested from another place than the viewer."""
    tab.problems.clear()
    tab.requests.clear()
    yield tab
    assert not tab.problems
    assert tab.requests
    assert all(one.startswith("http://127.0.0.1:") for one in tab.requests)
    tab.goto("about:blank")
