"""Write the table of docs/tutorials/first-real-run.md, by the plan and the settings of
scripts/first_real_run.sh: `python -m scripts.first_real_run_page` does it;
tests/test_first_real_run.py fails while it differs."""

import re
from pathlib import Path

from sage_fast.config.command_line import split_settings
from sage_fast.config.loader import load
from sage_fast.config.shipped import FOLDER
from scripts.first_real_run import cost_of
from scripts.reference import FOLDER as REFERENCE
from scripts.reference import page_with

SCRIPT = Path(__file__).with_suffix("").with_name("first_real_run.sh")
PAGE = "../tutorials/first-real-run.md"
BEGIN = "<!-- cost: written by python -m scripts.first_real_run_page -->"
END = "<!-- end of cost -->"
COMMAND = "$ scripts/first_real_run.sh runs/real cost"


def settings_of_script() -> dict[str, str]:
    """Return the settings that the script gives to every step."""
    found = re.search(
        r"^RUN_SETTINGS=\(\n(.*?)^\)", SCRIPT.read_text(encoding="utf-8"), re.M | re.S
    )
    assert found is not None
    _, settings = split_settings(found[1].split())
    return settings


def defaults_of_script() -> dict[str, int]:
    """Return the numbers that the script takes from the environment, where it holds none."""
    found = re.findall(r"\$\{(\w+):-(\d+)\}", SCRIPT.read_text(encoding="utf-8"))
    return {name: int(value) for name, value in found}


def written() -> str:
    """Return the page with the table of today."""
    defaults = defaults_of_script()
    text, _ = cost_of(
        load(FOLDER / "hunyuanvideo15-480p.yaml", settings_of_script()),
        gpus=defaults["GPUS"],
        gpu_memory=defaults["GPU_MEMORY"],
        signal=defaults["SIGNAL"],
        used_at=defaults["USED_AT"],
    )
    return page_with(PAGE, BEGIN, f"```console\n{COMMAND}\n{text}\n```\n", END)


if __name__ == "__main__":
    (REFERENCE / PAGE).write_text(written(), encoding="utf-8")
