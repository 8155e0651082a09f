"""What commands print, word by word: each file in `golden` has a command and what it says.

With CHATMILL_GOLDEN=write in the environment the files are written anew; read the difference before you commit it.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len

from chatmill.systems.document_boundaries import block_tokenize_fn
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.cli.run import here
from tests.cli.test_template import CHATML
from tests.look.sets import folder

GOLDEN = Path(__file__).parent / "golden"
TEXTS = ["Hello there.", "Zwei Zeilen\nund mehr", "three", "vier", "x" * 50]
PAIR = [{"role": "user", "content": "What is <|im_end|>?\n"}, {"role": "assistant", "content": "A token."}]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the commands are given."""
    place = tmp_path_factory.mktemp("golden")
    for name in ("episodes", "rows", "hf", "parquet", "kd"):
        (place / name).symlink_to(folder() / name)
    blocks = block_tokenize_fn({"t": TEXTS}, byte_tokenizer(), "t", max_length=48, packed=True)
    pq.write_table(pa.table(blocks), place / "blocks.parquet")
    wrong = {"input_ids": [[65, 66], [67, 68]], "document_starts": [[0], [0, 5]]}
    pq.write_table(pa.table(wrong), place / "wrong.parquet")
    records = [{"id": f"r{number}", "messages": PAIR} for number in range(5)]
    (place / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (place / "own.jinja").write_text(CHATML)
    return place


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_a_command_prints_what_its_file_says(path: Path, home: Path) -> None:
    command, _, wanted = path.read_text(encoding="utf-8").partition("\n")
    program, *arguments = shlex.split(command.removeprefix("$ "))
    assert program == "chatmill"
    done = here(*arguments, cwd=home)
    lines = [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]
    if "--json" not in arguments:
        assert max(map(cell_len, lines)) <= 80
        assert "\x1b" not in done.stdout
    found = "".join(f"{line}\n" for line in [*lines, f"exit status {done.returncode}"])
    if os.environ.get("CHATMILL_GOLDEN") == "write":
        path.write_text(f"{command}\n{found}", encoding="utf-8")
    else:
        assert found == wanted
