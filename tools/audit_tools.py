"""What `chatmill audit` finds in token data made by other tools: the tables of docs/audit-findings.md.

    python -m tools.audit_tools            # prints the tables
    python -m tools.audit_tools --write    # and puts them into docs/audit-findings.md
    python -m tools.audit_tools --python axolotl=ENV/bin/python --python unsloth=OTHER/bin/python --write

TRL: the dataset that `SFTTrainer` prepares with `assistant_only_loss=True`, for its own training templates. A template
has no vocabulary next to it, so bytes and the special tokens that it spells take its place; the model is a GPT-2 of one
small layer with random weights, which the trainer needs and the data does not depend on.

axolotl, LLaMA-Factory and Unsloth: sets that `tools/audit_makers.py` makes in an environment of each tool. The
section of a tool without `--python` stays as it is.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from chatmill.auditor.report import AuditReport
from chatmill.auditor.run import audit
from chatmill.core.conversation import Conversation, Role
from chatmill.errors import RecordError
from chatmill.render.jinja.options import Unproved
from chatmill.render.model_template import JinjaSource, ModelTemplate
from chatmill.render.registry import bind, find_template, given_options
from chatmill.tokenizer.load import load_tokenizer
from tools.mask_differences import (
    ROOT,
    as_given,
    byte_tokenizer,
    conversations,
    put,
    real_tokenizer,
    trl_templates,
    with_bytes,
)

PAGE = ROOT / "docs" / "audit-findings.md"
VOCABULARIES = ROOT / "tests" / "data" / "tokenizers"
TEMPLATES = (
    "cohere_training",
    "gemma3_training",
    "glm4moe_training",
    "gptoss_training",
    "lfm2_v2_training",
    "llama3_training",
    "nemotron_3_nano_training",
    "phi3_training",
    "qwen2_5_training",
    "qwen3_5_think_training",
    "qwen3_instruct_2507_training",
    "qwen3_training",
)


@dataclass
class Result:
    """The audits of one set."""

    name: str
    without: AuditReport
    with_source: AuditReport


def trl_set(peer: Any, rows: Sequence[dict[str, Any]], folder: str) -> Any:
    """The dataset that TRL's trainer would train on."""
    from datasets import Dataset
    from transformers import GPT2Config, GPT2LMHeadModel
    from trl import SFTConfig, SFTTrainer

    size = GPT2Config(vocab_size=len(peer), n_embd=8, n_layer=1, n_head=1, n_positions=64)
    arguments = SFTConfig(
        output_dir=folder, assistant_only_loss=True, max_length=None, report_to="none", use_cpu=True, bf16=False
    )
    trainer = SFTTrainer(
        model=GPT2LMHeadModel(size), args=arguments, train_dataset=Dataset.from_list(list(rows)), processing_class=peer
    )
    return trainer.train_dataset


