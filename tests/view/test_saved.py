"""`chatmill view --save`: one page that stands by itself, says the right numbers, and survives what it shows."""

from __future__ import annotations

import json
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

from chatmill.core.ledger import FATE_NAMES
from chatmill.errors import ConfigError
from chatmill.look.dataset import open_for_looking
from chatmill.look.pages import compact, percent, write_page
from chatmill.look.safe_text import visible
from chatmill.look.stats import dataset_stats
from chatmill.look.viewer.overview import saved_page
from tests.cli.run import invoke
from tests.look.sets import HOSTILE, folder, tokenizer_once

ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "main", "footer", "section", "article", "div", "mark", "small"),
    *("h1", "h2", "h3", "p", "span", "b", "i", "em", "a", "ul", "li", "table", "thead", "tbody", "tr", "th", "td"),
    *("details", "summary", "pre", "code", "svg", "rect", "line", "text", "dl", "dt", "dd"),
}
LOADS = {"src", "srcset", "data", "action", "xlink:href", "style", "href"}


@pytest.fixture(autouse=True)
def _tokenizers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatmill.look.decoder.load_tokenizer", tokenizer_once)


class Page(HTMLParser):
    """Tags with their attributes, and text of a page; unbalanced tags are an error."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, set[str]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # A link to a part of the page itself loads nothing.
        self.tags.append((tag, {name for name, value in attrs if name != "href" or not (value or "").startswith("#")}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@cache
def page(name: str) -> str:
    return saved_page(open_for_looking(folder() / name), items=200, version="1.2.3")


@pytest.mark.parametrize("name", ["episodes", "rows", "hf", "kd"])
def test_the_page_is_whole_and_loads_nothing(name: str) -> None:
    text = page(name)
    tags = Page(text).tags
    assert {tag for tag, _ in tags} <= ALLOWED
    assert len(tags) > 100
    assert not [tag for tag, names in tags if names & LOADS or any(name.startswith("on") for name in names)]
    assert not re.search(r"@import|https?://", text)
    assert "default-src 'none'" in text
    assert not set("\x00\x1b\x07\x9b\u202e\u2028") & set(text)


def test_hostile_content_is_shown_as_it_is() -> None:
    text = page("episodes")
    shown = "".join(Page(text).text)
    for name, content in HOSTILE.items():
        assert visible(content[:1500]) in shown, name
    assert "more characters" in shown
    assert "<script" not in text
    assert "<img" not in text
    assert text.count("</html>") == 1


def test_the_numbers_are_those_of_the_dataset() -> None:
    stats = dataset_stats(open_for_looking(folder() / "rows"))
    shown = "".join(part.strip() for part in Page(page("rows")).text)
    assert stats.accounts is not None
    for fate, count in stats.accounts.fates().items():
        assert not count or f"{FATE_NAMES[fate]}{count:,}" in shown
    for split in stats.splits:
        for one in (*split.roles, *split.turns[:9], *split.parts):
            assert f"{one.name}{one.tokens:,}{one.trained:,}{percent(one.trained, one.tokens)}" in shown
    assert "1records left out:unknown_role" in shown
    assert "Made by Chatmill 1.2.3" in shown
    assert [compact(n) for n in (0, 9999, 10_000, 20_872, 4_100_000)] == ["0", "9,999", "10K", "20.9K", "4.1M"]
    shares = [percent(*share) for share in ((1, 10_000), (9_999, 10_000), (0, 5), (1, 0))]
    assert shares == ["<0.1%", ">99.9%", "0.0%", "–"]


def test_the_command_writes_the_page_whole(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    result = invoke("view", folder() / "episodes", "--save", out, "-n", 2)
    assert result.exit_code == 0, result.exception
    text = out.read_text(encoding="utf-8")
    assert result.output == f"{out}: {len(text.encode()):,} bytes\n"
    assert text.count('<section class="item">') == 2
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    again = invoke("view", folder() / "kd", "--save", out, "--json", "--split", "valid")
    assert json.loads(again.output) == {"page": str(out), "bytes": out.stat().st_size}
    for wrong, words in ((tmp_path, "is a folder"), (tmp_path / "no" / "a.html", "no such folder")):
        with pytest.raises(ConfigError, match=words):
            write_page(wrong, "x")
