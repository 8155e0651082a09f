"""What commands print, word by word: each file in `golden` has a command and what it says.

With CHATMILL_GOLDEN=write in the environment the files are written anew; read the difference before you commit it.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len

from chatmill.systems.document_boundaries import block_tokenize_fn
from chatmill.tokenizer.byte_level import byte_tokenizer
from tests.cli.run import here
from tests.cli.test_template import OWN
from tests.compiler.builds import talk, write_jsonl
from tests.look.sets import folder

GOLDEN = Path(__file__).parent / "golden"
TOKENIZERS = Path(__file__).parents[1] / "data" / "tokenizers"
TEXTS = ["Hello there.", "Zwei Zeilen\nund mehr", "three", "vier", "x" * 50]
PAIR = talk("What is <|im_end|>?\n", "A token.")


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
    spelled, lines = [*b"<|eos|>", 257, *b"x"], [*b"\n".join(b"line %d" % n for n in range(100))]
    odd = {"input_ids": [[65, 66, 67], spelled, lines], "labels": [[-100, 66, 67], spelled, lines]}
    pq.write_table(pa.table(odd), place / "odd.parquet")
    records: list[Any] = [{"id": f"r{number}", "messages": PAIR} for number in range(5)]
    write_jsonl(place / "chats.jsonl", records)
    pope, silent = {"messages": [{"role": "pope", "content": "x"}]}, {"messages": PAIR[:1]}
    write_jsonl(place / "bad.jsonl", ["{broken", pope, records[0], silent])
    write_jsonl(place / "none.jsonl", [{"messages": []}])
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
    some = [talk("Q", "A"), talk("Q", "A") * 2, talk("A", "Q")[::-1], [*talk("Q", "A", "Q"), call]]
    write_jsonl(place / "mixed.jsonl", [*({"messages": one} for one in some), "{broken"])
    for name, template in OWN.items():
        (place / f"{name}.jinja").write_text(template)
    (place / "models").symlink_to(TOKENIZERS)
    (place / "configured").mkdir()
    for file in (TOKENIZERS / "qwen3").iterdir():
        (place / "configured" / file.name).symlink_to(file)
    (place / "configured" / "generation_config.json").write_text('{"eos_token_id": [151643]}')
    return place


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_a_command_prints_what_its_file_says(path: Path, home: Path) -> None:
    command, _, wanted = path.read_text(encoding="utf-8").partition("\n")
    program, *arguments = shlex.split(command.removeprefix("$ "))
    assert program == "chatmill"
    done = here(*arguments, cwd=home)
    lines = [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]
    if "--json" not in arguments and arguments[0] != "init":
        assert max(map(cell_len, done.stdout.splitlines()), default=0) <= 80
        assert "\x1b" not in done.stdout
    found = "".join(f"{line}\n" for line in [*lines, f"exit status {done.returncode}"])
    if os.environ.get("CHATMILL_GOLDEN") == "write":
        path.write_text(f"{command}\n{found}", encoding="utf-8")
    else:
        assert found == wanted
