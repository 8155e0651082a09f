"""The server: pages from files, answers as JSON, and no way for anything in a dataset to become code."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from chatmill.errors import ChatmillError, ConfigError, UnknownNameError, member
from chatmill.look.decoder import text_of
from chatmill.look.viewer.background import Background
from chatmill.look.viewer.comparison import Compare, Comparison
from chatmill.look.viewer.guard import Guard
from chatmill.look.viewer.item_page import WINDOW, item_json, opening_text
from chatmill.look.viewer.opened import Filter, OpenedDataset, OpenedSplit, Sort
from chatmill.look.viewer.overview_page import overview_json
from chatmill.look.viewer.search import SearchPart, search

STATIC = Path(__file__).parent / "static"
PAGE = 50
MOST_PAGE = 200
MOST_HITS = 500


class Viewer:
    """The datasets that are open, and the answers to questions about them."""

    def __init__(self, datasets: Sequence[OpenedDataset], *, compare: Compare | None = None, version: str = "") -> None:
        self.version = version
        self.datasets = {dataset.key: dataset for dataset in datasets}
        self.comparison = Comparison(compare) if compare is not None else None
        self.searches = 0
        """Searches that are running."""
        self.last_searched = 0
        """Items that the latest search has gone through."""

    def warm_up(self) -> None:
        """Load tokenizers and what searches need of them in the background, before anyone asks."""
        Background(self._warm_up, "warm-up").start()

    def _warm_up(self) -> None:
        for dataset in self.datasets.values():
            # a tokenizer that fails to load is reported when a page asks for it
            with contextlib.suppress(ChatmillError):
                if dataset.decoder is not None and dataset.decoder.bytes_add_up:
                    _ = dataset.decoder.spelling

    def opened(self, request: Request) -> OpenedSplit:
        """The split that an address names."""
        key = request.path_params["dataset"]
        if key not in self.datasets:
            raise UnknownNameError("dataset", key, list(self.datasets))
        opened = self.datasets[key].split(request.path_params["split"])
        opened.scan.start()
        return opened

    def about(self, request: Request) -> Response:
        """What is open."""
        return _json(
            {
                "version": self.version,
                "datasets": [dataset.as_json() for dataset in self.datasets.values()],
                "compare": self.comparison is not None,
            }
        )

    def overview(self, request: Request) -> Response:
        """Sums and plots of a split."""
        return _json(overview_json(self.opened(request)))

    def items(self, request: Request) -> Response:
        """One page of the list, filtered and sorted."""
        opened = self.opened(request)
        first, count = _number(request, "first", 0), _number(request, "count", PAGE)
        if not 0 < count <= MOST_PAGE:
            raise ConfigError(f"a page has 1 to {MOST_PAGE} items, not {count}")
        selected = opened.select(_filter(request))
        total = len(opened.split) if selected is None else len(selected)
        first = min(max(first, 0), max(total - 1, 0))
        numbers = np.arange(first, min(first + count, total)) if selected is None else selected[first : first + count]
        return _json(
            {
                "first": first,
                "matched": total,
                "items": len(opened.split),
                "scan": opened.scan.as_json(),
                "roles": opened.scan.role_names(),
                "rows": _rows(opened, numbers.astype(np.int64)),
            }
        )

    def item(self, request: Request) -> Response:
        """One item."""
        opened = self.opened(request)
        first, count = _number(request, "first", 0), _number(request, "count", WINDOW)
        policy = request.query_params.get("policy")
        return _json(item_json(opened, request.path_params["number"], first=first, count=count, policy=policy))

    def find(self, request: Request) -> Response:
        """Items of a record id; close ids where there is none."""
        opened = self.opened(request)
        wanted = request.query_params.get("id", "")
        numbers = opened.split.find(wanted)
        close = [] if numbers else opened.split.similar_ids(wanted, 5)
        return _json({"numbers": numbers[:MOST_PAGE], "found": len(numbers), "close": close})

    def search(self, request: Request) -> Response:
        """Text search: one JSON object per line, as soon as there is something to say."""
        opened = self.opened(request)
        wanted = _filter(request)
        chosen = None if wanted.keeps_all else opened.chosen(wanted)
        words = request.query_params.get("q", "")
        match_case = request.query_params.get("case") == "1"
        return StreamingResponse(self._found(opened, words, chosen, match_case), media_type="application/x-ndjson")

    async def _found(self, opened: OpenedSplit, words: str, chosen: Any, match_case: bool) -> AsyncIterator[bytes]:
        """Lines of a search. When the page goes away the server closes this generator between two batches."""
        self.searches += 1
        hits, done, items = 0, 0, len(opened.split)
        self.last_searched = 0
        try:
            batches = search(opened.split, opened.dataset.decoder, words, chosen=chosen, match_case=match_case)
            yield _line({"items": 0, "of": items, "hits": 0})
            while (found := await run_in_threadpool(_next, batches)) is not None:
                for hit in found.hits[: MOST_HITS - hits]:
                    yield _line({"hit": {**asdict(hit), **_brief(opened, hit.number)}})
                hits, done = hits + len(found.hits), found.items
                self.last_searched = done
                yield _line({"items": done, "of": items, "hits": min(hits, MOST_HITS)})
                if hits >= MOST_HITS:
                    break
            yield _line({"done": True, "items": done, "of": items, "hits": min(hits, MOST_HITS),
                         "stopped": hits >= MOST_HITS})  # fmt: skip
        except ChatmillError as error:
            yield _line({"error": str(error)})
        finally:
            self.searches -= 1

    def compare(self, request: Request) -> Response:
        """How two datasets differ."""
        if self.comparison is None:
            return _json({"error": "only one dataset is open: chatmill view A B compares two"}, 404)
        return _json(self.comparison.as_json())

    def compared_record(self, request: Request) -> Response:
        """One record that differs, line by line."""
        found = self.comparison.record(request.path_params["number"]) if self.comparison else None
        if found is None:
            return _json({"error": f"no changed record {request.path_params['number']} is shown"}, 404)
        return _json({**found, "lines": [self._with_text(line) for line in found["lines"]]})

    def _with_text(self, line: dict[str, Any]) -> dict[str, Any]:
        """A line with its words, where only the viewer was given a tokenizer."""
        if "ids" not in line or "text" in line:
            return line
        side = self.datasets["a" if line["sign"] == "-" else "b"]
        return {**line, "text": text_of(np.asarray(line["ids"]), side.decoder)}


def _next(batches: Iterator[SearchPart]) -> SearchPart | None:
    return next(batches, None)


def _json(value: Any, status: int = 200) -> Response:
    # ASCII alone: whatever a manifest spells, lone surrogates included, is valid JSON in any encoding
    return Response(json.dumps(value, separators=(",", ":")), status, media_type="application/json")


def _line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a whole number") from None


def _share(request: Request, name: str) -> float | None:
    text = request.query_params.get(name, "")
    try:
        value = float(text) if text else None
    except ValueError:
        value = float("nan")
    if value is not None and not 0 <= value <= 100:
        raise ConfigError(f"{name}={text!r} is not a percentage from 0 to 100")
    return value


def _filter(request: Request) -> Filter:
    asked = request.query_params
    return Filter(
        source=asked.get("source"),
        min_tokens=_number(request, "min_tokens", 0) or None,
        max_tokens=_number(request, "max_tokens", 0) if asked.get("max_tokens") else None,
        min_share=_share(request, "min_share"),
        max_share=_share(request, "max_share"),
        role=asked.get("role") or None,
        sort=member(Sort, "order", asked.get("sort") or Sort.STORED),
    )


def _brief(opened: OpenedSplit, number: int) -> dict[str, Any]:
    """What lists say of an item besides its text."""
    split, trained = opened.split, opened.trained
    sources, turns = split.sources, split.turns
    ids = split.record_ids(np.array([number]))
    return {
        "number": number,
        "tokens": int(split.tokens[number]),
        "trained": None if trained is None else int(trained[number]),
        "documents": int(split.documents[number]) if split.capacity else None,
        "source": None if sources is None else split.source_names[int(sources[number])],
        "turns": None if turns is None else int(turns[number]),
        "record_id": (ids[0] or None) if ids else None,
    }


def _rows(opened: OpenedSplit, numbers: Any) -> list[dict[str, Any]]:
    decoder = opened.dataset.decoder
    return [
        {**_brief(opened, number), "text": opening_text(opened.item(number), decoder)} for number in numbers.tolist()
    ]


def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8")


def _failed(request: Request, error: Exception) -> Response:
    return _json({"error": str(error)}, 404 if isinstance(error, UnknownNameError) else 400)


def make_app(viewer: Viewer, *, token: str | None = None) -> Any:
    """The ASGI app. With a `token`, every request must bring it; without one only loopback hosts are answered."""
    split = "/api/{dataset}/{split}"
    routes = [
        Route("/", _page),
        Mount("/static", StaticFiles(directory=STATIC)),
        Route("/api/about", viewer.about),
        Route("/api/compare", viewer.compare),
        Route("/api/compare/{number:int}", viewer.compared_record),
        Route(f"{split}/overview", viewer.overview),
        Route(f"{split}/items", viewer.items),
        Route(f"{split}/item/{{number:int}}", viewer.item),
        Route(f"{split}/find", viewer.find),
        Route(f"{split}/search", viewer.search),
    ]
    app = Starlette(routes=routes, exception_handlers={ChatmillError: _failed})
    return Guard(app, token=token)
