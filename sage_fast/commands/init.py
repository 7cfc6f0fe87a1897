"""`sage-fast init`: create a starter folder with settings and prompts to edit, and for the testbed
a reward.

Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from sage_fast.config.loader import load
from sage_fast.config.shipped import FOLDER, describe_shipped, gpus_of, shipped_names
from sage_fast.data.prompts import SETS, read_prompts
from sage_fast.util.errors import UserError, nearest, printable
from sage_fast.util.files import write_atomic
from sage_fast.util.paths import TypedFile

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

TESTBED_PROMPT = "a small red ball moves left quickly"
PROMPT = "a red fox trots through fresh snow"
"""Prompts to sample: of the testbed's words, and for any other model."""


def add_arguments(add: Callable[..., object]) -> None:
    add(
        "folder",
        type=TypedFile,
        metavar="FOLDER",
        nargs="?",
        help="new folder, or one without files of those names",
    )
    add("--config", metavar="NAME", default="demo", help="a shipped configuration (default: demo)")
    add(
        "--list",
        action="store_true",
        help="show the shipped configurations: what each trains, on what evidence, memory and time",
    )


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    if options.list:
        if options.folder is not None:
            raise UserError(f"--list writes nothing: expected it without {str(options.folder)!r}")
        print(printable(describe_shipped()))
        return
    if options.folder is None:
        raise UserError("expected FOLDER, a new one such as my-run, or --list")
    print(printable(init(options.folder, options.config)))


def init(folder: Path, name: str) -> str:
    """Write config.yaml, prompts.txt, heldout.txt and my_rewards.py, and slurm.sbatch if it is for
    several GPUs.

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
    names = shipped_names()
    if name not in names:
        raise UserError(f"--config {name!r}: {nearest(name, names)}; --list shows them")
    config = load(FOLDER / f"{name}.yaml")

    suffix = Path(config.data.prompts).suffix or ".txt"
    prompt_files: dict[str, str] = {}
    images: dict[str, bytes] = {}
    captions: set[str] = set()
    for file, given in (("prompts", config.data.prompts), ("heldout", config.data.eval_prompts)):
        prompts = read_prompts(given)
        if given in SETS:
            prompt_files[file + suffix] = "".join(f"{prompt.text}\n" for prompt in prompts)
        else:
            prompt_files[file + suffix] = Path(given).read_text(encoding="utf-8")
        for prompt in prompts:
            captions.add(prompt.text)
            if prompt.image:
                images[prompt.image] = Path(prompt.caption.image).read_bytes()

    # The testbed's model understands only the words of its own prompts.
    testbed_captions = {prompt.text for name in SETS for prompt in read_prompts(name)}
    on_testbed = captions <= testbed_captions

    own = {setting: value.replace(".txt", suffix) for setting, value in OWN.items()}
    extra = ["my_rewards.py"]
    gpus, gigabytes = gpus_of(name)
    if on_testbed:
        own |= OWN_REWARD
    elif gpus > 1:
        extra.append("slurm.sbatch")
    texts = {"config.yaml": _own_settings(FOLDER / f"{name}.yaml", own)}
    for file in extra:
        texts[file] = (FOLDER / file).read_text(encoding="utf-8")
    texts |= prompt_files

    _write_new(folder, texts, images)
    wrote = ", ".join(texts)
    if images:
        wrote += f" and {len(images)} images"
    sampled = TESTBED_PROMPT if on_testbed else PROMPT
    commands = _next_commands(folder, f"heldout{suffix}", sampled, gpus, gigabytes)
    return f"{folder}: wrote {wrote}\n{commands}"


def _write_new(folder: Path, texts: Mapping[str, str], images: Mapping[str, bytes]) -> None:
    """Write files into a folder that holds none of them.

    Raises:
        UserError: the folder is a file, or one of the files exists; nothing is written.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(
            f"{str(folder)!r} is a file; expected a folder, new or without {', '.join(texts)}"
        )
    contents: dict[str, str | bytes] = {**texts, **images}
    found = [file for file in contents if (folder / file).exists()]
    if found:
        raise UserError(
            f"{str(folder)!r} already holds {', '.join(found)}; expected another folder"
        )
    for file, content in contents.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / file, content)


def _own_settings(file: Path, own: Mapping[str, str]) -> str:
    """Replace settings in a shipped configuration, in which each occurs exactly once."""
    text = file.read_text(encoding="utf-8")
    for key, value in own.items():
        text, count = re.subn(rf"^( *{key}:) .*$", rf"\1 {value}", text, flags=re.MULTILINE)
        assert count == 1, f"{key}: {count} times in a shipped configuration"
    return text


def _next_commands(folder: Path, heldout: str, prompt: str, gpus: int, gigabytes: int) -> str:
    """Return what to type next.

    Args:
        heldout: file of held-out prompts.
        prompt: to sample.
        gpus, gigabytes: GPUs that the configuration is for, and their memory; 0 for a CPU.
    """
    launch, planned = "sage-fast", ""
    if gpus == 1:
        planned = f" --gpus 1 --gpu-memory {gigabytes}"
    elif gpus > 1:
        launch, planned = "torchrun --nproc-per-node 8 -m sage_fast", " --gpus 8"
    prompts = f"--prompts {heldout}" if heldout.endswith(".jsonl") else f'--prompt "{prompt}"'
    commands = [
        f"cd {shlex.quote(str(folder))}",
        f"sage-fast train config.yaml --dry-run{planned}  # memory, time",
        f"{launch} train config.yaml  # or --resume",
        f"sage-fast sample runs/first {prompts}",
        f"sage-fast eval base runs/first  # scores before and after, on {heldout}",
    ]
    return "\n  ".join(["next:", *commands])
