"""The audit: opens a set, finds out what every token is, and runs all checks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.auditor.findings import RawFinding
from chatmill.auditor.layout import DocumentLayout, find_layout, find_literals
from chatmill.auditor.literals import Literals
from chatmill.auditor.live import kept_random_states
from chatmill.auditor.masks import LAST, check_masks
from chatmill.auditor.matching import compare
from chatmill.auditor.open import open_tokenized
from chatmill.auditor.report import AuditFinding, AuditReport, Example, ReportPart
from chatmill.auditor.source import SourceRows, render_source
from chatmill.auditor.structure import Structure, VocabularyBytes
from chatmill.core.conversation import Conversation
from chatmill.core.kinds import REPEATED
from chatmill.core.tokens import offsets_of
from chatmill.core.trainer_columns import LABELS, TrainerRows, read_columns
from chatmill.errors import ConfigError, DataError, RecordError, short_errors
from chatmill.images.files import Pictures, picture_folder
from chatmill.look.decoder import Decoder
from chatmill.read.conversations import read_conversations
from chatmill.render.jinja.options import TemplateOptions, Unproved
from chatmill.render.model_template import ModelTemplate
from chatmill.render.registry import bind, find_template, given_options
from chatmill.store.receipts import export_target, mask_shift_of
from chatmill.tokenizer.hub_cache import model_folder
from chatmill.tokenizer.load import load_tokenizer

EXAMPLES = 3
AROUND = 16
"""Tokens that are shown on each side of a finding."""
MOST_SHOWN = 48
"""Tokens of a finding that are shown."""
Ints = NDArray[np.int64]
MOST_TRIED = 64
"""Places from which examples are chosen."""
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
    answers: str | None = None,
    no_reasoning: str | None = None,
    thinking_close: str | None = None,
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
    token; `answers`, `no_reasoning` and `thinking_close` are those of a recipe.
    """
    model = _files_of(getattr(dataset, "processing_class", None) if model is None else model)
    named = model if isinstance(model, str | os.PathLike) else getattr(_tokenizer_of(model), "name_or_path", None)
    folder = None if named is None else model_folder(named)
    options = given_options(
        template_options, date, answers=answers, no_reasoning=no_reasoning, thinking_close=thinking_close
    )
    if folder is not None:
        patterns = [os.fspath(source)] if isinstance(source, str | os.PathLike) else []
        options = replace(options, pictures=Pictures.of(folder, picture_folder(None, patterns)))
    bound = _bound(model, template, options)
    pad = bound.tokenizer.pad_id
    pad = None if pad == bound.tokenizer.eos_id else pad  # a pad that is the eos may be a real one
    columns = open_tokenized(dataset, split=split, mask=mask, batches=batches)
    mask_shift = 0
    if isinstance(dataset, str | os.PathLike):
        place = Path(dataset)
        mask_shift = mask_shift_of(export_target(place if place.is_dir() else place.parent))
    data = read_columns(columns, mask=mask, pad_id=pad, mask_shift=mask_shift)
    if not len(data.ids):
        raise DataError("the set holds no tokens")
    more: list[RawFinding] = []
    if data.shift != int(shifted) and data.mask_name.startswith(LABELS):
        detail = f"labels[t] is input_ids[t {data.shift:+d}]"
        more.append(RawFinding("labels_shifted", data.offsets[:-1], data.offsets[1:], len(data), detail))
    name = Path(dataset).name if isinstance(dataset, str | os.PathLike) else type(dataset).__name__
    rows = None
    if source is not None:  # answers without a proof are compared as text, and not judged
        lenient = _bound(model, template, replace(options, unproved=Unproved.UNTRAINED))
        unread: Counter[str] = Counter()
        rows = render_source(_records(source, shape, unread), lenient)
        rows = replace(rows, refused=rows.refused + unread, count=rows.count + unread.total())
    has_targets = getattr(columns, "has_targets", True)
    return _report(data, bound, name, rows, examples, more, has_targets=has_targets)


