"""Requests that no browser of ours would make: foreign cookies, broken addresses, bytes drawn by lot."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.view.sets import Running, Sets, running

FOREIGN = [
    *("a/b=c", "a,b=c", 'a={"x":1}', "a[b]=c", "a", "=", ";", ";;", "é=ü", 'a="b;c"', "a=b\x01c", "\xff" * 9, "a = b"),
    *("expires=Thu, 01 Jan 1970 00:00:00 GMT", "path", "$Version=1", "HttpOnly", 'open="', "a\tb=c"),
]
"""Cookies that other programs of this machine may have set for all of its ports."""
ADDRESSES = ["http://[::1", "http://[", "//[/a", "http://[v1.a]]/", "http://a[b]/", "http://\u2100.example/"]
"""Absolute addresses that Python refuses to take apart."""


@pytest.fixture(scope="module")
def viewer(sets: Sets) -> Iterator[Running]:
    with running(sets.hostile, tokenizer="bytes", use_token=True) as found:
        yield found


def raw(viewer: Running, request: bytes) -> bytes:
    """The answer to some bytes, up to the end of the connection."""
    with socket.create_connection(("127.0.0.1", urlsplit(viewer.url).port or 0), timeout=300) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def status(viewer: Running, address: str, *headers: str) -> int:
    request = "".join(f"{line}\r\n" for line in (f"GET {address} HTTP/1.1", "Host: 127.0.0.1", *headers, ""))
    answer = raw(viewer, request.encode())
    assert answer.startswith(b"HTTP/1.0 "), (address, headers, answer[:200])
    return int(answer.split()[1])


def own_cookie(viewer: Running) -> tuple[str, str]:
    """The name of the cookie that the viewer sets, and its value."""
    port = urlsplit(viewer.url).port
    return f"chatmill_view_{port}", viewer.url.split("token=")[1]


@pytest.mark.parametrize("foreign", FOREIGN)
def test_cookies_of_other_programs_lock_nobody_out(
    viewer: Running, capfd: pytest.CaptureFixture[str], foreign: str
) -> None:
    name, token = own_cookie(viewer)
    ours = f"{name}={token}"
    for header in (f"{foreign}; {ours}", f"{ours}; {foreign}", f"{foreign};{ours};{foreign}"):
        assert status(viewer, "/splits/train", f"Cookie: {header}") == 200, header
    assert status(viewer, "/splits/train", f"Cookie: {foreign}", f"Cookie: {ours}") == 200, "two headers"
    assert status(viewer, "/splits/train", f"Cookie: {foreign}") == 403
    assert capfd.readouterr().err == ""


def test_a_cookie_of_our_name_with_another_value_locks_nobody_out_and_lets_nobody_in(viewer: Running) -> None:
    name, token = own_cookie(viewer)
    for header in (f"{name}=wrong; {name}={token}", f"{name}={token}; {name}=wrong", f"{name}; {name}={token}"):
        assert status(viewer, "/splits/train", f"Cookie: {header}") == 200, header
    for header in (f"{name}=wrong", f"{name}=", name, f"{name}x={token}", f"x{name}={token}", f"x={token}", token):
        assert status(viewer, "/splits/train", f"Cookie: {header}") == 403, header


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_broken_address_is_answered_in_words(
    viewer: Running, capfd: pytest.CaptureFixture[str], address: str
) -> None:
    answer = raw(viewer, f"GET {address} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    assert answer.startswith((b"HTTP/1.0 400 ", b"HTTP/1.0 403 ")), answer
    assert b"\r\n\r\n" in answer
    assert not answer.endswith(b"\r\n\r\n"), "it says something"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "path",
    ["//evil.example/", "///evil.example", "/\\evil.example/", "\\\\evil.example", "/\\/evil.example", "evil.example"],
)
def test_no_redirect_names_another_host(viewer: Running, path: str) -> None:
    _, token = own_cookie(viewer)
    for address in (f"http://x{path}?token={token}", f"{path}?token={token}", f"http:{path}?token={token}&x=1"):
        answer = raw(viewer, f"GET {address} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        places = [line.split(b": ", 1)[1] for line in answer.split(b"\r\n") if line.lower().startswith(b"location: ")]
        for place in places:
            assert place.startswith(b"/"), address
            assert place[1:2] not in (b"/", b"\\"), address


def test_every_request_is_answered_whatever_its_bytes_are(viewer: Running, capfd: pytest.CaptureFixture[str]) -> None:
    """Drawn bytes in the address, in the names and in the values of headers; with the token and without."""
    draw = random.Random(20)
    name, token = own_cookie(viewer)
    pieces = [
        b"/",
        b"//",
        b"[",
        b"]",
        b"?",
        b"#",
        b"%",
        b"%00",
        b"%ff",
        b"&",
        b"=",
        b";",
        b"a",
        b"train",
        b"\xff",
        b"\\",
        b":",
        b"@",
    ]
    for number in range(300):
        drawn = b"".join(draw.choices(pieces, k=draw.randrange(1, 9)))
        secret = f"token={token}".encode() if number % 2 else b""
        address = draw.choice([b"/" + drawn, b"http://" + drawn, drawn]) + draw.choice([b"?", b"&", b""]) + secret
        cookie = f"{name}={token}".encode() if number % 3 else b""
        lines = [
            b"GET " + address + b" HTTP/1.1",
            b"Host: " + draw.choice([drawn, b"127.0.0.1"]),
            b"Cookie: " + drawn + b"; " + cookie,
        ]
        answer = raw(viewer, b"\r\n".join([*lines, b"", b""]))
        assert answer.startswith(b"HTTP/1.0 "), (lines, answer[:200])
        assert answer.split()[1] in (b"200", b"303", b"400", b"403", b"404"), (lines, answer[:200])
    assert capfd.readouterr().err == ""
