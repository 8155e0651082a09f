"""Opening data never runs code from it: a Python template that data names is run when the user names it again."""

from __future__ import annotations

import ast
import hashlib
import json
import py_compile
from collections.abc import Callable
from importlib.util import cache_from_source
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

import pytest
import typer

import chatmill
from chatmill.cli import app
from chatmill.cli.statuses import ended
from chatmill.compiler.run import run_build
from chatmill.look.viewer.opened import open_viewed
from chatmill.prove.verify import verify
from chatmill.render.registry import find_template
from chatmill.render.templates.token_native import TokenNative
from chatmill.render.trust import (
    NO_TRUST,
    TemplateTrust,
    UntrustedTemplateError,
    allowed_template,
)
from chatmill.store.receipts import receipt_bytes, sealed
from tests.compiler.builds import chats, plain_recipe, write_jsonl

CODE = """
import pathlib
from chatmill.render.templates.token_native import TokenNative

with pathlib.Path({mark!r}).open("a") as file:
    file.write("ran")


class Mine(TokenNative):
    name = "mine"


TEMPLATE = Mine
"""
ROOT = Path(chatmill.__file__).parent


class Received:
    """A dataset whose template is a Python file that leaves a mark when it is run."""

    def __init__(self, home: Path) -> None:
        self.home, self.mark, self.template = home, home / "mark", home / "mine.py"
        self.template.write_text(CODE.format(mark=str(self.mark)))
        self.source = write_jsonl(home / "chats.jsonl", chats(12))
        self.recipe = plain_recipe(self.source, template=str(self.template), split={"val_fraction": 0.3})
        self.data = home / "data"
        run_build(self.recipe, self.data, workers=0)
        assert self.ran, "the build runs it: its recipe names it"

    @property
    def ran(self) -> bool:
        """Whether the template was run since this was asked before."""
        there = self.mark.exists()
        self.mark.unlink(missing_ok=True)
        return there

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.template.read_bytes()).hexdigest()


@pytest.fixture
def received(tmp_path: Path) -> Received:
    return Received(tmp_path)


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*arguments: object) -> tuple[int, str]:
        group: Any = typer.main.get_command(app)
        capsys.readouterr()
        status = ended(lambda: group.main([str(one) for one in arguments], standalone_mode=False))
        return status, "".join(capsys.readouterr())

    return call


def test_commands_that_open_data_do_not_run_it(received: Received, run: Run, tmp_path: Path) -> None:
    data = received.data
    for arguments, wanted, words in (
        (("verify", data), 0, "was not run"),
        (("inspect", data), 0, "<|ngpt_asst_"),
        (("stats", data), 0, "trained"),
        (("view", data, "--save", tmp_path / "page.html"), 0, "bytes"),
        (("diff", data, data), 0, "All records are equal"),
        (("export", data, "--to", "parquet", "--out", tmp_path / "out"), 0, "tokens"),
        (("inspect", tmp_path / "out"), 0, "<|ngpt_asst_"),
        (("verify", tmp_path / "out"), 0, "nothing wrong"),
        (("verify", data, "--deep"), 2, received.sha256),
        (("build", "--help"), 0, ""),
    ):
        status, text = run(*arguments)
        assert status == wanted, (arguments, text)
        assert words in text, (arguments, text)
        assert not received.ran, arguments
    (viewed,) = open_viewed([data], split=None, tokenizer=None)
    assert viewed.look.decoder is not None
    assert viewed.look.decoder_problem == "", "all that is needed stands in the manifest"
    assert not received.ran


def test_verify_runs_a_template_that_is_named_again_or_trusted(received: Received, run: Run, tmp_path: Path) -> None:
    data = received.data
    status, text = run("verify", data)
    assert f"--trust-template {received.sha256}" in text
    assert f"--template {received.template}" in text
    assert "compared: tokenizer with recorded fingerprint" in text
    for options in (("--template", received.template), ("--trust-template", received.sha256.upper())):
        for deep in ((), ("--deep",)):
            status, text = run("verify", data, *options, *deep)
            assert status == 0, text
            assert "tokenizer, template and policy with recorded fingerprints" in text
            assert received.ran
    status, text = run("verify", data, "--deep", "--trust-template", "0" * 64)
    assert status == 2
    assert "not the file that you trust" in text
    assert not received.ran
    report = verify(data, deep=True, template=received.template)
    assert report.passed
    assert report.counts["records_derived"] == 12
    assert not verify(data, deep=True).passed

    other = tmp_path / "other.py"
    other.write_text(received.template.read_text().replace('name = "mine"', 'name = "mine"\n    extra = 1'))
    status, text = run("verify", data, "--template", other)
    assert status == 1
    assert "the template has changed since the build" in text


