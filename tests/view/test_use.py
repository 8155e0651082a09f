"""Used with the keyboard alone, in the dark, on a phone, and at 400% zoom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.view.sets import Running

Page = Any

PLACES = {
    "overview": ("a/train/overview", "text=Who speaks"),
    "browse": ("a/train/browse", "#list tbody tr"),
    "item": ("a/train/item/0?colour=kind", "#runs .token"),
    "compare": ("compare", "#sides"),
}
CONTRAST = Path(__file__).with_name("contrast.js").read_text()


def show(page: Page, running: Running, name: str) -> None:
    place, wait = PLACES[name]
    page.goto(f"{running.url}#/{place}")
    page.wait_for_selector(wait)


@pytest.mark.parametrize("name", PLACES)
def test_no_page_scrolls_sideways_at_320_pixels(page: Page, pair: Running, name: str) -> None:
    """1280 pixels at 400% zoom are 320 CSS pixels, which is also the smallest phone."""
    page.set_viewport_size({"width": 320, "height": 256})
    show(page, pair, name)
    wide = page.evaluate("[document.documentElement.scrollWidth, document.body.scrollWidth]")
    assert max(wide) <= 320, wide
    for button in page.locator("header a:visible, header button:visible, main button:visible").all()[:25]:
        box = button.bounding_box()
        if box and box["width"] > 1:
            assert box["x"] >= -1
    page.watch.check(pair.url)


def test_a_row_fits_a_phone(page: Page, rows: Running) -> None:
    page.set_viewport_size({"width": 320, "height": 600})
    page.goto(f"{rows.url}#/a/train/item/0?colour=position")
    page.wait_for_selector("#map svg")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    page.locator("#runs .token").nth(3).click()
    tip = page.locator("#tip").bounding_box()
    assert tip["x"] >= 0
    assert tip["x"] + tip["width"] <= 320


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", PLACES)
def test_text_has_contrast_in_both_themes(page: Page, pair: Running, name: str, theme: str) -> None:
    page.emulate_media(color_scheme=theme)
    show(page, pair, name)
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    found = page.evaluate(CONTRAST)
    assert len(found) > 40
    weak = [one for one in found if one[0] < 4.5]
    assert not weak, weak[:10]


def test_the_theme_can_be_switched_and_is_remembered(page: Page, pair: Running) -> None:
    show(page, pair, "browse")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate(background) != light
    page.reload()
    page.wait_for_selector("#list tbody tr")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.locator("#theme").click()
    assert page.evaluate(background) == light


def test_everything_can_be_reached_by_keys(page: Page, pair: Running) -> None:
    show(page, pair, "overview")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    assert "colour by trained, kind, document, position" in page.locator("dialog").inner_text()
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog[open]", state="detached")
    page.keyboard.press("g")
    page.keyboard.press("b")
    page.wait_for_selector("#list tbody tr")
    for _ in range(3):
        page.keyboard.press("j")
    page.keyboard.press("k")
    assert page.locator("tr[aria-selected=true]").get_attribute("data-number") == "1"
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:text-is('Episode 1')")
    page.wait_for_selector("#runs .token")
    page.keyboard.press("j")
    page.wait_for_selector("h1:text-is('Episode 2')")
    page.keyboard.press("k")
    page.wait_for_selector("h1:text-is('Episode 1')")
    page.keyboard.press("w")
    assert page.evaluate("document.activeElement.id") == "policy"
    page.keyboard.press("Escape")
    page.keyboard.press("b")
    page.wait_for_selector("#list tbody tr")
    page.keyboard.press("n")
    page.wait_for_function("() => document.querySelector('#list tbody tr')?.dataset.number === '50'")
    page.keyboard.press("p")
    page.wait_for_function("() => document.querySelector('#list tbody tr')?.dataset.number === '0'")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("jk?")
    assert page.locator("#search").input_value() == "jk?"
    page.keyboard.press("Escape")
    page.keyboard.press("s")
    page.wait_for_selector(".head .badge:text-is('val')")
    page.keyboard.press("g")
    page.keyboard.press("d")
    page.wait_for_selector("#sides")
    page.keyboard.press("g")
    page.keyboard.press("o")
    page.wait_for_selector("#tiles")
    page.keyboard.press("r")
    page.wait_for_selector("#runs .token")
    page.watch.check(pair.url)


def test_a_page_that_is_being_left_does_not_call_the_reader_back(page: Page, pair: Running) -> None:
    """A list that has just been loaded notes its first row in the address: not over the address of the next page."""
    show(page, pair, "browse")
    page.evaluate(
        """async () => {
            const { go, note } = await import(new URL('state.js', document.querySelector('script[src]').src));
            go({ page: 'compare' });
            note({ first: 50 });
        }"""
    )
    page.wait_for_selector("#sides")
    assert "compare" in page.url


def test_every_control_has_a_name_and_focus_is_seen(page: Page, pair: Running) -> None:
    for name in PLACES:
        show(page, pair, name)
        nameless = page.evaluate(
            """[...document.querySelectorAll('button, a[href], select, input')].filter(node => node.checkVisibility() &&
            !(node.getAttribute('aria-label') || node.textContent.trim() || node.title || node.labels?.length))
            .map(node => node.outerHTML)"""
        )
        assert not nameless
        assert page.locator("h1").count() == 1
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"


def test_a_wrong_address_says_what_is_wrong(page: Page, pair: Running) -> None:
    page.goto(f"{pair.url}#/a/train/item/999999")
    page.wait_for_selector(".error")
    assert "there is no episode 999,999 in train" in page.locator(".error").inner_text()
    page.get_by_text("Back to the overview").click()
    page.wait_for_selector("#tiles")
