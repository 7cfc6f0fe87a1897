"""`sage-fast sample`: sample videos of given prompts with the ODE."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from sage_fast.commands.sources import load_source
from sage_fast.data.prompts import Prompt, read_prompts
from sage_fast.util.errors import UserError


def add_arguments(add: Callable[..., object]) -> None:
    add("config", metavar="CONFIG", help="YAML file, or a run folder (its weights are used)")
    add("--prompt", action="append", default=[], help="may be given several times")
    add("--prompts", metavar="FILE", help="UTF-8 text with one prompt a line, or .jsonl")
    add("--folder", type=Path, default="samples", help="where the MP4 files go (default: samples)")
    add("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    if not options.prompt and not options.prompts:
        raise UserError("give at least one --prompt, or --prompts FILE")
    config = load_source("sample", options.config, overrides)
    from sage_fast.commands.videos import sample

    prompts = [Prompt(text=text) for text in options.prompt]
    prompts += read_prompts(options.prompts) if options.prompts else []
    print(*sample(config, prompts, options.folder), sep="\n")
