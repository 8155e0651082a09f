"""The viewer's server: pages rendered here, GET alone, a token for every request; data never becomes code."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import random
import secrets
import socket
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import numpy as np
from markupsafe import escape

from chatmill.errors import ChatmillError, ConfigError, UnknownNameError, member
from chatmill.label.policy import Policy
from chatmill.look.item_view import ItemView, opening_text, view_item
from chatmill.look.items import Item
from chatmill.look.pages import FOLDER, environment
from chatmill.look.safe_text import visible
from chatmill.look.viewer.comparison import Compare, Comparison
from chatmill.look.viewer.opened import Filter, Opened, OpenedSplit, Sort
from chatmill.look.viewer.overview import overview_values
from chatmill.look.viewer.row_map import row_map
from chatmill.look.viewer.search import Hit, search
from chatmill.look.viewer.thumbnails import thumbnail

FIRST_PORT, PORTS = 8420, 20
"""Ports that are tried when none is asked for."""
SLOW_SECONDS = 30.0
"""For a client to send the next piece of a request, or to take that of an answer."""
PAGE, WINDOW, MOST_HITS = 50, 2048, 500
"""Items of a list, tokens of an item, and hits that are shown at once."""
COOKIE = "chatmill_view"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
FILES = {"/style.css": "text/css", "/view.js": "text/javascript", "/icon.svg": "image/svg+xml"}
SORTS = (
    ("", "as stored"),
    (Sort.LONGEST, "longest first"),
    (Sort.SHORTEST, "shortest first"),
    (Sort.MOST_TRAINED, "most trained first"),
    (Sort.LEAST_TRAINED, "least trained first"),
)
Query = Mapping[str, str]


class Answer(NamedTuple):
    """What a request gets."""

    body: Iterable[str] | bytes = b""
    status: int = 200
    kind: str = "text/html; charset=utf-8"
    location: str = ""
    """Where to go instead."""


class Here:
    """The address of the item that is shown, with what is kept while one looks around."""

    def __init__(self, opened: OpenedSplit, number: int, query: Query) -> None:
        self._opened, self._number = opened, number
        self.path = opened.url(number)
        self.kept = [(name, query[name]) for name in ("colour", "policy") if query.get(name)]

    def __call__(self, **changes: Any) -> str:
        """The same item with other parameters."""
        return self._opened.url(self._number, **{**dict(self.kept), **changes})

    def picture(self, number: int) -> str:
        """A small copy of a picture of the item."""
        return f"{self.path}/picture?n={number}"

    def item(self, number: int) -> str:
        """Another item, shown in the same way."""
        return self._opened.url(number, **dict(self.kept))


class Viewer:
    """The datasets that are open, and the answers to questions about them."""

    def __init__(self, datasets: Mapping[str, Opened], *, compare: Compare | None = None) -> None:
        """`datasets` have the keys `a` and, with a second one, `b`."""
        self.datasets = datasets
        self.first = next(iter(datasets["a"].values()))
        self.looks = {key: next(iter(splits.values())).look for key, splits in datasets.items()}
        self.comparison = Comparison(compare, self.looks) if compare is not None else None

    def answer(self, path: str, query: Query) -> Answer:
        """The page of an address."""
        if path in FILES:
            name = path[1:]
            body = (FOLDER / name).read_bytes()
            return Answer(body, kind=f"{FILES[path]}; charset=utf-8")
        try:
            return self._page(path, query)
        except UnknownNameError as error:
            return self._error(404, "Not found", str(error))
        except ChatmillError as error:
            return self._error(400, "Cannot be shown", str(error))
        except Exception as error:
            traceback.print_exc()
            return self._error(500, "Failed", _failure(error))

    def _error(self, status: int, title: str, problem: str) -> Answer:
        return self._render("error.html", title=title, problem=problem)._replace(status=status)

    def _page(self, path: str, query: Query) -> Answer:
        parts = [unquote(part) for part in path.split("/") if part]
        if not parts:
            return Answer(status=303, location=self.first.url())
        if parts[0] == "compare":
            if self.comparison is None:
                raise ConfigError("only one dataset is open: chatmill view A B compares two")
            values = self.comparison.values(_number(query, "n", 0))
            return self._render("compare.html", page="compare", **values)
        opened = self._opened(parts)
        opened.start()
        what = parts[2] if len(parts) > 2 else ""
        if len(parts) == 4 and what.isdigit() and parts[3] == "picture":
            return Answer(thumbnail(opened, int(what), _number(query, "n", 0)), kind="image/png")
        if len(parts) > 3:
            raise UnknownNameError("page", "/".join(parts[2:]), ["browse"])
        if not what:
            waits = 0 if opened.done or opened.problem else 1
            return self._render("overview.html", page="overview", refresh=waits, **overview_values(opened))
        if what == "browse":
            return self._browse(opened, query)
        if what == "random":
            return Answer(status=303, location=opened.url(random.randrange(max(1, len(opened.split)))))
        if what == "item":
            return Answer(status=303, location=opened.url(_number(query, "number", 0)))
        if not what.lstrip("-").isdigit():
            raise UnknownNameError("page", what, ["browse"])
        return self._item(opened, int(what), query)

    def _opened(self, parts: Sequence[str]) -> OpenedSplit:
        key, name = (*parts, "")[:2]
        if key not in self.datasets:
            raise UnknownNameError("dataset", key, list(self.datasets))
        splits = self.datasets[key]
        if name and name not in splits:
            raise UnknownNameError("split", name, list(splits))
        return splits[name or next(iter(splits))]

    def _render(self, template: str, page: str = "", **values: Any) -> Answer:
        made = environment().get_template(template)
        return Answer([made.render(viewer=self, page=page, **values)])

    def _browse(self, opened: OpenedSplit, query: Query) -> Answer:
        """A page of the list, the hits of a search as they are found, or a record by its id."""
        words = query.get("q", "")
        values: dict[str, Any] = {
            "opened": opened,
            "query": query,
            "sorts": SORTS,
            "hits": (),
            "rows": None,
            "q": words,
        }
        if words and query.get("by") == "id":
            numbers = opened.split.find(words)
            if numbers:
                return Answer(status=303, location=opened.url(numbers[0]))
            values |= {"problem": f"No record has the id {words!r}.", "closes": opened.split.similar_ids(words, 5)}
            values |= {"q": "", **self._rows(opened, {})}
        elif words:
            chosen = None if (wanted := _filter(query)).keeps_all else opened.chosen(wanted)
            found = search(opened.split, opened.look.decoder, words, chosen)
            first = next(found, 0)  # what cannot be searched for is an error page
            made = environment().get_template("browse.html")
            values["hits"] = _hits(opened, first, found)
            return Answer(_streamed(made.generate(viewer=self, page="browse", **values), found))
        else:
            values |= self._rows(opened, query)
        return self._render("browse.html", page="browse", **values)

    def _rows(self, opened: OpenedSplit, query: Query) -> dict[str, Any]:
        selected = opened.select(_filter(query))
        matched = len(opened.split) if selected is None else len(selected)
        first = min(max(_number(query, "first", 0), 0), max(matched - 1, 0)) // PAGE * PAGE
        last = min(first + PAGE, matched)
        numbers = np.arange(first, last) if selected is None else selected[first:last]
        decoder = opened.look.decoder
        rows = [
            {**_brief(opened, number), "text": opening_text(opened.item(number), decoder)}
            for number in numbers.tolist()
        ]
        end = max(0, (matched - 1) // PAGE * PAGE)

        def to(place: int) -> str | None:
            kept = {name: value for name, value in query.items() if name != "first"}
            return None if place == first or not 0 <= place <= end else opened.url("browse", **kept, first=place or "")

        pages = [("«", "", "First page", to(0)), ("‹", "p", "Previous page", to(first - PAGE)),
                 ("›", "n", "Next page", to(first + PAGE)), ("»", "", "Last page", to(end))]  # fmt: skip
        return {"rows": rows, "matched": matched, "first": first, "pages": pages}

    def _item(self, opened: OpenedSplit, number: int, query: Query) -> Answer:
        item = opened.item(number)
        policy = opened.policy(query.get("policy"))
        at, hit = _number(query, "at", -1), _number(query, "hit", 1)
        first = _number(query, "first", max(0, at - 64) if at >= WINDOW else 0)
        if first and not 0 <= first < len(item):
            raise ConfigError(f"token {first:,} of {opened.split.layout.item} {item.number:,}, which has {len(item):,}")
        view = view_item(item, opened.look.decoder, opened.split.layout.item, policy)
        last = min(first + WINDOW, len(item))
        said = [message for document in view.documents for message in document.messages]
        return self._render(
            "item.html",
            page="browse",
            opened=opened,
            view=view,
            policy=policy,
            colour="kind" if query.get("colour") == "kind" else "trained",
            here=Here(opened, item.number, query),
            first=first,
            last=last,
            window=WINDOW,
            shown=view.window(first, last),
            partner=_partner(opened, item, policy),
            said=said,
            roles=list(dict.fromkeys(message.label for message in said)),
            map=row_map(view),
            at=at,
            hit=hit if at >= 0 else 0,
        )


def _partner(opened: OpenedSplit, item: Item, policy: Policy | None) -> ItemView | None:
    """The other answer of a pair, which is the next document, or the one before."""
    step = {"chosen": 1, "rejected": -1}.get(item.side or "")
    if step is None:
        return None
    return view_item(opened.item(item.number + step), opened.look.decoder, opened.split.layout.item, policy)


def _brief(opened: OpenedSplit, number: int) -> dict[str, Any]:
    """What lists say of an item besides its text."""
    split, trained = opened.split, opened.trained
    sources, turns = split.sources, split.turns
    return {
        "number": number,
        "href": opened.url(number),
        "tokens": int(split.tokens[number]),
        "trained": None if trained is None else int(trained[number]),
        "documents": int(split.documents[number]),
        "source": None if sources is None else split.source_names[int(sources[number])],
        "turns": None if turns is None else int(turns[number]),
        "record_id": split.record_id(number) or None,
    }


def _hits(opened: OpenedSplit, first: Hit | int, rest: Iterator[Hit | int]) -> Iterator[dict[str, Any]]:
    """Rows of a search as it finds them, and what it came to; between batches something that keeps the page alive."""
    one, items, hits = opened.split.layout.item, 0, 0
    whole = f"{len(opened.split):,} {one}{'' if len(opened.split) == 1 else 's'}"
    for found in itertools.chain([first], rest):
        if isinstance(found, int):
            items = found
            yield {"beat": items}
            continue
        if hits == MOST_HITS:
            yield {"said": f"The first {hits:,} hits; {items:,} of {whole} were searched."}
            return
        hits += 1
        href = opened.url(found.number, at=found.at, hit=found.tokens) + "#hit"
        yield {**_brief(opened, found.number), "hit": found, "href": href}
    yield {"said": f"{hits:,} hit{'' if hits == 1 else 's'} in {whole}."}


def _streamed(page: Iterator[str], found: Generator[Hit | int, None, None]) -> Iterator[str]:
    """A page as it is rendered; the search behind it ends with it, and an error ends the page in words."""
    with contextlib.closing(found):
        try:
            yield from page
        except Exception as error:
            traceback.print_exc()
            yield f'<p class="error">{escape(visible(_failure(error), mark_newlines=False))}</p>'


def _failure(error: Exception) -> str:
    """What a page says of an error that nobody foresaw."""
    return f"{type(error).__name__}: {error}. Where chatmill view was started, the whole error is shown."


def _number(query: Query, name: str, default: int) -> int:
    text = query.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a whole number") from None


def _share(query: Query, name: str) -> float | None:
    text = query.get(name, "")
    try:
        value = float(text) if text else None
    except ValueError:
        value = float("nan")
    if value is not None and not 0 <= value <= 100:
        raise ConfigError(f"{name}={text!r} is not a percentage from 0 to 100")
    return value


def _filter(query: Query) -> Filter:
    return Filter(
        source=query.get("source") or None,
        min_tokens=_number(query, "min_tokens", 0) or None,
        max_tokens=_number(query, "max_tokens", 0) if query.get("max_tokens") else None,
        min_share=_share(query, "min_share"),
        max_share=_share(query, "max_share"),
        role=query.get("role") or None,
        sort=member(Sort, "order", query.get("sort") or Sort.STORED),
    )


class _Handler(BaseHTTPRequestHandler):
    """One connection; the server has the viewer and the token."""

    server: ViewServer
    timeout = SLOW_SECONDS
    server_version, sys_version = "chatmill", ""

    def do_GET(self) -> None:
        """Answer, unless the request may not ask."""
        asked = urlsplit(self.path)
        pairs = parse_qsl(asked.query, keep_blank_values=True)
        refused = self._refused([value for name, value in pairs if name == "token"])
        if refused:
            self._send(Answer([refused], 403, "text/plain; charset=utf-8"))
            return
        query = {name: value for name, value in pairs if name != "token"}
        if len(query) < len(pairs) and self.server.token is not None:
            # the cookie carries the token from here on; an address that is copied does not give it away
            place = f"{asked.path}{'?' if query else ''}{urlencode(query)}"
            self._send(Answer(status=303, location=place), cookie=True)
            return
        self._send(self.server.viewer.answer(asked.path, query))

    do_HEAD = do_GET  # noqa: N815

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server refuses itself: other methods, and what is no HTTP."""
        status, words = (405, "the viewer only shows: GET and HEAD") if code == 501 else (code, message or "")
        self._send(Answer([f"{words}\n"], status, "text/plain; charset=utf-8"))
        self.close_connection = True

    def _refused(self, given: list[str]) -> str:
        token, host = self.server.token, self.headers.get("host", "")
        if token is None:
            name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
            return "" if name in LOOPBACK else f"not a name of this machine: {host!r}; use 127.0.0.1\n"
        kept = SimpleCookie(self.headers.get("cookie", "")).get(self._cookie)
        if any(secrets.compare_digest(one.encode(), token.encode()) for one in [*given, kept.value if kept else ""]):
            return ""
        return "the address must end in ?token=..., as chatmill view printed it\n"

    @property
    def _cookie(self) -> str:
        """Cookies are shared by all ports of a host, so the port is part of the name."""
        return f"{COOKIE}_{self.server.server_address[1]}"

    def _send(self, answer: Answer, *, cookie: bool = False) -> None:
        self.send_response(answer.status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("content-type", answer.kind)
        self.send_header("connection", "close")
        if answer.location:
            self.send_header("location", answer.location)
        if cookie:
            self.send_header("set-cookie", f"{self._cookie}={self.server.token}; Path=/; HttpOnly; SameSite=Strict")
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            for part in [answer.body] if isinstance(answer.body, bytes) else answer.body:
                self.wfile.write(part if isinstance(part, bytes) else part.encode("utf-8", errors="replace"))
        finally:  # whoever goes away ends a search between two pieces
            if isinstance(answer.body, Generator):
                answer.body.close()

    def handle_one_request(self) -> None:
        """One request; a client that goes away, or is too slow, is no error."""
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        return


class ViewServer(ThreadingHTTPServer):
    """A server that is listening; `serve_forever` answers."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, viewer: Viewer, *, host: str = "127.0.0.1", port: int | None = None, use_token: bool = True
    ) -> None:
        """Without a port the first free one from 8420 on; 0 takes any. Without a token only this machine may look."""
        if not use_token and not is_loopback(host):
            raise ConfigError(f"--no-token is for this machine alone: whoever can reach {host} could read the dataset")
        self.viewer = viewer
        self.token = secrets.token_urlsafe(18) if use_token else None
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        problem: Exception | None = None
        for number in [port] if port is not None else [*range(FIRST_PORT, FIRST_PORT + PORTS), 0]:
            try:
                super().__init__((host, number), _Handler)
                break
            except (OSError, OverflowError) as error:
                problem = error
        else:
            raise ConfigError(
                f"cannot listen on {host} port {port}: {getattr(problem, 'strerror', None) or problem}; give another "
                "--port (0 takes any that is free) or --host"
            )
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.server_address[1]}/" + (f"?token={self.token}" if self.token else "")
        """What to open in a browser."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are no errors; anything else is shown."""
        import sys

        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host name or address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(viewer: Viewer, on_ready: Callable[[str], None], **how: Any) -> None:
    """Serve until interrupted; `on_ready` gets the address. `how` as for `ViewServer`."""
    with ViewServer(viewer, **how) as server:
        on_ready(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:  # the way to stop it
            return
