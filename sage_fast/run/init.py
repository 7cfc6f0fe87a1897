"""`sage-fast init`: create a starter folder with settings, a reward and prompts to edit."""

from __future__ import annotations

import re
import shlex
from importlib.resources import files
from pathlib import Path

from sage_fast.util.errors import UserError, nearest
from sage_fast.util.files import write_atomic

OWN = {
    "output": "runs/first",
    "prompts": "prompts.txt # one prompt a line",
    "eval_prompts": "heldout.txt # prompts that are never trained on",
    "name": "my_rewards:MyReward # the class in my_rewards.py; see there",
    "weights": "{color: 1, steady: 1} # reward = sum of weight x part; parts without a weight are only logged",
}
"""Settings that `init` changes in a shipped configuration to point at the files it writes."""


def init(folder: Path, name: str) -> str:
    """Write config.yaml, my_rewards.py, prompts.txt and heldout.txt.

    Args:
        folder: created if missing.
        name: a shipped configuration, such as `demo`.

    Returns:
        A text that lists the files and the next commands.

    Raises:
        UserError: there is no such configuration, or one of the files exists; nothing is written.
    """
    shipped = files("sage_fast.configs")
    names = sorted(file.name.removesuffix(".yaml") for file in shipped.iterdir() if file.name.endswith(".yaml"))
    if name not in names:
        raise UserError(f"--config {name!r}: {nearest(name, names)}")
    from sage_fast.testbed.world import heldout_prompts, train_prompts

    texts = {
        "config.yaml": _own_settings((shipped / f"{name}.yaml").read_text(encoding="utf-8")),
        "my_rewards.py": (shipped / "my_rewards.py").read_text(encoding="utf-8"),
        "prompts.txt": "".join(f"{prompt}\n" for prompt in train_prompts()),
        "heldout.txt": "".join(f"{prompt}\n" for prompt in heldout_prompts()),
    }
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{str(folder)!r} is a file; expected a folder, new or without {', '.join(texts)}")
    if found := [file for file in texts if (folder / file).exists()]:
        raise UserError(
            f"{str(folder)!r} already holds {', '.join(found)}; choose another folder (nothing was changed)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        write_atomic(folder / file, text)
    return f"{folder}: wrote {', '.join(texts)}\n{_next_commands(folder, testbed=name == 'demo')}"


def _own_settings(text: str) -> str:
    """Replace the settings of `OWN` in a shipped configuration, each of which occurs exactly once."""
    for key, value in OWN.items():
        text, count = re.subn(rf"^( *{key}:) .*$", rf"\1 {value}", text, flags=re.MULTILINE)
        assert count == 1, f"{key}: {count} times in a shipped configuration"
    return re.sub(r"^  args: .*\n", "", text, flags=re.MULTILINE)  # the arguments of the shipped reward


def _next_commands(folder: Path, *, testbed: bool) -> str:
    rows = [
        (f"cd {shlex.quote(str(folder))}", ""),
        ("sage-fast train config.yaml --dry-run", "sizes, FLOPs and memory"),
        ("sage-fast train config.yaml", "Ctrl-C, then again with --resume")
        if testbed
        else ("torchrun --nproc-per-node 8 -m sage_fast train config.yaml", "--resume"),
        ('sage-fast sample runs/first --prompt "a red circle moves left quickly"', ""),
        ("sage-fast eval runs/first", "scores on heldout.txt"),
    ]
    return "\n".join(["next:", *(f"  {command:<42}{f'  # {note}' if note else ''}".rstrip() for command, note in rows)])
