"""The web viewer on a million episodes: seconds of every page and filter, of a search, and resident memory.

    python -m benchmarks.viewer [--quick] [--json] [--keep FOLDER]

The set is a million short episodes with masks, kinds, sources, turns and record ids: the shorter ones of the demo's
conversations, rendered with o200k and Harmony, and repeated under ids of their own. `chatmill view` runs in a process
of its own; everything is asked over HTTP, as the page does it, one question after the other, and the slowest answer
counts. Resident memory is the process's peak (VmHWM), mapped file pages included.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np

from benchmarks.harness import dump, options
from chatmill.core.tokens import offsets_of
from chatmill.label.presets import find_policy
from chatmill.read.conversations import ConversationFile
from chatmill.render.render import render
from chatmill.store.episode_writer import EpisodeWriter
from chatmill.tokenizer.load import load_tokenizer

DATA = Path(__file__).parent.parent / "examples" / "data" / "conversations.jsonl"
NEEDLE = "horseshoes number nine hundred thousand"
"""Stands in one episode, near the end of the set."""
BATCH = 20_000
ROUNDS = 5

PAGES = {
    "page: about": "about",
    "page: overview": "a/train/overview",
    "page: first of the list": "a/train/items?first=0",
    "page: last of the list": "a/train/items?first=999950",
    "page: an episode": "a/train/item/{middle}",
    "page: an episode, policy last_turn": "a/train/item/{middle}?policy=last_turn",
    "page: record by id": "a/train/find?id=copy-{middle}",
    "filter: source": "a/train/items?source=gsm8k",
    "filter: length": "a/train/items?min_tokens=90&max_tokens=140",
    "filter: trained share": "a/train/items?min_share=40&max_share=60",
    "filter: role": "a/train/items?role=system",
    "filter: source, length and share": "a/train/items?source=gsm8k&min_tokens=80&min_share=50",
    "filter: source, page 1000": "a/train/items?source=oasst_realistic&first=50000",
    "order: longest first": "a/train/items?sort=longest",
    "order: most trained first, of a source": "a/train/items?sort=most_trained&source=gsm8k",
}


def write_set(folder: Path, episodes: int) -> dict[str, int]:
    """Real short conversations, repeated; in bulk."""
    tokenizer = load_tokenizer("o200k")
    conversations = [one for one in ConversationFile(DATA) if len(str(one.messages)) < 1800]
    tokens = render(conversations, "harmony", tokenizer).tokens
    weights = tokens.per_token(find_policy("assistant").run_weights(tokens))
    lengths = np.diff(tokens.offsets)
    sources = [one.source or "none" for one in conversations]
    order = np.random.RandomState(0).randint(0, len(lengths), episodes)
    needle = np.array(tokenizer.encode(NEEDLE), dtype=np.int64)
    with EpisodeWriter(folder, "train") as writer:
        for first in range(0, episodes, BATCH):
            chosen = order[first : first + BATCH]
            places = np.concatenate([np.arange(tokens.offsets[i], tokens.offsets[i + 1]) for i in chosen])
            ids = tokens.ids[places].astype(np.int64)
            offsets = offsets_of(lengths[chosen])
            if first <= episodes * 9 // 10 < first + BATCH:
                begin = int(offsets[episodes * 9 // 10 - first]) + 3
                ids[begin : begin + len(needle)] = needle
            writer.append_batch(
                ids,
                offsets,
                weights[places].astype(np.uint8),
                tokens.kinds[places],
                source=[sources[i] for i in chosen],
                turns=np.ones(len(chosen), dtype=np.int64),
                record_ids=[f"copy-{first + i}" for i in range(len(chosen))],
            )
    return {"episodes": episodes, "tokens": int(lengths[order].sum())}


class Server:
    """`chatmill view` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        """Start it and wait for its address."""
        code = "import typer; from chatmill.cli.view import command; typer.run(command)"
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder), "--tokenizer", "o200k", "--port", "0", "--json", "--no-token"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = urlsplit(json.loads(self.process.stdout.readline())["url"])
        self.seconds_to_start = time.perf_counter() - began

    def ask(self, path: str) -> tuple[float, Any]:
        """Seconds until the whole answer is there, and the answer."""
        began = time.perf_counter()
        connection = http.client.HTTPConnection(self.url.hostname or "", self.url.port, timeout=120)
        connection.request("GET", f"/api/{path}")
        body = connection.getresponse().read()
        connection.close()
        return time.perf_counter() - began, json.loads(body)

    def search(self, words: str) -> Iterator[tuple[float, dict[str, Any]]]:
        """Each line of a search with the seconds until it came."""
        began = time.perf_counter()
        connection = http.client.HTTPConnection(self.url.hostname or "", self.url.port, timeout=120)
        connection.request("GET", f"/api/a/train/search?q={quote(words)}")
        answer = connection.getresponse()
        while line := answer.readline():
            yield time.perf_counter() - began, json.loads(line)
        connection.close()

    def memory(self) -> dict[str, int]:
        """Peak and present resident bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        lines = dict(line.split(":", 1) for line in status.splitlines())
        return {name: int(lines[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS", "RssAnon", "RssFile")}

    def stop(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait(30)


def measure(folder: Path, about: dict[str, int]) -> dict[str, Any]:
    """Ask everything."""
    server = Server(folder)
    try:
        server.ask("about")
        during = [server.ask("a/train/items?first=0")[0]]
        began = time.perf_counter()
        while not (now := server.ask("a/train/overview"))[1]["scan"]["done"]:
            during.append(server.ask(f"a/train/items?first={len(during) * 1000}")[0])
        counted = time.perf_counter() - began
        assert now[1]["items"] == about["episodes"]
        middle = about["episodes"] // 2
        pages: dict[str, list[float]] = {name: [] for name in PAGES}
        for round_number in range(ROUNDS):
            for name, path in PAGES.items():
                asked = path.format(middle=middle + round_number)
                if name.startswith(("filter: length", "filter: trained")):  # a new question each time: nothing is kept
                    asked = asked.replace("=90", f"={90 + round_number}").replace("=40", f"={40 + round_number}")
                seconds, answer = server.ask(asked)
                assert "error" not in answer, answer
                pages[name].append(seconds)
        searches = {words: timed_search(server, words) for words in ("the", "photosynthesis", NEEDLE, "zzzz nowhere")}
        assert searches[NEEDLE]["hits"] == 1
        return {
            **about,
            "seconds_to_start": server.seconds_to_start,
            "seconds_to_count_labels": counted,
            "list_while_counting_slowest": max(during),
            "slowest": {name: max(times) for name, times in pages.items()},
            "median": {name: sorted(times)[len(times) // 2] for name, times in pages.items()},
            "searches": searches,
            "cancel_seconds": cancelled(server),
            "memory": server.memory(),
        }
    finally:
        server.stop()


def timed_search(server: Server, words: str) -> dict[str, Any]:
    """Seconds to the first line, the first hit and the end."""
    first_line = first_hit = None
    hits = 0
    seconds, line = 0.0, {}
    for seconds, line in server.search(words):
        first_line = seconds if first_line is None else first_line
        if "hit" in line:
            hits += 1
            first_hit = seconds if first_hit is None else first_hit
    return {
        "hits": hits,
        "first_line": first_line,
        "first_hit": first_hit,
        "seconds": seconds,
        "searched": line["items"],
    }


def cancelled(server: Server) -> float:
    """Seconds until a page is answered after a search was left in the middle."""
    for _, line in server.search("zzzz nowhere"):
        if line.get("items"):
            break
    return server.ask("a/train/items?first=0")[0]


def main() -> None:
    """Write, serve, ask, report."""
    parser = options(str(__doc__))
    parser.add_argument("--keep", type=Path, help="write the set here, or use the one that is there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary) / "set"
        note = folder / "about.json"
        if not note.exists():
            began = time.perf_counter()
            made = write_set(folder, 50_000 if arguments.quick else 1_000_000)
            note.write_text(json.dumps({**made, "seconds_to_write": time.perf_counter() - began}))
        found = measure(folder, json.loads(note.read_text()))
    if arguments.json:
        dump("viewer", **found)
    else:
        report(found)


def report(found: dict[str, Any]) -> None:
    """A table."""
    print(f"{found['episodes']:,} episodes, {found['tokens']:,} tokens; ready in {found['seconds_to_start']:.1f} s")
    print(
        f"  labels counted in {found['seconds_to_count_labels']:.1f} s in the background; meanwhile a page of the list"
    )
    print(f"  took at most {found['list_while_counting_slowest'] * 1000:.0f} ms")
    print(f"  {'':<40}{'median ms':>11}{'slowest ms':>12}")
    for name, slowest in found["slowest"].items():
        print(f"  {name:<40}{found['median'][name] * 1000:>11.0f}{slowest * 1000:>12.0f}")
    for words, search in found["searches"].items():
        first = "no hit" if search["first_hit"] is None else f"first hit {search['first_hit'] * 1000:.0f} ms"
        line = (
            f"  search {words[:24]!r}: first line {search['first_line'] * 1000:.0f} ms, {first}, {search['hits']} hits,"
        )
        print(f"{line} ended after {search['seconds']:.2f} s, {search['searched']:,} searched")
    print(f"  after a search was left, the next page took {found['cancel_seconds'] * 1000:.0f} ms")
    memory = found["memory"]
    print(f"  resident: peak {memory['VmHWM'] / 1e6:.0f} MB, now {memory['VmRSS'] / 1e6:.0f} MB", end="")
    print(f" (own {memory['RssAnon'] / 1e6:.0f} MB, mapped files {memory['RssFile'] / 1e6:.0f} MB)")


if __name__ == "__main__":
    main()