def test_a_template_that_was_changed_is_not_what_was_trusted(received: Received) -> None:
    trusted = received.sha256
    with received.template.open("a") as file:
        file.write("# more\n")
    report = verify(received.data, deep=True, trust_template=trusted)
    assert "not the file that you trust" in report.blocked
    assert not received.ran
    received.template.unlink()
    report = verify(received.data, deep=True)
    assert report.blocked
    assert any("is not here" in sentence for sentence in report.unchecked)


def test_a_changed_tokenizer_is_found_without_the_template(received: Received) -> None:
    path = received.data / "manifest.json"
    content = json.loads(path.read_bytes())
    assert content["tokenizer"]["control_tokens"] == list(TokenNative.control_tokens)
    content["tokenizer"]["fingerprint"] = "0" * 64
    path.write_bytes(receipt_bytes(sealed(content)))
    report = verify(received.data)
    assert any("the tokenizer has changed since the build" in finding.message for finding in report.findings)
    assert not received.ran


def test_a_compiled_file_beside_a_template_is_not_what_runs(tmp_path: Path) -> None:
    """Python would run it in place of the text, which is what was hashed, and trust in which was asked for."""
    path, other = tmp_path / "mine.py", tmp_path / "other.py"
    for file, mark in ((path, "good"), (other, "bad")):
        file.write_text(CODE.format(mark=str(tmp_path / mark)))
    compiled = cache_from_source(str(path))
    py_compile.compile(str(other), cfile=compiled, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH, doraise=True)
    find_template(str(path))
    assert ((tmp_path / "good").exists(), (tmp_path / "bad").exists()) == (True, False)


def test_the_gate(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    with pytest.raises(UntrustedTemplateError, match="is not here: name it with --template"):
        allowed_template(str(path), NO_TRUST, "data")
    path.write_text("raise SystemExit")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(UntrustedTemplateError, match=f"--trust-template {found}"):
        allowed_template(str(path), NO_TRUST, "data")
    with pytest.raises(UntrustedTemplateError, match="not the file that you trust"):
        allowed_template(str(path), TemplateTrust(sha256=found[:12]), "data")
    assert allowed_template(str(path), TemplateTrust(sha256=found), "data") == str(path)
    assert allowed_template(str(path), TemplateTrust(template=path), "data") == str(path)
    assert allowed_template(str(path), TemplateTrust(template="chatml"), "data") == "chatml"
    for name in ("chatml", "model/chat_template.jinja"):
        assert allowed_template(name, NO_TRUST, "data") == name, "no Python is run for it"


def test_templates_are_looked_up_in_few_places() -> None:
    """Whoever adds one asks whether the name comes from data; those in `gated` take it from `render.trust`."""
    gated = {
        "prove/reference.py",
        "prove/verify.py",
        "prove/deep.py",
    }
    named_by_the_user = {
        "compiler/chunk_job.py", "compiler/first_recipe.py", "compiler/recipe_text.py", "compiler/pipeline.py",
        "cli/raw_files.py", "render/registry.py",
        "render/render.py", "render/trust.py", "look/template_list.py", "look/template_look.py", "auditor/run.py",
        "cli/build.py", "dataset/models.py",
        "compiler/template_comparison.py",  # verify asks the last one behind its own gate
    }  # fmt: skip
    found = set()
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        if not any(f"{name}(" in text for name in ("find_template", "Pipeline", "bind")):
            continue
        for node in ast.walk(ast.parse(text)):
            called = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if called in ("find_template", "Pipeline") or (called == "bind" and "viewer" not in path.parts):
                found.add(str(path.relative_to(ROOT)))
    assert found - named_by_the_user == gated
