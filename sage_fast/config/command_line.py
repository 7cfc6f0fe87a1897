"""Settings as options of a command: their arguments, their help and their completion.

Help and completion come from the tree of settings and the docstrings of its fields.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import get_origin

import yaml

from sage_fast.config.fields import meanings, own_settings, sections, settings_of
from sage_fast.config.schema import Config
from sage_fast.util.errors import UserError


def settings_apart(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into its own words and its settings, each followed by its value.

    A setting is an option with a dot in its name, or one that is named like a setting, such as `--seed`.
    """
    own, given, rest = [], [], list(arguments)
    while rest:
        word = rest.pop(0)
        key, assigned, _ = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not ("." in key or key in settings_of(Config)):
            own.append(word)
            continue
        given.append(word)
        if not assigned and rest and not rest[0].startswith("--"):
            given.append(rest.pop(0))
    return own, given


def overrides_of(arguments: Sequence[str]) -> dict[str, str]:
    """Parse `--key.path value` and `--key.path=value` to dotted key -> value as typed; the last one wins.

    Raises:
        UserError: an argument of another form, or an option without its value.
    """
    settings: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise UserError(f"unexpected argument {argument!r}; settings are given as --key.path value")
        key, separator, value = argument[2:].partition("=")
        if not separator:
            if not rest or rest[0].startswith("--"):
                known = key in settings_of(Config) or key.startswith(("reward.weights.", "reward.args."))
                raise UserError(f"{argument} needs a value" if known else f"unknown option {argument}; see --help")
            value = rest.pop(0)
        settings[key] = value
    return settings


METAVARS = {int: "INTEGER", float: "NUMBER", dict: "{NAME: NUMBER, ...}", list: "[...]"}


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add every setting as an option, for the help and for completion. `overrides_of` parses the arguments."""
    for name, section in sections(Config).items():
        meaning = meanings(section)
        group = parser.add_argument_group(f"settings, {name}" if name else "settings", meaning[""])
        for setting in own_settings(section):
            bounds = f"{setting.range}; " if setting.range else ""
            text = f"{meaning[setting.field]} ({bounds}default: {_yaml(setting.default)})"
            group.add_argument(
                f"--{setting.name}",
                choices=setting.choices or (("true", "false") if setting.type is bool else None),
                metavar="TEXT" if setting.is_text else METAVARS.get(get_origin(setting.type) or setting.type),
                help=text.replace("%", "%%"),
            )


def _yaml(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")
