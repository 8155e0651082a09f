"""Content is data: whatever a conversation, an id or a source spells, the page shows it and nothing happens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.view.sets import HOSTILE, LARGE, Running

Page = Any


def check(page: Page, running: Running) -> None:
    """Nothing ran, nothing was asked of another host, no element came out of the data."""
    assert page.evaluate("window.pwned") is None
    assert page.locator("main script, main img, main iframe, main object, main embed").count() == 0
    assert page.locator("main a[href^='javascript:'], main a[href^='http']").count() == 0
    page.watch.check(running.url)


def test_lists_and_plots_show_hostile_ids_and_sources_as_text(page: Page, hostile: Running) -> None:
    page.goto(f"{hostile.url}a/train")
    page.wait_for_selector("text=Who speaks")
    assert "<script>alert('source')</script>" in page.locator("main").inner_text()
    check(page, hostile)
    page.goto(f"{hostile.url}a/train/browse")
    page.wait_for_selector("#list tbody tr")
    shown = page.locator("#list").inner_text()
    assert page.locator("#list tbody tr").count() == len(HOSTILE) + 2
    assert "<img src=x onerror=alert(1)>" in shown
    assert "\u202e" not in shown
    assert "\\u202e" in shown
    page.locator("[name=source]").select_option("<script>alert('source')</script>")
    page.locator("#filters").get_by_role("button", name="Filter").click()
    page.wait_for_selector("text=(of 10)")
    assert page.locator("#list tbody tr").count() == len(HOSTILE) + 1
    check(page, hostile)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_shown_and_nothing_more(page: Page, hostile: Running, name: str) -> None:
    number, raw = list(HOSTILE).index(name), HOSTILE[name]
    page.goto(f"{hostile.url}a/train/{number}?colour=kind")
    page.wait_for_selector("#runs .token")
    assert page.locator("#n-tokens").inner_text() == f"{len(raw) + 3 + 7 + min(len(raw), 200):,}"
    shown = page.locator("#runs").evaluate("node => node.textContent")
    for hidden in "\u202e\u2066\u2069\u202c\u200f\x00\x01\x1b\x7f\x08\u2028\ufeff\x85":
        assert hidden not in shown
    if name == "nul":
        assert "␀" in shown
        assert "␛[31mred" in shown
    if name == "direction":
        assert "\\u202e" in shown
        assert "\u05d0\u05d1" in shown
    if name == "no utf-8":
        assert page.locator(".token.raw").count() >= 6
        page.locator(".token.raw").first.hover()
        assert "e2" in page.locator("#tip").inner_text()
    if raw.isascii() and raw.decode().isprintable():
        assert raw.decode() in shown
    check(page, hostile)


def test_a_message_of_a_megabyte_is_shown_in_windows(page: Page, hostile: Running) -> None:
    number = len(HOSTILE)
    page.goto(f"{hostile.url}a/train/{number}?colour=trained")
    page.wait_for_selector("#runs .token")
    total = len(LARGE) + 3 + 7 + 200
    assert total > 1 << 20
    assert page.locator("#n-tokens").inner_text() == f"{total:,}"
    assert page.locator("#runs .token").count() <= 2048
    page.locator("input[aria-label='Token to go to']").first.fill(str(total - 50))
    page.get_by_role("button", name="Go to token").first.click()
    page.wait_for_selector(f"text={total - 50 - 64:,}–{total - 1:,}")
    page.wait_for_selector("#hit")
    assert page.locator("#runs .run.trained").count() > 0
    page.keyboard.press("p")
    page.wait_for_selector(f"text={total - 50 - 64 - 2048:,}–{total - 50 - 64 - 1:,}")
    check(page, hostile)


def test_search_of_hostile_text(page: Page, hostile: Running) -> None:
    page.goto(f"{hostile.url}a/train/browse")
    page.wait_for_selector("#list tbody tr")
    page.locator("#search").fill("<script>window.PWNED")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=1 hit in 10 episodes.")
    assert page.locator("#list mark").inner_text() == "<script>window.pwned"
    check(page, hostile)
    page.goto(f"{hostile.url}a/<script>/<img src=x onerror=alert(1)>?colour=<b>&policy=<i>")
    page.wait_for_selector(".error")
    assert page.evaluate("window.pwned") is None
    assert page.locator("main img, main i, main script").count() == 0
