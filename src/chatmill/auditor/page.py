"""The audit as one HTML page without scripts, in the style of the dataset report."""

from __future__ import annotations

from html import escape

from chatmill.auditor.findings import AuditFinding, Example
from chatmill.auditor.report import AuditReport
from chatmill.look.report.page import html_page, tile_boxes
from chatmill.look.safe_text import visible

MORE_CSS = ".bad{outline:2px solid var(--dropped);border-radius:2px}.verdict{font-size:1.1rem;font-weight:600}"


def audit_page(report: AuditReport, *, version: str = "") -> str:
    """The whole page; all content of the set is escaped."""
    name = escape(visible(report.name, mark_newlines=False))
    body = _findings(report) + "".join(map(_section, (*report.findings, *report.notes))) + _unknown(report)
    made = f"template {visible(report.template)} \u00b7 tokenizer {visible(report.tokenizer)}"
    head = f'<p class="soft">{escape(made)}</p><p class="verdict">{escape(report.verdict)}</p>{_tiles(report)}'
    return html_page(name, "audit", f"{head}\n{body}", version, MORE_CSS)


def _tiles(report: AuditReport) -> str:
    tiles = [
        (f"{report.rows:,}", "rows"),
        (f"{report.documents:,}", f"documents by {report.boundaries or 'rows'}"),
        (f"{report.tokens:,}", "tokens"),
        (f"{report.answers:,}", "answers"),
    ]
    if report.trained is not None:
        tiles.append((f"{report.trained / max(1, report.tokens):.1%}", f"trained, by {report.mask_name}"))
    if report.source is not None:
        tiles.append((f"{report.source['equal']:,}", "documents with the ids of a record"))
    return tile_boxes(tiles)


def _findings(report: AuditReport) -> str:
    listed = (*report.findings, *report.notes)
    if not listed:
        return ""
    lines = "".join(
        f'<tr><td><a href="#{one.code}">{escape(one.rule.title)}</a>{" (note)" * one.rule.is_note}</td>'
        f'<td class="n">{one.count:,}</td><td class="n">{one.total:,} {one.rule.unit}</td>'
        f'<td class="n">{one.share:.1%}</td></tr>'
        for one in listed
    )
    head = '<tr><th>finding</th><th class="n">count</th><th class="n">of</th><th class="n">share</th></tr>'
    return f'<section><h2>Findings</h2><div class="card"><table>{head}{lines}</table></div></section>'


def _section(finding: AuditFinding) -> str:
    rule = finding.rule
    detail = f" {escape(finding.detail)}." if finding.detail else ""
    shown = "".join(map(_example, finding.examples))
    return (
        f'<section id="{finding.code}"><h2>{escape(rule.title)}</h2><p>{escape(rule.says)}{detail}</p>'
        f'<p class="soft">{escape(rule.mend)}</p>{shown}</section>'
    )


def _example(example: Example) -> str:
    parts = []
    for text, trained, control, found in example.parts:
        css = ["t" if trained else "c", *(["control"] if control else []), *(["bad"] if found else [])]
        parts.append(f'<span class="{" ".join(css)}">{escape(visible(text))}</span>')
    title = f"row {example.row:,}, tokens {example.first:,} to {example.last:,}"
    return (
        f'<article class="sample"><header><b>{title}</b><span>green: trained; framed: the finding</span></header>'
        f'<div class="message role-document"><div class="who"></div><div class="text">{"".join(parts)}</div></div>'
        "</article>"
    )


def _unknown(report: AuditReport) -> str:
    if not report.unknown:
        return ""
    lines = "".join(f'<li class="warn">{escape(sentence)}.</li>' for sentence in report.unknown)
    return f'<section id="unknown"><h2>Could not be known</h2><ul class="notes">{lines}</ul></section>'
