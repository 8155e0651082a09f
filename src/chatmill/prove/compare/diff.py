"""What changed between two datasets: which records differ in ids, weights or kinds, and what in their recipes does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatmill.core.checksums import INPUT_HASH
from chatmill.core.kinds import kind_name
from chatmill.core.ledger import Ledger
from chatmill.core.tokens import offsets_of, ranges, segment_sums
from chatmill.look.decoder import Decoder, manifest_tokenizer
from chatmill.prove.compare.changes import Line, changed_lines
from chatmill.prove.compare.records import Match, Records, in_equal_shards, pairs_of
from chatmill.store.documents import open_dataset
from chatmill.store.split import Documents, StoredDataset
from chatmill.tokenizer.tokenizer import Tokenizer


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


class Totals(NamedTuple):
    """Sums over one dataset, or over one record."""

    records: int = 0
    """Documents; a record in several windows counts for each."""
    tokens: int = 0
    trained: int = 0
    """Tokens with a weight above 0."""


class ChangedRecord(NamedTuple):
    """One record that differs."""

    change: Change
    record_id: str | None
    place_a: tuple[str, int] | None
    """Split and number of the record there."""
    place_b: tuple[str, int] | None
    a: Totals
    b: Totals
    lines: tuple[Line, ...]


class ManifestDifference(NamedTuple):
    """One thing that the manifests say differently; None if one of them does not say it."""

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
    """Tokenizers of A and B, for showing; None if one does not load (a note says so) or none is needed."""

    @property
    def equal(self) -> bool:
        """Whether every record is in both, in the same split, with the same ids, weights and kinds."""
        return not self.differing

    def as_json(self) -> dict[str, Any]:
        """Plain values; a line has its `text` if the tokenizer is there."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            "equal": self.equal,
            "differing": self.differing,
            "counts": {str(change): self.counts[change] for change in Change},
            "moved_to_another_split": self.moved,
            "matched_by": {str(match): self.matched[match] for match in Match},
            "totals": {"a": self.totals_a._asdict(), "b": self.totals_b._asdict()},
            "manifest": [item._asdict() for item in self.manifest],
            "notes": list(self.notes),
            "changed": [self._record_json(record) for record in self.shown],
        }

    def _record_json(self, record: ChangedRecord) -> dict[str, Any]:
        return {
            "change": str(record.change),
            "record_id": record.record_id,
            "a": None if record.place_a is None else {"place": list(record.place_a), **record.a._asdict()},
            "b": None if record.place_b is None else {"place": list(record.place_b), **record.b._asdict()},
            "lines": [self._line_json(line) for line in record.lines],
        }

    def _line_json(self, line: Line) -> dict[str, Any]:
        if line.sign == " ":
            return {"sign": " ", "tokens": line.tokens}
        decoder = self.decoder(line)
        about = {"sign": line.sign, "tokens": line.tokens, "weight": line.weight, "ids": line.ids.tolist()}
        about |= {} if line.kind is None else {"kind": kind_name(line.kind)}
        return about | ({} if decoder is None else {"text": Decoder(decoder).text(line.ids)})

    def decoder(self, line: Line) -> Tokenizer | None:
        """Return the tokenizer of the side that a line is from."""
        return self.decoders[line.sign == "+"]


def diff_datasets(a: str | Path, b: str | Path, *, show: int = 5) -> DatasetDiff:
    """Compare two datasets record by record; the tokens of about a million positions are in memory at a time.

    Records are matched by id, or by content if there are no ids. `show`: how many changed records to
    take apart into lines.
    """
    old, new = Records(open_dataset(a)), Records(open_dataset(b))
    pairs = pairs_of(old, new)
    paired, only_in_a = np.flatnonzero(pairs.partner >= 0), np.flatnonzero(pairs.partner < 0)
    partner = pairs.partner[paired]
    changes = np.zeros(len(paired), dtype=np.int8)
    trained_a = trained_b = done = 0
    # Tokens of equal shards of two remote datasets are not fetched; how many are trained, their manifests say.
    fetched = np.flatnonzero(~in_equal_shards(old, new, paired, partner))
    trained = _stated_trained(old, new) if len(fetched) < len(paired) else None
    if trained is None:
        fetched = np.arange(len(paired))
    for numbers in old.batches(paired[fetched]):
        chosen = fetched[done : done + len(numbers)]
        document, other = old.gather(numbers), new.gather(partner[chosen])
        changes[chosen] = compare_documents(document, other)
        trained_a, trained_b = trained_a + _trained(document), trained_b + _trained(other)
        done += len(numbers)
    if trained is None:
        trained_a += sum(_trained(old.gather(numbers)) for numbers in old.batches(only_in_a))
        trained_b += sum(_trained(new.gather(numbers)) for numbers in new.batches(pairs.only_in_b))
    else:
        trained_a, trained_b = trained
    moved = old.split_names(paired) != new.split_names(partner)
    differ = np.flatnonzero((changes > 0) | moved)
    listed = [
        *((_BY_CODE[changes[at]], int(paired[at]), int(partner[at])) for at in differ[:show].tolist()),
        *((Change.ONLY_IN_A, number, -1) for number in only_in_a[:show].tolist()),
        *((Change.ONLY_IN_B, -1, number) for number in pairs.only_in_b[:show].tolist()),
    ]
    shown = tuple(_taken_apart(old, new, *document) for document in listed[:show])
    notes = [*_notes("A", old), *_notes("B", new)]
    if (np.diff(partner[~moved]) < 0).any():
        notes.append("the records are in another order; only their contents are compared")
    decoders, problems = _decoders(old.dataset, new.dataset) if shown else ((None, None), [])
    counts = {change: int(np.count_nonzero(changes == code)) for code, change in enumerate(_BY_CODE)}
    return DatasetDiff(
        a=old.dataset.directory,
        b=new.dataset.directory,
        counts={**counts, Change.ONLY_IN_A: len(only_in_a), Change.ONLY_IN_B: len(pairs.only_in_b)},
        differing=len(differ) + len(only_in_a) + len(pairs.only_in_b),
        moved=int(moved.sum()),
        matched=pairs.matched,
        totals_a=Totals(len(old), int(old.lengths.sum()), trained_a),
        totals_b=Totals(len(new), int(new.lengths.sum()), trained_b),
        manifest=tuple(_manifest_differences(old.dataset.about, new.dataset.about)),
        notes=(*notes, *problems),
        shown=shown,
        decoders=decoders,
    )


