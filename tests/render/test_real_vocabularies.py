"""Real vocabularies with their own templates, and bundled templates: ids equal to transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from chatmill.core.conversation import Conversation
from chatmill.render.registry import bundled_names
from chatmill.tokenizer.load import load_tokenizer
from tests.data.npm_vocabularies import PACKAGES, npm_vocabulary
from tests.data.tokenizer_files import loaded, unpacked
from tests.render.against_transformers import compare, with_tokens_of

VOCABULARY = {"mistral_nemo": "mistral_nemo"}
"""Vocabularies of bundled templates whose own is at hand; the others get qwen3's with their tokens added."""
BUNDLED = [name for name in bundled_names() if name not in ("harmony", "markers", "token_native")]


@pytest.fixture(scope="module", autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    theirs.cache_clear()  # a gigabyte that no other module needs
    with_all_tokens.cache_clear()


@cache
def theirs(folder: Path) -> Any:
    """The tokenizer as transformers loads it."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "at_least"), [("qwen3", 18), ("mistral_nemo", 11), ("deepseek_v3", 14)])
def test_a_folders_own_template_gives_the_ids_of_transformers(
    name: str, at_least: int, count: int, real_conversations: Callable[[int], list[Conversation]]
) -> None:
    folder = unpacked(name)
    counts = compare(str(folder), loaded(name), theirs(folder), real_conversations(count))
    assert counts["compared"] >= at_least * count, counts


@cache
def with_all_tokens(vocabulary: str) -> tuple[Any, Any]:
    """A vocabulary in both libraries with the special tokens of all templates that use it here."""
    users = [name for name in BUNDLED if VOCABULARY.get(name, "qwen3") == vocabulary]
    return with_tokens_of(users, loaded(vocabulary), copy.deepcopy(theirs(unpacked(vocabulary))))


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_template_gives_the_ids_of_transformers(
    name: str, count: int, real_conversations: Callable[[int], list[Conversation]]
) -> None:
    ours, reference = with_all_tokens(VOCABULARY.get(name, "qwen3"))
    counts = compare(name, ours, reference, real_conversations(count))
    assert counts["compared"] >= 11 * count, counts


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_published_vocabularies_give_the_ids_of_transformers(
    name: str, real_conversations: Callable[[int], list[Conversation]]
) -> None:
    folder = npm_vocabulary(name)
    counts = compare(str(folder), load_tokenizer(folder), theirs(folder), real_conversations(40))
    assert counts["compared"] >= 300, counts
    assert counts["broken"] == 0, counts
