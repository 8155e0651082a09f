"""What `chatmill audit` finds in token data made by other tools: the tables of docs/audit-findings.md.

    python -m benchmarks.audit_tools            # prints the tables
    python -m benchmarks.audit_tools --write    # and puts them into docs/audit-findings.md

TRL: the dataset that `SFTTrainer` prepares with `assistant_only_loss=True`, for its own training templates. A template
has no vocabulary beside it, so bytes and the special tokens that it spells take its place; the model is a GPT-2 of one
small layer with random weights, which the trainer needs and the data does not depend on.
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.mask_differences import ROOT, as_given, byte_tokenizer, conversations, put, trl_templates
from chatmill.auditor.report import AuditReport
from chatmill.auditor.run import audit
from chatmill.core.conversation import Conversation
from chatmill.errors import RecordError
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind, given_options
from chatmill.tokenizer.load import load_tokenizer

PAGE = ROOT / "docs" / "audit-findings.md"
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
    refused: int = 0
    examples: dict[str, str] = field(default_factory=dict)


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


def axolotl_set(peer: Any, rows: Sequence[dict[str, Any]], stops: Sequence[str]) -> list[dict[str, Any]]:
    """The rows that axolotl's `chat_template` strategy makes."""
    from axolotl.prompt_strategies.chat_template import ChatTemplatePrompter, ChatTemplateStrategy

    prompter = ChatTemplatePrompter(peer, chat_template=peer.chat_template, max_length=1 << 20)
    strategy = ChatTemplateStrategy(
        prompter,
        tokenizer=peer,
        train_on_inputs=False,
        sequence_len=1 << 20,
        roles_to_train=["assistant"],
        train_on_eos="turn",
        eot_tokens=list(stops),
    )
    made = [strategy.tokenize_prompt(dict(row)) for row in rows]
    return [{"input_ids": list(one["input_ids"]), "labels": list(one["labels"])} for one in made]


def audited(path: Path, chats: Sequence[Conversation], today: str, tool: str = "trl") -> Result:
    """Make a set with one template and audit it with the same template."""
    text = path.read_text(encoding="utf-8")
    peer = byte_tokenizer(text)
    peer.pad_token = peer.eos_token
    bound = bind(path, load_tokenizer(peer), given_options(None, today))
    assert isinstance(bound, ModelTemplate)
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
        made: Any
        if tool == "axolotl":
            made = axolotl_set(peer, rows, [one for one in bound.chat.stops.names if one in path.read_text("utf-8")])
        else:
            made = trl_set(peer, rows, folder)
        without = audit(made, bound)
        with_source = audit(made, bound, source=used)
    return Result(path.stem, without, with_source, len(chats) - len(used))


def plain_chats() -> list[Conversation]:
    """Bundled conversations without tools."""
    return [one for one in conversations() if not one.tools and not any(m.tool_calls or m.name for m in one.messages)]


def table(results: Sequence[Result]) -> Iterator[str]:
    """One line a set."""
    yield "| template | documents | tokens | found without the source | found with the source | not known |"
    yield "|---|---:|---:|---|---|---|"
    for one in results:
        known = "turns, without the source" if one.without.unknown else ""
        yield (
            f"| `{one.name}` | {one.without.documents} | {one.without.tokens:,} | {_found(one.without)} "
            f"| {_found(one.with_source)} | {known} |"
        )


def _found(report: AuditReport) -> str:
    listed = [f"`{one.code}` {one.count:,} of {one.total:,} {one.rule.unit}" for one in report.findings]
    return "; ".join(listed) or "nothing"


def trl_lines() -> list[str]:
    """The section about TRL."""
    today = datetime.datetime.now().astimezone().date().isoformat()  # transformers hands out the real date
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


OTHERS = ("chatml", "llama3", "mistral_nemo", "phi4", "qwen2_5", "qwen3_2507")
"""Bundled templates that axolotl is tried with."""


def other_lines() -> list[str]:
    """The section about axolotl; LLaMA-Factory and Unsloth are not tried."""
    chats, today = plain_chats(), datetime.datetime.now().astimezone().date().isoformat()
    folder = ROOT / "src" / "chatmill" / "render" / "templates"
    results = [audited(folder / f"{name}.jinja", chats, today, "axolotl") for name in OTHERS]
    return [
        f"axolotl {version('axolotl')}: the strategy `chat_template` with `train_on_inputs: false`, "
        "`roles_to_train: [assistant]`, `train_on_eos: turn` and the template's stops as `eot_tokens`, called for "
        f"{len(chats)} bundled conversations without tools and {len(OTHERS)} templates. The package was installed "
        "without its dependencies beside those of TRL; its command line and trainer were not run.",
        "",
        *table(results),
    ]


def main() -> None:
    """Make the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/audit-findings.md")
    arguments = parser.parse_args()
    sections = {"trl": trl_lines}
    if find_spec("axolotl") is not None:
        sections["axolotl"] = other_lines
    for name, make in sections.items():
        lines = make()
        print("\n".join(lines))
        if arguments.write:
            PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), name, lines), encoding="utf-8")


if __name__ == "__main__":
    main()
