"""The server without a browser: who is let in, what headers say, how searches stream and stop."""

from __future__ import annotations

import html
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from chatmill.compiler.run import run_build
from chatmill.errors import ConfigError
from chatmill.look.pages import FOLDER
from chatmill.look.viewer import pages
from chatmill.look.viewer.search import search
from chatmill.look.viewer.server import ViewServer, is_loopback
from chatmill.store.episode_writer import EpisodeWriter
from tests.compiler.builds import plain_recipe, write_jsonl
from tests.view.sets import HOSTILE, Running, running, write_hostile


def ask(url: str, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("small")
    write_hostile(folder)
    with running(folder, tokenizer="bytes") as found:
        yield found


@pytest.mark.parametrize(
    "path", ["/", "/view.js", "/style.css", "/a/train", "/a/train/browse", "/a/train/0", "/nothing"]
)
def test_every_answer_forbids_foreign_code(small: Running, path: str) -> None:
    status, headers, _ = ask(small.url, path)
    assert status == {"/": 303, "/nothing": 404}.get(path, 200)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"


def test_pages_name_no_other_host() -> None:
    served = [file for file in FOLDER.iterdir() if file.name != "notebook.html"]  # which has no style sheet
    files = [file for file in served if file.suffix in (".html", ".js", ".css")]
    assert len(files) > 8
    for file in files:
        text = file.read_text()
        for foreign in ("http://", "https://", "innerHTML", "insertAdjacentHTML", "eval(", " style=", "|safe"):
            assert foreign not in text, (file, foreign)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]"])
def test_only_names_of_this_machine_are_answered(small: Running, host: str) -> None:
    assert ask(small.url, "/a/train", Host=host)[0] == 403
    for name in ("localhost", "127.0.0.1:1", "[::1]:7", "localhost:99"):
        assert ask(small.url, "/a/train", Host=name)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_the_viewer_only_shows(small: Running, method: str) -> None:
    assert ask(small.url, "/a/train", method)[0] == 405


@pytest.mark.parametrize("path", ["/../server.py", "/%2e%2e/server.py", "//etc/passwd", "/base.html", "/__init__.py"])
def test_no_other_files_are_served(small: Running, path: str) -> None:
    status, _, body = ask(small.url, path)
    assert status == 404
    assert b"import" not in body


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_every_request_needs_the_token(tmp_path: Path, host: str) -> None:
    write_hostile(tmp_path)
    with running(tmp_path, tokenizer="bytes", host=host, use_token=True) as found:
        token = found.url.split("token=")[1]
        assert len(token) >= 20
        local = f"http://127.0.0.1:{urlsplit(found.url).port}"
        wrong = ("/?token=", "/?token=wrong", f"/?token={token[:-1]}")
        for path in ("/", "/view.js", "/a/train", "/a/train/browse?q=a", "/nothing", *wrong):
            status, headers, body = ask(local, path)
            assert status == 403, path
            assert b"token" in body
            assert "set-cookie" not in headers
        status, headers, _ = ask(local, f"/a/train?token={token}&x=1")
        assert (status, headers["location"]) == (303, "/a/train?x=1"), "the token leaves the address"
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert ask(local, "/a/train", Cookie=cookie.split(";")[0])[0] == 200
        assert ask(local, "/a/train", Cookie=cookie.split(";")[0][:-1])[0] == 403


def test_the_token_can_be_left_out_on_this_machine_alone(small: Running) -> None:
    with pytest.raises(ConfigError, match="--no-token is for this machine alone"):
        ViewServer(small.viewer, host="0.0.0.0", port=0, use_token=False)


def test_loopback_and_ports(small: Running) -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.com")] == [False] * 4
    with pytest.raises(ConfigError, match="--port"):
        ViewServer(small.viewer, port=urlsplit(small.url).port)
    with ViewServer(small.viewer) as one, ViewServer(small.viewer) as other:
        assert one.url != other.url


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("a/train/99", 400, "there is no episode 99 in train: it has 10"),
        ("a/train/0?first=9999999", 400, "token 9,999,999 of episode 0"),
        ("a/train/0?first=x", 400, "Expected `int | null`, got `str` - at `$.first`"),
        ("a/train/0?policy=nothing", 404, "unknown policy 'nothing'"),
        ("a/train/browse?sort=odd", 400, "Invalid enum value 'odd' - at `$.sort`"),
        ("a/train/browse?source=odd", 404, "unknown source"),
        ("a/train/browse?role=pope", 404, "unknown role"),
        ("a/train/browse?min_share=200", 400, "<= 100.0 - at `$.min_share`"),
        ("a/train/browse?min_share=nan", 400, ">= 0.0 - at `$.min_share`"),
        ("a/train/browse?q=%20", 400, "nothing to search for"),
        ("a/nowhere/browse", 404, "unknown split 'nowhere'"),
        ("c/train", 404, "unknown dataset 'c'"),
        ("a/train/odd", 404, "unknown page 'odd'"),
        ("compare", 400, "only one dataset is open"),
    ],
)
def test_a_wrong_question_is_answered_in_words(small: Running, path: str, status: int, words: str) -> None:
    small.viewer.first.wait()
    found, _, body = ask(small.url, f"/{path}")
    assert found == status
    assert words in html.unescape(body.decode())