def _files_of(model: Any) -> Any:
    """Find what has the tokenizer and the template: for a loaded model, the folder it was loaded from."""
    if model is None:
        raise ConfigError("audit needs the model: its folder, or its loaded tokenizer or processor")
    if not hasattr(model, "state_dict"):
        return model
    if not getattr(model, "name_or_path", ""):
        raise ConfigError(f"the {type(model).__name__} was not loaded from a folder: give its tokenizer or processor")
    return model.name_or_path


def _tokenizer_of(model: Any) -> Any:
    """Return the tokenizer of a processor; a tokenizer itself."""
    return getattr(model, "tokenizer", model)


def _bound(model: Any, template: str | os.PathLike[str] | None, options: TemplateOptions) -> ModelTemplate:
    if isinstance(model, ModelTemplate):
        return model
    if template is None and not isinstance(model, str | os.PathLike):
        template = model if getattr(model, "chat_template", None) else _tokenizer_of(model)
        if not getattr(template, "chat_template", None):
            raise ConfigError(f"the {type(model).__name__} has no chat template: name one (template=)")
    if isinstance(model, str | os.PathLike) and not model_folder(model).exists():
        load_tokenizer(model)  # raises what is missing, unless it is the name of a vocabulary
    chosen = find_template(model if template is None else template)
    return bind(chosen, load_tokenizer(model, control_tokens=chosen.control_tokens), options)


def _records(source: Any, shape: str | None, unread: Counter[str]) -> Iterator[Conversation]:
    """Read the conversations of a file; count those that cannot be read by error code."""
    if not isinstance(source, str | os.PathLike):
        yield from source
        return

    def count(error: RecordError) -> None:
        unread[error.code] += 1

    yield from read_conversations(source, shape=shape, on_error=count)


def _report(
    data: TrainerRows,
    bound: ModelTemplate,
    name: str,
    source: SourceRows | None,
    examples: int,
    more: list[RawFinding],
    *,
    has_targets: bool,
) -> AuditReport:
    """Run all other checks.

    Args:
        data: The set.
        bound: The model's template.
        name: Name of the set.
        source: What the records behind the set give, if they are there.
        examples: Examples of each finding, at most.
        more: What has been found already.
        has_targets: Whether tokens are targets. If not, masks are not checked.
    """
    literals, vocabulary = find_literals(bound), VocabularyBytes(bound)
    layout = find_layout(data, literals)
    hidden_stops = _hidden_stops(data, layout, literals)
    if len(hidden_stops):
        padding = data.padding.copy()
        padding[hidden_stops] = False
        data = replace(data, padding=padding, hidden=np.union1d(data.hidden, hidden_stops))
        layout = find_layout(data, literals)
    counts: dict[str, Any] | None = None
    of_source: list[RawFinding] = []
    if source is not None:
        of_source, counts = compare(data, layout, source, literals, vocabulary)
    structure = Structure(data, layout, literals, bound.tokenizer.eos_id, vocabulary)
    by_code: dict[str, list[RawFinding]] = {}
    for finding in (
        *_labels(data, layout, bound, has_targets=has_targets),
        *more,
        *structure.check(None if source is None else {finding.code for finding in of_source}),
        *of_source,
    ):
        if finding.number:
            by_code.setdefault(finding.code, []).append(finding)
    findings = [_finding(_joined(same), data, bound, examples) for same in by_code.values()]
    findings.sort(key=lambda finding: (-finding.share, finding.code))
    left_out = sum(one.number for one in by_code.get("some_untrained", ()) if one.what == LAST)
    unknown = [*_unknown(literals, counts, left_out), *structure.unknown, *_isolation(data)]
    if source is None:
        unknown += _changed(data, layout, literals)
    trained_answers, trained_stops = _trained(data, layout)
    return AuditReport(
        name=name,
        template=bound.name,
        tokenizer=bound.tokenizer.name,
        rows=len(data),
        documents=int(data.filled.sum()),
        tokens=int((~data.padding).sum()),
        trained=None if data.trained is None else int((data.trained & ~data.padding).sum()),
        answers=len(layout.answers),
        trained_answers=trained_answers,
        trained_stops=trained_stops,
        mask_name=data.mask_name,
        boundaries=data.boundaries,
        findings=tuple(finding for finding in findings if not finding.rule.is_note),
        notes=tuple(finding for finding in findings if finding.rule.is_note),
        unknown=tuple(unknown),
        source=counts,
    )


