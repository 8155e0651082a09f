"""The overview in a browser: colours of the ledger, the card of what was left out, and trees in words."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from chatmill.core.kinds import Part, parts_of
from chatmill.core.ledger import FATES
from chatmill.look.item_view import view_item
from chatmill.look.viewer.opened import OpenedSplit
from chatmill.look.viewer.overview import overview_values
from tests.view.sets import Running

Page = Any
NARROW = 390
COLOURS = """fates => fates.map(fate => {
    const bar = document.querySelector('.flow'), mark = document.querySelector('.legend i').cloneNode();
    const part = document.createElementNS('http://www.w3.org/2000/svg', 'rect');
    part.setAttribute('class', fate); bar.appendChild(part);
    mark.className = fate; document.querySelector('#ledger .legend').appendChild(mark);
    const found = [getComputedStyle(part).fill, getComputedStyle(mark).backgroundColor];
    part.remove(); mark.remove();
    return found;
})"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_class_of_the_ledger_has_a_colour(page: Page, trees: Running, theme: str) -> None:
    page.emulate_media(color_scheme=theme)
    page.goto(f"{trees.url}splits/train")
    colours = page.evaluate(COLOURS, list(FATES))
    page.emulate_media(color_scheme="light")
    assert len({fill for fill, _ in colours}) == len(FATES)
    assert all(fill == background for fill, background in colours)
    # What an SVG has without a rule.
    assert "rgb(0, 0, 0)" not in {fill for fill, _ in colours}


def test_one_card_has_what_was_left_out_with_links(page: Page, trees: Running) -> None:
    page.goto(f"{trees.url}splits/train")
    assert page.locator("main > .note").count() == 1
    line = page.locator("#problems")
    assert line.inner_text().startswith("2 records left out, 1 episode of train that trains nothing")
    line.locator("a").click()
    assert page.url.endswith("#left-out")

    card = page.locator("#left-out")
    records = card.locator("details li")
    # Both reasons are listed with their records, and what they spell is text.
    assert sorted(re.sub(r"\S*agents", "agents", text) for text in records.all_inner_texts()) == [
        "agents.jsonl:3 no words the record has no messages",
        "agents.jsonl:4 a <b>list</b> a message must be an object, found a number",
    ]
    assert card.locator("b b").count() == 0

    # Colour is for what asks to be looked at: answers that later messages change are no fault.
    noted = card.locator("li", has_text="answers that later messages change")
    assert "warning" not in (noted.get_attribute("class") or "")
    card.get_by_role("link", name="show them").click()
    page.wait_for_selector("#list")
    assert page.locator("#list .id").all_inner_texts() == ["silent"]


def test_the_card_is_there_while_labels_are_counted(trees: Running) -> None:
    opened = OpenedSplit(trees.viewer.first.look, trees.viewer.first.split)
    assert not opened.done
    words = {row.words for row in overview_values(opened)["noted"]}
    assert "records that train nothing" in words
    opened.wait()
    words = {row.words for row in overview_values(opened)["noted"]}
    assert "records that train nothing" not in words
    assert "episode of train that trains nothing" in words


def test_branches_say_which_message_they_go_back_to(page: Page, trees: Running) -> None:
    split = trees.viewer.first.split
    checked = 0
    for number in range(len(split)):
        item = split.item(number)
        view = view_item(item, trees.viewer.first.look.decoder, "episode")
        messages = [message for document in view.documents for message in document.messages]
        assert [branch.start for branch in view.branches] == [start for start, _ in item.branches]
        for place, branch in enumerate(view.branches, 1):
            row = item.row(place)
            left = messages[branch.message - 1]
            entered = next(message for message in messages if message.start == branch.start)
            depth = item.branches[place - 1][1]
            # The branch begins with a copy of a token of the message that it goes back to, after the same prompt.
            assert row.ids[depth] == item.ids[branch.start]
            assert branch.label == left.label == "assistant" == entered.label
            kinds = np.asarray(item.kinds)
            of_left = parts_of(kinds[left.start : left.start + left.tokens])
            of_entered = parts_of(kinds[entered.start : entered.start + entered.tokens])
            loses = (of_left == Part.REASONING).any() and not (of_entered == Part.REASONING).any()
            assert branch.loses_reasoning == loses
            checked += branch.loses_reasoning
    assert checked > 5

    most = max(range(len(split)), key=lambda number: len(split.item(number).branches))
    page.goto(f"{trees.url}splits/train/{most}")
    words = page.locator("#runs .branch").all_inner_texts()
    view = view_item(split.item(most), None, "episode")
    assert words == [branch.words for branch in view.branches]
    assert words[0].endswith("(assistant), as later answers see it, without its reasoning")
    # The list of messages has the branches, and its numbers are those beside the messages.
    assert page.locator("#turns .branch").all_inner_texts() == words
    numbers = page.locator("#runs .role .num").all_inner_texts()
    assert numbers == page.locator("#turns .role .num").all_inner_texts()
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]


def test_pages_of_trees_fit_a_phone(page: Page, trees: Running) -> None:
    page.set_viewport_size({"width": NARROW, "height": 800})
    try:
        for address in ("", "/browse", "/0", "/0?colour=kind"):
            page.goto(f"{trees.url}splits/train{address}")
            assert page.evaluate("document.documentElement.scrollWidth") == NARROW
            # All of the bar is in one line.
            assert page.locator(".bar").bounding_box()["height"] < 60
    finally:
        page.set_viewport_size({"width": 1200, "height": 900})
