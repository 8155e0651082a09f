"""Ids of our renderings against transformers' `apply_chat_template(tokenize=True)`, every difference explained.

The one difference that is meant: no token lies across the place where a model starts to write. Where the reference has
such a token, ours must be the ids of the same text cut at these places.
"""

from __future__ import annotations

import copy
import datetime
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from chatmill.core.conversation import Conversation
from chatmill.errors import TokenizerError
from chatmill.render.documents import TextDocument
from chatmill.render.jinja.options import Expand, TemplateOptions, Unproved
from chatmill.render.jinja.record_view import RecordView
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind, bundled_names, find_template
from chatmill.render.render import render
from chatmill.tokenizer.load import load_tokenizer, with_control_tokens
from tests.chats import chat
from tests.data.npm_vocabularies import PACKAGES, npm_vocabulary
from tests.data.tokenizer_files import loaded, unpacked
from tests.render.reference import TEMPLATES, on

DATE = datetime.date(2026, 1, 2)
SPECIAL = re.compile(
    r"<\|[^|<>\s{}'\"]+\|>|<｜[^｜<>]+｜>|\[/?[A-Z_]{3,}\]|\[gMASK\]|<sop>|</?s>|<(?:start|end)_of_turn>|<bos>"
)
"""How families spell special tokens."""
VOCABULARY = {"mistral_nemo": "mistral_nemo"}
"""Vocabularies of bundled templates whose own is at hand; the others get qwen3's with their tokens added."""
BUNDLED = [name for name in bundled_names() if name not in ("harmony", "markers", "token_native")]
PUBLISHED = {name: TEMPLATES / f"{name}.jinja" for name in BUNDLED if (TEMPLATES / f"{name}.jinja").is_file()}
"""What the model's own folder has, where it is at hand; else the reference gets the text of ours."""


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


@cache
def with_all_tokens(vocabulary: str) -> tuple[Any, Any]:
    """A vocabulary in both libraries with the special tokens of all templates that use it here."""
    ours, reference = loaded(vocabulary), copy.deepcopy(theirs(unpacked(vocabulary)))
    wanted: dict[str, None] = {}
    for name in BUNDLED:
        if VOCABULARY.get(name, "qwen3") == vocabulary:
            source = find_template(name)
            wanted |= dict.fromkeys([*SPECIAL.findall(source.text), *source.control_tokens])
    names = [name for name in wanted if name not in ours.control_ids]
    reference.add_special_tokens({"additional_special_tokens": names})
    ours = with_control_tokens(ours, names)
    assert [ours.control(name) for name in names] == reference.convert_tokens_to_ids(names)
    return ours, reference


def bound(template: str, ours: Any) -> ModelTemplate:
    """A template whose rows are whole renderings."""
    return bind(template, ours, TemplateOptions(today=DATE, expand=Expand.NONE, unproved=Unproved.UNTRAINED))


def by_transformers(conversation: Conversation, template: ModelTemplate, tokenizer: Any, **options: Any) -> list[int]:
    messages, tools = RecordView(conversation, template.form).values(len(conversation.messages), None)
    published = PUBLISHED.get(template.name)
    text = template.source.text if published is None else published.read_text()
    values = {**template.named_tokens, **options, "chat_template": text, "tools": tools}
    with on(DATE):
        return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **values))


def compare(
    template: str, ours: Any, theirs: Any, conversations: Sequence[Conversation], *, anchor: str = ""
) -> Counter[str]:
    """Compare all that the template shows and that spell no special token, in bulk and one by one.

    `anchor` is text that merges with nothing, for vocabularies that put a space before text: it takes that space where
    a document is cut.

    Counts: `compared`, `broken` (a token of the reference lies where a model starts to write).
    """
    one_by_one, bulk, counts = bound(template, ours), bound(template, ours), Counter[str]()
    rendered = render(conversations, bulk, collect_failures=True)
    for position, index in enumerate(rendered.kept.tolist()):
        conversation = conversations[index]
        text = json.dumps([conversation.messages, conversation.tools], ensure_ascii=False)
        if any(json.dumps(name, ensure_ascii=False)[1:-1] in text for name in ours.special_tokens):
            continue
        ids = rendered.tokens.conversation(position).ids.tolist()
        alone = render([conversation], one_by_one)
        assert alone.tokens.ids.tolist() == ids, f"{template}: bulk differs: {conversation.where}"
        written = one_by_one.text_documents(conversation)
        reference = by_transformers(conversation, one_by_one, theirs, **dict(written.options))
        counts["compared"] += 1
        document = written.documents[-1]
        if document.appended:  # a stop that the template leaves to the next header
            ids = ids[: -document.appended]
        if ids != reference:
            assert ids == _cut_where_models_write(document, theirs, anchor), f"{template}: {conversation.where}"
            counts["broken"] += 1
    return counts