def test_a_page_that_fails_says_so(small: Running, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("disk <on> fire")

    monkeypatch.setattr(pages, "view_item", broken)
    status, headers, body = ask(small.url, "/a/train/0")
    assert (status, headers["content-type"]) == (500, "text/html; charset=utf-8")
    assert "RuntimeError: disk &lt;on&gt; fire" in body.decode()
    assert "Back to the overview" in body.decode()
    monkeypatch.setattr(pages, "_brief", broken)
    status, _, body = ask(small.url, "/a/train/browse?q=answer")
    assert status == 200, "it had begun"
    assert body.decode().endswith("the terminal that runs chatmill view.</p>")
    assert capfd.readouterr().err.count("RuntimeError: disk <on> fire") == 2
    assert ask(small.url, "/a/train")[0] == 200


def test_a_search_streams_its_hits_and_ends_with_a_sentence(small: Running) -> None:
    def rows(asked: str) -> tuple[list[int], str]:
        text = ask(small.url, f"/a/train/browse?{asked}")[2].decode()
        return list(map(int, re.findall(r'data-number="(\d+)"', text))), text

    found, text = rows("q=ANSWER")
    assert found == list(range(len(HOSTILE) + 1))
    assert "9 hits in 10 episodes." in text
    assert 0 < len(rows("q=answer&max_tokens=100")[0]) < 9


def test_a_search_stops_when_the_page_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten million tokens, each batch of which takes a while: closing the connection ends the search early."""
    searched: list[int] = []
    ended = threading.Event()

    def slow(*given: Any) -> Iterator[Any]:
        try:
            for found in search(*given):
                searched.append(1)
                time.sleep(0.05)
                yield found
        finally:
            ended.set()

    monkeypatch.setattr("chatmill.look.viewer.pages.search", slow)
    with EpisodeWriter(tmp_path, "train") as writer:
        for _ in range(1000):
            writer.append(np.full(10_000, 97, dtype=np.uint32))
    with running(tmp_path, tokenizer="bytes") as found:
        parts = urlsplit(found.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
        connection.request("GET", "/a/train/browse?q=aab")
        answer = connection.getresponse()
        assert b"<!doctype html>" in answer.readline()
        answer.close()
        connection.close()
        assert ended.wait(300)
        assert len(searched) < 10


def test_plain_pages_wait_for_labels_that_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr("chatmill.look.viewer.opened.count_tokens", lambda *_, **__: go_on.wait(60))
    write_hostile(tmp_path)
    with running(tmp_path, tokenizer="bytes") as found:
        waiting = ask(found.url, "/a/train")[2].decode()
        assert 'http-equiv="refresh"' in waiting
        assert "Reading the labels once" in waiting
        assert ask(found.url, "/a/train/browse")[0] == 200
        go_on.set()
        found.viewer.first.wait()
        assert 'http-equiv="refresh"' not in ask(found.url, "/a/train")[2].decode()


def test_the_answers_of_a_pair_are_side_by_side(tmp_path: Path) -> None:
    pairs = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "which?", "chosen": "this one", "rejected": "that one"}])
    run_build(plain_recipe(pairs, preferences="pairs"), tmp_path / "built", workers=0)
    with running(tmp_path / "built") as found:
        for number, side, other in ((0, "chosen", "that one"), (1, "rejected", "this one")):
            page = ask(found.url, f"/a/train/{number}")[2].decode()
            assert f'id="side">{side}<' in page
            assert other in page.partition('id="sides"')[2]


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    write_hostile(tmp_path)
    code = "import typer; from chatmill.cli.view import command; typer.run(command)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), "--tokenizer", "bytes", "--json", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{24}", url), "a token by default"
        assert ask(url, "/")[0] == 403
        status, headers, _ = ask(url, f"/?{urlsplit(url).query}")
        assert status == 303
        cookie = headers["set-cookie"].split(";")[0]
        assert b"</b> of 10" in ask(url, "/a/train/browse", Cookie=cookie)[2]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.communicate()