def audited(path: Path, chats: Sequence[Conversation], today: datetime.date) -> Result:
    """Make a set with one template and audit it with the same template."""
    peer, bound = with_bytes(path, today)
    peer.pad_token = peer.eos_token
    rows, used = [], []
    for conversation in chats:
        try:
            options = dict(bound.write(conversation).options)
        except RecordError:
            continue
        messages, _ = as_given(conversation, bound.form)
        plain = [{"role": one["role"], "content": one["content"]} for one in messages]
        rows.append({"messages": plain, "chat_template_kwargs": options} if options else {"messages": plain})
        used.append(conversation)
    if len({frozenset(row) for row in rows}) > 1:
        rows = [row | {"chat_template_kwargs": row.get("chat_template_kwargs") or {}} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        made = trl_set(peer, rows, folder)
        without = audit(made, bound)
        with_source = audit(made, bound, source=used)
    return Result(path.stem, without, with_source)


def plain_chats() -> list[Conversation]:
    """Bundled conversations without tools."""
    return [one for one in conversations() if not one.tools and not any(m.tool_calls or m.name for m in one.messages)]


def table(results: Sequence[Result]) -> Iterator[str]:
    """One line a set."""
    yield "| template | documents | tokens | found without the source | found with the source | not known |"
    yield "|---|---:|---:|---|---|---|"
    for one in results:
        known = "turns, without the source" if any("prompt" in said for said in one.without.unknown) else ""
        yield (
            f"| `{one.name}` | {one.without.documents} | {one.without.tokens:,} | {_found(one.without)} "
            f"| {_found(one.with_source)} | {known} |"
        )


def _found(report: AuditReport) -> str:
    both = (*report.findings, *(note for note in report.notes if note.code == "after_stop_trained"))
    listed = [f"`{one.code}` {one.count:,} of {one.total:,} {one.rule.unit}" for one in both]
    return "; ".join(listed) or "nothing"


def trl_lines() -> list[str]:
    """The section about TRL."""
    today = datetime.datetime.now().astimezone().date()  # transformers hands out the real date
    chats = plain_chats()
    paths = [path for path in trl_templates() if path.stem in TEMPLATES]
    results = [audited(path, chats, today) for path in paths]
    return [
        f"TRL {version('trl')}, transformers {version('transformers')}, datasets {version('datasets')}; {len(chats)} "
        "bundled conversations without tools. Conversations that the template refuses, or whose answers cannot be "
        "proved, are left out.",
        "",
        *table(results),
    ]


# ---- tools with environments of their own


MAKERS = Path(__file__).with_name("audit_makers.py")
OTHERS = {
    "chatml": "chatml",
    "llama3": "llama3",
    "phi4": "phi4",
    "qwen2_5": "qwen",
    "qwen3": "qwen3",
    "qwen3_2507": "qwen3_nothink",
}
"""Bundled templates that the tools are tried with, and what LLaMA-Factory calls them."""
REAL = {"qwen3": "qwen3", "qwen3_2507": "qwen3", "qwen2_5": "qwen3"}
"""Templates with a real vocabulary of tests/data; the others have bytes and their special tokens."""
ABOUT = {
    "axolotl": "`axolotl preprocess` with the strategy `chat_template`, `chat_template: tokenizer_default`, "
    "`roles_to_train: [assistant]`, `train_on_inputs: false`, `train_on_eos: turn` and the template's stops as "
    "`eot_tokens`; the prepared folder is audited",
    "llamafactory": "`get_dataset` for the stage `sft` with the tool's own template of the family, as its workflow "
    "calls it; the folder that `tokenized_path` names is audited",
    "unsloth": "`train_on_responses_only` with the parts that it finds itself, on the ids of the texts that "
    "`apply_chat_template` writes",
}


@dataclass
class Job:
    """A set that a tool is to make."""

    folder: Path
    bound: ModelTemplate
    chats: list[Conversation]


def make_job(folder: Path, name: str, today: str) -> Job:
    """Write conversations, tokenizer and settings of one set."""
    from transformers import LlamaConfig

    path = ROOT / "src" / "chatmill" / "render" / "templates" / f"{name}.jinja"
    text = path.read_text(encoding="utf-8")
    peer = byte_tokenizer(text) if name not in REAL else real_tokenizer(VOCABULARIES / REAL[name])
    peer.chat_template = text
    found = find_template(name)
    assert isinstance(found, JinjaSource)
    peer.bos_token = found.named_tokens.get("bos_token", peer.bos_token)  # LLaMA-Factory writes the tokenizer's
    bound = bind(found, load_tokenizer(peer), replace(given_options(None, today), unproved=Unproved.UNTRAINED))
    assert isinstance(bound, ModelTemplate)
    stops = [one for one in bound.stops.names if one in text]
    peer.eos_token = stops[0]
    peer.pad_token = peer.pad_token or peer.eos_token
    peer.save_pretrained(folder / "model")
    size = LlamaConfig(
        vocab_size=len(peer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    size.save_pretrained(folder / "model")
    chats = [one for one in plain_chats() if _alternates(one) and _is_written(bound, one)]
    with (folder / "chats.jsonl").open("w", encoding="utf-8") as file:
        for one in chats:
            messages = [{"role": str(m.role.value), "content": m.content} for m in one.messages]
            file.write(json.dumps({"messages": messages}) + "\n")
    about = {"stops": stops, "pad": peer.pad_token, "template": OTHERS[name]}
    (folder / "job.json").write_text(json.dumps(about))
    return Job(folder, bound, chats)


def _alternates(conversation: Conversation) -> bool:
    """Whether a question and an answer take turns, which LLaMA-Factory asks for."""
    roles = [one.role for one in conversation.messages if one.role is not Role.SYSTEM]
    return len(roles) % 2 == 0 and all(role is (Role.ASSISTANT if n % 2 else Role.USER) for n, role in enumerate(roles))


def _is_written(bound: ModelTemplate, conversation: Conversation) -> bool:
    try:
        bound.write(conversation)
    except RecordError:
        return False
    return True


def tool_lines(tool: str, python: str) -> list[str]:
    """The section about a tool that has an environment of its own."""
    today = datetime.datetime.now().astimezone().date().isoformat()
    with tempfile.TemporaryDirectory() as where:
        jobs = {}
        for name in OTHERS:
            (Path(where) / name).mkdir()
            jobs[name] = make_job(Path(where) / name, name, today)
        folders = [str(job.folder) for job in jobs.values()]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_DISABLED": "true"}
        # -P: the modules of this folder are none of the tool's business
        program = [python, "-P", "-W", "ignore", str(MAKERS), tool, *folders]
        subprocess.run(program, check=True, env=environment, stdout=subprocess.DEVNULL)
        results = []
        for name, job in jobs.items():
            made = job.folder / "made" if (job.folder / "made").is_dir() else job.folder / "made.jsonl"
            without, with_source = audit(made, job.bound), audit(made, job.bound, source=job.chats)
            results.append(Result(name, without, with_source))
        versions = json.loads((jobs["chatml"].folder / "versions.json").read_text())
    listed = ", ".join(f"{name} {number}" for name, number in versions.items())
    return [
        f"{listed}: {ABOUT[tool]}. {len(jobs['chatml'].chats)} bundled conversations without tools.",
        "",
        *table(results),
    ]


def main() -> None:
    """Make the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/audit-findings.md")
    parser.add_argument("--python", action="append", default=[], metavar="TOOL=PATH", help="the Python that has a tool")
    parser.add_argument("--skip-trl", action="store_true", help="leave the section about TRL as it is")
    arguments = parser.parse_args()
    sections = {} if arguments.skip_trl else {"trl": trl_lines}
    for one in arguments.python:
        tool, _, python = one.partition("=")
        sections[tool] = partial(tool_lines, tool, python)
    for name, make in sections.items():
        lines = make()
        print("\n".join(lines), flush=True)
        if arguments.write:
            PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), name, lines), encoding="utf-8")


if __name__ == "__main__":
    main()