def _hidden_stops(data: TrainerRows, layout: DocumentLayout, literals: Literals) -> Ints:
    """Find stops at the ends of documents that are padding by the attention mask.

    A mask made as `ids != pad` with pad = eos hides them; then most last answers have no stop, and one follows them.
    """
    answers = layout.answers
    ends = data.bounds[1][answers.documents]
    is_last = answers.behind >= ends
    after = np.minimum(answers.ends, ends)[is_last & (answers.stops < 0)]
    after = after[after < len(data.ids)]
    after = after[~np.isin(after, data.offsets)]
    found = after[data.padding[after] & np.isin(data.ids[after], list(literals.stops))]
    return found if 2 * len(found) > int(is_last.sum()) else found[:0]


def _labels(
    data: TrainerRows, layout: DocumentLayout, bound: ModelTemplate, *, has_targets: bool
) -> Iterator[RawFinding]:
    """Check the mask and the labels."""
    if not has_targets:
        pass
    elif data.trained is None:
        yield RawFinding("mask_full", *data.bounds, int(data.filled.sum()), "The set has neither labels nor a mask")
    else:
        names = bound.tokenizer.control_ids
        yield from check_masks(data, layout, data.trained, [names[name] for name in THINK_ENDS if name in names])
    tokens = int((~data.padding).sum())
    yield RawFinding("labels_differ", data.wrong_labels, data.wrong_labels + 1, tokens)
    yield RawFinding("hidden_tokens", data.hidden, data.hidden + 1, tokens)


def _unknown(literals: Literals, counts: Mapping[str, Any] | None, left_out: int) -> Iterator[str]:
    """Say what only a source shows, and what the source leaves open."""
    if literals.unusable and counts is None:
        yield f"What is prompt and what is answer: {literals.unusable}. --source shows it"
    elif literals.unusable and counts is not None and counts["equal"] < counts["documents"]:
        rest = counts["documents"] - counts["equal"]
        yield f"Masks of {rest:,} documents that differ from their records: {literals.unusable}"
    if left_out:
        hint = "--source shows it" if counts is None else "their documents differ from the records"
        yield f"Whether {left_out:,} answers were left out of training on purpose: {hint}"
    if counts is not None and counts["refused"]:
        reasons = ", ".join(f"{count:,} {code}" for code, count in sorted(counts["refused"].items()))
        yield f"Records that Chatmill cannot write with this template are not compared: {reasons}"


def _trained(data: TrainerRows, layout: DocumentLayout) -> tuple[int, int]:
    """Count the answers of which tokens are trained, and those whose stop is trained."""
    if data.trained is None:
        return 0, 0
    before = offsets_of(data.trained)
    answers = layout.answers
    stops = answers.stops[answers.stops >= 0]
    has_targets = before[answers.ends] > before[answers.starts]
    return int(has_targets.sum()), int(data.trained[stops].sum())


def _changed(data: TrainerRows, layout: DocumentLayout, literals: Literals) -> Iterator[str]:
    """Say how many trained answers later messages may have changed, under a template that changes answers."""
    probes = literals.probes
    is_proved = np.repeat(~probes.doubtful, np.diff(probes.offsets))
    is_changing = bool((probes.kinds[is_proved] & REPEATED).any())
    if not is_changing or data.trained is None:
        return
    answers = layout.answers
    following = np.append(layout.openings, len(data.ids))[np.searchsorted(layout.openings, answers.starts)]
    has_later_messages = following < data.documents[answers.documents + 1]
    before = offsets_of(data.trained)
    has_targets = before[answers.ends] > before[answers.starts]
    count = int((has_later_messages & has_targets).sum())
    if count:
        yield (
            f"Whether answers are trained as later messages have changed them, which this template does: {count:,} of "
            f"{int(has_targets.sum()):,} trained answers have messages after them. --source shows it"
        )


