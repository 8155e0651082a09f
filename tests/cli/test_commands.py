"""All commands together: help, examples, pages, options, completion, exit statuses, and errors without tracebacks."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from chatmill.cli import main
from chatmill.cli import options as shared_options
from chatmill.cli.app import COMMANDS, app
from chatmill.cli.layout import help_of
from chatmill.cli.statuses import Status, ended
from tests.cli.run import Call, forked
from tests.compiler.builds import chats, plain_recipe, write_jsonl
from tests.faults import faults, faults_hit

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "commands"
SHORT = {"--tokenizer": "-t", "--template": "-T", "--policy": "-p", "--out": "-o", "--count": "-n", "--workers": "-w",
         "--quiet": "-q", "--help": "-h"}  # fmt: skip
"""Long options that have a short form have this one in every command."""


@pytest.fixture(scope="module")
def context() -> Any:
    group: Any = typer.main.get_command(app)
    return group.make_context("chatmill", ["--help"], resilient_parsing=True)


@pytest.fixture(params=list(COMMANDS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def options(name: str, context: Any) -> list[Any]:
    parameters = context.command.get_command(context, name).get_params(context)
    return [one for one in parameters if one.param_type_name == "option"]


def test_the_table_of_commands_is_the_folder() -> None:
    """A module with a function `command` is a command; every command has a module."""
    folder = ROOT / "src" / "chatmill" / "cli"
    modules = {path.stem for path in folder.glob("*.py") if re.search(r"^def command\(", path.read_text(), re.M)}
    assert {name.replace("-", "_") for name in COMMANDS} == modules, "a command is named as its module"
    assert len(COMMANDS) >= 10


def test_a_command_has_text_and_examples_that_parse(name: str, context: Any, call: Call) -> None:
    done = call(name, "--help", columns=80)
    assert (done.status, done.said) == (Status.DONE, "")
    assert max(map(len, done.out.splitlines())) <= 80
    assert f"Usage: chatmill {name} " in done.out.partition("\nExamples\n")[0]
    assert "\x1b" not in done.out
    assert call(name, "-h", columns=80).out == done.out
    text, examples = help_of(importlib.import_module(f"chatmill.cli.{name.replace('-', '_')}").__doc__)
    assert text
    assert any(shlex.split(line)[:2] == ["chatmill", name] for line in examples)
    for line in examples:
        assert " ".join(line.split())[:40] in " ".join(done.out.split())
        words = shlex.split(line.partition(" | ")[0])
        other, *arguments = words[words.index("chatmill") + 1 :]  # after torchrun or variables, perhaps
        parsed = context.command.get_command(context, other)
        assert parsed is not None, line
        with contextlib.suppress(typer.Exit):  # --list answers at once, as --help does
            parsed.make_context(other, arguments, parent=context)


def test_options_have_the_same_names_everywhere(name: str, options: list[Any]) -> None:
    for option in options:
        assert option.help, option.opts
        for long, short in SHORT.items():
            if long in option.opts:
                assert short in option.opts, f"{name} {long} has the short form {short}"
            elif short in option.opts:  # but inspect shows examples
                assert "--examples" in option.opts, f"{name}: {short} means {long} elsewhere"
    assert any("--json" in option.opts for option in options) or name == "init", "what init makes is read by people"


TAKE_FILES = {"--template", "--policy", "--shape"}
"""Their names have pages of their own; a file may be given too."""


def test_the_help_of_an_option_that_takes_one_of_few_names_has_them_all() -> None:
    with_names = {
        one.default: (one.help, one.autocompletion())  # where typer keeps the first name
        for one in vars(shared_options).values()
        if getattr(one, "autocompletion", None) and one.default not in TAKE_FILES
    }
    assert {"--pack", "--overflow", "--expand", "--on-error", "--engine"} <= set(with_names)
    for option, (text, names) in with_names.items():
        assert not set(names) - set(re.findall(r"\w+", text)), option


def test_a_command_has_a_page_that_names_every_option(name: str, options: list[Any]) -> None:
    page = PAGES / f"{name}.md"
    assert page.is_file(), f"write docs/commands/{name}.md"
    text = page.read_text()
    assert f"chatmill {name} " in text
    for option in options:
        if "--help" not in option.opts:
            assert any(f"{long}" in text for long in (*option.opts, *option.secondary_opts)), f"{name} {option.opts}"
    assert f"({name}.md)" in (PAGES / "index.md").read_text()


def test_the_help_is_quick_and_imports_no_command() -> None:
    code = (
        "import sys; sys.argv = ['chatmill', '--help']\n"
        "from chatmill.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f" {command} " in done.stdout for command in COMMANDS)
    modules = set(done.stderr.split())
    heavy = {"numpy", "torch", "pyarrow", "pydantic", "msgspec", "yaml", "tokenizers", "transformers", "asyncio"}
    assert not heavy & modules, "what takes long to import is not imported for a help text"
    imported = {module.removeprefix("chatmill.") for module in modules if module.startswith("chatmill.")}
    assert imported == {"cli", "cli.app", "cli.layout", "cli.statuses", "errors", "_facade"}


# completion


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("chatmill ver", ["verify"]),
        ("chatmill build --val", ["--val-fraction"]),
        ("chatmill inspect x.jsonl --template qw", ["qwen2_5", "qwen3", "qwen3_2507", "qwen3_training"]),
        ("chatmill build x.jsonl -p last", ["last_turn"]),
        ("chatmill build x.jsonl --overflow drop", ["drop", "drop_oldest_turns"]),
        ("chatmill build x.jsonl --pack best", ["best_fit"]),
        ("chatmill init x.jsonl --shape al", ["alpaca"]),
        ("chatmill init x.jsonl -t o2", ["o200k"]),
    ],
)
def test_completion(
    line: str, offered: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What bash would offer at the end of a line."""
    monkeypatch.setenv("_CHATMILL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    monkeypatch.setattr(sys, "argv", ["chatmill"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.split() == offered


# exit statuses


def test_the_statuses_of_the_documentation_are_those_of_the_code() -> None:
    section = (PAGES / "index.md").read_text().partition("## Exit statuses")[2].partition("\n## ")[0]
    listed = [int(value) for value in re.findall(r"^\| (\d+) \|", section, re.M)]
    assert listed == [int(status) for status in Status]


BYTES = ("-t", "bytes", "--add-control-tokens", "-w", "0")
OUT = ("-o", "out")
TRANSCRIPTS = ("transcripts", "chats.jsonl", "-t", "bytes", "--context-length", "9")


@pytest.fixture
def chat_file(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "chats.jsonl", chats(6))


def test_status_0_1_and_141(chat_file: Path, call: Call) -> None:
    for out, policy in (("a", "assistant"), ("b", "all")):
        assert call("build", chat_file, "-o", out, *BYTES, "-p", policy).status == Status.DONE
    assert call("diff", "a", "a").status == Status.DONE
    assert call("diff", "a", "b").status == Status.FOUND
    for extra in ("--json", "--full"):
        code = (
            "import os, sys; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1)\n"
            f"sys.argv = ['chatmill', 'inspect', {str(chat_file)!r}, '-t', 'bytes', {extra!r}]\n"
            "from chatmill.cli import main; main()"
        )
        closed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (closed.returncode, closed.stderr) == (Status.PIPE, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], ""),
        (["bild"], "unknown command 'bild'. Did you mean 'build'?"),
        (["build"], "Missing argument 'FILES'. Help: chatmill build --help"),
        (["build", "x.jsonl"], "Missing option '--out'"),
        (["inspect", "--no-such-option"], "No such option: --no-such-option"),
        (["inspect", "chats.jsonl", "-n", "none"], "should be a valid integer"),
        (["inspect", "nowhere.jsonl"], "no such file: nowhere.jsonl"),
        (["verify", "nowhere"], "nowhere"),
        (["diff", "nowhere", "nowhere"], "nowhere"),
        (["export", "nowhere", "--to", "hf"], "nowhere"),
        (["isolate", "nowhere"], "nowhere has no config.json"),
        (["isolate", "nowhere", "--split", "train"], "--split needs PACKED"),
        (["synth-kd", "o", "--set", "max_token=1"], "unknown key 'max_token'. Did you mean 'max_tokens'?"),
        (["synth-kd", "o", "--set", "max_tokens=-1"], "--set max_tokens takes an integer >= 0, not -1"),
        (["build", "c.jsonl", "-o", "o", "--shape", "alpaca", "--shape", "user=q"], "alpaca says what all fields are"),
        (["init", "nowhere.jsonl"], "nowhere.jsonl"),
        (["init", "nowhere.jsonl", "-m", "bytes"], "nowhere.jsonl"),
        (["build", "chats.jsonl", "-o", "new"], "name the model that the tokens are for: --model FOLDER"),
        (
            ["build", "chats.jsonl", "-o", "new", "-m", "./no/model"],
            "no tokenizer './no/model': there is no such folder",
        ),
        (["audit", "chats.jsonl", "-m", "../nowhere"], "no tokenizer '../nowhere': there is no such folder"),
        (["template", "../nowhere"], "no template '../nowhere': there is no such folder"),
        (["init", "chats.jsonl", "-m", "bytes", "--for", "megatrn"], "Did you mean 'megatron'?"),
        (["init", "chats.jsonl", "-o", "r.yaml", "-t", "bytes"], "is there already and is not overwritten"),
        (["init", "chats.jsonl"], "name the model that the tokens are for: --model FOLDER"),
        (["init", "chats.jsonl", "--set", "preference=chosen"], "Did you mean 'preferences'?"),
        (["transcripts", "nowhere.jsonl", "-t", "bytes", "--context-length", "9", "-o", "t"], "nowhere.jsonl"),
        ([*TRANSCRIPTS, "-o", "."], "is not a regular file"),
        ([*TRANSCRIPTS, "-o", "chats.jsonl"], "--out chats.jsonl is also an input"),
        ([*TRANSCRIPTS, "-o", "no/out.jsonl"], "the folder of --out does not exist: no"),
        (["inspect", "chats.jsonl", "--split", "train"], "remove --split, or build it first"),
        (["inspect", "chats.jsonl", "--row", "0"], "remove --row, or build it first"),
        (["inspect", "chats.jsonl", "--random", "0"], "remove --random, or build it first"),
        (["template", "broken.jinja"], "template 'broken.jinja', line 2"),
        (["template", "empty"], "empty holds no chat template"),
        (["template", "chatml", "--set", "template_options.thinking=true"], "never reads the option 'thinking'"),
        (["template", "chatml", "--set", "date=yesterday"], "a date is YYYY-MM-DD"),
        (["build", "chats.jsonl", *OUT, "-t", "bytes"], "--add-control-tokens on the command line"),
        (["build", "chats.jsonl", *OUT, *BYTES, "--overflow", "truncate"], "packing.overflow: "),
        (["build", "chats.jsonl", *OUT, *BYTES, "--engine", "spark"], "unknown engine 'spark'"),
        (["build", "chats.jsonl", *OUT, *BYTES, "--shard", "2/2"], "--shard is i/N with i from 0 to N-1, not '2/2'"),
        (["build", "chats.jsonl", *OUT, *BYTES, "--set", "gates.records=1"], "unknown key 'gates.records'"),
        (["build", "r.yaml", *OUT, "--shape", "openai"], "names its sources: give the shape of one there"),
        (["build", "r.yaml", *OUT, "--set", "pack.lenght=4"], "unknown key 'pack.lenght', did you mean 'length'?"),
        (["build", "r.yaml", *OUT, "--set", "sources.7.weight=4"], "'7' is not there"),
        (["build", "r.yaml", *OUT, "--set", "tokenizer.name=4"], "tokenizer holds 'bytes'"),
        (["build", "r.yaml", *OUT, "--set", "policy"], "--set is KEY=VALUE, not 'policy'"),
    ],
)
def test_status_2(chat_file: Path, arguments: list[str], message: str, call: Call) -> None:
    home = chat_file.parent
    (home / "r.yaml").write_text(json.dumps(plain_recipe(Path("chats.jsonl"))))
    (home / "broken.jinja").write_text("{{ bos_token }}\n{% for message in messages %}{% endif %}")
    (home / "empty").mkdir()
    before = {path: path.read_bytes() for path in home.iterdir() if path.is_file()}
    done = call(*arguments)
    assert done.status == Status.MISTAKE
    assert done.messages == bool(arguments), done.said
    assert message in done.error
    assert bool(done.out) == (not arguments), "without arguments the overview, else nothing"
    assert not list(home.glob("out/**/*"))
    assert {path: path.read_bytes() for path in home.iterdir() if path.is_file()} == before


