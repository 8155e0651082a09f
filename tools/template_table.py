"""The table of published templates in docs/template-table.md: what is proved under each, and why the rest is not.

    python -m tools.template_table FOLDER [--each 2] [--only PATTERN] [--page docs/template-table.md]

FOLDER holds `index.tsv` (columns `file`, `family`) and the templates. The conversations are the bundled ones, the same
few of every source, spread over its file.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.inputs import CONVERSATION_FILES
from chatmill.core.conversation import Conversation
from chatmill.read.conversations import ConversationFile
from tools.template_survey import NOT_WRITTEN, Survey, bind_bytes, survey

ENOUGH = 0.95
SAID = re.compile(
    r"^(?P<id>\S+): (?:field (?P<field>\S+): )?(?P<said>.*?)(?:\. Another template or option.*)?$", re.DOTALL
)
HEAD = """# Published templates

136 chat templates as training and serving projects publish them, each on the same {records} real conversations
({each} of every bundled source). `python -m tools.template_table FOLDER` makes this page. A template file has no
vocabulary: it is bound to bytes and the special tokens it writes, and its stops are those that models of its family
name.

- *written*: records that the template accepts and shows whole. A template without a place for tools or a system message
  refuses such records or leaves the text out; both are in *refused*, by reason.
- *proved*: of the written ones, those in which every answer is proved by plain Jinja: the context is the generation
  prompt, the answer is what the template writes after it, with one stop.
- *history*: how many of the answers change once more messages follow. These get documents of their own.
- *appended*: answers whose stop the template leaves to the next message, and Chatmill appends.
- *switch*: the options for thinking that were chosen for some of the records.

## What is refused, and why

Records by reason, with what others do with such a record, whether a proof exists, and what to do. The other tools use
the template through transformers (TRL, Axolotl) or write a family by hand (`renderers`, tinker-cookbook).

{reasons}
## By template

