"""The pages of the viewer: which address shows what."""

from __future__ import annotations

import contextlib
import itertools
import random
import traceback
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
import numpy as np
from markupsafe import escape

from chatmill.core.words import counted
from chatmill.errors import ChatmillError, ConfigError, UnknownNameError
from chatmill.label.policy import Policy
from chatmill.look.item_view import ItemView, opening_text, view_item
from chatmill.look.items import Item
from chatmill.look.pages import FOLDER, environment
from chatmill.look.safe_text import visible
from chatmill.look.viewer.opened import SPLITS, Filter, OpenedSplit, Sort
from chatmill.look.viewer.overview import overview_values
from chatmill.look.viewer.search import Hit, search
from chatmill.look.viewer.thumbnails import thumbnail

PAGE, WINDOW, MOST_HITS = 50, 2048, 500
"""Items of a list, tokens of an item, and hits that are shown at once."""
FILES = {"/style.css": "text/css", "/view.js": "text/javascript", "/icon.svg": "image/svg+xml"}
SORTS = [("", "as stored"), *((sort, f"{sort.replace('_', ' ')} first") for sort in Sort if sort is not Sort.STORED)]
Query = Mapping[str, str]


class PageRequest(Filter, frozen=True, kw_only=True):
    """The parameters of an address."""

    q: str = ""
    """Words to search for, or with `by` = `id` a record id."""
    by: str = ""
    first: int | None = None
    """The first item of a list, or token of an item, that is shown."""
    number: int = 0
    """The item to go to."""
    policy: str = ""
    colour: str = "trained"
    at: int = -1
    """A token to go to, and with `hit` how many are marked."""
    hit: int = 1
    n: int = 0
    """Which picture."""


class PageAnswer(NamedTuple):
    """The response to a request."""

    body: Iterable[str] | bytes = b""
    status: int = 200
    kind: str = "text/html; charset=utf-8"
    location: str = ""
    """Where to go instead."""


class Viewer:
    """An open dataset, and the pages about it."""

    def __init__(self, splits: Mapping[str, OpenedSplit]) -> None:
        """Take the splits by name."""
        self.splits = splits
        self.first = next(iter(splits.values()))

    def answer(self, path: str, query: Query) -> PageAnswer:
        """Answer with the page of an address."""
        if path in FILES:
            return PageAnswer((FOLDER / path[1:]).read_bytes(), kind=f"{FILES[path]}; charset=utf-8")
        try:
            params = {name: value for name, value in query.items() if value}
            return self._page(path, query, msgspec.convert(params, PageRequest, strict=False))
        except UnknownNameError as error:
            return self._error(404, "Not found", str(error))
        except (ChatmillError, msgspec.ValidationError) as error:
            return self._error(400, "Cannot be shown", str(error))
        except Exception as error:
            traceback.print_exc()
            return self._error(500, "Failed", _failure(error))

    def _error(self, status: int, title: str, problem: str) -> PageAnswer:
        return self._render("error.html", title=title, problem=problem)._replace(status=status)

    def _page(self, path: str, query: Query, request: PageRequest) -> PageAnswer:
        parts = [unquote(part) for part in path.split("/") if part]
        if not parts:
            return PageAnswer(status=303, location=self.first.url())
        opened = self._opened(parts)
        opened.start()
        match parts[2:]:
            case []:
                waits = 0 if opened.done or opened.problem else 1
                return self._render("overview.html", page="overview", refresh=waits, **overview_values(opened))
            case ["browse"]:
                return self._browse(opened, query, request)
            case ["random"]:
                return PageAnswer(status=303, location=opened.url(random.randrange(max(1, len(opened.split)))))
            case ["item"]:
                return PageAnswer(status=303, location=opened.url(request.number))
            case [number] if number.lstrip("-").isdigit():
                return self._item(opened, int(number), request)
            case [number, "picture"] if number.isdigit():
                return PageAnswer(thumbnail(opened, int(number), request.n), kind="image/png")
        raise UnknownNameError("page", "/".join(parts[2:]), ["browse"])

    def _opened(self, parts: Sequence[str]) -> OpenedSplit:
        kind, name = (*parts, "")[:2]
        if kind != SPLITS:
            raise UnknownNameError("page", kind, [SPLITS])
        if name and name not in self.splits:
            raise UnknownNameError("split", name, list(self.splits))
        return self.splits[name] if name else self.first

    def _render(self, template: str, page: str = "", **values: Any) -> PageAnswer:
        return PageAnswer([environment().get_template(template).render(viewer=self, page=page, **values)])

    def _browse(self, opened: OpenedSplit, query: Query, request: PageRequest) -> PageAnswer:
        """Show a page of the list, the hits of a search as they are found, or a record by its id."""
        values: dict[str, Any] = {"opened": opened, "query": query, "sorts": SORTS, "hits": (), "rows": None}
        values["q"] = request.q
        if request.q and request.by == "id":
            numbers = opened.split.find(request.q)
            if numbers:
                return PageAnswer(status=303, location=opened.url(numbers[0]))
            values["problem"] = f"No record has the id {request.q!r}."
            values |= {"q": "", "closes": opened.split.similar_ids(request.q, 5), **_rows(opened, {}, PageRequest())}
        elif request.q:
            results = search(
                opened.split, opened.look.decoder, request.q, None if request.keeps_all else opened.chosen(request)
            )
            first = next(results, 0)  # a query that cannot be searched for is an error page
            values["hits"] = _hits(opened, first, results)
            template = environment().get_template("browse.html")
            return PageAnswer(_streamed(template.generate(viewer=self, page="browse", **values), results))
        else:
            values |= _rows(opened, query, request)
        return self._render("browse.html", page="browse", **values)

    def _item(self, opened: OpenedSplit, number: int, request: PageRequest) -> PageAnswer:
        item = opened.item(number)
        policy = opened.policy(request.policy)
        first = request.first if request.first is not None else max(0, request.at - 64) if request.at >= WINDOW else 0
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
            colour="kind" if request.colour == "kind" else "trained",
            kept={"colour": request.colour if request.colour == "kind" else "", "policy": request.policy},
            first=first,
            last=last,
            window=WINDOW,
            shown=view.window(first, last),
            partner=_partner(opened, item, policy),
            said=said,
            roles=list(dict.fromkeys(message.label for message in said)),
            at=request.at,
            hit=request.hit if request.at >= 0 else 0,
        )


