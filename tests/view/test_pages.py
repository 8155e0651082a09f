"""Every page in a real browser: what it shows is what the dataset holds, and whatever that spells is text."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatmill.core.kinds import RoleCode, kind_name, roles_of
from chatmill.label.presets import PRESETS
from chatmill.look.dataset import open_for_looking
from chatmill.store.episodes import Episode, EpisodeDataset
from tests.view.sets import HOSTILE, LARGE, RARE, TURNS, Running, Sets

Page = Any


def numbers_of(text: str) -> list[int]:
    return [int(found.replace(",", "")) for found in re.findall(r"\d[\d,]*", text)]


def listed(page: Page) -> list[int]:
    return [int(row.get_attribute("data-number")) for row in page.locator("#list tbody tr").all()]


def arrive(page: Page, wait: str) -> None:
    """Wait until a page that was asked for is there, with its script."""
    page.wait_for_selector(wait)
    page.wait_for_load_state()


def shown_tokens(page: Page) -> list[tuple[int, str, float, bool]]:
    """Id, kind, weight and mark of every token on the page."""
    found = page.evaluate(
        """() => [...document.querySelectorAll('#runs .token')].map(node => {
            const run = node.closest('.run');
            return [node.dataset.i, run.dataset.kind, Number(run.dataset.weight), run.classList.contains('trained')];
        })"""
    )
    return [(int(one), kind, weight, marked) for ids, kind, weight, marked in found for one in ids.split()]


@pytest.fixture(scope="module")
def episodes(sets: Sets) -> list[Episode]:
    found = list(EpisodeDataset(sets.episodes, "train"))
    assert len(found) > 100
    return found


@pytest.fixture(scope="module")
def decoder(chats_set: Running) -> Any:
    return chats_set.viewer.first.look.decoder.tokenizer


def test_the_overview_shows_the_sums_of_the_split(page: Page, chats_set: Running, episodes: list[Episode]) -> None:
    def table(heading: str) -> dict[str, list[int]]:
        card = page.locator("section.card", has=page.get_by_role("heading", name=heading))
        card.locator("summary").click()
        return {row.split("\t")[0]: numbers_of(row)[:2] for row in card.locator("tbody tr").all_inner_texts()}

    page.goto(f"{chats_set.url}splits/train")
    kinds, weights = (np.concatenate([getattr(e, name) for e in episodes]) for name in ("kinds", "weights"))
    tokens, trained = len(kinds), int((weights > 0).sum())
    tiles = page.locator(".tiles .tile")
    assert tiles.nth(0).inner_text().split() == [f"{len(episodes):,}", "episodes"]
    assert tokens >= 10_000
    assert tiles.nth(1).get_attribute("title") == f"{tokens:,}"
    assert tiles.nth(2).inner_text().split()[0] == f"{100 * trained / tokens:.1f}%"
    roles = {role: roles_of(kinds) == role for role in RoleCode}
    assert table("Who speaks") == {
        "document" if role is RoleCode.NONE else role.name.lower(): [int(mine.sum()), int((weights[mine] > 0).sum())]
        for role, mine in roles.items()
        if mine.any()
    }
    policies = table("What would be trained if")
    assert policies.pop("as stored") == [tokens, trained]
    assert {"assistant", "last_turn", "final_only", "all"} <= set(policies)
    for name, row in policies.items():
        assert row == [tokens, sum(int((PRESETS[name].token_weights(e.kinds) > 0).sum()) for e in episodes)]


def test_browsing_pages_through_all_episodes(page: Page, chats_set: Running, episodes: list[Episode]) -> None:
    page.goto(f"{chats_set.url}splits/train/browse")
    seen = listed(page)
    assert len(seen) == 50
    first = page.locator("#list tbody tr").first.inner_text()
    assert episodes[0].record_id in first
    assert f"{len(episodes[0]):,}" in first
    while len(seen) < len(episodes):
        page.get_by_label("Next page").click()
        page.wait_for_selector(f"#list tbody tr:first-child[data-number='{len(seen)}']")
        seen += listed(page)
    assert seen == list(range(len(episodes)))


def test_filters_show_what_passes_in_the_wanted_order(page: Page, chats_set: Running, episodes: list[Episode]) -> None:
    median = int(np.median([len(e) for e in episodes]))
    page.goto(f"{chats_set.url}splits/train/browse")
    form = page.locator("#filters")
    for name, value in (("min_tokens", "9"), ("max_tokens", str(median)), ("max_share", "70")):
        form.locator(f"[name={name}]").fill(value)
    for name, value in (("source", "chats"), ("role", "system"), ("sort", "longest")):
        form.locator(f"[name={name}]").select_option(value)
    form.get_by_role("button", name="Filter").click()
    passing = [
        (-len(e), i)
        for i, e in enumerate(episodes)
        if (roles_of(e.kinds) == RoleCode.SYSTEM).any() and e.source == "chats" and 9 <= len(e) <= median
        if (e.weights > 0).mean() <= 0.7
    ]
    assert 5 < len(passing) < 50
    page.wait_for_selector(f"#matched:has-text('of {len(passing)} (of {len(episodes)})')")
    assert listed(page) == [i for _, i in sorted(passing)]
    page.locator("#clear").click()
    page.wait_for_selector(f"#matched:has-text('1–50 of {len(episodes)}')")


def test_search_finds_every_episode_with_the_words(
    page: Page, chats_set: Running, episodes: list[Episode], decoder: Any
) -> None:
    texts = [decoder.decode(e.ids).lower() for e in episodes]
    for words, most in ((RARE.lower(), 10**9), ("水車 Löwe", 10**9), ("<|im_start|>user", 100)):
        wanted = [i for i, text in enumerate(texts) if words.lower() in text and len(episodes[i]) <= most]
        assert 0 < len(wanted) < len(episodes), words
        page.goto(f"{chats_set.url}splits/train/browse")
        page.locator("[name=max_tokens]").fill(str(most))
        page.locator("#search").fill(words)
        page.keyboard.press("Enter")
        plural = "hit" if len(wanted) == 1 else "hits"
        page.wait_for_selector(f"text={len(wanted)} {plural} in {len(episodes)} episodes.")
        assert listed(page) == wanted
        assert page.locator("#list mark").first.inner_text().lower() == words.lower()
    page.locator("#list tbody tr").first.locator("a").click()
    page.wait_for_selector("#runs mark")


def test_a_record_is_found_by_its_id_and_close_ids_are_offered(
    page: Page, chats_set: Running, episodes: list[Episode]
) -> None:
    for wanted, found in (
        (episodes[9].record_id, f"#record-id:text-is('{episodes[9].record_id}')"),
        ("12", "#problem a"),
    ):
        page.goto(f"{chats_set.url}splits/train/browse")
        page.locator("#search").fill(str(wanted))
        page.locator("#by-id").click()
        page.wait_for_selector(found)


def test_an_episode_is_shown_whole_with_kinds_and_weights(
    page: Page, chats_set: Running, episodes: list[Episode], decoder: Any
) -> None:
    with_tools = next(i for i, e in enumerate(episodes) if (roles_of(e.kinds) == RoleCode.TOOL).any())
    weighted = next(i for i, e in enumerate(episodes) if (e.weights == 0.25).any())
    for number in (0, with_tools, weighted, len(episodes) - 1):
        episode = episodes[number]
        page.goto(f"{chats_set.url}splits/train/{number}")
        assert page.locator("#record-id").inner_text() == episode.record_id
        assert page.locator("#n-tokens").inner_text() == f"{len(episode):,}"
        assert page.locator("#n-trained").inner_text() == f"{int((episode.weights > 0).sum()):,}"
        columns = (episode.ids.tolist(), episode.kinds.tolist(), episode.weights.tolist())
        wanted = [(i, kind_name(kind), weight, weight > 0) for i, kind, weight in zip(*columns, strict=True)]
        assert shown_tokens(page) == wanted
        text = page.locator("#runs .token").evaluate_all("nodes => nodes.map(node => node.textContent).join('')")
        assert text.replace("⏎\n", "\n") == decoder.decode(episode.ids)


def test_hovering_and_stepping_show_id_bytes_kind_weight_and_position(
    page: Page, chats_set: Running, episodes: list[Episode], decoder: Any
) -> None:
    page.goto(f"{chats_set.url}splits/train/1")
    page.locator("#runs .run.trained .token").first.hover()
    names, values = (page.locator(f"#tip {name}").all_inner_texts() for name in ("dt", "dd"))
    details = dict(zip(names, values, strict=True))
    episode, position = episodes[1], numbers_of(details["position"])[0]
    token_id = int(episode.ids[position])
    assert int(details["id"]) == token_id
    assert bytes.fromhex(details["bytes"]) == decoder.token_bytes(token_id)
    assert details["kind"] == kind_name(int(episode.kinds[position]))
    assert float(details["weight"]) == episode.weights[position] > 0
    page.mouse.move(5, 400)
    for key, place in (("ArrowRight", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
        page.keyboard.press(key)
        tokens = page.locator("#runs .token").evaluate_all("nodes => nodes.map(node => node.matches('.here'))")
        assert np.flatnonzero(tokens).tolist() == [place]
    assert page.locator("#tip").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_colourings_and_policies(page: Page, chats_set: Running, episodes: list[Episode]) -> None:
    number, episode = next((i, e) for i, e in enumerate(episodes) if e.turns and e.turns > 1)
    page.goto(f"{chats_set.url}splits/train/{number}")
    for name, sign in (("kind", ".tag"), ("trained", ".run.trained")):
        page.keyboard.press("c")
        arrive(page, f"#runs.by-{name}")
        assert page.locator(f"#runs {sign}").count() > 0, "colour is never the only sign"
    for name in ("last_turn", "all", "final_only"):
        trained = PRESETS[name].token_weights(episode.kinds) > 0
        page.locator("#policy").select_option(name)
        page.wait_for_url(f"**policy={name}*")
        assert [token[3] for token in shown_tokens(page)] == trained.tolist()
        assert numbers_of(page.locator("#n-trained").inner_text()) == [trained.sum()]
        assert page.locator("#n-stored").count() == 1
        signs = (page.locator(".run.gained").count() > 0, page.locator(".run.lost").count() > 0)
        stored = episode.weights > 0
        assert signs == ((trained & ~stored).any(), (stored & ~trained).any())
    page.locator("#policy").select_option("")
    page.wait_for_selector("#n-stored", state="detached")


def test_a_row_lists_its_documents(page: Page, rows: Running, sets: Sets) -> None:
    split = open_for_looking(sets.rows).split("train")
    number = int(np.argmax(split.documents))
    row = split.item(number)
    assert row.documents is not None
    assert len(row.starts) > 2
    page.goto(f"{rows.url}splits/train/{number}")
    assert page.locator("#n-documents").inner_text() == str(len(row.starts))
    lengths = [numbers_of(text)[0] for text in page.locator("#documents small").all_inner_texts()]
    assert lengths == [end - start for start, end in row.borders]
    dividers = page.locator("#runs .divider[data-document]").all_inner_texts()
    assert [numbers_of(text)[1] for text in dividers] == row.documents.tolist()
    page.locator("#documents a").last.click()
    last = int(row.starts[-1])
    assert page.url.endswith(f"#t{last}")
    page.locator(f"#t{last} .token").first.hover()
    assert f"0 in its document, {last:,} in all" in page.locator("#tip").inner_text()


def test_everything_can_be_reached_by_keys(page: Page, chats_set: Running, episodes: list[Episode]) -> None:
    page.goto(f"{chats_set.url}splits/train")
    page.keyboard.press("?")
    assert page.locator("#keys kbd").count() > 10
    page.keyboard.press("Escape")
    for keys, wait in (
        ("b", "#list tbody tr"),
        ("n", "#list tr[data-number='50']"),
        ("jjk", "#list tr[data-number='50'][aria-selected=true]"),
        (["Enter"], f"#record-id:text-is('{episodes[50].record_id}')"),
        ("j", f"#record-id:text-is('{episodes[51].record_id}')"),
        ("f", "#runs :target"),
        ("w", "#policy:focus"),
        (["Escape", "s"], ".badge:text-is('val')"),
        ("o", "text=Who speaks"),
        ("b", "#search"),
        ("/", "#search:focus"),
    ):
        for key in keys:
            page.keyboard.press(key)
        arrive(page, wait)


def test_a_long_chat_has_ways_through_it(page: Page, hostile: Running) -> None:
    page.goto(f"{hostile.url}splits/train/{len(HOSTILE) + 2}")
    assert page.locator("#turns li").count() == 2 * TURNS + 1
    page.keyboard.press("f")
    assert page.url.endswith(f"#t{26 * 20 + len('Question 0')}"), "the first trained token"
    line = page.locator("#turns li a", has_text="Said 11")
    line.click()
    assert page.url.endswith(f"#t{line.get_attribute('data-start')}")
    assert page.locator(".message.long").count() == 1, "a long prompt does not push the chat off the screen"
    assert page.locator(".message.long").evaluate("node => node.offsetHeight") < 300


def inert(page: Page) -> None:
    """Nothing ran, and no element came out of the data."""
    assert page.evaluate("window.pwned") is None
    assert page.locator("main script, main img, main iframe, main object, main embed").count() == 0
    assert page.locator("main a[href^='javascript:'], main a[href^='http']").count() == 0


def test_lists_searches_and_plots_show_hostile_ids_and_sources_as_text(page: Page, hostile: Running) -> None:
    page.goto(f"{hostile.url}splits/train")
    assert "<script>alert('source')</script>" in page.locator("main").inner_text()
    inert(page)
    page.goto(f"{hostile.url}splits/train/browse")
    shown = page.locator("#list").inner_text()
    assert listed(page) == list(range(len(HOSTILE) + 3))
    assert "<img src=x onerror=alert(1)>" in shown
    assert "\u202e" not in shown
    assert "\\u202e" in shown
    page.locator("[name=source]").select_option("<script>alert('source')</script>")
    page.locator("#filters").get_by_role("button", name="Filter").click()
    page.wait_for_selector("text=(of 11)")
    assert listed(page) == list(range(len(HOSTILE) + 1))
    page.locator("#search").fill("<script>window.PWNED")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=1 hit in 11 episodes.")
    assert page.locator("#list mark").inner_text() == "<script>window.pwned"
    inert(page)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_shown_and_nothing_more(page: Page, hostile: Running, name: str) -> None:
    raw = HOSTILE[name]
    page.goto(f"{hostile.url}splits/train/{list(HOSTILE).index(name)}?colour=kind")
    assert page.locator("#n-tokens").inner_text() == f"{len(raw) + 3 + 7 + min(len(raw), 200):,}"
    shown = page.locator("#runs").evaluate("node => node.textContent")
    assert not set(shown) & set("\u202e\u2066\u2069\u202c\u200f\x00\x01\x1b\x7f\x08\u2028\ufeff\x85")
    for part in {"nul": ("␀", "␛[31mred"), "direction": ("\\u202e", "\u05d0\u05d1")}.get(name, ()):
        assert part in shown
    if name == "no utf-8":
        assert page.locator(".token.raw").count() >= 6
        page.locator(".token.raw").first.hover()
        assert "e2" in page.locator("#tip").inner_text()
    if raw.isascii() and raw.decode().isprintable():
        assert raw.decode() in shown
    inert(page)


def test_a_message_of_a_megabyte_is_shown_in_windows(page: Page, hostile: Running) -> None:
    page.goto(f"{hostile.url}splits/train/{len(HOSTILE)}")
    total = len(LARGE) + 3 + 7 + 200
    assert total > 1 << 20
    assert page.locator("#n-tokens").inner_text() == f"{total:,}"
    assert page.locator("#runs .token").count() <= 2048
    page.locator("input[aria-label='Token to go to']").first.fill(str(total - 50))
    page.get_by_role("button", name="Go to token").first.click()
    arrive(page, f"text={total - 50 - 64:,}–{total - 1:,}")
    assert page.locator("#hit").count() == 1
    assert page.locator("#runs .run.trained").count() > 0
    page.keyboard.press("p")
    page.wait_for_selector(f"text={total - 50 - 64 - 2048:,}–{total - 50 - 64 - 1:,}")
    inert(page)


@pytest.mark.slow
@pytest.mark.usefixtures("tab")  # says so where there is no browser
def test_the_screenshots_of_the_docs_can_be_taken_again(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "examples" / "screenshots.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in root.glob("docs/images/*.png")}
