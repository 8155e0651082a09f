"""Small model folders, one of each kind of vocabulary, and their files with something wrong in them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
Files = dict[str, Any]
"""What each file of a folder says."""
HIDDEN = [byte for byte in range(256) if not (0x21 <= byte < 0x7F or (0xA1 <= byte < 0x100 and byte != 0xAD))]
LETTERS = [chr(0x100 + HIDDEN.index(byte)) if byte in HIDDEN else chr(byte) for byte in range(256)]
"""The letter that stands for each byte in byte-level vocabularies."""


def _byte_level() -> dict[str, Any]:
    merges = [["h", "i"], ["Ġ", "a"], ["a", "b"]]
    names = [*LETTERS, *map("".join, merges)]
    rules = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {name: number for number, name in enumerate(names)}, "merges": merges}
    return {"normalizer": {"type": "NFC"}, "pre_tokenizer": rules, "decoder": rules, "model": model}


def _with_bytes() -> dict[str, Any]:
    """As sentencepiece's: bytes have tokens of their own, and a mark stands for a space."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghiorstu", "hi", "▁a"]
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    model = {
        "type": "BPE",
        "unk_token": "<unk>",
        "byte_fallback": True,
        "fuse_unk": True,
        "vocab": {name: number for number, name in enumerate(names)},
        "merges": ["h i", "▁ a"],
    }
    return {"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None, "model": model}


def _unigram() -> dict[str, Any]:
    names = ["<unk>", "▁", *"abcdefghiorstu\n", "hi", "▁a"]
    rules = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    model = {"type": "Unigram", "unk_id": 0, "vocab": [[name, -number] for number, name in enumerate(names)]}
    return {"normalizer": None, "pre_tokenizer": rules, "decoder": rules, "model": model}


def _word_pieces() -> dict[str, Any]:
    names = ["[UNK]", *"abcdefghiorstu", *(f"##{letter}" for letter in "abcdefghiorstu"), "hi"]
    model = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {name: number for number, name in enumerate(names)},
    }
    return {"normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "BertPreTokenizer"}, "model": model}


def _folder(rules: dict[str, Any]) -> Files:
    first = len(rules["model"]["vocab"])
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = [
        {"id": first, "content": "<|im_start|>", "special": True, **flags},
        {"id": first + 1, "content": "<|im_end|>", "special": True, **flags},
        # a vocabulary that puts a space in front of text has no tokens that text may spell
        {"id": first + 2, "content": "<tool>", "special": "▁" in str(rules), **flags, "lstrip": True},
    ]
    decoder = {str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in added[:2]}
    config = {
        "added_tokens_decoder": decoder,
        "eos_token": {"content": "<|im_end|>", **flags},
        "pad_token": "<|im_end|>",
        "chat_template": CHATML,
    }
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "decoder": None, **rules}
    return dict(zip(FILES, (whole, config, {"eos_token_id": [first + 1, first]}), strict=True))


FOLDERS: dict[str, Files] = {
    name: _folder(rules())
    for name, rules in (
        ("byte_level", _byte_level),
        ("with_bytes", _with_bytes),
        ("unigram", _unigram),
        ("word_pieces", _word_pieces),
    )
}
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**31 - 1, 2**31, 2**32, 2**63, 10**30, 0.5, -1.5e300),
    *("", " ", "x", "<|im_start|>", "<0xZZ>", "<0x+1>", "<0x 1>", "\ud800", "\0", "▁", "Sequence", "Unigram", "BPE"),
    *([], [None], [[]], [1], ["x"], ["x", 1], {}, {"": ""}, {"type": "Sequence"}, {"type": "Prepend"}, {"type": {}}),
    *({"content": ""}, {"id": 0, "content": ""}, {"id": -1, "content": "x"}, {"x": 1}, {"x": -1}, {"x": 2**40}),
)
"""What stands in the place of something else."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to everything in a file; of many alike, as in a vocabulary, the first ones and the last."""
    yield path
    keys: list[Any] = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    for key in keys if len(keys) < 12 else [*keys[:3], keys[-1]]:
        yield from places(value[key], (*path, key))


def changed(value: Any, path: tuple[Any, ...], how: str, new: Any) -> Any:
    """A copy in which what lies at a path is another thing, is gone, has another name, or is there twice."""
    if not path:
        return new
    whole = copy.deepcopy(value)
    holder = whole
    for key in path[:-1]:
        holder = holder[key]
    key = path[-1]
    if how == "gone":
        del holder[key]
    elif how == "renamed" and isinstance(holder, dict):
        holder[new if isinstance(new, str) else json.dumps(new)] = holder.pop(key)
    elif how == "twice" and isinstance(holder, list):
        holder.insert(key, holder[key])
    else:
        holder[key] = new
    return whole


def mutated(count: int, seed: int) -> Iterator[tuple[str, dict[str, bytes]]]:
    """So many folders with one to two changes each: what was changed, and the bytes of the files."""
    draw = random.Random(seed)
    for _ in range(count):
        name = draw.choice(list(FOLDERS))
        files, said = dict(FOLDERS[name]), [name]
        for _ in range(draw.choice((1, 1, 1, 2))):
            file = draw.choices(FILES, (6, 3, 1))[0]
            path, how = (
                draw.choice(list(places(files[file]))),
                draw.choice(("other", "other", "other", "gone", "renamed", "twice")),
            )
            new = draw.choice(HOSTILE)
            files[file] = changed(files[file], path, how, new)
            said.append(f"{file} {path} {how} {new!r}")
        raw = {file: json.dumps(content).encode() for file, content in files.items()}
        if draw.randrange(8) == 0:  # bytes, whatever they mean
            file = draw.choice(FILES)
            data = bytearray(raw[file])
            at = draw.randrange(len(data))
            data[at : at + draw.choice((0, 1, 9))] = draw.choice((b"", b"\xff", b'"', b"{", b"[" * 5000, b"1e999"))
            raw[file] = bytes(data)
            said.append(f"{file} byte {at}")
        yield "; ".join(said), raw