def _isolation(data: TrainerRows) -> Iterator[str]:
    """Say what only the model shows about packed rows."""
    if len(data.packed_rows):
        yield "Whether documents of packed rows see each other in the model: `chatmill isolate MODEL SET` shows it"


def _joined(same: Sequence[RawFinding]) -> RawFinding:
    """Return the largest finding of a code; its detail says how many there are of each fault."""
    largest = max(same, key=lambda finding: finding.number)
    counts = [f"{finding.number:,} {finding.what}" for finding in same if finding.what]
    return largest._replace(detail=", ".join(counts)) if counts else largest


def _different(raw: RawFinding, data: TrainerRows, count: int) -> list[int]:
    """Choose places of a finding that differ in the tokens around them, from as many rows as there are.

    Rows of one conversation have their beginnings in common, and would show the same fault again.
    """
    many = min(len(raw.starts), MOST_TRIED)
    spread = np.linspace(0, len(raw.starts) - 1, many, dtype=np.int64).tolist() if many else []
    starts = np.minimum(raw.starts[spread], len(data.ids) - 1)
    rows = data.row_of(starts).tolist() if spread else []

    # The first place of each row comes before the second one of any.
    in_row: Counter[int] = Counter()
    ordered = []
    for place, row in zip(spread, rows, strict=True):
        ordered.append((in_row[row], place, row))
        in_row[row] += 1

    chosen: list[int] = []
    seen: set[tuple[int, ...]] = set()
    for _, place, row in sorted(ordered):
        if len(chosen) == count:
            break
        start = int(raw.starts[place])
        first = max(int(data.offsets[row]), start - AROUND)
        last = min(int(data.offsets[row + 1]), start + AROUND)
        context = tuple(data.ids[first:last].tolist())
        if context not in seen:
            seen.add(context)
            chosen.append(place)
    return chosen


def _finding(raw: RawFinding, data: TrainerRows, bound: ModelTemplate, examples: int) -> AuditFinding:
    places = _different(raw, data, examples)
    shown = zip(raw.starts[places].tolist(), raw.ends[places].tolist(), strict=True)
    return AuditFinding(
        code=raw.code,
        count=raw.number,
        total=raw.total,
        detail=raw.detail,
        examples=tuple(_example(data, Decoder(bound.tokenizer), start, end) for start, end in shown),
    )


def _example(data: TrainerRows, decoder: Decoder, start: int, end: int) -> Example:
    row = int(data.row_of(np.array([min(start, len(data.ids) - 1)]))[0])
    low, high = int(data.offsets[row]), int(data.offsets[row + 1])
    first, last = max(low, start - AROUND), min(high, max(min(end, start + MOST_SHOWN), start + 1) + AROUND)
    ids = data.ids[first:last]
    trained = np.zeros(len(ids), dtype=np.bool_) if data.weights is None else data.weights[first:last] > 0
    about = (np.arange(first, last) >= start) & (np.arange(first, last) < end)
    codes = trained * 4 + about * 2 + decoder.is_control(ids)
    edges = np.flatnonzero(np.diff(codes)) + 1
    parts = []
    for piece, code in zip(np.split(ids, edges), codes[np.append(0, edges)].tolist(), strict=True):
        text = _spelled(piece, decoder) if code & 1 else decoder.text(piece)
        parts.append(ReportPart(text, trained=bool(code & 4), control=bool(code & 1), found=bool(code & 2)))
    return Example(row, start - low, end - low, tuple(parts))


def _spelled(ids: Any, decoder: Decoder) -> str:
    """Spell control tokens; a token repeated many times, as those of pictures are, is counted."""
    groups = ((decoder.text(np.array([token])), len(list(same))) for token, same in groupby(ids.tolist()))
    return "".join(text * count if count < MANY else f"{text} x{count:,} " for text, count in groups)