"""


class Review(NamedTuple):
    """What is known about a reason."""

    says: str
    others: str
    proof: str
    advice: str


NOT_SEEN = "-"
"""No record here has this reason, so that nothing was compared."""
REVIEWS: Mapping[str, Review] = {
    "template_refused": Review(
        "the template raises an error, in its own words",
        "transformers raises the same error",
        "none: there is no text",
        "change the record as the error says, [`repairs`](templates.md#options), another template",
    ),
    "not_shown": Review(
        "the template leaves out a content, a call or the tool definitions",
        "transformers writes the rest: a row says less than the record",
        "of the rest: `not_shown: drop` trains it, and counts what is left out",
        "`not_shown: drop`, another template",
    ),
    "no_reasoning": Review(
        "the prompt opens reasoning that history leaves out, and the message has none",
        "TRL rewrites the template; `renderers` trains the answer after a header without the mark "
        "([differences](differences.md))",
        "yes, if the reasoning is closed at once",
        "`no_reasoning: close`; reasoning in the data",
    ),
    "ambiguous_thinking": Review(
        "what ends the reasoning is in such an answer more than once",
        NOT_SEEN,
        "none: two readings",
        "take it out of the reasoning or the answer",
    ),
    "no_stop": Review(
        "no special token ends the answer",
        "transformers writes an answer without an end",
        "none: nothing says where the answer ends",
        "a copy of the template that writes `eos_token` after answers; the model's folder, if its generation config "
        "has stops",
    ),
    "prompt_not_in_history": Review(
        "what a model is given to answer is not what the template writes before the answer, nor is it known what a "
        "model would write there",
        "by tags, history is trained as it stands, after text that is not the prompt",
        "none: the context is not the prompt",
        "another option or template; one message for two answers in a row; `unproved: untrained`",
    ),
    "reasoning_not_closed": Review(
        "the prompt opens reasoning, and the answer never closes it",
        NOT_SEEN,
        "none: the answer is a thought that does not end",
        "the reasoning in the data, or the switch for thinking",
    ),
    "no_prompt": Review(
        "the template raises an error where it is to write the generation prompt",
        NOT_SEEN,
        "none: no server writes such a prompt",
        "begin with a user; `leading_answer` of [`repairs`](templates.md#options)",
    ),
    "goes_on_after_stop": Review(
        "a stop, and then more of the same message without the generation prompt between them",
        NOT_SEEN,
        "none for what is after the stop",
        "several assistant messages; `parallel_calls` of [`repairs`](templates.md#options)",
    ),
    "content_after_result": Review(
        "the answer goes on after a tool result that the template writes into it",
        NOT_SEEN,
        "none for what is after the result",
        "a message of its own for it",
    ),
    "origin_lost": Review(
        "the template changes a text so that its characters cannot be followed back",
        "transformers writes it, without a mask: the template has no tags",
        "none that is derived: nothing says whose text it is",
        "another template",
    ),
    "arguments_not_an_object": Review(
        "the template takes arguments as an object, and these are none",
        NOT_SEEN,
        "none: there is no text",
        "repair the arguments",
    ),
}
"""Every reason for which an answer is refused."""


def reason_rows(reasons: Sequence[Mapping[str, int]], records: int) -> str:
    """Make the table of reasons.

    Args:
        reasons: Refused records by reason, for each template.
        records: Records under all templates.
    """
    heads = ["reason", f"of {records:,} records", "templates", "what it says", "others", "proof", "what to do"]
    rows = [heads, ["---"] * len(heads)]
    total: Counter[str] = Counter()
    for one in reasons:
        total.update(one)
    for reason, review in sorted(REVIEWS.items(), key=lambda item: -total[item[0]]):
        count = sum(bool(one.get(reason)) for one in reasons)
        rows.append([f"`{reason}`", f"{total[reason]:,}", str(count), *review])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


class Line(NamedTuple):
    """One template."""

    file: str
    family: str
    stops: tuple[str, ...]
    found: Survey

    @property
    def is_proved(self) -> bool:
        """Whether enough of what the template can write is proved."""
        return self.found.share >= ENOUGH

    def cells(self) -> list[str]:
        """The cells of the table."""
        found = self.found
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(found.reasons.items()))
        switches = sorted({f"{key}={value}".lower() for chosen in found.options for key, value in chosen})
        history = f"{found.changed} of {found.answers}" if found.changed else "kept" if found.answers else "-"
        share = f"{found.proved} ({found.share:.0%})" if found.written else "-"
        return [
            *(self.file, self.family, f"{found.written} of {found.records}", share, reasons or "-", history),
            *(
                str(found.appended or "-"),
                " ".join(f"`{stop}`" for stop in self.stops) or "-",
                ", ".join(switches) or "-",
            ),
        ]


def conversations(each: int) -> list[Conversation]:
    """The same few conversations of every bundled source."""
    found: list[Conversation] = []
    for path in CONVERSATION_FILES:
        read = list(ConversationFile(path))
        found += read[:: max(1, len(read) // each)][:each]
    return found


def lines(folder: Path, records: Sequence[Conversation], only: str = "") -> Iterator[Line]:
    """A line for every template of the index."""
    with (folder / "index.tsv").open(encoding="utf-8") as file:
        index = [row for row in csv.DictReader(file, delimiter="\t") if re.search(only, row["file"])]
    for row in index:
        template = bind_bytes(row["file"], (folder / row["file"]).read_text(encoding="utf-8"))
        found = survey(template, records)
        if found.failures:
            raise SystemExit(f"{row['file']}: {found.failures[0]}")
        stops = template.stops.names
        shown = tuple(stop for stop in stops if stop in template.source.text) or stops[: bool(found.proved)]
        yield Line(row["file"], row["family"], shown, found)


def page(made: Sequence[Line], each: int) -> str:
    """The page, in Markdown."""
    heads = ["template", "family", "written", "proved", "refused", "history", "appended", "stops", "switch"]
    table = [heads, ["---"] * len(heads), *(line.cells() for line in made)]
    reasons = [line.found.reasons for line in made]
    count = sum(line.found.records for line in made)
    text = HEAD.format(records=made[0].found.records, each=each, reasons=reason_rows(reasons, count))
    text += "".join(f"| {' | '.join(_escaped(cell) for cell in cells)} |\n" for cells in table)
    good = sum(line.is_proved for line in made)
    records, written, proved, answers = (
        sum(getattr(line.found, name) for line in made) for name in ("records", "written", "proved", "answers")
    )
    text += (
        f"\n{len(made)} templates, {records:,} records: {written:,} can be written, {proved:,} of them are proved, "
        f"with {answers:,} answers. Under {good} templates at least {ENOUGH:.0%} of what can be written is proved.\n"
        "\n## The others, and what is wrong with them\n\n"
    )
    for line in made:
        if not line.is_proved:
            said = "; ".join(_reason(line, code) for code in _codes(line))
            text += f"- `{line.file}`: {said or 'writes none of them'}.\n"
    return text


def _codes(line: Line) -> list[str]:
    return [code for code, _ in line.found.reasons.most_common() if code not in NOT_WRITTEN]


def _reason(line: Line, code: str) -> str:
    said = SAID.match(line.found.examples[code])
    assert said is not None
    return _escaped(f"{line.found.reasons[code]} x {code}, as in {said['id']}: {said['said']}")


def _escaped(cell: str) -> str:
    parts = re.split(r"(`[^`]*`)", cell.replace("\n", " "))
    kept = [part if part.startswith("`") else part.replace("<", "&lt;").replace("*", "\\*") for part in parts]
    return "".join(kept).replace("|", "&#124;") if "`" not in cell else _in_code("".join(kept))


def _in_code(text: str) -> str:
    """Code cannot hold an escaped bar inside a table."""
    return re.sub(
        r"`([^`]*)`", lambda code: f"<code>{code[1].replace('<', '&lt;').replace('|', '&#124;')}</code>", text
    )


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--each", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--page", type=Path, default=Path("docs/template-table.md"))
    given = parser.parse_args()
    made: list[Line] = []
    for line in lines(given.folder, conversations(given.each), given.only):
        print(" ".join(line.cells()[:5]), file=sys.stderr, flush=True)
        made.append(line)
    given.page.write_text(page(made, given.each), encoding="utf-8")


if __name__ == "__main__":
    main()