def _stated_trained(a: Records, b: Records) -> tuple[int, int] | None:
    """Return how many tokens are trained, by the ledgers of two builds; None where one of them has none."""
    counts: list[int] = []
    for side in (a, b):
        ledger = side.dataset.about.get("ledger")
        tokens = side.dataset.about.get("splits", {})
        if not isinstance(ledger, dict) or set(tokens) != set(side.dataset.splits):
            return None
        counts.append(Ledger.from_json(ledger).total("trained"))
    return counts[0], counts[1]


def _trained(documents: Documents) -> int:
    return int(np.count_nonzero(documents.trained))


def _taken_apart(a: Records, b: Records, change: Change, number_a: int, number_b: int) -> ChangedRecord:
    sides = ((a, number_a), (b, number_b))
    old, new = (None if number < 0 else side.gather(np.array([number])) for side, number in sides)
    place_a, place_b = (None if number < 0 else side.place(number) for side, number in sides)
    names = [side.record_ids(np.array([number]))[0] for side, number in sides if number >= 0]
    in_a, in_b = (
        Totals() if document is None else Totals(1, len(document.ids), _trained(document)) for document in (old, new)
    )
    name = next((name for name in names if name), None)
    return ChangedRecord(change, name, place_a, place_b, in_a, in_b, changed_lines(old, new))


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


def _notes(letter: str, side: Records) -> Iterator[str]:
    if not side.dataset.about:
        yield f"{letter} has no manifest: nothing is known about how it was built"
    if not any(documents.facts("record_id", np.arange(1)) for documents in side.splits):
        yield f"{letter} stores no ids of records: its records are matched by content"
    for name, documents in side.dataset.splits.items():
        if not documents.has_masks:
            yield f"{letter}, {name}: no weights are stored; every token counts as trained"
        if not documents.has_kinds:
            yield f"{letter}, {name}: no kinds are stored; kinds are not compared there"


def _decoders(a: StoredDataset, b: StoredDataset) -> tuple[tuple[Tokenizer | None, Tokenizer | None], list[str]]:
    """Return the tokenizers of both manifests, where they load and are still those of the builds; else the reasons."""
    old = manifest_tokenizer(a.about, home=a.directory)
    new = old
    if a.about.get("tokenizer") != b.about.get("tokenizer"):
        new = manifest_tokenizer(b.about, home=b.directory)
    tokenizers = [None if problem else tokenizer for tokenizer, problem in (old, new)]
    sides = zip("AB", (old[1], new[1]), strict=True)
    problems = [f"{letter}: ids are shown, not text: {problem}" for letter, problem in sides if problem]
    return (tokenizers[0], tokenizers[1]), problems


def _manifest_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[ManifestDifference]:
    """Everything that decides the bytes of a dataset and is not the same in two manifests; none without manifests."""
    if not a or not b:
        return
    said_a, said_b = _said(a), _said(b)
    for field in dict.fromkeys([*said_a, *said_b]):
        if said_a.get(field) != said_b.get(field):
            yield ManifestDifference(what=field, a=said_a.get(field), b=said_b.get(field))


def _said(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest's statements, flat: tokenizer, template, policy, input files, and every option of the recipe."""
    said: dict[str, Any] = {name: manifest.get(name) for name in ("package_version", "git_sha")}
    for name in ("tokenizer", "template", "policy"):
        said[name] = f"{manifest[name]['name']} ({manifest[name]['fingerprint'][:12]})"
    for file in manifest["inputs"]:
        said[f"input {file['path']}"] = f"{INPUT_HASH} {file[INPUT_HASH][:12]}, {file['bytes']:,} bytes"
    said.update(_flat(manifest["recipe"], "recipe"))
    return said


def _flat(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: item for part, inner in value.items() for key, item in _flat(inner, f"{name}.{part}").items()}
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return {key: item for i, inner in enumerate(value) for key, item in _flat(inner, f"{name}[{i}]").items()}
    return {name: value}
