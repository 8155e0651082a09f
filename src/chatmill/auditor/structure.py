"""Checks of what rows are made of: ids and their text, beginnings, ends, boundaries, special tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from chatmill.auditor.findings import RawFinding
from chatmill.auditor.layout import DocumentLayout, Wanted, find_layout, set_of_probes
from chatmill.auditor.literals import Literals, special_ids
from chatmill.auditor.thresholds import FEW_ROWS, MOST_BEGIN, MOST_ROWS, NEARLY_FULL
from chatmill.core.kinds import RoleCode
from chatmill.core.tokens import offsets_of, ranges, segment_sums
from chatmill.core.trainer_columns import TrainerRows
from chatmill.look.decoder import Decoder
from chatmill.render.model_template import ModelTemplate

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


BETTER = ("truncated", "special_from_text", "unbounded", "other_ids")
"""Findings that a source tells better."""


class VocabularyBytes(Decoder):
    """The bytes of ids, and which of them no text can have."""

    def __init__(self, bound: ModelTemplate) -> None:
        super().__init__(bound.tokenizer)
        self.special = np.zeros(bound.tokenizer.vocab_size, dtype=np.bool_)
        self.special[list(special_ids(bound))] = True

    def begins_white(self, ids: Ints) -> Bools:
        """Mark ids that begin with white space."""
        data, at = self.joined_bytes(ids)
        return np.array([data[first : first + 1].isspace() for first in at[:-1].tolist()], dtype=np.bool_)

    def unlike(self, ids: Ints, starts: Ints, ends: Ints) -> Bools:
        """Mark stretches of ids that the tokenizer does not give for their text, as all that are no UTF-8."""
        flat, at = self.joined_bytes(ids)
        bounds = zip(at[starts].tolist(), at[ends].tolist(), strict=True)
        encoded, offsets = self.tokenizer.encode_batch([flat[a:b].decode("utf-8", errors="replace") for a, b in bounds])
        sizes = np.diff(offsets)
        wrong: Bools = sizes != ends - starts
        same = np.flatnonzero(~wrong)
        mine = ids[ranges(starts[same], sizes[same])]
        theirs = encoded[ranges(offsets[:-1][same], sizes[same])]
        wrong[same] = segment_sums(mine != theirs, offsets_of(sizes[same])) > 0
        return wrong

    def unlike_stretches(self, data: TrainerRows, layout: DocumentLayout) -> tuple[Bools, Ints, Ints]:
        """Mark stretches of text whose ids neither way of tokenising gives; also return all stretches."""
        ids, padding = data.ids, data.padding
        breaks = layout.answers.starts[~layout.answers.merged]
        edges = np.flatnonzero(np.diff(padding.astype(np.int8))) + 1
        starts, ends = self._stretches(ids, [breaks, edges, data.documents])
        keep = ~padding[starts] & self.has(ids[starts])
        starts, ends = starts[keep], ends[keep]
        unlike = self.unlike(ids, starts, ends)
        wrong = np.flatnonzero(unlike)
        if len(wrong):  # transformers tokenises prompt and answer together
            whole_starts, whole_ends = self._stretches(ids, [edges, data.documents])
            at = np.searchsorted(whole_starts, starts[wrong], side="right") - 1
            unlike[wrong] = self.unlike(ids, whole_starts[at], whole_ends[at])
        return unlike, starts, ends

    def _stretches(self, ids: Ints, breaks: Sequence[Ints]) -> tuple[Ints, Ints]:
        """Stretches between special tokens, cut at `breaks`."""
        is_special = self.special[np.minimum(ids, len(self.special) - 1)]
        cut = np.append(is_special, True)
        cut[1:] |= is_special
        cut[0] = True
        cut[np.concatenate(breaks)] = True
        edges = np.flatnonzero(cut)
        starts, ends = edges[:-1], edges[1:]
        text = ~is_special[starts]
        return starts[text], ends[text]


class Structure:
    """One set, its layout, and what its template writes."""

    def __init__(
        self,
        data: TrainerRows,
        layout: DocumentLayout,
        literals: Literals,
        eos: int | None,
        vocabulary: VocabularyBytes,
    ) -> None:
        self._data, self._layout, self._literals, self._eos = data, layout, literals, eos
        self._vocabulary = vocabulary
        self._begins, self._ends = data.bounds
        self._count = int(data.filled.sum())
        self.unknown: list[str] = []
        """What could not be known."""

    def check(self, source_codes: Collection[str] | None) -> Iterator[RawFinding]:
        """Check the structure; `source_codes` are the codes of the comparison with a source, None without a source."""
        replaced = set(source_codes or ()) & set(BETTER)
        yield from (finding for finding in self._check() if finding.code not in replaced)
        if source_codes is not None:
            self.unknown.clear()
        else:
            yield from self._other_ids()

    def _check(self) -> Iterator[RawFinding]:
        data = self._data
        rows = data.wrong_boundaries
        yield RawFinding("wrong_boundaries", data.offsets[:-1][rows], data.offsets[1:][rows], len(data))
        yield self._places("outside_vocabulary", np.flatnonzero(~self._vocabulary.has(data.ids) & ~data.padding))
        if self._literals.unusable:
            return
        opened = np.bincount(data.document_of(self._layout.openings), minlength=len(self._begins)) > 0
        yield self._documents("template_differs", ~opened & data.filled & ~self._parts(opened))
        yield from self._merged()
        yield from self._beginnings(opened)
        yield from self._endings()
        yield from self._special(opened)
        yield from self._packed()

    def _other_ids(self) -> Iterator[RawFinding]:
        """Stretches of text whose ids are not those of the tokenizer, if it gives those of the template's probes."""
        data, probes = self._data, self._literals.probes
        if len(probes):
            tried = set_of_probes(self._literals)
            unlike, starts, _ = self._vocabulary.unlike_stretches(tried, find_layout(tried, self._literals))
            if (unlike & ~probes.doubtful[tried.row_of(starts)]).any():
                self.unknown.append("Whether ids are those of their text: this tokenizer writes text otherwise in rows")
                return
        unlike, starts, ends = self._vocabulary.unlike_stretches(data, self._layout)
        document = data.document_of(starts)
        unlike &= (starts > self._begins[document]) & (ends < self._ends[document])  # cut text may have other ids
        first = np.unique(document[unlike], return_index=True)[1]
        yield RawFinding("other_ids", starts[unlike][first], ends[unlike][first], len(data.documents) - 1)

    def _parts(self, opened: Bools) -> Bools:
        """Find documents that may be a cut start or end of a conversation, in a set that holds others."""
        literals = self._literals
        short = self._ends - self._begins <= max(opening.solid for opening in literals.openings) + MOST_BEGIN
        first_ids = {opening.ids[0] for opening in literals.openings} - literals.stops
        tail = ~self._holds(first_ids) & self._holds(literals.written)
        return (short | tail) & opened.any()

    def _holds(self, wanted: Collection[int]) -> Bools:
        """Documents that hold one of some ids."""
        places = np.flatnonzero(np.isin(self._data.ids, list(wanted)))
        return np.bincount(self._data.document_of(places), minlength=len(self._begins)) > 0

    def _documents(self, code: str, chosen: Bools) -> RawFinding:
        return RawFinding(code, self._begins[chosen], self._ends[chosen], self._count)

    def _places(self, code: str, places: Ints) -> RawFinding:
        """Documents that hold some places, each shown by its first one."""
        first = np.unique(self._data.document_of(places), return_index=True)[1]
        return RawFinding(code, places[first], places[first] + 1, self._count)

    def _rows_of(self, code: str, places: Ints) -> RawFinding:
        """Rows that hold some places, each shown by its first one."""
        first = np.unique(self._data.row_of(places), return_index=True)[1]
        return RawFinding(code, places[first], places[first] + 1, len(self._data))

    def _merged(self) -> Iterator[RawFinding]:
        """Answers whose opening continues in another way than the template writes it."""
        answers = self._layout.answers
        places = answers.starts[answers.merged]
        white = self._vocabulary.begins_white(self._data.ids[places])
        trained = places[white & self._trained()[answers.merged]]  # in context such tokens do no harm
        yield self._places("other_ids", trained)._replace(what="merged with the prompt")
        yield self._places("template_differs", places[~white])

    def _beginnings(self, opened: Bools) -> Iterator[RawFinding]:
        ids, literals = self._data.ids, self._literals
        filled = opened & (self._ends - self._begins > 1)
        first, second = (ids[np.minimum(self._begins + step, len(ids) - 1)] for step in (0, 1))
        inner = ~np.isin(self._data.documents[:-1], self._data.offsets)
        inside = np.zeros(len(filled), dtype=np.bool_)
        if literals.first_ids:
            inside = filled & inner & ~np.isin(first, list(literals.first_ids))
        yield self._rows_of("wrong_boundaries", self._begins[inside])._replace(what="inside a conversation")
        if literals.bos is not None:
            missing = filled & (first != literals.bos) & ~inside
            twice = filled & (first == literals.bos) & (second == literals.bos)
            yield self._documents("bos_wrong", missing)._replace(what="missing")
            yield self._documents("bos_wrong", twice)._replace(what="twice")

    def _endings(self) -> Iterator[RawFinding]:
        """Answers without a stop: cut at the end of a row that is as long as rows get, or without one at all."""
        answers, data = self._layout.answers, self._data
        open_end = (answers.stops < 0) & ~self._ended_by_template()
        document = answers.documents
        final = open_end & (answers.ends >= self._ends[document])
        row_sizes = segment_sums(~data.padding, data.offsets)
        longest = int(row_sizes.max())
        row = data.row_of(data.documents[document])
        at_limit = final & (row_sizes[row] == longest) & (self._ends[document] >= data.offsets[row] + longest)
        at_limit &= (open_end & ~at_limit).sum() < at_limit.sum()  # else answers end without a stop anyway
        missing = open_end & ~at_limit
        yield RawFinding("stop_missing", answers.starts[missing], answers.ends[missing], len(answers))
        cut = np.zeros(len(self._begins), dtype=np.bool_)
        cut[document[at_limit]] = True
        yield self._documents("truncated", cut)

    def _ended_by_template(self) -> Bools:
        """Answers to which the template itself writes no stop: the source has none, or another answer follows."""
        answers = self._layout.answers
        alone: Bools = answers.wanted != Wanted.UNKNOWN
        if self._literals.ends_by_next:
            speaking = self._layout.openings[self._layout.opening_roles == RoleCode.ASSISTANT]
            alone |= np.isin(answers.ends, speaking)
            alone |= ~self._trained()  # the stop is written after answers that are trained
        alone |= answers.prompts == answers.ends  # what closes a question opens the answer, and there is none
        return alone

    def _trained(self) -> Bools:
        """Answers of which something is trained; all of them where nobody says what is."""
        answers, data = self._layout.answers, self._data
        if data.trained is None:
            return np.ones(len(answers), dtype=np.bool_)
        targets = offsets_of(data.trained)
        return targets[answers.ends] > targets[answers.starts]

    def _special(self, opened: Bools) -> Iterator[RawFinding]:
        """Special tokens that came from text; an eos or pad at the end of a document is no such thing."""
        places = self._layout.unexpected
        document = self._data.document_of(places)
        ids = self._data.ids
        ends = {token for token in (self._eos, self._literals.bos) if token is not None}
        near_end = places >= self._ends[document] - 2
        following = ids[np.minimum(places + 1, len(ids) - 1)]
        opens = np.isin(places + 1, self._layout.openings) | np.isin(following, list(ends))
        harmless = np.isin(ids[places], list(ends)) & (near_end | opens)
        if self._layout.doubtful:
            self.unknown.append(
                f"Whether texts spell some of {self._layout.doubtful:,} special tokens: the template writes such ones "
                "between messages, too. --source shows it"
            )
        yield self._places("special_from_text", places[~harmless & opened[document]])

    def _packed(self) -> Iterator[RawFinding]:
        """Yield several documents where boundaries say there is one."""
        data, literals = self._data, self._literals
        row_ids = data.ids
        inner = np.zeros(len(row_ids), dtype=np.bool_)
        stops = self._layout.answers.stops
        if literals.bos is not None:
            inner |= row_ids == literals.bos
            inner[np.minimum(self._begins, len(inner) - 1)] = False
            inner[np.minimum(self._begins + 1, len(inner) - 1)] = False
        elif self._eos not in {None, *(literals.written - literals.stops), *row_ids[stops[stops >= 0]].tolist()}:
            before = self._layout.openings[self._layout.openings > 0] - 1
            inner[before[row_ids[before] == self._eos]] = True
            inner[self._ends[self._ends < len(inner)] - 1] = False
        inner &= ~data.padding
        inner[self._repeated_systems()] = True
        rows = np.unique(data.row_of(np.flatnonzero(inner)))
        yield RawFinding("unbounded", data.offsets[:-1][rows], data.offsets[1:][rows], len(data))
        self._doubt_packing(rows)

    def _systems(self) -> tuple[Ints, Ints]:
        """System messages after answers of the same document, as numbers of openings; and their documents."""
        roles, document = self._layout.opening_roles, self._data.document_of(self._layout.openings)
        headers = {opening.ids for opening in self._literals.openings if opening.role is RoleCode.SYSTEM}
        headers -= {opening.ids for opening in self._literals.openings if opening.role is not RoleCode.SYSTEM}
        follows = np.roll(roles == RoleCode.ASSISTANT, 1) & (np.diff(document, prepend=-1) == 0)
        return np.flatnonzero(follows & (roles == RoleCode.SYSTEM) & bool(headers)), document

    def _repeated_systems(self) -> Ints:
        """Places of system messages that their document has word by word before: no conversation says it twice."""
        (late, document), places = self._systems(), self._layout.openings
        ends = np.minimum(np.append(places[1:], len(self._data.ids)), self._ends[document])

        def text(number: int) -> bytes:
            return self._data.ids[places[number] : ends[number]].tobytes()

        firsts = np.searchsorted(document, document[late])
        is_same = [text(n) == text(first) for n, first in zip(late.tolist(), firsts.tolist(), strict=True)]
        return places[late[np.array(is_same, dtype=np.bool_)]]

    def _doubt_packing(self, unbounded: Ints) -> None:
        """Note what may be packed without boundaries: system messages after answers, and rows that are all full."""
        data = self._data
        if data.boundaries or not len(self._layout.openings):
            return
        late, _ = self._systems()
        rows = np.setdiff1d(np.unique(data.row_of(self._layout.openings[late])), unbounded)
        if len(rows):
            self.unknown.append(
                f"{len(rows):,} rows have a system message after an answer. They hold several documents without "
                "boundaries, or system messages in the middle: --source shows it"
            )
        sizes = segment_sums(~data.padding, data.offsets)
        several = np.bincount(data.row_of(self._layout.answers.starts), minlength=len(data)) > 1
        full = several & (sizes >= NEARLY_FULL * sizes.max())
        if not len(rows) and not len(unbounded) and len(data) >= FEW_ROWS and full.sum() >= MOST_ROWS * len(data):
            self.unknown.append(
                f"{int(full.sum()):,} of {len(data):,} rows are nearly as long as the longest ({int(sizes.max()):,} "
                "tokens), as packed rows are, and no column says where documents begin: --source shows it"
            )
