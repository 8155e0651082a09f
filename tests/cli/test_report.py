"""`chatmill report`: one page that stands by itself, says the right numbers, and is not broken by what it shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from chatmill.cli import view as module
from chatmill.core.ledger import Ledger
from chatmill.errors import ConfigError
from chatmill.look.dataset import open_for_looking
from chatmill.look.report.flow import HEIGHT, LINE, NAME_WIDTH, flow_of_ledger, flow_svg
from chatmill.look.report.page import make_report, write_report
from chatmill.look.safe_text import visible
from chatmill.look.stats import FATE_NAMES, dataset_stats
from tests.look.sets import HOSTILE, folder, tokenizer_once

APP = typer.Typer()
APP.command(help=module.__doc__)(module.command)
LAYOUTS = ["episodes", "rows", "hf", "kd"]
CHROMIUM = Path(os.environ.get("CHROMIUM", "/usr/bin/chromium"))
ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "main", "header", "footer", "nav", "section", "article", "div"),
    *("h1", "h2", "h3", "p", "span", "b", "i", "em", "a", "ul", "li", "table", "thead", "tbody", "tr", "th", "td"),
    *("details", "summary", "pre", "code", "svg", "g", "path", "rect", "line", "text", "tspan"),
}


@pytest.fixture(autouse=True)
def _tokenizers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatmill.render.trust.load_tokenizer", tokenizer_once)


class Page(HTMLParser):
    """Tags, attributes and text of a page; unbalanced tags are an error."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.titles: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@cache
def page(name: str) -> str:
    return make_report(open_for_looking(folder() / name), samples=200, version="1.2.3")


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_page_is_whole_and_loads_nothing(name: str) -> None:
    text = page(name)
    read = Page(text)
    assert {tag for tag, _ in read.tags} <= ALLOWED
    assert len(read.tags) > 100
    for tag, attributes in read.tags:
        assert not any(key.startswith("on") for key in attributes), (tag, attributes)
        assert not {"src", "srcset", "data", "action", "xlink:href"} & set(attributes), (tag, attributes)
        if "href" in attributes:
            assert (attributes["href"] or "").startswith("#")
    targets = {attributes["href"] for tag, attributes in read.tags if tag == "a"}
    assert targets == {f"#{attributes['id']}" for tag, attributes in read.tags if tag == "section"}
    assert not re.search(r"url\(|@import|https?://", text)
    assert "default-src 'none'" in text
    assert not set("\x00\x1b\x07\x9b\u202e\u2028") & set(text)


def test_hostile_content_is_shown_as_it_is() -> None:
    text = page("episodes")
    shown = "".join(Page(text).text)
    for name, content in HOSTILE.items():
        assert visible(content[:700]) in shown, name
    assert "29,300 more characters" in shown
    assert "<script" not in text
    assert "<img" not in text
    assert text.count("</html>") == 1


def test_the_numbers_are_those_of_the_dataset() -> None:
    stats = dataset_stats(open_for_looking(folder() / "rows"))
    shown = "".join(part.strip() for part in Page(page("rows")).text)
    assert stats.accounts is not None
    for fate, count in stats.accounts.fates().items():
        assert f"{FATE_NAMES[fate]}{count:,}" in shown
    for split in stats.splits:
        for one in (*split.roles, *split.turns[:13]):
            assert f"{one.name}{one.tokens:,}{one.trained:,}{one.share:.1%}" in shown
    assert "1 records were left out: unknown role" in shown
    assert "spells control tokens, and it stayed text: <|im_start|> (2), <|im_end|> (2)" in shown.replace(
        "<|im_end|> (2), <|im_start|> (2)", "<|im_start|> (2), <|im_end|> (2)"
    )
    assert "Made by Chatmill 1.2.3" in shown


def test_the_flow_conserves_tokens() -> None:
    ledger = open_for_looking(folder() / "rows").ledger
    assert ledger is not None
    flow = flow_of_ledger(ledger)
    fates = ledger.fates()
    assert flow.left.total() == flow.right.total() == sum(fates.values())
    for fate, count in fates.items():
        assert sum(tokens for (_, target), tokens in flow.right.items() if target == fate) == count
    for role in {role for _, role in flow.left}:
        into = sum(tokens for (_, target), tokens in flow.left.items() if target == role)
        assert into == sum(tokens for (source, _), tokens in flow.right.items() if source == role)


def ledger_of(tokens: dict[str, Any]) -> Ledger:
    return Ledger.from_json({"tokens": tokens, "records": {}, "notes": {}, "padding": 0})


