"""Every page in a real browser: what it shows is what the dataset holds."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from chatmill.core.kinds import RoleCode, kind_name, roles_of
from chatmill.label.presets import PRESETS
from chatmill.look.dataset import open_for_looking
from chatmill.prove.compare.diff import diff_datasets
from chatmill.store.episodes import Episode, EpisodeDataset
from tests.view.sets import RARE, Running, Sets

Page = Any


def show(page: Page, running: Running, place: str, wait: str) -> None:
    """Open a page of the viewer and wait until something on it is there."""
    page.goto(f"{running.url}{place}")
    page.wait_for_selector(wait)


def arrive(page: Page, wait: str) -> None:
    """Wait until a page that a key opens is there, with the script that hears the next key."""
    page.wait_for_selector(wait)
    page.wait_for_load_state()


def numbers_of(text: str) -> list[int]:
    return [int(found.replace(",", "")) for found in re.findall(r"\d[\d,]*", text)]


@pytest.fixture(scope="module")
def episodes(sets: Sets) -> list[Episode]:
    found = list(EpisodeDataset(sets.episodes, "train"))
    assert len(found) > 100
    return found


@pytest.fixture(scope="module")
def decoder(pair: Running) -> Any:
    return pair.viewer.looks["a"].decoder.tokenizer


@pytest.fixture(scope="module")
def differences(sets: Sets) -> dict[str, Any]:
    return diff_datasets(sets.episodes, sets.other, show=100).as_json()


def listed(page: Page) -> list[int]:
    return [int(row.get_attribute("data-number")) for row in page.locator("#list tbody tr").all()]


def wait_for_matched(page: Page, count: int) -> None:
    """Until the pager says how many items pass."""
    page.wait_for_function(
        "n => document.querySelector('#matched')?.textContent.match(/of ([\\d,]+)/)?.[1].replace(',', '') == n",
        arg=count,
    )


def test_the_overview_shows_the_sums_of_the_split(page: Page, pair: Running, episodes: list[Episode]) -> None:
    show(page, pair, "a/train", "text=Who speaks")
    tokens, trained = sum(map(len, episodes)), sum(int((e.weights > 0).sum()) for e in episodes)
    tiles = page.locator(".tiles .tile").all_inner_texts()
    assert tiles[0].split() == [f"{len(episodes):,}", "episodes"]
    assert tiles[2].split()[0] == f"{100 * trained / tokens:.1f}%"
    assert tokens >= 10_000
    assert page.locator(".tiles .tile").nth(1).get_attribute("title") == f"{tokens:,}"

    kinds = np.concatenate([e.kinds for e in episodes])
    weights = np.concatenate([e.weights for e in episodes])
    card = page.locator("section.card", has=page.get_by_role("heading", name="Who speaks"))
    card.locator("summary").click()
    rows = {row.split("\t")[0]: numbers_of(row)[:2] for row in card.locator("tbody tr").all_inner_texts()}
    assert len(rows) >= 4
    for role in RoleCode:
        mine = roles_of(kinds) == role
        if mine.any():
            name = "document" if role is RoleCode.NONE else role.name.lower()
            assert rows.pop(name) == [int(mine.sum()), int((weights[mine] > 0).sum())]
    assert not rows

    card = page.locator("section.card", has=page.get_by_role("heading", name="What would be trained if"))
    card.locator("summary").click()
    rows = {row.split("\t")[0]: numbers_of(row)[1] for row in card.locator("tbody tr").all_inner_texts()}
    for name in ("assistant", "last_turn", "final_only", "all"):
        wanted = sum(int((PRESETS[name].token_weights(e.kinds) > 0).sum()) for e in episodes)
        assert rows[name] == wanted, name
    assert rows["as stored"] == trained
    page.watch.check(pair.url)


def test_browsing_pages_through_all_episodes(page: Page, pair: Running, episodes: list[Episode]) -> None:
    show(page, pair, "a/train/browse", "#list tbody tr")
    seen = listed(page)
    assert len(seen) == 50
    first = page.locator("#list tbody tr").first.inner_text()
    assert episodes[0].record_id in first
    assert f"{len(episodes[0]):,}" in first
    while len(seen) < len(episodes):
        before = len(seen)
        page.get_by_label("Next page").click()
        page.wait_for_function(
            "n => Number(document.querySelector('#list tbody tr')?.dataset.number) === n", arg=before
        )
        seen += listed(page)
    assert seen == list(range(len(episodes)))
    page.watch.check(pair.url)


def test_filters_show_what_passes_and_nothing_else(page: Page, pair: Running, episodes: list[Episode]) -> None:
    median = int(np.median([len(e) for e in episodes]))
    show(page, pair, "a/train", "text=Who speaks")  # the labels are counted then
    show(page, pair, "a/train/browse", "#list tbody tr")
    form = page.locator("#filters")
    for fill, keep in (
        ({"min_tokens": str(median)}, lambda e: len(e) >= median),
        (
            {"role": "system", "source": "wiki", "max_tokens": str(median)},
            lambda e: (roles_of(e.kinds) == RoleCode.SYSTEM).any() and e.source == "wiki" and len(e) <= median,
        ),
    ):
        page.locator("#clear").click()
        wait_for_matched(page, len(episodes))
        for name, value in fill.items():
            field = form.locator(f"[name={name}]")
            field.select_option(value) if name in ("source", "role") else field.fill(value)
        form.get_by_role("button", name="Filter").click()
        wanted = [i for i, e in enumerate(episodes) if keep(e)]
        assert 0 < len(wanted) < len(episodes)
        wait_for_matched(page, len(wanted))
        assert listed(page) == wanted[:50], fill
    page.watch.check(pair.url)


def test_search_finds_every_episode_with_the_words(
    page: Page, pair: Running, episodes: list[Episode], decoder: Any
) -> None:
    texts = [decoder.decode(e.ids) for e in episodes]
    for words in (RARE.lower(), "水車 Löwe", "<|im_start|>user"):
        wanted = [i for i, text in enumerate(texts) if words.lower() in text.lower()]
        assert wanted, words
        show(page, pair, "a/train/browse", "#list tbody tr")
        page.locator("#search").fill(words)
        page.keyboard.press("Enter")
        plural = "hit" if len(wanted) == 1 else "hits"
        page.wait_for_selector(f"text={len(wanted)} {plural} in {len(episodes)} episodes.")
        assert listed(page) == wanted
        assert page.locator("#list mark").first.inner_text().lower() == words.lower()
    page.locator("#list tbody tr").first.locator("a").click()
    page.wait_for_selector("#runs mark")
    page.watch.check(pair.url)


def test_a_record_is_found_by_its_id_and_close_ids_are_offered(
    page: Page, pair: Running, episodes: list[Episode]
) -> None:
    show(page, pair, "a/train/browse", "#list tbody tr")
    page.locator("#search").fill(episodes[9].record_id)
    page.locator("#by-id").click()
    page.wait_for_selector("#record-id")
    assert page.locator("#record-id").inner_text() == episodes[9].record_id
    show(page, pair, "a/train/browse", "#list tbody tr")
    page.locator("#search").fill("rec-01")
    page.locator("#by-id").click()
    page.wait_for_selector("#problem a")


def shown_tokens(page: Page) -> list[dict[str, Any]]:
    """What stands on the page, token by token, line signs taken away."""
    return page.evaluate(
        """() => [...document.querySelectorAll('#runs .token')].map(node => {
            const copy = node.cloneNode(true); copy.querySelectorAll('.newline').forEach(sign => sign.remove());
            const run = node.closest('.run');
            return {text: copy.textContent, ids: node.dataset.i, kind: run.dataset.kind,
                    weight: Number(run.dataset.weight), trained: run.classList.contains('trained')};
        })"""
    )


def test_an_episode_is_shown_whole_with_kinds_and_weights(
    page: Page, pair: Running, episodes: list[Episode], decoder: Any
) -> None:
    with_tools = next(i for i, e in enumerate(episodes) if (roles_of(e.kinds) == RoleCode.TOOL).any())
    halved = next(i for i, e in enumerate(episodes) if (e.weights == 0.5).any())
    for number in {0, with_tools, halved, len(episodes) - 1}:
        episode = episodes[number]
        show(page, pair, f"a/train/{number}?colour=trained", f"#record-id:text-is('{episode.record_id}')")
        assert page.locator("#n-tokens").inner_text() == f"{len(episode):,}"
        assert page.locator("#n-trained").inner_text() == f"{int((episode.weights > 0).sum()):,}"
        shown = shown_tokens(page)
        assert "".join(token["text"] for token in shown) == decoder.decode(episode.ids)
        at = 0
        for token in shown:
            for token_id in map(int, token["ids"].split()):
                assert token_id == episode.ids[at]
                assert token["kind"] == kind_name(int(episode.kinds[at]))
                assert token["weight"] == episode.weights[at]
                assert token["trained"] == bool(episode.weights[at] > 0)
                at += 1
        assert at == len(episode)
    page.watch.check(pair.url)


def here(page: Page) -> int:
    """The place of the token that is stepped to."""
    return page.evaluate("[...document.querySelectorAll('#runs .token')].findIndex(n => n.matches('.here'))")


def test_hovering_and_stepping_show_id_bytes_kind_weight_and_position(
    page: Page, pair: Running, episodes: list[Episode], decoder: Any
) -> None:
    show(page, pair, "a/train/1?colour=trained", ".token")
    tokens = page.locator("#runs .token")
    where = page.evaluate(
        "[...document.querySelectorAll('#runs .token')].findIndex(node => node.closest('.run.trained'))"
    )
    tokens.nth(where).hover()
    details = dict(
        zip(page.locator("#tip dt").all_inner_texts(), page.locator("#tip dd").all_inner_texts(), strict=True)
    )
    episode = episodes[1]
    position = numbers_of(details["position"])[0]
    token_id = int(episode.ids[position])
    assert int(details["id"]) == token_id
    assert bytes.fromhex(details["bytes"]) == decoder.token_bytes(token_id)
    assert details["kind"] == kind_name(int(episode.kinds[position]))
    assert float(details["weight"]) == episode.weights[position] > 0
    page.mouse.move(5, 400)
    for step in range(3):
        page.keyboard.press("ArrowRight")
        assert here(page) == step
    page.keyboard.press("ArrowLeft")
    assert here(page) == 1
    assert page.locator("#tip").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_colourings_and_policies(page: Page, pair: Running, episodes: list[Episode]) -> None:
    number = next(i for i, e in enumerate(episodes) if e.turns and e.turns > 1)
    episode = episodes[number]
    show(page, pair, f"a/train/{number}?colour=trained", ".token")
    for name, sign in (("kind", ".tag"), ("trained", ".run.trained")):
        page.keyboard.press("c")
        page.wait_for_selector(f"#runs.by-{name}")
        assert page.locator(f"#runs {sign}").count() > 0, "colour is never the only sign"
    for name in ("last_turn", "all", "final_only"):
        weights = PRESETS[name].token_weights(episode.kinds)
        page.locator("#policy").select_option(name)
        page.wait_for_selector("#n-stored")
        page.wait_for_function(
            "n => document.querySelector('#n-trained').textContent.replaceAll(',', '') === String(n)",
            arg=int((weights > 0).sum()),
        )
        shown = shown_tokens(page)
        assert [t["trained"] for t in shown if t["text"]].count(True) == page.locator(
            "#runs .run.trained .token"
        ).count()
        gained = bool(((weights > 0) & (episode.weights == 0)).any())
        lost = bool(((weights == 0) & (episode.weights > 0)).any())
        assert (page.locator(".run.gained").count() > 0, page.locator(".run.lost").count() > 0) == (gained, lost)
    page.locator("#policy").select_option("")
    page.wait_for_selector("#n-stored", state="detached")
    page.watch.check(pair.url)


def test_a_row_is_a_map_of_its_documents(page: Page, rows: Running, sets: Sets) -> None:
    split = open_for_looking(sets.rows).split("train")
    number = int(np.argmax(split.documents))
    row = split.item(number)
    assert len(row.starts) > 2
    show(page, rows, f"a/train/{number}", "#map")
    assert page.locator("#n-documents").inner_text() == str(len(row.starts))
    assert page.locator("#map .documents tbody tr").count() == len(row.starts)
    for (start, end), line in zip(row.borders, page.locator("#map .documents tbody tr").all(), strict=True):
        assert line.locator("td.n").first.inner_text() == f"{end - start:,}"
    assert (page.locator("#map .pad").count() > 0) == (row.padding > 0)
    titles = {text.split(":")[0] for text in page.locator("#map svg .doc title").all_text_contents()}
    assert titles == {f"document {i}" for i in range(len(row.starts))}
    dividers = page.locator("#runs .divider[data-document]").all_inner_texts()
    assert row.documents is not None
    assert [numbers_of(text)[1] for text in dividers] == row.documents.tolist()
    page.locator("#map .documents tbody tr a").last.click()
    assert page.url.endswith(f"#t{int(row.starts[-1])}")
    page.locator(f"#t{int(row.starts[-1])} .token").first.hover()
    assert f"0 in its document, {int(row.starts[-1]):,} in all" in page.locator("#tip").inner_text()
    page.watch.check(rows.url)


def test_two_datasets_side_by_side(page: Page, pair: Running, differences: dict[str, Any]) -> None:
    found = differences
    assert found["counts"]["weights"] > 0
    assert found["counts"]["ids"] > 0
    assert found["counts"]["only_in_a"] > 0
    assert found["counts"]["only_in_b"] > 0
    show(page, pair, "compare", "#sides")
    for change, count in found["counts"].items():
        assert page.locator(f"#counts [data-change={change}] b").inner_text() == f"{count:,}"
    rows = [numbers_of(text)[:2] for text in page.locator("#totals tbody tr").all_inner_texts()]
    assert rows == [[found["totals"][side][name] for side in "ab"] for name in ("records", "tokens", "trained")]
    picks = page.locator(".picks a")
    assert picks.count() == len(found["changed"])
    for change in ("ids", "weights", "only_in_a", "only_in_b"):
        number = next(i for i, one in enumerate(found["changed"]) if one["change"] == change)
        record = found["changed"][number]
        picks.nth(number).click()
        page.wait_for_function("n => location.search === '?n=' + n", arg=number)
        page.wait_for_function(
            "id => document.querySelector('.layout h2')?.textContent.startsWith(id)", arg=record["record_id"]
        )
        cells = page.locator("#sides .cell.minus, #sides .cell.plus").count()
        assert cells == sum(line["sign"] != " " for line in record["lines"]) > 0
        for line in record["lines"]:
            if line["sign"] != " " and line["text"].strip().isalnum():
                assert line["text"].strip() in page.locator("#sides").inner_text()
    before = page.locator("#sides").inner_text()
    page.keyboard.press("k")
    page.wait_for_function("text => document.querySelector('#sides').innerText !== text", arg=before)
    page.watch.check(pair.url)


def test_equal_stretches_of_a_comparison_can_be_shown(
    page: Page, pair: Running, sets: Sets, decoder: Any, differences: dict[str, Any]
) -> None:
    number, record = next(
        (i, one)
        for i, one in enumerate(differences["changed"])
        if one["change"] == "weights" and one["lines"][0]["sign"] == " "
    )
    show(page, pair, f"compare?n={number}", "#sides .equal summary")
    page.locator("#sides .equal summary").first.click()
    page.wait_for_selector("#sides .equal .text")
    ids = EpisodeDataset(sets.episodes, record["a"]["place"][0])[record["a"]["place"][1]].ids
    wanted = decoder.decode(ids[: record["lines"][0]["tokens"]])
    shown = page.locator("#sides .equal .text").first.evaluate("node => node.textContent")
    assert shown.replace("\u23ce\n", "\n") == wanted


def test_everything_can_be_reached_by_keys(page: Page, pair: Running, episodes: list[Episode]) -> None:
    show(page, pair, "a/train", "text=Who speaks")
    page.keyboard.press("?")
    assert page.locator("#keys kbd").count() > 10
    page.keyboard.press("Escape")
    page.keyboard.press("b")
    arrive(page, "#list tbody tr")
    page.keyboard.press("n")
    arrive(page, "#list tr[data-number='50']")
    for key in "jjk":
        page.keyboard.press(key)
    assert page.locator("#list [aria-selected=true]").get_attribute("data-number") == "50"
    page.keyboard.press("Enter")
    arrive(page, f"#record-id:text-is('{episodes[50].record_id}')")
    page.keyboard.press("j")
    arrive(page, f"#record-id:text-is('{episodes[51].record_id}')")
    page.keyboard.press("f")
    page.wait_for_url(re.compile(r"#t\d+$"))
    page.keyboard.press("w")
    assert page.evaluate("document.activeElement.id") == "policy"
    page.keyboard.press("Escape")
    page.keyboard.press("s")
    arrive(page, ".badge:text-is('val')")
    page.keyboard.press("d")
    arrive(page, "#sides")
    page.keyboard.press("o")
    arrive(page, "text=Who speaks")
    page.keyboard.press("b")
    arrive(page, "#search")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.watch.check(pair.url)
