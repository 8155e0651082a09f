"""`chatmill build` as a user meets them: words, exit statuses, and what is left in the folder."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from chatmill.compiler.progress import shown_progress
from chatmill.compiler.run import BuildProgress
from tests.cli.run import Call, chatmill, forked
from tests.compiler.builds import chats, digest, files_of, leftovers, plain_recipe, talk, write_jsonl

BYTES = ["-t", "bytes", "--add-control-tokens"]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe next to its input, with a relative path."""
    write_jsonl(tmp_path / "chats.jsonl", chats(30))
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(plain_recipe(Path("chats.jsonl"), split={"val_fraction": 0.2})))
    return path


def test_a_build_as_a_process(recipe: Path, tmp_path: Path) -> None:
    done = chatmill("build", recipe, "--out", "data/built", "-w", "2", "--set", "shard_bytes=3000", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "quiet without a terminal"
    lines = done.stdout.splitlines()
    assert lines[0] == "tokenizer bytes (as recipe.yaml says)"
    assert lines[4].split() == ["source", "records", "left", "out", "trained", "context", "cut", "dropped", "repeated"]
    assert lines[-1].startswith("data/built in ")
    assert "\x1b" not in done.stdout
    assert max(map(len, lines)) <= 80
    built = tmp_path / "data" / "built"
    assert {path.name for path in built.iterdir()} == {"manifest.json", "chunks.jsonl", "train", "val"}
    files_of(built)
    again = forked("build", recipe, "--out", "data/built", "--set", "shard_bytes=3000", cwd=tmp_path)
    assert again.returncode == 0
    assert "data/built already holds exactly this build; nothing to do." in again.stdout
    assert "tokens/s" not in again.stdout, "nothing was built"
    assert leftovers(built) == []


def test_options_make_a_recipe(call: Call, recipe: Path, tmp_path: Path) -> None:
    options = [
        "--policy", "all", "--max-length", "128", "--overflow", "cut", "--pack", "greedy", "--set", "pack.length=256",
        "--shape", "openai", "--val-fraction", "0.25", "--on-error", "quarantine", "--template", "llama3",
    ]  # fmt: skip
    done = call("build", "chats.jsonl", "-o", "out", "-w", "0", *BYTES, *options)
    assert done.status == 0, done.error
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    again = call("build", "chats.jsonl", "-o", "out", "-w", "0", *BYTES, *options, "--json")
    assert json.loads(again.out) == manifest
    held, made = manifest["splits"]["train"], manifest["recipe"]
    line = f"train: {held['episodes']:,} episodes in {held['rows']:,} rows of 256 tokens, {held['fill']:.2%} full"
    assert line in " ".join(done.out.split())
    assert made["sources"][0] | {"path": 0} == {
        "path": 0, "shape": "openai", "name": None, "weight": 1.0, "where": None, "max_records": None,
        "pick": None, "tools_file": None, "system_file": None, "unknown_prompt": "refuse",
    }  # fmt: skip
    assert made["sources"][0]["path"] == ["chats.jsonl"]
    assert made["packing"] == {"max_length": 128, "overflow": "cut"}
    assert made["pack"] == {"length": 256, "strategy": "greedy"}
    assert (made["policy"], made["template"]) == ("all", "llama3")
    assert (made["split"], made["on_error"], made["add_control_tokens"]) == ({"val_fraction": 0.25}, "quarantine", True)


OTHER = ("build", "chats.jsonl", "-o", "out", "-w", "0", *BYTES, "--policy", "all")
"""A build of something else."""


def test_folders_that_are_refused(call: Call, recipe: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    done = call("build", recipe, "-o", "mine", "-w", "0")
    assert done.status == 2
    assert "mine is not empty (thesis.txt) and holds no build; choose an empty folder" in done.error
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
    assert call("build", recipe, "-o", "out", "-w", "0").status == 0
    before = digest(tmp_path / "out")
    done = call(*OTHER)
    assert done.status == 2
    assert "out holds another dataset" in done.error
    assert digest(tmp_path / "out") == before
    assert leftovers(tmp_path / "out") == []


def test_an_unfinished_build_is_continued_or_replaced_where_nothing_is_done(
    call: Call, recipe: Path, tmp_path: Path
) -> None:
    share = call("build", recipe, "-o", "out", "-w", "0", "--shard", "0/2")
    assert share.status == 0
    assert "This share is done. When all are: --resume in place of --shard makes out." in share.out
    done = call("build", recipe, "-o", "out", "-w", "0")
    assert done.status == 2
    assert "holds an unfinished build of this recipe: continue with --resume" in done.error
    done = call(*OTHER, "--resume")
    assert done.status == 2
    assert "holds an unfinished build of something else" in done.error
    shutil.copytree(tmp_path / "out", tmp_path / "unfinished")
    assert call("build", recipe, "-o", "out", "-w", "0", "--resume").status == 0
    assert leftovers(tmp_path / "out") == []
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "unfinished").rename(tmp_path / "out")
    for receipt in (tmp_path / "out" / ".build" / "receipts").iterdir():
        receipt.unlink()
    done = call(*OTHER)
    assert done.status == 0
    assert "holds an unfinished build with other options: starting over" in done.error
    assert leftovers(tmp_path / "out") == []


def test_a_failed_build_does_not_block_the_corrected_one(call: Call, recipe: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "bad.jsonl", [*chats(40), {"messages": [{"role": "pope", "content": "x"}]}])
    options = ["-w", "0", "--set", "shard_bytes=2000", *BYTES]
    assert call("build", "bad.jsonl", "-o", "out", *options).status == 2
    receipts = tmp_path / "out" / ".build" / "receipts"
    assert list(receipts.iterdir()), "some chunks are done, and still nothing is to be resumed"
    (tmp_path / "out" / "mine.txt").write_text("not of the build")
    corrected = call("build", "chats.jsonl", "-o", "out", *options)
    assert corrected.status == 0, corrected.error
    assert corrected.error.count("out holds an unfinished build with other options: starting over") == 1
    (tmp_path / "out" / "mine.txt").unlink()
    assert leftovers(tmp_path / "out") == []
    assert call("build", "chats.jsonl", "-o", "fresh", *options).status == 0
    assert digest(tmp_path / "out") == digest(tmp_path / "fresh")


def test_reuse_says_how_many_chunks(call: Call, recipe: Path, tmp_path: Path) -> None:
    options = ["-w", "0", "--set", "shard_bytes=2000"]
    assert call("build", recipe, "-o", "old", *options).status == 0
    done = call("build", recipe, "-o", "new", *options, "--reuse", "old", "--rehash")
    assert done.status == 0, done.error
    chunks = len((tmp_path / "new" / "chunks.jsonl").read_text().splitlines())
    assert f"{chunks} of {chunks} chunks reused from old" in done.out
    assert files_of(tmp_path / "new") == files_of(tmp_path / "old")


def test_reasoning_of_answers_that_are_context_is_counted_apart_from_lost_reasoning(call: Call, tmp_path: Path) -> None:
    messages = [*talk("2+2?", "4"), *talk("3+3?", "6")]
    messages[1] |= {"reasoning_content": "Add.", "train": False}
    messages[3]["reasoning_content"] = "Add again."
    write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}] * 2)
    build = ["-t", "bytes", "-T", "qwen3", "--set", "add_control_tokens=true", "-w", "0"]
    done = call("build", "a.jsonl", "-o", "out", *build)
    assert done.status == 0, done.error
    assert "characters of the reasoning of untrained answers that are in no document: 8" in done.out
    assert "characters of reasoning that" not in done.out
    assert call("verify", "out", "--deep").status == 0


