"""Write findings: figures, data, a self-contained HTML page and the documentation page."""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from sage_fast.report.charts import inline_picture, picture
from sage_fast.report.html import render
from sage_fast.util.files import write_atomic
from studies.paper.finding import Claim, Finding

TEMPLATE = Path(__file__).parent / "results.html.j2"
PAGE, MARKDOWN = "results.html", "results.md"
ABOUT = """\
Claims of the SAGE-GRPO paper (arXiv 2603.21872), and questions beyond it, decided on the testbed: a tiny HunyuanVideo
1.5 of moving shapes, not the 8.3 B model. `make reproduce` writes this page, verdicts included. It takes hours, can be
stopped, and goes on. `make reproduce CLAIMS="all --quick"` shows in a quarter of an hour on two cores that everything
works, and decides nothing; `make reproduce CLAIMS=list` names the claims."""
ABOUT_QUICK = "Made with `--quick`: no verdict of a claim that trains means anything. "


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
    writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in finding.rows)
    return text.getvalue()


def write_pages(
    findings: Mapping[Claim, Finding], folder: Path, facts: Mapping[str, str], protocol: Sequence[str], *, quick: bool
) -> Path:
    """Write the page of all findings and the same as Markdown; return the path of the page.

    Args:
        findings: in the order of the page.
        folder: where to write the pages; has a `results/` with the files of `write_finding`.
        facts: provenance: command, seeds, commits, versions, device.
        protocol: paragraphs.
        quick: state at the top that nothing is decided.
    """
    about = quick * ABOUT_QUICK + ABOUT
    drawn = [
        {
            "claim": claim,
            "finding": finding,
            "figure": inline_picture(finding.draw, claim.size, claim.name, claim.title),
            "data": base64.b64encode(data(finding).encode()).decode(),
        }
        for claim, finding in findings.items()
    ]
    write_atomic(folder / PAGE, render(TEMPLATE, drawn=drawn, facts=facts, protocol=protocol, about=about))
    write_atomic(folder / MARKDOWN, markdown(findings, facts, protocol, about))
    return folder / PAGE


def markdown(findings: Mapping[Claim, Finding], facts: Mapping[str, str], protocol: Sequence[str], about: str) -> str:
    """Return the Markdown of docs/results.md; it links figures and data in `results/`."""
    lines = ["# Results", "", about, ""]
    lines += ["| " + " | ".join(("claim", "source", "verdict")) + " |", "|---|---|---|"]
    lines += [f"| [{c.says}](#{_anchor(c.title)}) | {c.source} | {f.verdict} |" for c, f in findings.items()]
    lines += ["", "## How it was made", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "## Protocol", "", "\n\n".join(protocol)]
    for claim, finding in findings.items():
        lines += [
            "",
            f"## {claim.title}",
            "",
            f"*{claim.source}.* {claim.says} **{finding.verdict.capitalize()}.**",
            "",
        ]
        lines += [f"![{claim.title}](results/{claim.name}.svg)", "", finding.text, ""]
        lines += [f"[Data](results/{claim.name}.csv)."]
    return "\n".join(lines) + "\n"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))
