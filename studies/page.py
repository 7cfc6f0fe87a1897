"""Write findings: figures, data, a self-contained HTML page and the documentation page."""

from __future__ import annotations

import base64
import csv
import io
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from sage_fast.report.html import render
from sage_fast.util.console import quiet
from sage_fast.util.files import write_atomic
from studies.drawn import inline_picture, picture
from studies.finding import KINDS, Claim, Finding, Material, corrected

log = logging.getLogger("sage_fast.studies")

TEMPLATE = Path(__file__).parent / "results.html.j2"
PAGE, MARKDOWN = "results.html", "results/results.md"
_WITH_INTERVAL = re.compile(r"(\S+) (\[\S+, \S+\])")
ABOUT_QUICK = "Made with `--quick`: no verdict of a claim that trains means anything. "


def write_study(
    claims: Sequence[Claim],
    material: Material,
    folder: Path,
    about: str,
    facts: Mapping[str, str],
    protocol: Sequence[str],
    *,
    title: str,
) -> Path:
    """Decide claims, write the figures and data of each into `results/`, then the pages; return the
    page's path.

    Args:
        claims: in the order of the page.
        material: the runs.
        folder: where to write.
        about: first paragraph.
        facts: provenance: command, seeds, commits, versions, device.
        protocol: paragraphs.
        title: heading of the page.
    """
    found = {}
    for place, claim in enumerate(claims, start=1):
        with quiet():
            found[claim] = claim.find(material)
        log.info(f"{claim.name}: {place} of {len(claims)} claims looked at")
    findings = corrected(found)
    for claim, finding in findings.items():
        write_finding(claim, finding, folder / "results")
        log.info(f"{claim.name}: {finding.verdict}. {finding.text}")
    about = material.quick * ABOUT_QUICK + about
    drawn = [
        {
            "claim": claim,
            "finding": finding,
            "figure": inline_picture(finding.draw, claim.size, claim.name, claim.title),
            "data": base64.b64encode(data(finding).encode()).decode(),
            "tables": _tables(finding),
        }
        for claim, finding in findings.items()
    ]
    kinds = by_kind(findings)
    write_atomic(
        folder / PAGE,
        render(TEMPLATE, kinds=kinds, drawn=drawn, facts=facts, protocol=protocol, about=about),
    )
    write_atomic(folder / MARKDOWN, markdown(findings, facts, protocol, about, title))
    return folder / PAGE


def write_finding(claim: Claim, finding: Finding, folder: Path) -> None:
    """Write `<claim>.csv` and `<claim>.svg`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{claim.name}.csv", data(finding))
    write_atomic(folder / f"{claim.name}.svg", picture(finding.draw, claim.size, "svg", claim.name))


def data(finding: Finding) -> str:
    """Return the data of a finding as CSV."""
    columns = list(dict.fromkeys(column for row in finding.rows for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
        for row in finding.rows
    )
    return text.getvalue()


def markdown(
    findings: Mapping[Claim, Finding],
    facts: Mapping[str, str],
    protocol: Sequence[str],
    about: str,
    title: str,
) -> str:
    """Return the page of the documentation, to stand beside the figures and data that it links
    to."""
    lines = [f"# {title}", "", about, ""]
    for heading, counted, chosen in by_kind(findings):
        lines += [f"## {heading}", "", f"{counted}.", ""]
        lines += _table([("claim", "source", "verdict")])
        lines += [
            f"| [{c.says}](#{_anchor(c.title)}) | {c.source or '-'} | {f.verdict} |"
            for c, f in chosen.items()
        ]
        lines += [""]
    for claim, finding in findings.items():
        lines += [f"## {claim.title}", "", f"![{claim.name}]({claim.name}.svg)", ""]
        lines += [f"**{finding.verdict.capitalize()}.** {finding.text}", ""]
        for table in _tables(finding):
            lines += [*_table(table), ""]
        lines += [f"[Data]({claim.name}.csv).", ""]
    lines += ["## How it was made", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "## Protocol", "", "\n\n".join(protocol)]
    return "\n".join(lines) + "\n"


def by_kind(findings: Mapping[Claim, Finding]) -> list[tuple[str, str, dict[Claim, Finding]]]:
    """Return heading, a line that counts the verdicts, and findings of each kind of claim that
    there is."""
    found = []
    for kind, heading in KINDS.items():
        chosen = {claim: finding for claim, finding in findings.items() if claim.kind == kind}
        verdicts = Counter(finding.verdict for finding in chosen.values())
        counted = ", ".join(
            f"{verdicts[verdict]} {verdict}" for verdict in ("not held", "not decidable")
        )
        if chosen:
            found.append(
                (
                    heading,
                    f"{verdicts['held']} of {len(chosen)} held, {counted} at this size",
                    chosen,
                )
            )
    return found


def _tables(finding: Finding) -> list[list[list[str]]]:
    """Return the tables of a finding; the interval of a cell `value [low, high]` has a column of
    its own."""
    found = []
    for heading, *rows in filter(None, (finding.compared, finding.table)):
        wide = [any(_WITH_INTERVAL.fullmatch(row[i]) for row in rows) for i in range(len(heading))]
        split = [[_WITH_INTERVAL.fullmatch(cell) for cell in row] for row in rows]
        table = [
            [name for i, cell in enumerate(heading) for name in (cell, "interval")[: 1 + wide[i]]]
        ]
        for row, parts in zip(rows, split):
            pairs = [(part[1], part[2]) if part else (cell, "") for cell, part in zip(row, parts)]
            table.append([cell for i, pair in enumerate(pairs) for cell in pair[: 1 + wide[i]]])
        found.append(table)
    return found


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; the first row is its heading."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def _anchor(title: str) -> str:
    return re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))
