"""Write docs/reference/settings.md, docs/reference/cli.md, the tables of
docs/how-to/stop-and-resume.md and docs/how-to/from-another-trainer.md, and the ranges of
docs/how-to/profile.md.

`python -m scripts.reference` does it.

tests/test_docs.py fails while they differ from what the code says.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from sage_fast.cli import COMMANDS, load
from sage_fast.config.fields import Setting, kind, meanings, own_settings, sections
from sage_fast.config.other_trainers import COUNTERPARTS, INSTEAD
from sage_fast.config.schema import Config
from sage_fast.run.resume import CHECKPOINT, KINDS, RULES
from sage_fast.util.profiling import RANGES

FOLDER = Path(__file__).parent.parent / "docs" / "reference"
RESUME_PAGE = "../how-to/stop-and-resume.md"
RESUME_BEGIN = "<!-- resume: written by python -m scripts.reference -->"
RESUME_END = "<!-- end of resume -->"
TRAINERS_PAGE = "../how-to/from-another-trainer.md"
TRAINERS_BEGIN = "<!-- other trainers: written by python -m scripts.reference -->"
TRAINERS_END = "<!-- end of other trainers -->"
PROFILE_PAGE = "../how-to/profile.md"
RANGES_BEGIN = "<!-- ranges: written by python -m scripts.reference -->"
RANGES_END = "<!-- end of ranges -->"
SETTINGS = """# Settings

What every setting does. A YAML file holds the settings by section; a command takes any of them as
`--section.name VALUE`. [choose-settings.md](../how-to/choose-settings.md) says which values to
choose. `python -m scripts.reference` writes this page from `sage_fast/config/schema.py`.

A configuration is plain YAML, and a mapping must not repeat a key. Numbers are read as people write
them: `1e-4` and `010`, which is 10, are numbers; `1:30` is refused, since YAML's versions disagree
about it.

A relative path, or a module, in a settings file means the folder of that file, also if it is the
`base` of another. On the command line it means the current folder. `output` stays where the command
starts. `~`, `$NAME` and `${NAME}` are expanded in every path of a setting or an option, and an
unset variable is an error. Elsewhere nothing is substituted, except `${NAME}` in `reward.args`,
which a reward gets as a secret. A text in `reward.args` is a path if it names a file or folder
beside the settings, or begins with `~/`. A run's own config.yaml holds whole paths. An absolute
path of something that is there is taken as it is, with any `$` and `~` in it.
"""
COMMAND_LINE = """# Commands

