"""Takes the screenshots of the web viewer and of the terminal that the docs show, from the bundled conversations.

    python examples/screenshots.py [FOLDER]        (default: docs/images)

Needs Playwright and a Chromium: CHROMIUM names it, else /usr/bin/chromium is taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright
from rich.ansi import AnsiDecoder
from rich.console import Console

import chatmill
from chatmill.look.dataset import open_for_looking
from chatmill.look.viewer.opened import open_splits
from chatmill.look.viewer.pages import Viewer
from chatmill.look.viewer.server import ViewServer

DATA = Path(__file__).resolve().parent / "data" / "conversations.jsonl"
EPISODE, TOKEN = "gsm8k-00005", 118
"""A record with reasoning, and the token of it that is pointed at."""
KINDS = "glaive_toolcall_en-00000"
"""One with calls of tools."""
TREE = "mt_bench_ref-00000"
"""One of several turns, which is stored as a tree."""
BLOCK = 18
"""A row of many documents."""
COLUMNS, LINES = 90, 46
"""Of the terminal."""
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")


def build_sets(folder: Path) -> dict[str, Path]:
    """The conversations as episodes, as packed rows, and as trees."""
    recipe: dict[str, Any] = {"sources": [{"path": str(DATA)}], "tokenizer": "o200k", "template": "harmony"}
    whole = {"packing": {"max_length": 2048, "overflow": "windows"}}
    changes: dict[str, dict[str, Any]] = {
        "conversations": whole,
        "packed": {**whole, "pack": {"length": 2048}},
    }
    for name, options in changes.items():
        chatmill.build({**recipe, **options}, folder / name)
    build_trees(folder)
    return {name: Path(name) for name in (*changes, "trees")}


def build_trees(folder: Path) -> None:
    """The conversations as trees, from a file in which some records cannot be used."""
    lines = DATA.read_text(encoding="utf-8").splitlines()
    lines[3:3] = ['{"messages": [', '{"id": "empty", "messages": []}', '{"id": "other", "text": "No messages."}']
    lines.append('{"id": "unanswered", "messages": [{"role": "user", "content": "Is anyone there?"}]}')
    (folder / "mixed.jsonl").write_text("\n".join(lines), encoding="utf-8")
    recipe = {
        "sources": [{"path": "mixed.jsonl", "shape": "each"}],
        "tokenizer": "o200k",
        "template": "qwen3",
        "add_control_tokens": True,
        "expand": "tree",
        "on_error": "quarantine",
        "packing": {"max_length": 2048, "overflow": "drop"},
        "gates": {"records_left_out": None, "records_without_trained_tokens": None, "trained_tokens_lost": None},
    }
    with contextlib.chdir(folder):
        chatmill.build(recipe, "trees")


def last_of(path: Path, record: str) -> int:
    """The number of the last episode of a record."""
    episodes = chatmill.EpisodeDataset(path, "train")
    return max(number for number in range(len(episodes)) if episodes[number].record_id == record)


@contextlib.contextmanager
def viewer(path: Path) -> Iterator[str]:
    """A running viewer; gives its address."""
    with ViewServer(Viewer(open_splits(open_for_looking(path))), port=0, use_token=False) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.url
        server.shutdown()


def shoot(
    page: Page,
    address: str,
    target: Path,
    *,
    wait: str,
    theme: str = "light",
    height: int = 860,
    hover: int | None = None,
) -> None:
    """Open an address, wait until something is there, and save what is seen."""
    page.set_viewport_size({"width": 1240, "height": height})
    page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector(wait)
    page.wait_for_timeout(300)
    if hover is not None:
        page.locator(".token").nth(hover).hover()
    page.screenshot(path=target)
    print(f"{target}: {target.stat().st_size:,} bytes")


def printed(command: str) -> str:
    """What a command of Chatmill prints to a terminal, with its colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    code = "from chatmill.cli import main; main()"
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *shlex.split(command)[1:]],
        stdout=theirs,
        stderr=subprocess.DEVNULL,  # bars
        env=environment,
    )
    os.close(theirs)
    output = bytearray()
    with contextlib.suppress(OSError):  # Linux says so when nobody has the other side any more
        while part := os.read(ours, 1 << 16):
            output += part
    os.close(ours)
    if process.wait() != 0:
        raise SystemExit(f"{command}: {output.decode()}")
    return output.decode().replace("\r\n", "\n")  # as terminals have lines


def shoot_terminal(page: Page, command: str, target: Path) -> None:
    """Run a command in a terminal, and save a picture of its first screen."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    for line in list(AnsiDecoder().decode(printed(command)))[:LINES]:
        console.print(line, soft_wrap=True)
    page.goto("about:blank")  # the pages of the viewer forbid styles such as these
    page.set_viewport_size({"width": 1100, "height": 800})
    drawing = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=command), flags=re.DOTALL)  # of the network
    page.set_content(f"<body style='margin: 0'>{drawing}</body>")
    page.locator("svg").first.screenshot(path=target, omit_background=True)
    print(f"{target}: {target.stat().st_size:,} bytes")


def main() -> None:
    """Build, serve, and take the pictures."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images").resolve()
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        sets = build_sets(Path(temporary))
        stack.enter_context(contextlib.chdir(temporary))  # the pages show paths as they were given
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        with viewer(sets["conversations"]) as url:
            shoot(page, f"{url}splits/train", out / "view-overview.png", wait="text=Who speaks", height=1000)
            shoot(page, f"{url}splits/train/browse", out / "view-browse.png", wait="#list tbody tr")
            target, number = out / "view-episode.png", last_of(sets["conversations"], EPISODE)
            shoot(page, f"{url}splits/train/{number}", target, wait=".token", height=660, hover=TOKEN)
            target, number = out / "view-kinds-dark.png", last_of(sets["conversations"], KINDS)
            shoot(page, f"{url}splits/train/{number}?colour=kind", target, wait=".token", theme="dark")
        with viewer(sets["packed"]) as url:
            shoot(page, f"{url}splits/train/{BLOCK}", out / "view-block.png", wait="#documents")
        with viewer(sets["trees"]) as url:
            address, target = f"{url}splits/train#left-out", out / "view-left-out.png"
            shoot(page, address, target, wait="text=show them", height=760)
            address, target = f"{url}splits/train/{last_of(sets['trees'], TREE)}", out / "view-tree.png"
            shoot(page, address, target, wait=".branch", height=1000)
        shoot_terminal(page, f"chatmill inspect conversations --episode {number}", out / "inspect.png")
        shoot_terminal(page, "chatmill stats conversations", out / "stats.png")
        browser.close()


if __name__ == "__main__":
    main()
