"""Which tokens other tools train and Chatmill does not, and the other way round: the tables of docs/differences.md.

    python -m tools.mask_differences            # prints the tables
    python -m tools.mask_differences --write    # and puts them into docs/differences.md

Two comparisons, on the bundled conversations that end with an assistant:

- every `*_training` template of the installed TRL, by transformers' `return_assistant_tokens_mask`. A template has no
  vocabulary next to it, so both sides use bytes and the special tokens that the template spells.
- PrimeIntellect's `renderers` (`pip install renderers`), on the vocabularies of tests/data/tokenizers that it knows.
  Where it is not installed, its table stays as it is.
"""

from __future__ import annotations

import argparse
import datetime
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.core.conversation import Conversation, Role
from chatmill.core.kinds import REPEATED, Part, RoleCode, part_of, role_of
from chatmill.errors import RecordError
from chatmill.label.presets import find_policy
from chatmill.look.template_probes import spelled_tokens
from chatmill.read.conversations import ConversationFile
from chatmill.render.jinja.options import TemplateOptions
from chatmill.render.jinja.record_view import InputForm, RecordView
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind
from chatmill.render.render import render
from chatmill.tokenizer.load import load_tokenizer

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "differences.md"
SOURCES = ("cookbook_finetune", "glaive_toolcall_en", "oasst_realistic", "reason_tool_use", "mt_bench_ref")
PER_SOURCE = 12
BOS, EOS = "<|bos|>", "<|eos|>"


class Fault(StrEnum):
    """How a mask differs from the proof."""

    PROMPT = "trains the prompt"
    BEHIND = "trains after the stop"
    CHANGED = "trains changed turns"
    OTHER = "trains other text"
    NO_STOP = "misses the stop"
    MISSED = "misses text"


@dataclass
class Tally:
    """The comparison of one template."""

    name: str
    records: int = 0
    answers: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Records that Chatmill cannot prove, by reason; they are not compared."""
    unlike: int = 0
    """Records whose ids differ: text in them spells a special token."""
    faults: Counter[Fault] = field(default_factory=Counter)
    """Answers by fault."""
    examples: dict[Fault, str] = field(default_factory=dict)


def conversations() -> list[Conversation]:
    """Bundled conversations of several kinds that end with an assistant."""
    found: list[Conversation] = []
    for name in SOURCES:
        path = ROOT / "tests" / "data" / "conversations" / f"{name}.jsonl.gz"
        usable = [one for one in ConversationFile(path) if one.messages[-1].role is Role.ASSISTANT]
        found += usable[:PER_SOURCE]
    return found


def as_given(conversation: Conversation, form: InputForm) -> tuple[list[dict[str, Any]], Any]:
    """Messages and tools as a template gets them."""
    return RecordView(conversation, form).values(len(conversation.messages), None)


def compare(
    tally: Tally, bound: ModelTemplate, conversation: Conversation, ids: Sequence[int], mask: Sequence[int]
) -> None:
    """Add one conversation: `ids` and `mask` are the other tool's."""
    rendered = render([conversation], bound)
    tokens = rendered.tokens
    first, last = tokens.offsets[-2:]
    if tokens.ids[first:last].tolist() != list(ids):
        tally.unlike += 1
        return
    policy = find_policy("assistant")
    ours = tokens.per_token(policy.run_weights(tokens))[first:last] > 0
    messages = np.repeat(tokens.run_messages, np.diff(tokens.run_offsets))[first:last]
    tally.records += 1
    tally.answers += sum(message.role is Role.ASSISTANT for message in conversation.messages)
    seen: dict[tuple[int, Fault], list[int]] = {}
    for at in np.flatnonzero(ours != (np.asarray(mask) > 0)).tolist():
        fault = fault_of(int(tokens.kinds[first + at]), ours=bool(ours[at]))
        seen.setdefault((int(messages[at]), fault), []).append(at)
    for (_, fault), places in seen.items():
        tally.faults[fault] += 1
        text = bound.tokenizer.decode(tokens.ids[first:last][places])
        tally.examples.setdefault(fault, text)


