"""What changed between two builds: which records differ in ids, weights or kinds, and what in their recipes does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatmill.core.kinds import kind_name
from chatmill.core.tokens import offsets_of, ranges, segment_sums
from chatmill.look.decoder import Decoder, manifest_tokenizer
from chatmill.prove.compare.changes import Line, changed_lines
from chatmill.prove.compare.numbered import Side, common_keys
from chatmill.prove.compare.pairing import Match, Pairs, pair_records
from chatmill.store.documents import StoredDataset, open_dataset
from chatmill.store.split import Documents
from chatmill.tokenizer.tokenizer import Tokenizer

Ints = NDArray[np.int64]


class Change(StrEnum):
    """How a record of A compares with its partner in B; the first that fits counts."""

    ONLY_IN_A = "only_in_a"
    ONLY_IN_B = "only_in_b"
    IDS = "ids"
    """Other token ids (and perhaps other weights)."""
    WEIGHTS = "weights"
    """The same ids, other weights."""
    KINDS = "kinds"
    """The same ids and weights, other kinds."""
    EQUAL = "equal"


_BY_CODE = (Change.EQUAL, Change.KINDS, Change.WEIGHTS, Change.IDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over one build, or over one record."""

    records: int = 0
    """Episodes or packed documents; a record in several windows counts for each."""
    tokens: int = 0
    trained: int = 0
    """Tokens with a weight above 0."""

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            records=self.records + other.records,
            tokens=self.tokens + other.tokens,
            trained=self.trained + other.trained,
        )

    @classmethod
    def of(cls, documents: Documents) -> Totals:
        """Those of some documents."""
        trained = int(np.count_nonzero(documents.trained))
        return cls(records=len(documents), tokens=len(documents.ids), trained=trained)

    def as_json(self) -> dict[str, int]:
        """Plain numbers."""
        return {"records": self.records, "tokens": self.tokens, "trained": self.trained}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedRecord:
    """One record that differs."""

    change: Change
    record_id: str | None
    place_a: tuple[str, int] | None
    """Split and number of the record there."""
    place_b: tuple[str, int] | None
    a: Totals
    b: Totals
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestDifference:
    """One thing that the manifests say differently; None where one of them does not say it."""

    what: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetDiff:
    """What `diff_datasets` found."""

    a: Path
    b: Path
    counts: dict[Change, int]
    differing: int
    """Records that are not equal, or not in the same split, or only in one of the two."""
    moved: int
    """Records that are in another split; they are counted above as well."""
    matched: dict[Match, int]
    totals_a: Totals
    totals_b: Totals
    manifest: tuple[ManifestDifference, ...]
    notes: tuple[str, ...]
    """What could not be compared, and the like."""
    shown: tuple[ChangedRecord, ...]
    """The first changed records."""
    decoders: tuple[Tokenizer | None, Tokenizer | None]
    """Tokenizers of A and B, for showing; None where one does not load (a note says so) or none is needed."""

    @property
    def equal(self) -> bool:
        """Whether every record is in both, in the same split, with the same ids, weights and kinds."""
        return not self.differing

    def as_json(self) -> dict[str, Any]:
        """Plain values; `text` of a line is there where the tokenizer is."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            "equal": self.equal,
            "differing": self.differing,
            "counts": {str(change): self.counts[change] for change in Change},
            "moved_to_another_split": self.moved,
            "matched_by": {str(match): self.matched[match] for match in Match},
            "totals": {"a": self.totals_a.as_json(), "b": self.totals_b.as_json()},
            "manifest": [{"what": item.what, "a": item.a, "b": item.b} for item in self.manifest],
            "notes": list(self.notes),
            "changed": [self._record_json(record) for record in self.shown],
        }

    def _record_json(self, record: ChangedRecord) -> dict[str, Any]:
        return {
            "change": str(record.change),
            "record_id": record.record_id,
            "a": None if record.place_a is None else {"place": list(record.place_a), **record.a.as_json()},
            "b": None if record.place_b is None else {"place": list(record.place_b), **record.b.as_json()},
            "lines": [self._line_json(line) for line in record.lines],
        }

    def _line_json(self, line: Line) -> dict[str, Any]:
        if line.sign == " ":
            return {"sign": " ", "tokens": line.tokens}
        decoder = self.decoder(line)
        about = {"sign": line.sign, "tokens": line.tokens, "weight": line.weight, "ids": line.ids.tolist()}
        about |= {} if line.kind is None else {"kind": kind_name(line.kind)}
        about |= {"equal_before": line.before, "equal_after": line.after}
        return about | ({} if decoder is None else {"text": Decoder(decoder).text(line.ids)})

    def decoder(self, line: Line) -> Tokenizer | None:
        """The tokenizer of the side that a line is from."""
        return self.decoders[line.sign == "+"]


def diff_datasets(
    a: str | Path, b: str | Path, *, show: int = 5, on_progress: Callable[[int, int], None] | None = None
) -> DatasetDiff:
    """Compare two datasets record by record; the tokens of about a million positions are in memory at a time.

    Records are matched by id, or by content where there are no ids. `show`: how many changed records to
    take apart into lines. `on_progress` is called with the records that are compared, and how many there are.
    """
    old, new = Side(open_dataset(a)), Side(open_dataset(b))
    pairs = pair_records(*common_keys(old, new))
    walk = _RecordWalk(old, new, pairs, show)
    walk.run(on_progress or (lambda done, of: None))
    notes = [*_notes(old, new), *walk.notes]
    decoders: tuple[Tokenizer | None, Tokenizer | None] = (None, None)
    if walk.shown:
        decoders, problems = _decoders(old.dataset, new.dataset)
        notes += problems
    return DatasetDiff(
        a=old.dataset.directory,
        b=new.dataset.directory,
        counts=walk.counts,
        differing=walk.differing,
        moved=walk.moved,
        matched=pairs.matched,
        totals_a=walk.totals[0],
        totals_b=walk.totals[1],
        manifest=tuple(_manifest_differences(old.dataset.about, new.dataset.about)),
        notes=tuple(notes),
        shown=tuple(walk.shown),
        decoders=decoders,
    )


class _RecordWalk:
    """One pass over all records of A with their partners, then over what is only in B."""

    def __init__(self, a: Side, b: Side, pairs: Pairs, show: int) -> None:
        self._a, self._b, self._pairs, self._show = a, b, pairs, show
        self.counts = dict.fromkeys(Change, 0)
        self.differing = 0
        self.moved = 0
        self.totals = [Totals(), Totals()]
        self.shown: list[ChangedRecord] = []
        self.notes: list[str] = []
        self._only_in_a: list[int] = []
        self._last_partner = -1
        self._in_order = True

    def run(self, on_progress: Callable[[int, int], None]) -> None:
        """Compare everything."""
        only_in_b = self._pairs.only_in_b
        done, of = 0, len(self._pairs.partner) + len(only_in_b)
        for numbers in self._a.batches():
            on_progress(done, of)
            self._compare(numbers)
            done += len(numbers)
        on_progress(done, of)
        for numbers in self._b.batches_of(only_in_b):
            self.totals[1] += Totals.of(self._b.gather(numbers))
        self.counts[Change.ONLY_IN_B] = len(only_in_b)
        self.differing += self.counts[Change.ONLY_IN_A] + len(only_in_b)
        for number in self._only_in_a[: max(0, self._show - len(self.shown))]:
            self._take_apart(Change.ONLY_IN_A, number, -1)
        for number in only_in_b[: max(0, self._show - len(self.shown))].tolist():
            self._take_apart(Change.ONLY_IN_B, -1, number)
        if not self._in_order:
            self.notes.append("the records are in another order; only their contents are compared")

    def _compare(self, numbers: Ints) -> None:
        partners = self._pairs.partner[numbers]
        found = partners >= 0
        old = self._a.gather(numbers)
        self.totals[0] += Totals.of(old)
        lonely = numbers[~found]
        self.counts[Change.ONLY_IN_A] += len(lonely)
        self._only_in_a += lonely[: self._show - len(self._only_in_a)].tolist()
        numbers, partners = numbers[found], partners[found]
        if not len(numbers):
            return
        new = self._b.gather(partners)
        self.totals[1] += Totals.of(new)
        codes = compare_documents(old if found.all() else self._a.gather(numbers), new)
        for code, change in enumerate(_BY_CODE):
            self.counts[change] += int(np.count_nonzero(codes == code))
        names_a, names_b = np.array(self._a.names), np.array(self._b.names)
        moved = names_a[self._a.split_of(numbers)] != names_b[self._b.split_of(partners)]
        self.moved += int(moved.sum())
        self.differing += int(np.count_nonzero((codes > 0) | moved))
        stayed = np.append(self._last_partner, partners[~moved])
        self._in_order = self._in_order and bool((np.diff(stayed) > 0).all())
        self._last_partner = int(stayed[-1])
        for at in np.flatnonzero((codes > 0) | moved)[: self._show - len(self.shown)].tolist():
            self._take_apart(_BY_CODE[codes[at]], int(numbers[at]), int(partners[at]))

    def _take_apart(self, change: Change, number_a: int, number_b: int) -> None:
        sides = ((self._a, number_a), (self._b, number_b))
        there = [(side, np.array([number])) if number >= 0 else None for side, number in sides]
        old, new = (None if it is None else it[0].gather(it[1]) for it in there)
        names = [it[0].facts("record_id", it[1])[0] for it in there if it is not None]
        places = [None if number < 0 else side.place(number) for side, number in sides]
        self.shown.append(
            ChangedRecord(
                change=change,
                record_id=next((name for name in names if name), None),
                place_a=places[0],
                place_b=places[1],
                a=Totals() if old is None else Totals.of(old),
                b=Totals() if new is None else Totals.of(new),
                lines=changed_lines(old, new),
            )
        )


def compare_documents(a: Documents, b: Documents) -> NDArray[np.int8]:
    """For each pair of documents: 0 equal, 1 other kinds alone, 2 other weights, 3 other ids.

    Missing weights count as 1; kinds are compared where both sides have them.
    """
    lengths_a, lengths_b = np.diff(a.offsets), np.diff(b.offsets)
    same = lengths_a == lengths_b
    offsets = offsets_of(lengths_a[same])
    everything = slice(None)
    at_a, at_b = (everything if same.all() else ranges(side.offsets[:-1][same], lengths_a[same]) for side in (a, b))

    def differ(left: NDArray[Any], right: NDArray[Any]) -> NDArray[np.bool_]:
        unequal = left[at_a] != right[at_b]
        if not unequal.any():
            return np.zeros(len(offsets) - 1, dtype=np.bool_)
        return segment_sums(unequal, offsets) > 0

    codes = np.full(len(same), 3, dtype=np.int8)
    inner = np.zeros(int(same.sum()), dtype=np.int8)
    if a.kinds is not None and b.kinds is not None:
        inner[differ(a.kinds, b.kinds)] = 1
    inner[differ(a.full_weights, b.full_weights)] = 2
    inner[differ(a.ids, b.ids)] = 3
    codes[same] = inner
    return codes


def _notes(a: Side, b: Side) -> Iterator[str]:
    for letter, side in (("A", a), ("B", b)):
        if not side.dataset.about:
            yield f"{letter} has no manifest: nothing is known about how it was built"
        if not any(documents.facts("record_id", np.arange(1)) for documents in side.sets):
            yield f"{letter} stores no ids of records: its records are matched by content, then by place"
        for name, documents in side.dataset.splits.items():
            if not documents.has_masks:
                yield f"{letter}, {name}: no weights are stored; every token counts as trained"
            if not documents.has_kinds:
                yield f"{letter}, {name}: no kinds are stored; kinds are not compared there"


def _decoders(a: StoredDataset, b: StoredDataset) -> tuple[tuple[Tokenizer | None, Tokenizer | None], list[str]]:
    """The tokenizers of both manifests, where they load and are still those of the builds; else the reasons."""
    old = manifest_tokenizer(a.about)
    new = old if a.about.get("tokenizer") == b.about.get("tokenizer") else manifest_tokenizer(b.about)
    tokenizers = [None if problem else tokenizer for tokenizer, problem in (old, new)]
    sides = zip("AB", (old[1], new[1]), strict=True)
    problems = [f"{letter}: ids are shown, not text: {problem}" for letter, problem in sides if problem]
    return (tokenizers[0], tokenizers[1]), problems


def _manifest_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[ManifestDifference]:
    """Everything that decides the bytes of a dataset and is not the same in two manifests; none without manifests."""
    if not a or not b:
        return
    said_a, said_b = _said(a), _said(b)
    for what in dict.fromkeys([*said_a, *said_b]):
        if said_a.get(what) != said_b.get(what):
            yield ManifestDifference(what=what, a=said_a.get(what), b=said_b.get(what))


def _said(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest's statements, flat: tokenizer, template, policy, input files, and every option of the recipe."""
    said: dict[str, Any] = {name: manifest.get(name) for name in ("package_version", "git_sha")}
    for name in ("tokenizer", "template", "policy"):
        said[name] = f"{manifest[name]['name']} ({manifest[name]['fingerprint'][:12]})"
    for file in manifest["inputs"]:
        said[f"input {file['path']}"] = f"xxh128 {file['xxh128'][:12]}, {file['bytes']:,} bytes"
    said.update(_flat(manifest["recipe"], "recipe"))
    return said


def _flat(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: item for part, inner in value.items() for key, item in _flat(inner, f"{name}.{part}").items()}
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return {key: item for i, inner in enumerate(value) for key, item in _flat(inner, f"{name}[{i}]").items()}
    return {name: value}