def test_what_is_left_out_lost_or_empty_is_counted_by_kind_and_source(call: Call, tmp_path: Path) -> None:
    reasoned = talk("2+2?", "4")
    reasoned[1]["reasoning_content"] = "Add."
    write_jsonl(tmp_path / "one.jsonl", [{"messages": reasoned}] * 2 + ["{"])
    write_jsonl(tmp_path / "two.jsonl", [{"messages": reasoned}] * 3 + [{"messages": talk("q", "")}])
    build = ["build", "one.jsonl", "two.jsonl", "-o", "out", "-w", "0", *BYTES, "--on-error", "quarantine"]
    done = call(*build, "--set", "gates.max_lost_reasoning=null")
    assert done.status == 3
    assert "--set gates.records_left_out=0.15 (null turns the gate off)" in done.error
    build += ["--resume", "--set", "gates.records_left_out=0.2"]
    done = call(*build)
    assert done.status == 3
    assert "gate max_lost_reasoning" in done.error
    done = call(*build, "--set", "gates.max_lost_reasoning=null")
    assert done.status == 0, done.error
    assert "records left out: invalid_json: 1" in done.out
    assert "Those in quarantine are in out/rejected.jsonl" in done.out
    assert (tmp_path / "out" / "rejected.jsonl").read_text().count("\n") == 1
    assert "characters of reasoning that are in no document (one 8, two 12): 20" in done.out
    assert "characters of contents" not in done.out
    assert "answers that are empty: only the end of the turn is trained: 1" in done.out
    names, one, two = (next(line for line in done.out.splitlines() if line.startswith(word)).split()
                       for word in ("source", "one", "two"))  # fmt: skip
    column = names.index("left")
    assert (one[column], two[column]) == ("1", "0")