What every command does and takes. One with `--SETTING VALUE` in its usage takes every setting of
[settings.md](settings.md). Where such a command has `--folder`, `--output` means the same. The exit
status is 0, 2 for a user's mistake, 1 for a failed run, 130 after Ctrl-C. Every command takes
`--help`. `python -m scripts.reference` writes this page from the help texts.
"""


def settings_page() -> str:
    """Return the page of all settings: for each its type and bounds, default and docstring."""
    text = SETTINGS
    for name, section in sections(Config).items():
        meaning = meanings(section)
        rows = [
            (
                f"`{setting.name}`",
                _values(setting),
                f"`{_yaml(setting.default)}`",
                meaning[setting.field],
            )
            for setting in own_settings(section)
        ]
        text += f"\n## {name or 'run'}\n\n{_one_line(meaning[''])}\n\n"
        text += _table(("setting", "value", "default", "meaning"), rows)
    return text


def commands_page() -> str:
    """Return the page of all commands: for each its usage, arguments and options."""
    text = COMMAND_LINE
    for name, command in COMMANDS.items():
        actions = _actions(name)
        usage = [name, *(_words(action) for action in actions if not action.option_strings)]
        usage.append("[OPTION ...]")
        if command.settings:
            usage.append("[--SETTING VALUE ...]")
        rows = [(f"`{_words(action)}`", _meaning(action)) for action in actions]
        text += (
            f"\n## {name}\n\n{command.help[0].upper() + command.help[1:]}.\n\n`sage-fast "
            f"{' '.join(usage)}`\n\n"
        )
        text += _table(("argument", "meaning"), rows)
    return text


def _values(setting: Setting) -> str:
    if setting.choices:
        choices = ", ".join(f"`{choice}`" for choice in setting.choices)
        if setting.takes_number:
            return f"{choices} or {kind(int)}, {setting.range}"
        return f"{choices} or `package.module:name`" if setting.takes_plugin else choices
    in_words = kind(setting.type)
    return f"{in_words}, {setting.range}" if setting.range else in_words


def _yaml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _actions(command: str) -> list[argparse.Action]:
    parser = argparse.ArgumentParser()
    actions: list[argparse.Action] = []

    def add(*names: str, **options: object) -> argparse.Action:
        action = parser.add_argument(*names, **options)  # type: ignore[arg-type]
        actions.append(action)
        return action

    load(command).add_arguments(add)
    return actions


def _words(action: argparse.Action) -> str:
    """Return an argument as it is typed: `--folder FOLDER`, `RUN [RUN ...]`."""
    value = str(action.metavar or ",".join(action.choices or []) or action.dest.upper())
    if action.option_strings:
        option = action.option_strings[-1]
        return option if action.nargs == 0 else f"{option} {value}"
    return {"?": f"[{value}]", "+": f"{value} [{value} ...]"}.get(str(action.nargs), value)


def _meaning(action: argparse.Action) -> str:
    text = action.help or ""
    untold = action.default not in (None, False, []) and "default" not in text
    return f"{text} (default: {action.default})" if untold else text


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(map(_one_line, row))} |\n" for row in (head, *rows)]
    return lines[0] + "|" + "---|" * len(head) + "\n" + "".join(lines[1:])


def _one_line(text: str) -> str:
    """Return text for a cell: in one line, `<` and `|` escaped outside of code."""
    parts = " ".join(text.split()).split("`")  # every second part is code
    parts[::2] = [part.replace("<", "&lt;").replace("|", r"\|") for part in parts[::2]]
    return "`".join(parts)


def resume_page() -> str:
    """Return the page about resumes, with the tables of what a resume takes over as the code has
    them."""
    settings_rows = [
        (", ".join(f"`{name}`" for name in rule.settings), KINDS[rule.kind], rule.why)
        for rule in RULES
    ]
    checkpoint_rows = [(f"`{name}`", does) for name, does in CHECKPOINT.items()]
    text = _table(("setting", "another value on a resume", "why, or how"), settings_rows)
    text += "\n" + _table(("in a checkpoint", "on a resume"), checkpoint_rows)
    return page_with(RESUME_PAGE, RESUME_BEGIN, text, RESUME_END)


def other_trainers_page() -> str:
    """Return the page for users of other trainers, with the names that the hints after an unknown
    option know."""
    rows = []
    for row in COUNTERPARTS:
        elsewhere = ", ".join(f"`{name}`" for name in row.elsewhere.split())
        here = f"`{row.setting}: {row.value}`" if row.value else f"`{row.setting}`"
        if row.also:
            here += f", `{row.also}`"
        rows.append((here, row.flow_grpo, row.dancegrpo, row.unirl, row.official, elsewhere))
    head = ("here", "flow_grpo", "DanceGRPO", "UniRL", "the authors' code", "elsewhere")
    text = _table(head, rows)

    names_of: dict[str, list[str]] = {}
    for name, instead in INSTEAD.items():
        names_of.setdefault(instead, []).append(f"`{name}`")
    no_settings = [(", ".join(names), instead) for instead, names in names_of.items()]
    text += "\n" + _table(("no setting here", "instead"), no_settings)
    return page_with(TRAINERS_PAGE, TRAINERS_BEGIN, text, TRAINERS_END)


def profile_page() -> str:
    """Return the page about profiles, with the ranges that the code opens."""
    lines = []
    for row in RANGES:
        name = "  " * row.depth + row.name
        lines.append(f"{name:<24}{row.meaning}".rstrip())
    text = "\n".join(["```", *lines, "```", ""])
    return page_with(PROFILE_PAGE, RANGES_BEGIN, text, RANGES_END)


def page_with(name: str, begin: str, text: str, end: str) -> str:
    """Return a page with `text` in place of what stands between two of its lines."""
    page = (FOLDER / name).read_text(encoding="utf-8")
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{text}{end}{after}"


PAGES = {
    "settings.md": settings_page,
    "cli.md": commands_page,
    RESUME_PAGE: resume_page,
    TRAINERS_PAGE: other_trainers_page,
    PROFILE_PAGE: profile_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
