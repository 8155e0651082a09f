"""Report the calls of a capture file, run by run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chatmill.core.words import counted
from chatmill.read.agents.agent_file import AgentFile
from chatmill.read.agents.request_logs import CallJoiner, CallOutcome, LoggedCall

NO_RUN = "(no name)"
BAD_IDS = "bad_token_ids"


@dataclass(kw_only=True)
class RunReport:
    """Counts of the calls of one run."""

    run: str
    calls: int = 0
    joined: int = 0
    """Calls that continue another one."""
    roots: int = 0
    """Calls that begin a task."""
    branches: int = 0
    """Calls with a history that was rewritten, of a task that is there already."""
    repeated: int = 0
    cut: int = 0
    failed: int = 0
    unreadable: dict[str, int] = field(default_factory=dict)
    """Calls that cannot be read, by reason."""
    unresolved_retries: int = 0
    """Requests with several answers, of which no later call contains one."""
    unused_tries: int = 0
    """Answers that the client asked for again."""
    refusals: int = 0
    """Answers in which the model or its server refuses, which are not trained."""
    unknown_prompts: int = 0
    """Answers whose exact prompt the log does not hold."""
    without_ids: int = 0
    """Calls with an answer and no token ids."""
    ids_differ_from_usage: int = 0
    lost: int = 0
    """Calls that the proxy could not write."""
    sampled_tokens: int = 0
    trained_tokens: int = 0
    """Sampled tokens of answers that are trained."""
    uncounted: int = 0
    """Calls with an answer of which nobody counted the tokens."""

    @property
    def trained_share(self) -> float | None:
        """Trained share of the sampled tokens."""
        return self.trained_tokens / self.sampled_tokens if self.sampled_tokens else None

    def as_json(self) -> dict[str, Any]:
        """All numbers."""
        return {**asdict(self), "trained_share": self.trained_share}


def read_report(path: Path) -> list[RunReport]:
    """Read a capture file and report its runs in order."""
    reports: dict[str, RunReport] = {}
    calls = CallJoiner(path.name)
    torn = 0
    for line in AgentFile(path).lines():
        if line.error is not None:
            torn += 1
            continue
        calls.add_record(line.value, f"line {line.number}")
    calls.finish()

    runs: dict[int, str] = {}
    for call in calls.calls:
        name = call.run or NO_RUN
        report = reports.setdefault(name, RunReport(run=name))
        _add_call(report, call, calls.unused)
        for turn in call.answers:
            runs[id(turn)] = name
    for answers in calls.unresolved():
        reports[runs[id(answers[0])]].unresolved_retries += 1
    if torn:
        report = reports.setdefault(NO_RUN, RunReport(run=NO_RUN))
        report.calls += torn
        report.unreadable["torn line"] = torn
    return list(reports.values())


def report_lines(report: RunReport) -> Iterator[str]:
    """Describe a run in sentences."""
    tasks = f"{counted(report.roots, 'task')}, {report.joined:,} joined"
    if report.branches:
        tasks += f", {report.branches:,} with a rewritten history"
    yield f"{counted(report.calls, 'call')}: {tasks}."
    if report.trained_share is not None:
        yield (
            f"{report.trained_tokens:,} of {report.sampled_tokens:,} sampled tokens are trained "
            f"({report.trained_share:.1%})."
        )
    noted = {
        "cut off": report.cut,
        "failed": report.failed,
        "repeated": report.repeated,
        "asked for again": report.unused_tries,
        "refusals": report.refusals,
        "prompts not known exactly": report.unknown_prompts,
        "retries without a mark which answer was used": report.unresolved_retries,
        "without token ids": report.without_ids,
        "ids that differ from the usage": report.ids_differ_from_usage,
        "without a count of tokens": report.uncounted,
        "not recorded": report.lost,
    }
    named = [f"{what} {count:,}" for what, count in noted.items() if count]
    named += [f"unreadable ({code}) {count:,}" for code, count in report.unreadable.items()]
    if named:
        yield f"{', '.join(named)}.".capitalize()


def _add_call(report: RunReport, call: LoggedCall, unused: set[int]) -> None:
    """Count one call.

    `unused` has the identities of answers to repeated requests.
    """
    report.calls += 1
    report.lost += call.lost_before
    match call.outcome:
        case CallOutcome.ROOT:
            report.roots += 1
        case CallOutcome.BRANCH:
            report.branches += 1
        case CallOutcome.JOINED:
            report.joined += 1
        case CallOutcome.REPEATED:
            report.repeated += 1
        case CallOutcome.CUT:
            report.cut += 1
        case CallOutcome.FAILED:
            report.failed += 1
        case CallOutcome.UNREADABLE if call.code == BAD_IDS:
            report.ids_differ_from_usage += 1
        case CallOutcome.UNREADABLE:
            report.unreadable[call.code] = report.unreadable.get(call.code, 0) + 1

    has_answer = bool(call.answers)
    report.without_ids += has_answer and not call.has_ids
    trained = [turn for turn in call.answers if turn.key is not None and not turn.unknown]
    report.unknown_prompts += sum(bool(turn.unknown) for turn in call.answers)
    unused_tries = sum(id(turn) in unused for turn in call.answers)
    report.unused_tries += unused_tries
    report.refusals += sum(turn.key is None for turn in call.answers) - unused_tries
    if call.sampled_tokens is None:
        report.uncounted += has_answer
        return
    # A repeat was counted when it came first.
    if call.outcome is CallOutcome.REPEATED:
        return
    report.sampled_tokens += call.sampled_tokens
    if call.answers and len(trained) == len(call.answers):
        report.trained_tokens += call.sampled_tokens
    elif call.has_ids:
        report.trained_tokens += sum(len(turn.message["token_ids"]) for turn in trained)
