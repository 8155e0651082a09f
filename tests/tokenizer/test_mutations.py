"""Files of a model folder with something wrong in them: an error of Chatmill, or a tokenizer that works."""

from __future__ import annotations

import json
import lzma
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from chatmill.errors import ChatmillError, TokenizerError
from chatmill.tokenizer import load
from chatmill.tokenizer.json_file import TokenizerJson, spelled_tokens
from chatmill.tokenizer.load import load_tokenizer
from tests.tokenizer.small_models import FOLDERS, changed, mutated
from tests.tokenizer.uses import use_folder


def written(folder: Path, files: dict[str, bytes]) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    return folder


def as_bytes(files: dict[str, Any]) -> dict[str, bytes]:
    return {name: json.dumps(content).encode() for name, content in files.items()}


@pytest.fixture(autouse=True)
def _without_warnings() -> Any:
    """Some of the vocabularies are not for the fast engine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", FOLDERS)
def test_the_folders_that_are_changed_are_good_ones(tmp_path: Path, name: str) -> None:
    use_folder(written(tmp_path / "model", as_bytes(FOLDERS[name])))


@pytest.mark.parametrize(("count", "seed"), [(60, 7), pytest.param(800, 8, marks=pytest.mark.slow)])
def test_a_folder_with_something_wrong_works_or_ends_in_an_error_of_chatmill(
    tmp_path: Path, count: int, seed: int
) -> None:
    ended = {True: 0, False: 0}
    for what, files in mutated(count, seed):
        folder = written(tmp_path / "model", files)
        try:
            use_folder(folder)
            ended[True] += 1
        except ChatmillError:
            ended[False] += 1
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__} of: {what}") from error
    assert min(ended.values()) > count // 10, "both happen"


@pytest.mark.parametrize(
    ("name", "file", "path", "new"),
    [
        ("byte_level", "tokenizer.json", ("model", "type"), {}),
        ("byte_level", "tokenizer.json", ("model", "vocab", "a"), 2**40),
        ("byte_level", "tokenizer.json", ("model", "vocab", "a"), 2**31),
        ("byte_level", "tokenizer.json", ("model", "vocab"), 1),
        ("byte_level", "tokenizer.json", ("added_tokens", 0, "content"), ""),
        ("byte_level", "tokenizer.json", ("added_tokens", 0, "id"), -1),
        ("byte_level", "tokenizer.json", ("added_tokens", 0, "id"), 2**40),
        ("byte_level", "tokenizer.json", ("added_tokens", 2, "id"), 0),
        ("byte_level", "tokenizer.json", ("added_tokens", 2, "special"), "x"),
        ("byte_level", "tokenizer.json", ("normalizer", "type"), []),
        ("with_bytes", "tokenizer.json", ("normalizer", "normalizers", 0), {"type": "Prepend"}),
        ("with_bytes", "tokenizer.json", ("normalizer", "normalizers", 0, "prepend"), 1),
        ("unigram", "tokenizer.json", ("model", "vocab", 1), []),
        ("unigram", "tokenizer.json", ("model", "vocab", 1, 0), {}),
        ("unigram", "tokenizer.json", ("model", "vocab", 1, 0), "<unk>"),
        ("unigram", "tokenizer.json", ("pre_tokenizer", "replacement"), 1),
        ("word_pieces", "tokenizer.json", ("model", "unk_token"), "no such token"),
        ("byte_level", "tokenizer_config.json", ("added_tokens_decoder", "259", "content"), ""),
        ("byte_level", "tokenizer_config.json", ("added_tokens_decoder", "259", "lstrip"), 7),
        ("byte_level", "tokenizer_config.json", ("added_tokens_decoder",), {"9" * 5000: {"content": "x"}}),
        ("byte_level", "tokenizer_config.json", ("added_tokens_decoder",), {"9" * 12: {"content": "x"}}),
        ("byte_level", "tokenizer_config.json", ("eos_token",), "\ud800"),
        ("byte_level", "tokenizer_config.json", ("chat_template",), [{"name": "default", "template": None}]),
    ],
)
def test_what_a_file_cannot_say_is_a_clear_error(
    tmp_path: Path, name: str, file: str, path: tuple[Any, ...], new: Any
) -> None:
    files = {**FOLDERS[name], file: changed(FOLDERS[name][file], path, "other", new)}
    with pytest.raises(ChatmillError):
        use_folder(written(tmp_path / "model", as_bytes(files)))


def test_only_two_digits_make_a_token_a_byte() -> None:
    """What only looks like the token of a byte is text, as `tokenizers` takes it."""
    tokens = ["<0x41>", "<0xff>", "<0xZZ>", "<0x+1>", "<0x 1>", "<0x1_>", "<0x٣٤>", "<0x4>", "<0x041>"]
    raw = json.dumps({"model": {"vocab": {token: number for number, token in enumerate(tokens)}}}).encode()
    spelled = spelled_tokens(TokenizerJson(raw, "x"), {})
    assert list(spelled.values()) == [b"A", b"\xff", *(token.encode() for token in tokens[2:])]


def test_a_number_that_no_float_holds_is_said() -> None:
    file = TokenizerJson(b'{"model": {"vocab": [["a", 1e999]]}, "normalizer": 1e999}', "thing")
    with pytest.raises(TokenizerError, match=r"thing is not a tokenizer\.json: its vocab"):
        assert file.vocab
    with pytest.raises(TokenizerError, match=r"thing is not a tokenizer\.json: its normalizer"):
        file.rules("normalizer")


def test_a_packed_file_is_unpacked_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes may hold gigabytes; nothing is unpacked beyond the limit."""
    path = tmp_path / "tokenizer.json.xz"
    raw = as_bytes(FOLDERS["byte_level"])["tokenizer.json"]
    monkeypatch.setattr(load, "MAX_UNPACKED", len(raw))
    path.write_bytes(lzma.compress(raw))
    assert load_tokenizer(tmp_path).vocab_size == load_tokenizer(path).vocab_size > 256
    path.write_bytes(lzma.compress(raw + b" "))
    with pytest.raises(TokenizerError, match="when it is unpacked"):
        load_tokenizer(tmp_path)
    packed = lzma.compress(raw)
    for broken in (packed[:-20], packed[: len(packed) // 2], b"", b"\0" * 12):
        path.write_bytes(broken)
        with pytest.raises(TokenizerError):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "raw", [b'{"model": {"\xff": 1}}', b'{"model": ' + b"[" * 5000, b'{"model": {}, "x": ' + b"[" * 5000]
)
def test_bytes_that_are_no_json_are_said(raw: bytes) -> None:
    with pytest.raises(TokenizerError, match=r"thing is not a tokenizer\.json"):
        TokenizerJson(raw, "thing")


@pytest.mark.slow
def test_a_bomb_takes_no_more_memory_than_the_limit(tmp_path: Path) -> None:
    import subprocess
    import sys

    path = tmp_path / "tokenizer.json.xz"
    with lzma.open(path, "wb", preset=0) as file:
        for _ in range(4096):
            file.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 20
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))\n"
        "from chatmill.tokenizer.load import load_tokenizer\n"
        "load_tokenizer(sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert "when it is unpacked" in done.stderr.splitlines()[-1]
