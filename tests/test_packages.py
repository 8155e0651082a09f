"""A package adds a policy and a shape by entry points; the commands list and use them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatmill.cli import options
from chatmill.compiler.run import run_build
from chatmill.errors import ConfigError, UnknownNameError
from chatmill.label.presets import find_policy
from chatmill.prove.verify import verify
from chatmill.read.shapes import find_shape
from chatmill.render.registry import find_template

TEMPLATE = """{#-
licence: MIT
tokens: <|im_start|> <|im_end|>
stops: <|im_end|>
-#}
{%- for message in messages %}<|im_start|>{{ message.role }}: {{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"""
CODE = """
from chatmill.core.kinds import Part, RoleCode
from chatmill.label.policy import Policy

policy = Policy(name="anything", weights={(RoleCode.ASSISTANT, Part.CONTENT): 1.0})
shape = {"turns": [{"key": "ask", "role": "user"}, {"key": "say", "role": "assistant"}]}


wrong = 7
"""
ENTRIES = """[chatmill.policies]
toy-policy = toy_chat:policy
[chatmill.shapes]
toy-shape = toy_chat:shape
"""


def install(folder: Path, entries: str = ENTRIES, name: str = "toy-chat") -> None:
    """What pip leaves of a package with entry points."""
    about = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entries)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "toy_chat.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield folder
    sys.modules.pop("toy_chat", None)


def test_the_additions_of_a_package_are_used_by_name(site: Path, tmp_path: Path) -> None:
    install(site)
    (tmp_path / "a.jsonl").write_text(json.dumps({"ask": "2+2?", "say": "4"}) + "\n")
    recipe: dict[str, Any] = {
        "sources": [{"path": str(tmp_path / "a.jsonl"), "shape": "toy-shape"}],
        "tokenizer": "bytes",
        "template": "chatml",
        "policy": "toy-policy",
        "add_control_tokens": True,
    }
    built = run_build(recipe, tmp_path / "built", workers=0).manifest
    assert built["ledger"]["tokens"]["a"]["assistant"]["trained"] == 1, "the policy trains no terminator"
    report = verify(tmp_path / "built", deep=True)
    assert report.passed
    assert not [line for line in report.unchecked if "toy" in line]


def test_completion_has_them_and_nothing_is_run_for_it(site: Path) -> None:
    install(site)
    assert "toy-policy" in options._policies()
    assert "toy-shape" in options._shapes()
    assert "toy_chat" not in sys.modules


def test_a_comment_is_a_header_where_it_says_so(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(TEMPLATE)
    assert not find_template(file).control_tokens, "a comment that somebody wrote for people"
    file.write_text(TEMPLATE.replace("licence: MIT", "chatmill: template\nlicence: MIT\neos: <|im_end|>"))
    found = find_template(file)
    assert found.control_tokens == ("<|im_start|>", "<|im_end|>")
    assert found.stop_tokens == ("<|im_end|>",)
    assert (found.licence, found.named_tokens) == ("MIT", {"eos_token": "<|im_end|>"})


@pytest.mark.parametrize("find", [find_policy, find_shape])
def test_a_name_that_is_not_known_lists_them_too(site: Path, find: Any) -> None:
    install(site)
    with pytest.raises(UnknownNameError, match="toy-"):
        find("toy-nothing")


@pytest.mark.parametrize(
    ("entries", "find", "message"),
    [
        ("[chatmill.policies]\nassistant = toy_chat:policy\n", "x", "the name of one of Chatmill: rename it"),
        ("[chatmill.policies]\nA.json = toy_chat:policy\n", "x", "not made of small letters"),
        ("[chatmill.policies]\nmine = toy_chat:wrong\n", "mine", "its policy 'mine' is int, not a chatmill.Policy"),
        ("[chatmill.policies]\nmine = toy_chat:nothing\n", "mine", "cannot be loaded: AttributeError"),
    ],
)
def test_what_a_package_does_wrong_is_one_error_that_names_it(
    site: Path, entries: str, find: str, message: str
) -> None:
    install(site, entries)
    with pytest.raises(ConfigError, match=f"the package toy-chat: .*{message}"):
        find_policy(find)


def test_wrong_shapes_name_their_package(site: Path) -> None:
    install(site, "[chatmill.shapes]\nmine = toy_chat:wrong\n")
    with pytest.raises(ConfigError, match="the package toy-chat: its shape 'mine' is int"):
        find_shape("mine")


def test_two_packages_cannot_share_a_name(site: Path) -> None:
    install(site)
    install(site, "[chatmill.policies]\ntoy-policy = toy_chat:wrong\n", name="other")
    with pytest.raises(ConfigError, match="remove one of the packages"):
        find_policy("toy-policy")
