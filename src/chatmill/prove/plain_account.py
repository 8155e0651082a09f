"""The ledger of one record in the slow path: every token under its fate."""

from __future__ import annotations

from collections import Counter

from chatmill.core.conversation import Conversation
from chatmill.core.kinds import role_name, role_of
from chatmill.core.ledger import Ledger
from chatmill.prove.reference import Derived, DerivedRecord


def account(ledger: Ledger, conversation: Conversation, record: DerivedRecord, overflow: str) -> None:
    """Enter one built or dropped record, as the ledger of a build has it."""
    source, dropped = conversation.source, not any(sequence.episodes for sequence in record.sequences)
    for sequence in record.sequences:
        _account_sequence(ledger, source, sequence)
    outcome = ("skipped", f"overflow_{overflow}") if dropped else ("built", "")
    ledger.records[source, *outcome] += 1
    episodes = [episode for sequence in record.sequences for episode in sequence.episodes]
    notes = {
        **record.lost,
        **record.notes,
        "turns_that_later_messages_change": record.counts.unstable,
        "turns_without_proof": record.counts.untrained,
        "stops_appended": record.counts.appended,
        "rows_added": len(record.sequences) - record.sides,
        "tokens_in_added_rows": sum(len(sequence.ids) for sequence in record.sequences[: -record.sides]),
        "episodes": len(episodes),
        "untrained_terminators": sum(episode.unended for episode in episodes),
        "records_without_trained_tokens": int(not dropped and not any(episode.trained for episode in episodes)),
    }
    for name, count in notes.items():
        ledger.notes[source, name] += count


def _account_sequence(ledger: Ledger, source: str, derived: Derived) -> None:
    dropped = not derived.episodes
    kept = [False] * len(derived.ids)
    injected: Counter[int] = Counter()
    for piece in (piece for pieces in derived.spans for piece in pieces):
        if piece.injected:
            injected.update(derived.kinds[piece.start : piece.end])
        else:
            kept[piece.start : piece.end] = [True] * (piece.end - piece.start)
    trained = [weight > 0 for weight in derived.weights]
    for (code, is_trained, is_kept), count in Counter(zip(derived.kinds, trained, kept, strict=True)).items():
        name = "trained" if is_trained else "context"
        fate = name if is_kept else f"{'dropped' if dropped else 'cut'}_{name}"
        ledger.tokens[source, role_name(role_of(code)), "rendered"] += count
        ledger.tokens[source, role_name(role_of(code)), fate] += count
    for code, count in injected.items():
        ledger.tokens[source, role_name(role_of(code)), "injected"] += count