def test_small_sources_flow_together_and_bars_have_their_height() -> None:
    tokens = {f"s{n}": {"user": {"rendered": n + 1, "context": n + 1}} for n in range(30)}
    flow = flow_of_ledger(ledger_of(tokens))
    assert len({source for source, _ in flow.left}) == 11
    assert "(20 more sources)" in {source for source, _ in flow.left}
    svg = flow_svg(flow, "a <label>")
    assert 'aria-label="a &lt;label&gt;"' in svg
    heights = [float(h) for h in re.findall(r'<rect class="node fate-context"[^>]* height="([\d.]+)"', svg)]
    assert heights == [HEIGHT]
    everything = flow_svg(flow_of_ledger(Ledger()), "nothing")
    assert everything.startswith("<svg")


@pytest.mark.parametrize(
    "name",
    [
        "a-very-long-source-name/with-parts-of-a-path/and-more-2026-11",
        "x" * 70,
        "two words",
        "twenty-six-letters-in-all-",
    ],
)
def test_names_of_sources_are_shown_whole(name: str) -> None:
    tokens = {name: {"user": {"rendered": 5, "context": 5}}, "other": {"user": {"rendered": 10**9, "context": 10**9}}}
    svg = flow_svg(flow_of_ledger(ledger_of(tokens)), "label")
    labels = [re.findall(r'<tspan class="name"[^>]*>([^<]*)', text) for text in re.findall(r"<text.*?</text>", svg)]
    lines = next(found for found in labels if "".join(found).replace(" ", "") == name.replace(" ", ""))
    assert all(len(line) <= NAME_WIDTH for line in lines)
    tops = {
        tuple(found): text for found, text in zip(labels, re.findall(r"<text.*?</text>", svg), strict=True) if found
    }
    heights = {}
    for found, text in tops.items():
        first = float(re.findall(r' y="([\d.]+)"', text)[0])
        heights[found] = (first, first + sum(float(step) for step in re.findall(r'dy="(\d+)"', text)))
    (own_top, own_bottom), (top, bottom) = heights[tuple(lines)], heights[("other",)]
    assert own_top - bottom >= LINE or top - own_bottom >= LINE


def test_sections_that_have_nothing_to_say_are_left_out() -> None:
    text = make_report(open_for_looking(folder() / "kd"), samples=0)
    made = {attributes["id"] for tag, attributes in Page(text).tags if tag == "section"}
    assert made == {"flow", "labels", "lengths", "findings", "provenance"}


def test_the_command_writes_the_page_whole(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    result = CliRunner().invoke(APP, [str(folder() / "episodes"), "--save", str(out), "-n", "2"])
    assert result.exit_code == 0, result.exception
    text = out.read_text(encoding="utf-8")
    assert result.output == f"{out}: {len(text.encode()):,} bytes\n"
    assert text.count('<article class="sample">') == 2
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    again = CliRunner().invoke(APP, [str(folder() / "kd"), "--save", str(out), "--json", "--split", "valid"])
    assert json.loads(again.output) == {"page": str(out), "bytes": out.stat().st_size}
    for wrong, words in ((tmp_path, "is a folder"), (tmp_path / "no" / "a.html", "no such folder")):
        with pytest.raises(ConfigError, match=words):
            write_report(wrong, "x")


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "report.html"
    write_report(out, "old")

    def full(path: Path, data: bytes) -> None:
        path.write_text("a n")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(out, "a new one")
    assert out.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.skipif(not CHROMIUM.exists() and os.environ.get("CI") != "true", reason=f"no browser at {CHROMIUM}")
def test_a_browser_reads_the_page_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(page("episodes"), encoding="utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run(
        [*command, "--dump-dom", (tmp_path / "report.html").as_uri()],
        capture_output=True, text=True, timeout=600, check=True, encoding="utf-8",
    ).stdout  # fmt: skip
    before, after = Page(page("episodes")), Page(shown)
    assert "episodes \u00b7 Chatmill report" in shown[: shown.index("</title>")], "a script in a record has run"
    added = ("html", "head", "body", "tbody")  # what a parser may add by itself
    assert [tag for tag, _ in after.tags if tag not in added] == [tag for tag, _ in before.tags if tag not in added]
    assert "".join(after.text).split() == "".join(before.text).split()


def test_the_same_dataset_gives_the_same_page() -> None:
    dataset: Any = open_for_looking(folder() / "rows")
    assert make_report(dataset, samples=200, version="1.2.3") == page("rows")