JUNK = {
    "noise.jsonl": bytes(range(256)) * 20,
    "noise.parquet": b"PAR1 and nothing else",
    "noise.gz": b"\x1f\x8b broken",
    "noise.yaml": b"tokenizer: [\n\xff\xfe",
    "empty.jsonl": b"",
    "deep.json": b"[" * 100_000,
}


@pytest.mark.parametrize("file", list(JUNK))
@pytest.mark.parametrize("command", ["build", "init", "inspect", "transcripts"])
def test_junk_is_a_mistake_and_never_a_traceback(command: str, file: str, tmp_path: Path, call: Call) -> None:
    (tmp_path / file).write_bytes(JUNK[file])
    extra = {
        "build": ["-o", "out", *BYTES] if not file.endswith("yaml") else ["-o", "out"],
        "init": ["-m", "bytes"],
        "transcripts": ["-t", "bytes", "--context-length", "9", "-o", "t.jsonl"],
    }
    done = call(command, file, *extra.get(command, []))
    assert done.status == Status.MISTAKE, done.said
    assert done.said


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left", "data/x"), "data/x: No space left; free some space there"),
        (PermissionError(errno.EACCES, "Denied", "data/x"), "data/x: Denied; look at its permissions"),
        (OSError("no number"), "OSError: no number"),
        (MemoryError(), "not enough memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory", "data/x"), "not enough memory: use fewer workers"),
        (ImportError("lib.so: failed to map segment from shared object"), "not enough memory"),
        (RuntimeError("can't start new thread"), "not enough memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "not enough memory"),
        (ZeroDivisionError("a bug of ours"), "ZeroDivisionError: a bug of ours"),
    ],
)
def test_the_machine_fails_and_status_70(
    error: BaseException, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        raise error

    is_bug = isinstance(error, ZeroDivisionError)
    assert ended(run) == (Status.BUG if is_bug else Status.MISTAKE)
    said = capsys.readouterr().err
    assert message in said
    assert [words in said for words in ("Traceback", "Please report it")] == [is_bug] * 2


def test_status_130_and_the_build_goes_on(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "chats.jsonl", chats(400))
    arguments = ["build", "chats.jsonl", "-o", "out", "-t", "bytes", "--add-control-tokens", "-w", "2"]
    arguments += ["--set", "shard_bytes=2000"]
    code = "from chatmill.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | faults("before:receipts/.*3.json:1:wait", log=tmp_path / "reached"),
    )
    until = time.monotonic() + 300
    while not faults_hit(tmp_path / "reached"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
    out, said = process.communicate(timeout=300)
    assert process.returncode == Status.INTERRUPTED, said
    assert said.splitlines() == ["What is done is kept in out: the same command with --resume continues.", "Stopped."]
    assert "episodes" not in out, "the choices are printed, and no result"
    assert not (tmp_path / "out" / "manifest.json").exists()
    done = forked(*arguments, "--resume", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["splits"]["train"]["episodes"] == 400