def fault_of(kind: int, *, ours: bool) -> Fault:
    """What it means that a token of this kind is trained by one side alone."""
    part = part_of(kind)
    if ours:
        return Fault.NO_STOP if part is Part.TERMINATOR else Fault.MISSED
    if kind & REPEATED:
        return Fault.CHANGED
    if part is Part.SEPARATOR:
        return Fault.BEHIND
    if part is Part.HEADER and role_of(kind) is RoleCode.ASSISTANT:
        return Fault.PROMPT
    return Fault.OTHER


# ---- TRL's tags, by transformers


def byte_tokenizer(text: str) -> Any:
    """A transformers tokenizer of bytes with the special tokens that a template spells."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    spelled = spelled_tokens(text)
    inner.add_special_tokens(list(dict.fromkeys([BOS, EOS, *spelled])))
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=BOS, eos_token=EOS)
    made.chat_template = text
    return made


def with_bytes(path: Path, today: datetime.date) -> tuple[Any, ModelTemplate]:
    """A template with a vocabulary of bytes: the tokenizer of transformers, and the template bound to it."""
    peer = byte_tokenizer(path.read_text(encoding="utf-8"))
    bound = bind(path, load_tokenizer(peer), TemplateOptions(today=today))
    assert isinstance(bound, ModelTemplate)
    return peer, bound


def tagged(
    peer: Any, bound: ModelTemplate, chats: Sequence[Conversation], refused: Counter[str]
) -> Iterator[tuple[Conversation, Any]]:
    """Conversations with what `apply_chat_template` makes of them; those that Chatmill refuses are counted."""
    for conversation in chats:
        try:
            options = dict(bound.write(conversation).options)
        except RecordError as error:
            refused[error.code] += 1
            continue
        messages, tools = as_given(conversation, bound.form)
        yield (
            conversation,
            peer.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
            ),
        )


def against_tags(path: Path, chats: Sequence[Conversation], today: datetime.date) -> Tally:
    """One TRL template."""
    peer, bound = with_bytes(path, today)
    tally = Tally(path.stem)
    for conversation, done in tagged(peer, bound, chats, tally.refused):
        compare(tally, bound, conversation, done["input_ids"], done["assistant_masks"])
    return tally


def trl_templates() -> list[Path]:
    """The chat templates of the installed TRL."""
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja"))


# ---- renderers


def against_renderers(folder: str, family: str, chats: Sequence[Conversation]) -> Tally:
    """One family of `renderers`, on a real vocabulary."""
    from renderers.base import build_training_sample, create_renderer
    from renderers.configs import DeepSeekV3RendererConfig, Qwen3RendererConfig

    config = {"qwen3": Qwen3RendererConfig, "deepseek-v3": DeepSeekV3RendererConfig}[family]()
    peer = real_tokenizer(ROOT / "tests" / "data" / "tokenizers" / folder)
    renderer = create_renderer(peer, config)
    bound = bind(ROOT / "tests" / "data" / "tokenizers" / folder, load_tokenizer(peer))
    assert isinstance(bound, ModelTemplate)
    tally = Tally(family)
    for conversation in chats:
        try:
            bound.write(conversation)
        except RecordError as error:
            tally.refused[error.code] += 1
            continue
        messages, tools = as_given(conversation, InputForm(empty_content=""))
        sample = build_training_sample(renderer, messages, tools=tools)
        compare(tally, bound, conversation, sample.token_ids, sample.loss_mask)
    return tally


def real_tokenizer(folder: Path) -> Any:
    """A transformers tokenizer of a folder whose tokenizer.json may be packed."""
    import json
    import lzma

    import tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = tokenizers.Tokenizer.from_str(lzma.decompress((folder / "tokenizer.json.xz").read_bytes()).decode())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = {key: config[key] for key in ("bos_token", "eos_token", "pad_token") if config.get(key)}
    named = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **named)


# ---- tables


def table(tallies: Sequence[Tally], what: str) -> Iterator[str]:
    """Answers by fault, one line a template."""
    yield f"| {what} | records | answers | {' | '.join(Fault)} | refused here |"
    yield "|---" + "|---:" * (len(Fault) + 2) + "|---|"
    for tally in tallies:
        counts = " | ".join(str(tally.faults[fault] or "") for fault in Fault)
        refused = ", ".join(f"{count} `{code}`" for code, count in sorted(tally.refused.items()))
        if tally.unlike:
            refused += f"{'; ' if refused else ''}{tally.unlike} with other ids"
        yield f"| `{tally.name}` | {tally.records} | {tally.answers} | {counts} | {refused} |"


def examples(tallies: Sequence[Tally]) -> Iterator[str]:
    """What the tags train of the prompt, by template."""
    yield "| text of the prompt that is trained | templates |"
    yield "|---|---|"
    found: dict[str, list[str]] = {}
    for tally in tallies:
        if Fault.PROMPT in tally.examples:
            found.setdefault(repr(tally.examples[Fault.PROMPT])[1:-1].replace("|", "\\|"), []).append(tally.name)
    for text, names in found.items():
        yield f"| `{text}` | {', '.join(f'`{name}`' for name in names)} |"


def put(page: str, section: str, lines: Sequence[str]) -> str:
    """The page with a section replaced."""
    pattern = re.compile(rf"(<!-- {section} -->\n).*?(\n<!-- end -->)", re.DOTALL)
    assert pattern.search(page), f"{PAGE.name} has no section {section}"
    return pattern.sub(lambda found: found[1] + "\n" + "\n".join(lines) + "\n" + found[2], page)


def trl_lines(chats: Sequence[Conversation]) -> list[str]:
    """The section about TRL."""
    today = datetime.datetime.now().astimezone().date()  # transformers hands the real date to templates that ask
    paths = trl_templates()
    training = [path for path in paths if path.stem.endswith("_training")]
    published = [path for path in paths if path not in training]
    untagged = sum("endgeneration" not in path.read_text(encoding="utf-8") for path in published)
    tallies = [against_tags(path, chats, today) for path in training]
    wrong = sum(tally.faults[Fault.PROMPT] > 0 for tally in tallies)
    behind = sum(tally.faults[Fault.BEHIND] > 0 for tally in tallies)
    same = sum(not tally.faults and tally.records > 0 for tally in tallies)
    return [
        f"TRL {version('trl')}, transformers {version('transformers')}, {len(chats)} bundled conversations. "
        f"TRL has {len(published)} copies of published templates; {untagged} of them have no tags, and transformers "
        f"returns a mask of zeros for these. Of the {len(training)} training templates {wrong} train the prompt, "
        f"{behind} train text after the stop, and {same} agree with the proof on every conversation compared.",
        "",
        *table(tallies, "template"),
        "",
        *examples(tallies),
    ]


def renderers_lines(chats: Sequence[Conversation]) -> list[str]:
    """The section about renderers."""
    tallies = [against_renderers("qwen3", "qwen3", chats), against_renderers("deepseek_v3", "deepseek-v3", chats)]
    return [f"renderers {version('renderers')}, {len(chats)} bundled conversations.", "", *table(tallies, "renderer")]


def main() -> None:
    """Make the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/differences.md")
    arguments = parser.parse_args()
    chats = conversations()
    sections = {"trl": trl_lines(chats)}
    if find_spec("renderers") is not None:
        sections["renderers"] = renderers_lines(chats)
    for name, lines in sections.items():
        print(f"== {name}\n" + "\n".join(lines))
        if arguments.write:
            PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), name, lines), encoding="utf-8")


if __name__ == "__main__":
    main()
