"""Settings as options of a command: their arguments, their help and their completion.

Help and completion come from the tree of settings and the docstrings of its fields.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import get_origin

import yaml

from sage_fast.config.fields import Setting, meanings, own_settings, sections, settings_of
from sage_fast.config.schema import Config
from sage_fast.util.errors import UserError


def split_settings(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split a command line into its own words and its settings, dotted key -> value as typed; the
    last one wins.

    A setting is `--key.path value` or `--key.path=value`: an option with a dot in its name, or one
    that is named like a setting or a section, such as `--seed`.

    Raises:
        UserError: a setting without its value.
    """
    first_names = {name.partition(".")[0] for name in settings_of(Config)}
    words: list[str] = []
    settings: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        key, assigned, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not ("." in key or key in first_names):
            words.append(word)
            continue
        if not assigned:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"{word} needs a value")
            value = rest.pop(0)
        settings[key] = value
    return words, settings


METAVARS = {int: "INTEGER", float: "NUMBER", dict: "{NAME: NUMBER, ...}", list: "[...]"}


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add every setting as an option, for the help and for completion.

    `split_settings` parses the arguments.
    """
    for name, section in sections(Config).items():
        meaning = meanings(section)
        group = parser.add_argument_group(f"settings, {name}" if name else "settings", meaning[""])
        for setting in own_settings(section):
            bounds = f"{setting.range}; " if setting.range else ""
            text = f"{meaning[setting.field]} ({bounds}default: {_yaml(setting.default)})"
            group.add_argument(
                f"--{setting.name}",
                choices=setting.choices or (("true", "false") if setting.type is bool else None),
                metavar=_metavar(setting),
                help=text.replace("%", "%%"),
            )


def _metavar(setting: Setting) -> str | None:
    """Return what stands for the value in the help; None for the choices themselves."""
    if setting.takes_number:
        return f"{{{','.join(setting.choices)},INTEGER}}"
    if setting.choices:
        return None
    if setting.is_text:
        return "TEXT"
    return METAVARS.get(get_origin(setting.type) or setting.type)


def _yaml(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")
