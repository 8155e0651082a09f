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
from tests.view.sets import Running, Sets, running

TRAIN = "/splits/train"


def ask(url: str, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, str]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body.decode()


@pytest.mark.parametrize(
    ("status", "asked"),
    [
        (
            200,
            [
                ("/view.js",),
                ("/style.css",),
                ("/splits/train?token=x",),
                ("/splits/train/browse",),
                ("/splits/train/0",),
            ],
        ),
        (303, [("/",)]),
        (
            403,
            [(TRAIN, "GET", host) for host in ("evil.example", "127.0.0.1.evil.example", "a:80", "", "[::2]")],
        ),
        (200, [(TRAIN, "GET", host) for host in ("localhost", "127.0.0.1:1", "[::1]:7", "localhost:99")]),
        (404, [("/../server.py",), ("/%2e%2e/server.py",), ("//etc/passwd",), ("/base.html",), ("/__init__.py",)]),
        (405, [(TRAIN, method) for method in ("POST", "PUT", "DELETE", "OPTIONS")]),
    ],
)
def test_pages_are_given_to_names_of_this_machine_and_forbid_foreign_code(
    hostile: Running, status: int, asked: list[tuple[str, ...]]
) -> None:
    for path, *how in asked:
        method, *host = how or ["GET"]
        found, headers, body = ask(hostile.url, path, method, **({"Host": host[0]} if host else {}))
        assert found == status, (path, how)
        assert status == 200 or "import" not in body
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "script-src 'self';" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


def test_pages_name_no_other_host() -> None:
    served = [file for file in FOLDER.iterdir() if file.name != "notebook.html"]  # which has no style sheet
    files = [file for file in served if file.suffix in (".html", ".js", ".css")]
    assert len(files) > 8
    for file in files:
        for foreign in ("http://", "https://", "innerHTML", "insertAdjacentHTML", "eval(", " style=", "|safe"):
            assert foreign not in file.read_text(), (file, foreign)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_every_request_needs_the_token(sets: Sets, host: str) -> None:
    with running(sets.hostile, tokenizer="bytes", host=host, use_token=True) as found:
        token = found.url.split("token=")[1]
        assert len(token) >= 20
        local = f"http://127.0.0.1:{urlsplit(found.url).port}"
        wrong = ("/?token=", "/?token=wrong", f"/?token={token[:-1]}")
        for path in ("/", "/view.js", "/splits/train", "/splits/train/browse?q=a", "/nothing", *wrong):
            status, headers, body = ask(local, path)
            assert status == 403, path
            assert "token" in body
            assert "set-cookie" not in headers
        status, headers, _ = ask(local, f"/splits/train?token={token}&x=1")
        assert (status, headers["location"]) == (303, "/splits/train?x=1"), "the token leaves the address"
        cookie = headers["set-cookie"].split(";")[0]
        assert "HttpOnly" in headers["set-cookie"]
        assert "SameSite=Strict" in headers["set-cookie"]
        assert ask(local, "/splits/train", Cookie=cookie)[0] == 200
        assert ask(local, "/splits/train", Cookie=cookie[:-1])[0] == 403


def test_loopback_and_ports(hostile: Running) -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.com")] == [False] * 4
    with pytest.raises(ConfigError, match="--no-token is for this machine alone"):
        ViewServer(hostile.viewer, host="0.0.0.0", port=0, use_token=False)
    with pytest.raises(ConfigError, match="--port"):
        ViewServer(hostile.viewer, port=urlsplit(hostile.url).port)
    with ViewServer(hostile.viewer) as one, ViewServer(hostile.viewer) as other:
        assert one.url != other.url


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("splits/train/99", 400, "there is no episode 99 in train: it has 11"),
        ("splits/train/0?first=9999999", 400, "token 9,999,999 of episode 0"),
        ("splits/train/0?first=x", 400, "Expected `int | null`, got `str` - at `$.first`"),
        ("splits/train/0?policy=nothing", 404, "unknown policy 'nothing'"),
        ("splits/train/browse?sort=odd", 400, "Invalid enum value 'odd' - at `$.sort`"),
        ("splits/train/browse?source=odd", 404, "unknown source"),
        ("splits/train/browse?role=pope", 404, "unknown role"),
        ("splits/train/browse?min_share=200", 400, "<= 100.0 - at `$.min_share`"),
        ("splits/train/browse?min_share=nan", 400, ">= 0.0 - at `$.min_share`"),
        ("splits/train/browse?q=%20", 400, "nothing to search for"),
        ("splits/<img>/<img src=x>?colour=<img>", 404, "unknown split '<img>'"),
        ("c/train", 404, "unknown page 'c'"),
        ("splits/train/odd", 404, "unknown page 'odd'"),
    ],
)
def test_a_wrong_question_is_answered_in_words(hostile: Running, path: str, status: int, words: str) -> None:
    found, _, body = ask(hostile.url, "/" + path.replace(" ", "%20"))
    assert found == status
    assert words in html.unescape(body)
    assert "<img" not in body


def test_a_page_that_fails_says_so(hostile: Running, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("disk <on> fire")

    monkeypatch.setattr(pages, "view_item", broken)
    status, headers, body = ask(hostile.url, "/splits/train/0")
    assert (status, headers["content-type"]) == (500, "text/html; charset=utf-8")
    assert "RuntimeError: disk &lt;on&gt; fire" in body
    assert "Back to the overview" in body
    monkeypatch.setattr(pages, "_brief", broken)
    status, _, body = ask(hostile.url, "/splits/train/browse?q=answer")
    assert status == 200, "it had begun"
    assert body.endswith("the terminal that runs chatmill view.</p>")
    assert capfd.readouterr().err.count("RuntimeError: disk <on> fire") == 2
    assert ask(hostile.url, "/splits/train")[0] == 200


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
        connection.request("GET", "/splits/train/browse?q=aab")
        answer = connection.getresponse()
        assert b"<!doctype html>" in answer.readline()
        answer.close()
        connection.close()
        assert ended.wait(300)
        assert len(searched) < 10


def test_pages_wait_for_what_is_counted(sets: Sets, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr("chatmill.look.viewer.opened.count_tokens", lambda *_, **__: go_on.wait(60))
    with running(sets.hostile, tokenizer="bytes") as found:
        waiting = ask(found.url, "/splits/train")[2]
        assert 'http-equiv="refresh"' in waiting
        assert "Reading the labels once" in waiting
        assert ask(found.url, "/splits/train/browse")[0] == 200
        go_on.set()
        found.viewer.first.wait()
        assert 'http-equiv="refresh"' not in ask(found.url, "/splits/train")[2]


def test_the_answers_of_a_pair_are_side_by_side(tmp_path: Path) -> None:
    pairs = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "which?", "chosen": "this one", "rejected": "that one"}])
    run_build(plain_recipe(pairs, preferences="pairs"), tmp_path / "built", workers=0)
    with running(tmp_path / "built") as found:
        for number, side, other in ((0, "chosen", "that one"), (1, "rejected", "this one")):
            page = ask(found.url, f"/splits/train/{number}")[2]
            assert f'id="side">{side}<' in page
            assert other in page.partition('id="sides"')[2]


def test_the_command_serves_until_it_is_interrupted(sets: Sets) -> None:
    code = "import typer; from chatmill.cli.view import command; typer.run(command)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(sets.hostile), "--tokenizer", "bytes", "--json", "--port", "0"],
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
        cookie = ask(url, f"/?{urlsplit(url).query}")[1]["set-cookie"].split(";")[0]
        assert "</b> of 11" in ask(url, "/splits/train/browse", Cookie=cookie)[2]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.communicate()