def _cut_where_models_write(document: TextDocument, theirs: Any, anchor: str) -> list[int]:
    """The ids of a document's text as transformers encodes it, cut where a model starts to write."""
    pieces = [""]
    for span in document.spans:
        if span.breaks:
            pieces.append("")
        pieces[-1] += span.text
    ids = theirs.encode(pieces[0], add_special_tokens=False)
    known, before = len(theirs.encode(anchor, add_special_tokens=False)), pieces[0]
    for piece in pieces[1:]:
        inside = anchor and not before.endswith(tuple(theirs.all_special_tokens))
        begun = (anchor if inside else theirs.bos_token if anchor else "") + piece
        ids += theirs.encode(begun, add_special_tokens=False)[known if inside else bool(anchor) :]
        before = piece
    return ids[: -document.appended] if document.appended else ids


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "at_least"), [("qwen3", 18), ("mistral_nemo", 11), ("deepseek_v3", 14)])
def test_a_folders_own_template_gives_the_ids_of_transformers(
    name: str, at_least: int, count: int, real_conversations: Callable[[int], list[Conversation]]
) -> None:
    folder = unpacked(name)
    counts = compare(str(folder), loaded(name), theirs(folder), real_conversations(count))
    assert counts["compared"] >= at_least * count, counts


@pytest.mark.parametrize("name", [name for name in BUNDLED if name not in PUBLISHED])
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_bundled_template_gives_the_ids_of_transformers(
    name: str, count: int, real_conversations: Callable[[int], list[Conversation]]
) -> None:
    counts = compare(name, *with_all_tokens(VOCABULARY.get(name, "qwen3")), real_conversations(count))
    assert counts["compared"] >= 11 * count, counts


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("count", [6, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_bundled_template_gives_the_ids_of_the_published_one(
    name: str, count: int, real_conversations: Callable[[int], list[Conversation]]
) -> None:
    ours, reference = with_all_tokens("qwen3")
    counts = compare(name, ours, reference, real_conversations(count))
    assert counts["compared"] > (90 if name == "qwen3" else 54), counts
    assert counts["broken"] == 0, counts
    asked, template = (
        chat(("system", "S"), ("user", "q\n\n"), ("assistant", "a"), ("user", "\n q2 ")),
        bound(name, ours),
    )
    prompt = render([asked], template, add_generation_prompt=True).tokens.ids.tolist()
    assert prompt == by_transformers(asked, template, reference, add_generation_prompt=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_published_vocabularies_give_the_ids_of_transformers(
    name: str, real_conversations: Callable[[int], list[Conversation]]
) -> None:
    folder = npm_vocabulary(name)
    counts = compare(str(folder), load_tokenizer(folder), theirs(folder), real_conversations(40))
    assert counts["compared"] >= 300, counts
    assert counts["broken"] == 0, counts


# -- vocabularies whose added tokens match in ways of their own, in small -------------------------------------------

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ between }}{{ m.content }}{{ between }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{{ between }}{% endif %}"
)
TEXTS = ["a", " a", "a ", "\n a\n\n", "Hello  world", "  ", "\tx y\u3000", "x\u00a0", "été ▁ a▁b", "it's <b> x</b>"]
CORPUS = ["Hello world, it is a test of words", " a b c  d\n\ne\t x y z", "the quick brown fox  jumps", *TEXTS] * 5
CHATS = [
    chat(("user", one), ("assistant", other), ("user", other), ("assistant", one))
    for at, one in enumerate(TEXTS)
    for other in (TEXTS[at], TEXTS[(at + 4) % len(TEXTS)])
]
"""Every text before, after and between two others."""


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    return made


def sentencepiece(*, pre_tokenizer: Any = None, normalizer: Any = None, strips: bool = True) -> Tokenizer:
    """Words begin with ▁, unknown characters become bytes."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False))
    # The bytes are plain entries of the vocabulary, not added tokens, in real files.
    parts = json.loads(made.to_str())
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["content"] == "<unk>"]
    return Tokenizer.from_str(json.dumps(parts))


def metaspace(scheme: Any) -> Tokenizer:
    """Like Llama 2's and Mistral's."""
    return sentencepiece(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False))


def legacy() -> Tokenizer:
    """Like Llama 2's first files: a normalizer puts ▁ in front of every text between special tokens."""
    steps: Any = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    return sentencepiece(normalizer=normalizers.Sequence(steps))


def gemma_like() -> Tokenizer:
    split = pre_tokenizers.Split(" ", "merged_with_previous")
    return sentencepiece(pre_tokenizer=split, normalizer=normalizers.Replace(" ", "▁"), strips=False)


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "first": lambda: metaspace("first"),
    "always": lambda: metaspace("always"),
    "never": lambda: metaspace("never"),
    "legacy": legacy,
    "gemma_like": gemma_like,
}
ORDINARY = [AddedToken("<b>", special=False, normalized=True), AddedToken("</b>", special=False, normalized=False)]


