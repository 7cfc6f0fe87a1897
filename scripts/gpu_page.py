"""Write the tables of docs/results/gpu.md from the results that they name: `python -m
scripts.gpu_page`.

A table stands between `<!-- table: FILE -->` and `<!-- end -->`, as the command that measured FILE
prints it. tests/test_docs.py fails while they differ.
"""

import json
import re
from pathlib import Path

from sage_fast.benchmarks.limits import format_limits
from sage_fast.benchmarks.operators import format_result
from sage_fast.benchmarks.phases import format_profile
from sage_fast.benchmarks.rollout import format_rollout

REPOSITORY = Path(__file__).parent.parent
PAGE = REPOSITORY / "docs" / "results" / "gpu.md"
TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.S)
FORMS = {
    "limits": format_limits,
    "phases": format_profile,
    "ceiling_flops_per_second": format_rollout,
    "rows": format_result,
}
"""Key of a result -> the form of its table; the first key that it has decides."""


def written(page: str) -> str:
    """Return the page with new tables."""

    def table(found: re.Match[str]) -> str:
        result = json.loads((REPOSITORY / found[2]).read_text(encoding="utf-8"))
        form = next(form for key, form in FORMS.items() if key in result)
        # the rest is for who measured it
        text, *_ = re.split("\n\n(?:trace,|GPU seconds )", form(result))
        commit, changes, _ = result["environment"]["commit"].partition("+changes")
        state = " with changes" if changes else ""
        measured = f"commit {commit[:7]}{state}, {result['environment']['date'][:10]}"
        return f"{found[1]}```text\n{text}\n{measured}\n```\n{found[3]}"

    return TABLE.sub(table, page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
