"""The page of Python names is complete and true: every public name, its signature, and an example that runs."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from pathlib import Path
from typing import Any, is_typeddict

import pytest

import chatmill
from tests.pages import DOCS, run_python

PAGE = DOCS / "api.md"


def entries() -> dict[str, str]:
    """What the page says about each name, by name."""
    parts = re.split(r"^### (.+)\n", PAGE.read_text(encoding="utf-8"), flags=re.M)
    names, texts = parts[1::2], [re.split(r"^## ", text, flags=re.M)[0] for text in parts[2::2]]
    assert len(names) == len(set(names))
    return dict(zip(names, texts, strict=True))


ENTRIES = entries()


def test_the_page_has_every_public_name_and_no_other() -> None:
    assert set(ENTRIES) == set(chatmill.__all__) - {"__version__"}


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_every_name_has_a_signature_some_words_and_an_example(name: str) -> None:
    head, words, *_ = (part.strip() for part in ENTRIES[name].strip().split("\n\n"))
    assert re.fullmatch(rf"`{name}( = |\().*`", head)
    assert words.endswith((".", ")"))
    examples = re.findall(r"^```python\n(.*?)^```", ENTRIES[name], re.M | re.S)
    assert any(f"chatmill.{name}" in example for example in examples)


def parameters(value: Any) -> dict[str, inspect.Parameter]:
    if is_typeddict(value):
        keys = [key for key in value.__annotations__ if key in value.__required_keys__]
        return {key: inspect.Parameter(key, inspect.Parameter.POSITIONAL_OR_KEYWORD) for key in keys}
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return {"value": inspect.Parameter("value", inspect.Parameter.POSITIONAL_OR_KEYWORD)}
    return dict(inspect.signature(value).parameters)


@pytest.mark.parametrize("name", sorted(set(ENTRIES) - {"ChatmillError"}))
def test_signatures_are_those_of_the_code(name: str) -> None:
    head = ENTRIES[name].strip().split("\n")[0].strip("`")
    value = getattr(chatmill, name)
    if " = " in head.partition("(")[0]:
        assert head == f"{name} = {value!r}".replace("'", '"')
        return
    written: dict[str, Any] = {}
    exec(f"def written{head.removeprefix(name).replace(', ...)', ')')}: ...", written)
    shown, real = inspect.signature(written["written"]).parameters, parameters(value)
    assert [key for key in real if key in shown] == list(shown)
    for key, parameter in shown.items():
        assert real[key].kind is parameter.kind
        assert real[key].default == parameter.default
    if ", ...)" not in head:
        assert set(real) == set(shown)


def test_the_examples_run_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_python("api.md")


def test_the_further_names_are_where_the_page_says() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Further names")[2]
    found = re.findall(r"`(chatmill\.[\w.]+)\.(\w+)`", table)
    assert len(found) > 20
    for module, name in found:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
