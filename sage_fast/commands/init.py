"""`sage-fast init`: create a starter folder with settings and prompts to edit, and for the testbed
a reward.

Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path

from sage_fast.config.loader import load
from sage_fast.data.prompts import SETS, read_prompts
from sage_fast.util.errors import UserError, nearest, printable
from sage_fast.util.files import write_atomic
from sage_fast.util.paths import TypedFile

_FOLDER = Path(str(files("sage_fast.configs") / "demo.yaml")).parent

OWN = {
    "output": "runs/first",
    "prompts": "prompts.txt # one prompt a line",
    "eval_prompts": "heldout.txt # prompts that are never trained on",
}
"""Settings that `init` changes in a shipped configuration to point at the files it writes."""

OWN_REWARD = {
    "name": "my_rewards:MyReward # the class in my_rewards.py; see there",
    "weights": (
        "{color: 1, steady: 1} # reward = sum of weight x part; parts without a weight are only "
        "logged"
    ),
}
"""Settings that point at an example of a reward, made for the testbed.

Other configurations keep their own reward.
"""

PROMPTS = {True: "a red circle moves left quickly", False: "a red fox trots through fresh snow"}
"""Whether a configuration is for the testbed -> a prompt to sample."""


def add_arguments(add: Callable[..., object]) -> None:
    add(
        "folder",
        type=TypedFile,
        metavar="FOLDER",
        help="new folder, or one without files of those names",
    )
    add("--config", metavar="NAME", default="demo", help="a shipped configuration (default: demo)")


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    print(printable(init(options.folder, options.config)))


def init(folder: Path, name: str) -> str:
    """Write config.yaml, prompts.txt, heldout.txt and my_rewards.py, and slurm.sbatch if it is not
    for the testbed.

    If the configuration has .jsonl files, copies of these instead of the .txt files, and their
    images in `images`.

    Args:
        folder: created if missing.
        name: a shipped configuration, such as `demo`.

    Returns:
        A text that lists the files and the next commands.

    Raises:
        UserError: there is no such configuration, or one of the files exists; nothing is written.
    """
    if name not in (names := sorted(file.stem for file in _FOLDER.glob("*.yaml"))):
        raise UserError(f"--config {name!r}: {nearest(name, names)}")
    config = load(_FOLDER / f"{name}.yaml")
    suffix = Path(config.data.prompts).suffix or ".txt"
    files, images, captions = dict[str, str](), dict[str, bytes](), set[str]()
    for file, given in (("prompts", config.data.prompts), ("heldout", config.data.eval_prompts)):
        prompts = read_prompts(given)
        lines = "".join(f"{prompt.text}\n" for prompt in prompts)
        files[file + suffix] = lines if given in SETS else Path(given).read_text(encoding="utf-8")
        images |= {
            prompt.image: Path(prompt.caption.image).read_bytes()
            for prompt in prompts
            if prompt.image
        }
        captions |= {prompt.text for prompt in prompts}
    on_testbed = captions <= {prompt.text for name in SETS for prompt in read_prompts(name)}
    own = {setting: value.replace(".txt", suffix) for setting, value in OWN.items()}
    settings = _own_settings(_FOLDER / f"{name}.yaml", own | (OWN_REWARD if on_testbed else {}))
    extra = ["my_rewards.py", "slurm.sbatch"][: 2 - on_testbed]
    texts = {
        "config.yaml": settings,
        **{name: (_FOLDER / name).read_text(encoding="utf-8") for name in extra},
        **files,
    }
    if folder.exists() and not folder.is_dir():
        raise UserError(
            f"{str(folder)!r} is a file; expected a folder, new or without {', '.join(texts)}"
        )
    if found := [file for file in (*texts, *images) if (folder / file).exists()]:
        raise UserError(
            f"{str(folder)!r} already holds {', '.join(found)}; expected another folder"
        )
    for file, content in (texts | images).items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / file, content)
    wrote = f"{', '.join(texts)}{f' and {len(images)} images' if images else ''}"
    return (
        f"{folder}: wrote "
        f"{wrote}\n{_next_commands(folder, f'heldout{suffix}', on_testbed=on_testbed)}"
    )


def _own_settings(file: Path, own: Mapping[str, str]) -> str:
    """Replace settings in a shipped configuration, in which each occurs exactly once."""
    text = file.read_text(encoding="utf-8")
    for key, value in own.items():
        text, count = re.subn(rf"^( *{key}:) .*$", rf"\1 {value}", text, flags=re.MULTILINE)
        assert count == 1, f"{key}: {count} times in a shipped configuration"
    return text


def _next_commands(folder: Path, heldout: str, *, on_testbed: bool) -> str:
    launch, more = (
        ("sage-fast", "")
        if on_testbed
        else ("torchrun --nproc-per-node 8 -m sage_fast", " --gpus 8")
    )
    prompt = (
        f"--prompts {heldout}"
        if heldout.endswith(".jsonl")
        else f'--prompt "{PROMPTS[on_testbed]}"'
    )
    commands = [
        f"cd {shlex.quote(str(folder))}",
        f"sage-fast train config.yaml --dry-run{more}  # sizes, memory, time",
        f"{launch} train config.yaml  # or --resume",
        f"sage-fast sample runs/first {prompt}",
        f"sage-fast eval runs/first  # scores on {heldout}",
    ]
    return "\n  ".join(["next:", *commands])