def test_an_empty_answer_is_one_in_every_format(call: Call, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": ""}, {"question": "q", "answer": "a"}])
    (tmp_path / "a.csv").write_text("question,answer\nq,\nq,a\n")
    for name in ("a.jsonl", "a.csv"):
        assert call("build", name, "-o", f"out-{name}", "-w", "0", *BYTES).status == 0
        assert call("verify", f"out-{name}", "--deep").status == 0
    first, second = ((tmp_path / f"out-{name}" / "train" / "tokens.bin").read_bytes() for name in ("a.jsonl", "a.csv"))
    assert first == second


def test_verify_finds_the_inputs_from_any_folder(
    call: Call, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("build", recipe, "-o", "out", "-w", "0").status == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    done = call("verify", "../out", "--deep", "-w", "0")
    assert (done.status, Path.cwd()) == (0, elsewhere), done.error + done.out
    assert "30 records derived" in done.out
    moved = tmp_path.with_name(f"{tmp_path.name}-moved")
    tmp_path.rename(moved)  # folder and inputs together
    monkeypatch.chdir(moved.parent)
    assert call("verify", moved / "out", "--deep", "-w", "0").status == 0


def test_a_sample_of_a_long_build_is_tried_before_it_starts(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "hm. " * 20}]
    bad = [turn[0], {"role": "assistant", "content": "t", "reasoning_content": "r", "tool_calls": [CALL]}]
    write_jsonl(tmp_path / "a.jsonl", [{"messages": turn * 6}] * 3 + [{"messages": bad}])
    given = ["build", "a.jsonl", "-w", "0", *BYTES, "--on-error", "quarantine", "--set", "gates.records_left_out=1"]
    given += ["--set", "date=2026-01-01", "-T", "gpt_oss"]
    assert "of the first" not in call(*given, "-o", "short").out
    monkeypatch.setattr("chatmill.compiler.sample.LONG_INPUT", 1)
    said = " ".join(call(*given, "-o", "long").out.split())
    assert "refuses 1 of the first 4 records (25%): template_refused 1. The first: a.jsonl:4" in said
    assert "In the first 4 records: Later messages change earlier answers, so 15 rows are added" in said


def test_what_is_left_out_is_listed_on_a_page_and_inspect_repairs_what_a_build_would(
    call: Call, tmp_path: Path
) -> None:
    said = [{"role": "user", "content": "q<b>"}, {"role": "assistant", "tool_calls": [CALL]}]
    write_jsonl(tmp_path / "a.jsonl", [{"id": "r<i>", "messages": said}, *chats(30)])
    given = [*BYTES, "-T", "mistral_nemo"]
    left = ["--on-error", "quarantine", "--set", "gates.records_left_out=1"]
    assert call("build", "a.jsonl", "-o", "out", "-w", "0", *given, *left, "--set", "not_shown=drop").status == 0
    assert call("view", "out", "--save", "page.html").status == 0
    page = (tmp_path / "page.html").read_text()
    card = page[page.index('id="left-out"') :].partition("</section>")[0]
    assert "records left out: <code>template_refused</code>" in card
    row = card[card.index("<code>a.jsonl:1</code>") :].partition("</li>")[0]
    assert "r&lt;i&gt;" in row
    assert "with length 9" in row
    keys = ["-t", "bytes", "-T", "mistral_nemo", "-n", "1"]
    assert call("inspect", "a.jsonl", *keys).status != 0
    shown = call("inspect", "a.jsonl", *keys, "--set", 'repairs=["call_ids"]')
    assert shown.status == 0, shown.error
    assert "a.jsonl:1: changed as the recipe says: repaired call ids 1" in shown.out


def test_progress_is_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    values = {"chunks_done": 3, "chunks": 7, "bytes_done": 5, "bytes": 9, "tokens": 10, "records": 1234}
    with shown_progress() as on_progress:
        assert on_progress is not None
        on_progress(BuildProgress(stage="compile", **values))
    text = capsys.readouterr().err
    assert "None" not in text
    assert "0 chunks" in text, "a number from the first moment on"
    assert "3/7 chunks" in text
    assert "1,234 records" in text


def test_options_replace_keys_of_a_recipe(call: Call, recipe: Path, tmp_path: Path) -> None:
    more = ["--policy", "all", "--set", "sources.0.weight=2", "--set", "pack.length=1024", "--set", "strict_text=true"]
    done = call("build", recipe, "-o", "out", "-w", "0", *more, "--set", "template_options.default_system_text=x")
    assert done.status == 2, "the template does not read this option"
    done = call("build", recipe, "-o", "out", "-w", "0", *more)
    assert done.status == 0, done.error
    assert "policy all (as asked for)" in done.out
    made = json.loads((tmp_path / "out" / "manifest.json").read_text())["recipe"]
    assert (made["policy"], made["sources"][0]["weight"], made["pack"]["length"]) == ("all", 2.0, 1024)
    assert (made["strict_text"], made["split"]) == (True, {"val_fraction": 0.2})