def _rows(opened: OpenedSplit, query: Query, request: PageRequest) -> dict[str, Any]:
    """List the items of a page, and the addresses of other pages."""
    selected = opened.select(request)
    matched = len(opened.split) if selected is None else len(selected)
    first = min(max(request.first or 0, 0), max(matched - 1, 0)) // PAGE * PAGE
    last = min(first + PAGE, matched)
    numbers = np.arange(first, last) if selected is None else selected[first:last]
    decoder = opened.look.decoder
    rows = [
        {**_brief(opened, number), "text": opening_text(opened.item(number), decoder)} for number in numbers.tolist()
    ]
    end = max(0, (matched - 1) // PAGE * PAGE)

    def to(place: int) -> str | None:
        kept = {name: value for name, value in query.items() if name != "first"}
        return None if place == first or not 0 <= place <= end else opened.url("browse", **kept, first=place or "")

    pages = [("«", "", "First page", to(0)), ("‹", "p", "Previous page", to(first - PAGE)),
             ("›", "n", "Next page", to(first + PAGE)), ("»", "", "Last page", to(end))]  # fmt: skip
    return {"rows": rows, "matched": matched, "first": first, "pages": pages}


def _partner(opened: OpenedSplit, item: Item, policy: Policy | None) -> ItemView | None:
    """View the other answer of a pair, which is the next document or the one before."""
    step = {"chosen": 1, "rejected": -1}.get(item.side or "")
    if step is None:
        return None
    return view_item(opened.item(item.number + step), opened.look.decoder, opened.split.layout.item, policy)


def _brief(opened: OpenedSplit, number: int) -> dict[str, Any]:
    """Describe an item in lists, besides its text."""
    split, trained = opened.split, opened.trained
    return {
        "number": number,
        "href": opened.url(number),
        "tokens": int(split.tokens[number]),
        "trained": None if trained is None else int(trained[number]),
        "documents": int(split.documents[number]),
        "source": None if split.sources is None else split.source_names[int(split.sources[number])],
        "turns": None if split.turns is None else int(split.turns[number]),
        "record_id": split.record_id(number),
    }


def _hits(opened: OpenedSplit, first: Hit | int, rest: Iterator[Hit | int]) -> Iterator[dict[str, Any]]:
    """Yield hits as the search finds them, then a summary; between batches a beat keeps the page alive."""
    noun, items, hits = opened.split.layout.item, 0, 0
    whole = counted(len(opened.split), noun)
    for result in itertools.chain([first], rest):
        if isinstance(result, int):
            items = result
            yield {"beat": items}
            continue
        if hits == MOST_HITS:
            yield {"said": f"The first {hits:,} hits; {items:,} of {whole} were searched."}
            return
        hits += 1
        href = opened.url(result.number, at=result.at, hit=result.tokens) + "#hit"
        yield {**_brief(opened, result.number), "hit": result, "href": href}
    yield {"said": f"{counted(hits, 'hit')} in {whole}."}


def _streamed(page: Iterator[str], results: Generator[Hit | int, None, None]) -> Iterator[str]:
    """Stream a page as it is rendered; its search ends with it, and an error is shown at the end of the page."""
    with contextlib.closing(results):
        try:
            yield from page
        except Exception as error:
            traceback.print_exc()
            yield f'<p class="error">{escape(visible(_failure(error), mark_newlines=False))}</p>'


def _failure(error: Exception) -> str:
    """Describe an unexpected error."""
    return f"{type(error).__name__}: {error}. The traceback is in the terminal that runs chatmill view."
