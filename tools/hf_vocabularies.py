"""Tokenizers of transformers for templates whose own vocabulary is not at hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AddedToken

from chatmill.render.registry import find_template
from tools.mask_differences import real_tokenizer
from tools.template_survey import BOS, SPECIAL, STOPS

MARK = re.compile(r"</?[a-z_]+>")


def make_tokenizer(folder: Path, template: str = "", more: Sequence[str] = ()) -> Any:
    """Load a vocabulary and add the special tokens that a template spells.

    Args:
        folder: Folder of the vocabulary.
        template: Text of a template. Default: the folder's own.
        more: Other tokens.
    """
    tokenizer = real_tokenizer(folder)
    text = template or find_template(folder).text
    tokenizer.chat_template = text
    names = dict.fromkeys([*SPECIAL.findall(text), *more])
    missing = [name for name in names if tokenizer.convert_tokens_to_ids(name) in (None, tokenizer.unk_token_id)]
    # Marks such as <arg_key> are added tokens of published vocabularies, and no special ones.
    added = [AddedToken(name, special=MARK.fullmatch(name) is None, normalized=False) for name in missing]
    tokenizer.add_tokens(added)
    stops = next((stops for mark, stops in STOPS if mark in text), ())
    if stops and stops[0] in tokenizer.get_vocab():
        tokenizer.eos_token = stops[0]
    bos = next((name for name in BOS if name in tokenizer.get_vocab()), None)
    if tokenizer.bos_token is None and bos is not None and "bos_token" in text:
        tokenizer.bos_token = bos
    return tokenizer
