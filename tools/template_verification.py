"""The table in docs/template-verification.md: model templates built over many conversations, and verified one by one.

    python -m tools.template_verification CONVERSATIONS TOKENIZERS [--npm FOLDER] [--jobs N] [--page PAGE]

CONVERSATIONS holds files of records. TOKENIZERS holds folders with a tokenizer.json (or .xz) and `chat_templates`. A
vocabulary that is not there is Qwen3's with the special tokens of the template added.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tools.template_survey import BOS, SPECIAL, STOPS

DATE = "2026-01-02"
MARK = "<!-- made by tools.template_verification: -->\n"


class Model(NamedTuple):
    """A template and the vocabulary it is used with."""

    name: str
    vocabulary: str
    template: str = ""
    """In `chat_templates`, or a path from the folder that holds all of them on; empty: the folder's own."""
    adds_tokens: bool = False


MODELS = (
    Model("Qwen3", "qwen3", "qwen3"),
    Model("Qwen2.5", "qwen3", "qwen2_5"),
    Model("Qwen3-2507", "qwen3", "qwen3_instruct_2507"),
    Model("Llama-3.1", "npm-llama3_1", "llama3_1"),
    Model("Gemma-3", "npm-gemma3", "gemma3"),
    Model("Mistral-Nemo", "mistral_nemo"),
    Model("DeepSeek-V3", "deepseek_v3"),
    Model("GLM-4.5", "qwen3", "glm4moe", adds_tokens=True),
    Model("Phi-3", "qwen3", "phi3", adds_tokens=True),
    Model("gpt-oss", "gptoss", "gptoss"),
    Model("Llama-3.2", "npm-llama3_1", "llama3_2"),
    Model("ChatML", "qwen3", "chatml"),
)


class Outcome(NamedTuple):
    """What became of the records under one template."""

    model: Model
    records: int
    built: int
    answers: int
    refused: Counter[str]
    differences: int
    findings: list[str]


def model_folder(model: Model, tokenizers: Path, npm: Path | None, out: Path) -> Path:
    """A folder with a vocabulary and a template, as a model has it."""
    source = next(
        folder for folder in (*(npm.glob(f"{model.vocabulary}*") if npm else ()), tokenizers / model.vocabulary)
        if folder.is_dir()
    )  # fmt: skip
    packed = source / "tokenizer.json.xz"
    raw = lzma.decompress(packed.read_bytes()) if packed.exists() else (source / "tokenizer.json").read_bytes()
    config = json.loads((source / "tokenizer_config.json").read_text())
    vocabulary = json.loads(raw)
    if model.template:
        home = tokenizers.parent if "/" in model.template else tokenizers / "chat_templates"
        text = (home / f"{model.template}.jinja").read_text(encoding="utf-8")
        config["chat_template"] = text
        if model.adds_tokens:
            _add_tokens(text, vocabulary, config)
    folder = out / model.name
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _add_tokens(text: str, vocabulary: dict[str, Any], config: dict[str, Any]) -> None:
    stops = next((stops for mark, stops in STOPS if mark in text), ("</s>",))
    bos = next((one for one in BOS if one in text), None)
    known = {token["content"] for token in vocabulary["added_tokens"]}
    free = 1 + max(token["id"] for token in vocabulary["added_tokens"])
    for name in dict.fromkeys([*SPECIAL.findall(text), *stops, *filter(None, [bos])]):
        if name not in known:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            vocabulary["added_tokens"].append({"id": free, "content": name, **flags, "special": True})
            free += 1
    config |= {"bos_token": bos, "eos_token": stops[0]}
    config["added_tokens_decoder"] = {
        str(token["id"]): {name: value for name, value in token.items() if name != "id"}
        for token in vocabulary["added_tokens"]
    }


def verified(model: Model, inputs: Sequence[str], folder: Path) -> Outcome:
    """Build with a template, and derive every record again."""
    built = folder / "built"
    command = [sys.executable, "-c", "import sys; from chatmill.cli import main; sys.exit(main())"]
    options = ["-t", str(folder), "-T", str(folder), "-o", str(built), "-w", "1", "-q", "--on-error", "quarantine"]
    gates = "records_left_out", "max_lost_reasoning", "records_without_trained_tokens"  # the table says what is lost
    for setting in (f"date={DATE}", *(f"gates.{gate}=null" for gate in gates)):
        options += ["--set", setting]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "build", *inputs, *options], check=True, env=environment, stdout=subprocess.DEVNULL)
    found = subprocess.run(
        [*command, "verify", str(built), "--deep", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    report = json.loads(found.stdout)
    by_source = json.loads((built / "manifest.json").read_text())["ledger"]["records"].values()
    totals: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for outcomes in by_source:
        for outcome, reasons in outcomes.items():
            totals[outcome] += sum(reasons.values())
            if outcome == "quarantined":
                refused.update(reasons)
    findings = [str(one) for one in report["findings"]]
    answers = report["counts"].get("answers_proved", 0)
    return Outcome(model, totals["read"], totals["built"], answers, refused, report["differences"], findings)


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as Markdown."""
    lines = [
        "| template | vocabulary | records | built | answers proved | refused, by reason | differences |",
        "|---|---|---:|---:|---:|---|---:|",
    ]
    for one in outcomes:
        own = one.model.vocabulary != "qwen3" or one.model.name == "Qwen3"
        vocabulary = "own" if own else "Qwen3's, tokens added" if one.model.adds_tokens else "Qwen3's"
        refused = ", ".join(f"`{reason}` {count:,}" for reason, count in one.refused.most_common()) or "none"
        lines.append(
            f"| {one.model.name} | {vocabulary} | {one.records:,} | {one.built:,} | {one.answers:,} | {refused} "
            f"| {one.differences:,} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Build and verify, and print the table or put it into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("conversations", type=Path)
    parser.add_argument("tokenizers", type=Path)
    parser.add_argument(
        "--npm", type=Path, help="folder with npm-gemma3*, npm-llama3_1*; without it these are left out"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    inputs = sorted(str(path) for path in given.conversations.iterdir() if ".jsonl" in path.name)
    models = [one for one in MODELS if given.only in one.name and (given.npm or not one.vocabulary.startswith("npm-"))]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(given.jobs) as threads:
        folders = [model_folder(one, given.tokenizers, given.npm, Path(temporary)) for one in models]
        outcomes = list(threads.map(lambda pair: verified(pair[0], inputs, pair[1]), zip(models, folders, strict=True)))
    for one in outcomes:
        for finding in one.findings[:5]:
            print(f"{one.model.name}: {finding}", file=sys.stderr)
    text = table(outcomes)
    print(text, end="")
    if given.page is not None:
        before, _, after = given.page.read_text().partition(MARK)
        rest = after[after.index("\n\n") :]
        given.page.write_text(f"{before}{MARK}{text.rstrip()}{rest}")


if __name__ == "__main__":
    main()
