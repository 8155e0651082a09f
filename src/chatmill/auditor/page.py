"""The audit as one HTML page without scripts, in the style of the dataset report."""

from __future__ import annotations

from pathlib import Path

from chatmill.auditor.report import AuditReport
from chatmill.look.report.templates import page_of


def audit_page(report: AuditReport, *, version: str = "") -> str:
    """The whole page; all content of the set is escaped."""
    tiles: list[tuple[int | str, str]] = [
        (report.rows, "rows"),
        (report.documents, f"documents by {report.boundaries or 'rows'}"),
        (report.tokens, "tokens"),
        (report.answers, "answers"),
    ]
    if report.trained is not None:
        tiles.append((f"{report.trained / max(1, report.tokens):.1%}", f"trained, by {report.mask_name}"))
    if report.source is not None:
        tiles.append((report.source["equal"], "documents with the ids of a record"))
    page = Path(__file__).with_name("page.html")
    return page_of(page, name=report.name, version=version, report=report, tiles=tiles)
