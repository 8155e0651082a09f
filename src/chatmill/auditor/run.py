"""The audit: opens a set, finds out what every token is, and runs all checks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from chatmill.auditor.findings import RULES, AuditFinding, Example, Found
from chatmill.auditor.hybrid import check_hybrid
from chatmill.auditor.layout import Layout, find_layout, find_literals, set_of_probes
from chatmill.auditor.literals import Literals
from chatmill.auditor.live import kept_random_states
from chatmill.auditor.masks import check_masks
from chatmill.auditor.matching import SourceComparison, compare
from chatmill.auditor.open import open_tokenized
from chatmill.auditor.report import AuditReport
from chatmill.auditor.source import SourceRows, render_source
from chatmill.auditor.structure import Structure, VocabularyBytes, text_stretches
from chatmill.auditor.tokenized import TokenizedSet
from chatmill.core.conversation import Conversation
from chatmill.core.trainer_columns import LABELS
from chatmill.errors import ConfigError, RecordError, short_errors
from chatmill.images.files import Pictures, picture_folder
from chatmill.load.model_needs import HybridModel, hybrid_model
from chatmill.look.decoder import Decoder
from chatmill.read.conversations import read_conversations
from chatmill.render.jinja.options import TemplateOptions, Unproved
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind, find_template, given_options
from chatmill.tokenizer.hub_cache import model_folder
from chatmill.tokenizer.load import load_tokenizer

EXAMPLES = 3
AROUND = 16
"""Tokens that are shown on each side of a finding."""
MOST_SHOWN = 48
"""Tokens of a finding that are shown."""
MANY = 4
"""A control token that comes so often is counted in examples."""
THINK_ENDS = ("</think>", "[/THINK]", "</seed:think>")


@short_errors
@kept_random_states()
def audit(
    dataset: Any,
    model: Any = None,
    *,
    batches: int | None = None,
    source: str | os.PathLike[str] | Iterable[Conversation] | None = None,
    template: str | os.PathLike[str] | None = None,
    template_options: Mapping[str, Any] | None = None,
    date: str | None = None,
    split: str | None = None,
    mask: str | None = None,
    shifted: bool = False,
    shape: str | None = None,
    examples: int = EXAMPLES,
) -> AuditReport:
    """Check token data that another pipeline made.

    `dataset` is a path, a `datasets` dataset, a DataLoader, a Trainer, or rows with `input_ids` and `labels` or a mask.
    `model` is the folder of the model, or its loaded transformers tokenizer or processor, or itself; by default the
    `processing_class` of the Trainer. `batches`: how many to read of a loader or Trainer; by default all. With
    `source`, a file of conversations or the conversations themselves, every record is compiled and compared token by
    token.
    """
    model = _files_of(getattr(dataset, "processing_class", None) if model is None else model)
    named = model if isinstance(model, str | os.PathLike) else getattr(_tokenizer_of(model), "name_or_path", None)
    folder = None if named is None else model_folder(named)
    given = given_options(template_options, date)
    if folder is not None:
        patterns = [os.fspath(source)] if isinstance(source, str | os.PathLike) else []
        given = replace(given, pictures=Pictures.of(folder, picture_folder(None, patterns)))
    bound = _bound(model, template, given)
    pad = bound.tokenizer.pad_id
    pad = None if pad == bound.tokenizer.eos_id else pad  # a pad that is the eos may be a real one
    data = open_tokenized(dataset, split=split, mask=mask, pad_id=pad, shifted=shifted, batches=batches)
    name = Path(dataset).name if isinstance(dataset, str | os.PathLike) else type(dataset).__name__
    made = None
    if source is not None:  # answers without a proof are compared as text, and not judged
        lenient = _bound(model, template, replace(given, unproved=Unproved.UNTRAINED))
        unread: Counter[str] = Counter()
        made = render_source(_records(source, shape, unread), lenient)
        made = replace(made, refused=made.refused + unread, count=made.count + unread.total())
    return SetAudit(data, bound, name, None if folder is None else hybrid_model(folder)).run(made, examples)


def _files_of(model: Any) -> Any:
    """What has the tokenizer and the template: of a loaded model, the folder that it is from."""
    if model is None:
        raise ConfigError("audit needs the model: its folder, or its loaded tokenizer or processor")
    if not hasattr(model, "state_dict"):
        return model
    if not getattr(model, "name_or_path", ""):
        raise ConfigError(f"the {type(model).__name__} was not loaded from a folder: give its tokenizer or processor")
    return model.name_or_path


def _tokenizer_of(model: Any) -> Any:
    """The tokenizer of a processor; a tokenizer itself."""
    return getattr(model, "tokenizer", model)


def _bound(model: Any, template: str | os.PathLike[str] | None, given: TemplateOptions) -> ModelTemplate:
    if isinstance(model, ModelTemplate):
        return model
    if template is None and not isinstance(model, str | os.PathLike):
        template = model if getattr(model, "chat_template", None) else _tokenizer_of(model)
        if not getattr(template, "chat_template", None):
            raise ConfigError(f"the {type(model).__name__} has no chat template: name one (template=)")
    found = find_template(model if template is None else template)
    return bind(found, load_tokenizer(model, control_tokens=found.control_tokens), given)


def _records(source: Any, shape: str | None, unread: Counter[str]) -> Iterator[Conversation]:
    """Conversations of a file; those that cannot be read are counted by the code of their error."""
    if not isinstance(source, str | os.PathLike):
        yield from source
        return

    def count(error: RecordError) -> None:
        unread[error.code] += 1

    yield from read_conversations(source, shape=shape, on_error=count)


class SetAudit:
    """One set and the template that should have made it."""

    def __init__(self, data: TokenizedSet, bound: ModelTemplate, name: str, hybrid: HybridModel | None = None) -> None:
        self._data, self._bound, self._name, self._hybrid = data, bound, name, hybrid
        self._literals: Literals = find_literals(bound)
        self._vocabulary = VocabularyBytes(bound)
        self._unknown: list[str] = []

    def run(self, source: SourceRows | None = None, examples: int = EXAMPLES) -> AuditReport:
        """All checks."""
        data, literals = self._data, self._literals
        layout = find_layout(data, literals)
        compared = None if source is None else compare(data, layout, source, literals, self._vocabulary)
        if literals.unusable and compared is None:
            self._unknown.append(f"What is prompt and what is answer: {literals.unusable}. --source shows it")
        elif literals.unusable and compared is not None and compared.equal < compared.documents:
            rest = compared.documents - compared.equal
            self._unknown.append(f"Masks of {rest:,} documents that differ from their records: {literals.unusable}")
        findings = [self._finding(one, examples) for one in _joined(self._found(layout, compared)) if one.count]
        findings.sort(key=lambda one: (-one.share, one.code))
        for one in findings:
            if one.code == "last_untrained":
                told = "--source shows it" if compared is None else "their documents differ from the records"
                self._unknown.append(f"Whether {one.count:,} answers were left out of training on purpose: {told}")
        if len(data.packed_rows):
            self._unknown.append(
                "Whether documents of packed rows see each other in the model: `chatmill isolate MODEL SET` shows it"
                if self._hybrid is None or self._hybrid.is_known
                else f"What keeps documents apart in the recurrent layers of {self._hybrid.kind}: `chatmill isolate "
                "MODEL` shows it"
            )
        return AuditReport(
            name=self._name,
            template=self._bound.name,
            tokenizer=self._bound.tokenizer.name,
            rows=len(data),
            documents=int(data.filled.sum()),
            tokens=int((~data.padding).sum()),
            trained=None if data.trained is None else int((data.trained & ~data.padding).sum()),
            answers=len(layout.answers),
            mask_name=data.mask_name,
            boundaries=data.boundaries,
            findings=tuple(one for one in findings if not one.rule.is_note),
            notes=tuple(one for one in findings if one.rule.is_note),
            unknown=tuple(self._unknown),
            source=None if source is None or compared is None else self._source_counts(source, compared),
        )

    def _source_counts(self, source: SourceRows, compared: SourceComparison) -> dict[str, Any]:
        if source.refused:
            reasons = ", ".join(f"{count:,} {code}" for code, count in sorted(source.refused.items()))
            self._unknown.append(f"Records that Chatmill cannot write with this template are not compared: {reasons}")
        return {
            "records": source.count,
            "documents": compared.documents,
            "equal": compared.equal,
            "missing": compared.missing,
            "refused": dict(source.refused),
            "unproved": len(np.unique(source.records[source.unproved])),
        }

    def _found(self, layout: Layout, compared: SourceComparison | None) -> Iterator[Found]:
        data, eos = self._data, self._bound.tokenizer.eos_id
        if data.trained is None:
            yield Found("no_mask", data.offsets[:-1], data.offsets[1:], len(data))
        else:
            names = self._bound.tokenizer.control_ids
            think = frozenset(names[one] for one in THINK_ENDS if one in names)
            yield from check_masks(data, layout, data.trained, think)
        if data.shift != data.wanted_shift and data.mask_name.startswith(LABELS):
            code = "labels_shifted" if data.shift else "labels_unshifted"
            detail = f"labels[t] is input_ids[t {data.shift:+d}]" if data.shift else ""
            yield Found(code, data.offsets[:-1], data.offsets[1:], len(data), detail)
        wrong = data.wrong_labels
        yield Found("labels_differ", wrong, wrong + 1, int((~data.padding).sum()))
        if self._hybrid is not None:
            pads = (self._bound.tokenizer.pad_id, eos)
            yield from check_hybrid(self._hybrid, data, [one for one in pads if one is not None])
        structure = Structure(data, layout, self._literals, eos, self._vocabulary)
        hidden = set() if compared is None else {"truncated", "special_from_text", "unbounded", "merged_at_border"}
        told = {one.code for one in compared.found} if compared is not None else set()
        yield from (one for one in structure.check() if one.code not in hidden & told)
        if compared is None:
            self._unknown += structure.unknown
            yield from self._other_ids(layout)
        else:
            yield from compared.found

    def _other_ids(self, layout: Layout) -> Iterator[Found]:
        """Stretches of text whose ids are not those of the tokenizer."""
        data = self._data
        if not self._tokenises_probes():
            self._unknown.append("Whether ids are those of their text: this tokenizer writes text otherwise in rows")
            return
        unlike, starts, ends = self._unlike(data, layout)
        document = data.document_of(starts)
        begins, stops = data.bounds
        unlike &= (starts > begins[document]) & (ends < stops[document])  # a text that is cut may have other ids
        places = starts[unlike]
        first = np.unique(document[unlike], return_index=True)[1]
        yield Found("other_ids", places[first], ends[unlike][first], len(data.documents) - 1)

    def _unlike(self, data: TokenizedSet, layout: Layout) -> tuple[Any, Any, Any]:
        """Stretches of text, and which of them have other ids than both ways of tokenising them give."""
        ids, padding, special = data.ids, data.padding, self._vocabulary.special
        breaks = layout.answers.starts[~layout.answers.merged]
        edges = np.flatnonzero(np.diff(padding.astype(np.int8))) + 1
        starts, ends = text_stretches(ids, special, [breaks, edges], data.documents)
        keep = ~padding[starts] & self._vocabulary.has(ids[starts])
        starts, ends = starts[keep], ends[keep]
        unlike = self._vocabulary.unlike(ids, starts, ends)
        wrong = np.flatnonzero(unlike)
        if len(wrong):  # transformers tokenises prompt and answer together
            whole_starts, whole_ends = text_stretches(ids, special, [edges], data.documents)
            at = np.searchsorted(whole_starts, starts[wrong], side="right") - 1
            unlike[wrong] = self._vocabulary.unlike(ids, whole_starts[at], whole_ends[at])
        return unlike, starts, ends

    def _tokenises_probes(self) -> bool:
        """Whether the ids of the template's own renderings are those of their stretches of text."""
        probes = self._literals.probes
        if not len(probes):
            return True
        data = set_of_probes(self._literals)
        unlike, starts, _ = self._unlike(data, find_layout(data, self._literals))
        return not (unlike & ~probes.doubtful[data.row_of(starts)]).any()

    def _finding(self, found: Found, examples: int) -> AuditFinding:
        shown = tuple(
            self._example(int(start), int(end))
            for start, end in zip(found.starts[:examples].tolist(), found.ends[:examples].tolist(), strict=True)
        )
        return AuditFinding(code=found.code, count=found.count, total=found.total, detail=found.detail, examples=shown)

    def _example(self, start: int, end: int) -> Example:
        data = self._data
        row = int(data.row_of(np.array([min(start, len(data.ids) - 1)]))[0])
        low, high = int(data.offsets[row]), int(data.offsets[row + 1])
        first, last = max(low, start - AROUND), min(high, max(min(end, start + MOST_SHOWN), start + 1) + AROUND)
        decoder = Decoder(self._bound.tokenizer)
        ids = data.ids[first:last]
        trained = np.zeros(len(ids), dtype=np.bool_) if data.weights is None else data.weights[first:last] > 0
        about = (np.arange(first, last) >= start) & (np.arange(first, last) < end)
        control = decoder.is_control(ids)
        codes = trained * 4 + about * 2 + control
        edges = np.flatnonzero(np.diff(codes)) + 1
        parts = []
        for piece, code in zip(np.split(ids, edges), codes[np.append(0, edges)].tolist(), strict=True):
            text = _spelled(piece, decoder) if code & 1 else decoder.text(piece)
            parts.append((text, bool(code & 4), bool(code & 1), bool(code & 2)))
        return Example(row=row, first=start - low, last=end - low, parts=tuple(parts))


def _spelled(ids: Any, decoder: Decoder) -> str:
    """Control tokens; one that comes many times, as those of pictures do, is counted."""
    groups = ((decoder.text(np.array([one])), len(list(same))) for one, same in groupby(ids.tolist()))
    return "".join(text * count if count < MANY else f"{text} x{count:,} " for text, count in groups)


def _joined(found: Iterable[Found]) -> Iterator[Found]:
    """One entry per code, in the order of the rules."""
    by_code: dict[str, list[Found]] = {}
    for one in found:
        if one.count:
            by_code.setdefault(one.code, []).append(one)
    for code in RULES:
        listed = by_code.get(code, [])
        if len(listed) == 1:
            yield listed[0]
        elif listed:
            starts, ends = (np.concatenate([getattr(one, name) for one in listed]) for name in ("starts", "ends"))
            order = np.argsort(starts, kind="stable")
            yield Found(
                code,
                starts[order],
                ends[order],
                max(one.total for one in listed),
                next((one.detail for one in listed if one.detail), ""),
                counted=max(one.count for one in listed),
            )
