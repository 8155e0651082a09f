"""The server without a browser: who is let in, what headers say, how searches stream and stop."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
import pytest

from chatmill.errors import ConfigError
from chatmill.look.viewer.serve import bind, is_loopback
from chatmill.store.episode_writer import EpisodeWriter
from tests.cli.run import forked
from tests.forked import Forked
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
    "path", ["/", "/static/app.js", "/static/base.css", "/api/about", "/api/a/train/items", "/nothing"]
)
def test_every_answer_forbids_foreign_code(small: Running, path: str) -> None:
    status, headers, body = ask(small.url, path)
    assert status == (404 if path == "/nothing" else 200)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    if path.startswith("/api"):
        assert headers["content-type"] == "application/json"
        assert body.isascii()


def test_pages_name_no_other_host() -> None:
    from chatmill.look.viewer.app import STATIC

    files = list(STATIC.iterdir())
    assert len(files) > 10
    for file in files:
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, file
        assert "https://" not in text, file
        assert "innerHTML" not in text, file
        assert "insertAdjacentHTML" not in text, file
        assert "eval(" not in text, file


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]"])
def test_only_names_of_this_machine_are_answered(small: Running, host: str) -> None:
    assert ask(small.url, "/api/about", Host=host)[0] == 403
    for name in ("localhost", "127.0.0.1:1", "[::1]:7", "localhost:99"):
        assert ask(small.url, "/api/about", Host=name)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_the_viewer_only_shows(small: Running, method: str) -> None:
    assert ask(small.url, "/api/about", method)[0] == 405


@pytest.mark.parametrize(
    "path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd", "/static/%2e%2e%2f%2e%2e%2fitems.py"]
)
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
        for path in ("/", "/static/app.js", "/api/about", "/api/a/train/search?q=a", "/nothing", *wrong):
            status, headers, body = ask(local, path)
            assert status == 403, path
            assert b"token" in body
            assert "set-cookie" not in headers
        status, headers, _ = ask(local, f"/?token={token}")
        assert status == 200
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert ask(local, "/api/about", Cookie=cookie.split(";")[0])[0] == 200
        assert ask(local, "/api/about", Cookie=cookie.split(";")[0][:-1])[0] == 403


def test_the_token_can_be_left_out_on_this_machine_alone(tmp_path: Path) -> None:
    result = forked("view", tmp_path, "--tokenizer", "bytes", "--no-token", "--host", "0.0.0.0", "--port", "0")
    assert result.returncode == 2
    write_hostile(tmp_path)
    result = forked("view", tmp_path, "--tokenizer", "bytes", "--no-token", "--host", "0.0.0.0", "--port", "0")
    assert result.returncode == 2
    assert "--no-token is for this machine alone" in result.stderr
    process = Forked("chatmill", "view", tmp_path, "--tokenizer", "bytes", "--no-token", "--json", "--port", "0")
    try:
        while not process.heard().endswith("\n"):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        url = json.loads(process.heard())["url"]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
        assert ask(url, "/api/about")[0] == 200
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /api/about HT",
        b"GET /api/about HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ",
        b"GET /nothing HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\nab",
    ],
)
def test_a_request_that_never_ends_is_cut_off(tmp_path: Path, sent: bytes) -> None:
    write_hostile(tmp_path)
    with running(tmp_path, tokenizer="bytes", slow_seconds=0.3) as found:
        found.server.config.timeout_keep_alive = 3600
        parts = urlsplit(found.url)
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=300) as slow:
            slow.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                while slow.recv(4096):  # an answer may come; the end must
                    pass


def only_connection(found: Running) -> Any:
    """The one connection that the server has, once it has it."""
    deadline = time.monotonic() + 300
    while len(found.server.server_state.connections) != 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return next(iter(found.server.server_state.connections))


def test_the_second_request_of_a_connection_has_its_deadline_too(tmp_path: Path) -> None:
    write_hostile(tmp_path)
    with running(tmp_path, tokenizer="bytes", slow_seconds=3600) as found:
        found.server.config.timeout_keep_alive = 3600
        parts = urlsplit(found.url)
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=300) as slow:
            slow.sendall(b"HEAD /api/about HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert slow.recv(4096).startswith(b"HTTP/1.1 ")
            only_connection(found).slow_seconds = 0.1
            slow.sendall(b"GET /api/about HT")
            with contextlib.suppress(ConnectionResetError):
                while slow.recv(4096):
                    pass


def test_a_client_that_takes_no_answer_is_cut_off(tmp_path: Path) -> None:
    write_hostile(tmp_path)
    with running(tmp_path, tokenizer="bytes", slow_seconds=3600) as found:
        parts = urlsplit(found.url)
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((parts.hostname or "", parts.port or 0))
        connections = found.server.server_state.connections
        only_connection(found).slow_seconds = 0.1
        try:
            ask_for = b"GET /static/app.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            deadline = time.monotonic() + 300
            with contextlib.suppress(ConnectionError, BlockingIOError):
                slow.setblocking(False)
                while time.monotonic() < deadline:  # many answers, none of which is taken
                    slow.send(ask_for)
            while connections and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not connections
        finally:
            slow.close()


def test_a_client_has_no_deadline_while_its_answer_is_made(tmp_path: Path) -> None:
    write_hostile(tmp_path)
    asked, go_on = threading.Event(), threading.Event()
    with running(tmp_path, tokenizer="bytes", slow_seconds=3600) as found:
        original = found.viewer.opened

        def blocked(request: Any) -> Any:
            asked.set()
            assert go_on.wait(60)
            return original(request)

        found.viewer.opened = blocked  # type: ignore[method-assign]
        answers: list[int] = []
        client = threading.Thread(target=lambda: answers.append(ask(found.url, "/api/a/train/items")[0]))
        client.start()
        assert asked.wait(60)
        protocol = only_connection(found)
        assert (protocol._request, protocol._answer) == (None, None)
        go_on.set()
        client.join(60)
        assert answers == [200]


def test_loopback_and_ports() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.com")] == [False] * 4
    with bind("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="--port"):
        bind("127.0.0.1", taken.getsockname()[1])
    with bind("127.0.0.1", None) as one, bind("127.0.0.1", None) as other:
        assert one.getsockname() != other.getsockname()


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("a/train/item/99", 400, "there is no episode 99 in train: it has 10"),
        ("a/train/item/0?first=9999999", 400, "token 9,999,999 of episode 0"),
        ("a/train/item/0?count=0", 400, "a window has 1 to"),
        ("a/train/item/0?count=x", 400, "not a whole number"),
        ("a/train/item/0?policy=nothing", 404, "unknown policy 'nothing'"),
        ("a/train/items?sort=odd", 404, "unknown order"),
        ("a/train/items?source=odd", 404, "unknown source"),
        ("a/train/items?role=pope", 404, "unknown role"),
        ("a/train/items?min_share=200", 400, "0 to 100"),
        ("a/train/items?min_share=nan", 400, "0 to 100"),
        ("a/train/items?count=9999", 400, "a page has 1 to"),
        ("a/nowhere/items", 404, "unknown split 'nowhere'"),
        ("c/train/items", 404, "unknown dataset 'c'"),
        ("compare", 404, "only one dataset is open"),
    ],
)
def test_a_wrong_question_is_answered_in_words(small: Running, path: str, status: int, words: str) -> None:
    small.viewer.datasets["a"].split("train").scan.wait()
    found, _, body = ask(small.url, f"/api/{path}")
    assert found == status
    assert words in json.loads(body)["error"]


def lines(url: str, words: str, more: str = "") -> list[dict[str, Any]]:
    status, headers, body = ask(url, f"/api/a/train/search?q={quote(words)}{more}")
    assert status == 200
    assert headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in body.splitlines()]


def test_a_search_streams_hits_progress_and_an_end(small: Running) -> None:
    found = lines(small.url, "ANSWER")
    assert [line["hit"]["number"] for line in found if "hit" in line] == list(range(len(HOSTILE) + 1))
    assert found[0] == {"items": 0, "of": 10, "hits": 0}
    assert found[-1] == {"done": True, "items": 10, "of": 10, "hits": 9, "stopped": False}
    assert [line for line in lines(small.url, "ANSWER", "&case=1") if "hit" in line] == []
    only = lines(small.url, "answer", "&max_tokens=100")
    assert 0 < len([line for line in only if "hit" in line]) < 9
    assert lines(small.url, "  ")[-1]["error"].startswith("there is nothing to search for")


def test_a_search_stops_when_the_page_goes_away(tmp_path: Path) -> None:
    """Ten million tokens, each batch of which takes a while: closing the connection ends the search early."""
    rows, length = 1000, 10_000
    with EpisodeWriter(tmp_path, "train") as writer:
        for _ in range(rows // 100):
            ids = np.full(100 * length, 97, dtype=np.uint32)
            writer.append_batch(ids, np.arange(0, 100 * length + 1, length))
    with running(tmp_path, tokenizer="bytes") as found:
        parts = urlsplit(found.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
        connection.request("GET", "/api/a/train/search?q=aab")
        answer = connection.getresponse()
        assert json.loads(answer.readline())["items"] == 0
        assert found.viewer.searches == 1
        connection.close()
        answer.close()
        deadline = time.monotonic() + 300
        while found.viewer.searches and time.monotonic() < deadline:
            time.sleep(0.02)
        assert found.viewer.searches == 0
        assert found.viewer.last_searched < rows


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
        assert status == 200
        cookie = headers["set-cookie"].split(";")[0]
        assert json.loads(ask(url, "/api/a/train/items", Cookie=cookie)[2])["matched"] == 10
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.communicate()
