"""Secrets in the arguments of rewards: hidden wherever settings are shown or kept, and found again for a resume.

Imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sage_fast.config.load import parse_yaml
from sage_fast.config.schema import Config

HIDDEN = "(hidden)"
"""Placeholder for a secret in `config.yaml`, `run.json`, the report and the trackers."""
_PLURAL = ("key", "apikey", "secret", "password", "credential")
_TOKENS = ("access", "api", "auth", "bearer", "hf", "hub", "refresh", "session")
"""Words that make a following `tokens` a secret; `num_tokens` is a count."""
_ADDRESS_WITH_USER = re.compile(r"://[^/\s@]+@")
_QUERY = re.compile(r"[?&]([^=&\s]+)=")
_SECRETS = {"token", "passwd", "passphrase", "pwd", "authorization", "bearer", *_PLURAL, *(f"{n}s" for n in _PLURAL)}


def is_secret(name: str) -> bool:
    """Whether the end of a name is one for secrets: `api_key`, `apiKey` and `access_tokens`, but not `num_tokens`."""
    *words, last = re.split(r"[-_ ]|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", name)
    return last.lower() in _SECRETS or (last.lower() == "tokens" and "".join(words[-1:]).lower() in _TOKENS)


def hide(value: Any) -> Any:
    """Return a copy of a value without its secrets, at any depth.

    These are entries named like one, and addresses with a user or with such a name in their query.
    """
    if isinstance(value, Mapping):
        return {name: HIDDEN if is_secret(str(name)) else hide(item) for name, item in value.items()}
    if isinstance(value, str) and (_ADDRESS_WITH_USER.search(value) or any(map(is_secret, _QUERY.findall(value)))):
        return HIDDEN
    return [hide(item) for item in value] if isinstance(value, list) else value


def redacted(config: Config) -> Config:
    """Return the settings as they are shown and kept."""
    reward = config.reward
    several = [entry | {"args": hide(entry["args"])} if "args" in entry else entry for entry in reward.several]
    return dataclasses.replace(config, reward=dataclasses.replace(reward, args=hide(reward.args), several=several))


def restored(config: Config, source: Config) -> Config:
    """Return the settings of a run folder with the secrets that `source` has in the same places."""
    args = _found(config.reward.args, source.reward.args)
    several = _found(config.reward.several, source.reward.several)
    return dataclasses.replace(config, reward=dataclasses.replace(config.reward, args=args, several=several))


def _found(value: Any, source: Any) -> Any:
    if isinstance(value, Mapping):
        others = source if isinstance(source, Mapping) else {}
        return {name: _found(item, others.get(name)) for name, item in value.items()}
    if isinstance(value, list):
        fits = isinstance(source, list) and len(source) == len(value)
        return [_found(item, source[place] if fits else None) for place, item in enumerate(value)]
    return source if value == HIDDEN and source is not None else value


def hidden_in(value: Any, name: str) -> str | None:
    """Return the dotted name of a hidden secret within a value; None if there is none."""
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        return next((found for key, item in items if (found := hidden_in(item, f"{name}.{key}"))), None)
    return name if value == HIDDEN else None


def hide_in_command(words: Sequence[str]) -> list[str]:
    """Hide the secrets in a command, such as `--reward.args.token VALUE` and `--reward.args '{token: VALUE}'`."""
    shown, option = [], ""
    for word in words:
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            shown.append(_shown(option, word))
        else:
            shown.append(f"{name}={_shown(name, value)}" if equals else word)
        option = name if word.startswith("--") and not equals else ""
    return shown


def _shown(option: str, text: str) -> str:
    if not option.startswith("--reward."):
        return text
    value = {option.rpartition(".")[2]: parse_yaml(text)}
    return text if hide(value) == value else HIDDEN