def folder_of(path: Path, maker: str, between: str, *more: AddedToken, bos: bool = False, **flags: bool) -> Path:
    """A model folder; `flags` say how the special tokens of its template match."""
    made = MAKERS[maker]()
    names = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    special = [AddedToken(name, special=True, normalized=False, **flags) for name in names]
    every = [AddedToken("<s>", special=True, normalized=False), *special, *more]
    made.add_special_tokens([token for token in every if token.special])
    made.add_tokens([token for token in every if not token.special])
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    path.mkdir(exist_ok=True)
    made.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").write_text(TEMPLATE.replace("{{ between }}", between))
    return path


def compared(folder: Path, maker: str) -> int:
    import transformers

    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    anchor = "" if maker == "byte_level" else "\u2603"
    return compare(str(folder), load_tokenizer(folder), theirs, CHATS, anchor=anchor)["compared"]


STRIPPING = [{"rstrip": True}, {"lstrip": True}, {"lstrip": True, "rstrip": True}]


@pytest.mark.parametrize(
    ("maker", "between", "more", "flags"),
    [
        *((maker, between, (), {}) for maker in MAKERS for between in ("", " ")),
        *(pytest.param(maker, "\n", (), {}, marks=pytest.mark.slow) for maker in MAKERS),
        *((maker, "\n", (), flags) for maker in ("byte_level", "first", "legacy") for flags in STRIPPING),
        *((maker, "\n", ORDINARY, {}) for maker in ("byte_level", "gemma_like", "first")),
        *((maker, "\n", (), {"bos": True}) for maker in ("byte_level", "first")),
    ],
)
def test_special_tokens_of_any_vocabulary(
    tmp_path: Path, maker: str, between: str, more: Sequence[AddedToken], flags: dict[str, bool]
) -> None:
    """Also those that take white space away, ordinary ones that text spells, and a bos that is not written twice."""
    assert compared(folder_of(tmp_path / "model", maker, between, *more, **flags), maker) == len(CHATS)


def test_added_tokens_that_documents_cannot_follow_are_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "legacy", "\n", AddedToken("<b>", special=False, normalized=False))
    with pytest.raises(TokenizerError, match="strict_text: true"):
        bound(str(folder), load_tokenizer(folder))
    bound(str(folder), load_tokenizer(folder, strict_text=True))
    single = AddedToken("<x>", special=True, normalized=False, single_word=True)
    folder = folder_of(tmp_path / "single", "byte_level", "<x>", single)
    with pytest.raises(TokenizerError, match=r"'<x>'.*single_word"):
        bound(str(folder), load_tokenizer(folder))
    assert compared(folder_of(tmp_path / "unused", "byte_level", "\n", single), "byte_level") == len(CHATS)
