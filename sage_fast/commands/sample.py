"""`sage-fast sample`: sample videos of given prompts with the ODE."""

from __future__ import annotations

import argparse
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence

from sage_fast.commands.sources import check_folder, load_source
from sage_fast.data.prompts import Prompt, read_prompts
from sage_fast.util.errors import UserError, printable
from sage_fast.util.files import writing
from sage_fast.util.paths import TypedFile, TypedPath

log = logging.getLogger(__name__)


def add_arguments(add: Callable[..., object]) -> None:
    add(
        "config",
        type=TypedPath,
        metavar="CONFIG",
        help="YAML file, or a run folder (its weights are used)",
    )
    add("--prompt", action="append", default=[], help="may be given several times")
    image = "image of each --prompt in turn, or one for all"
    add("--image", type=TypedPath, metavar="FILE", action="append", default=[], help=image)
    add(
        "--prompts",
        type=TypedPath,
        metavar="FILE",
        help="UTF-8 text with one prompt a line, or .jsonl",
    )
    add(
        "--folder",
        type=TypedFile,
        default="samples",
        help="where the MP4 files go (default: samples)",
    )
    add("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    """Write one video per prompt and a contact sheet, and print the video files.

    A prompt's own seed is used if it has one.

    Raises:
        UserError: there is no prompt, or an empty one, the folder is a file, or as `load_setup`.
    """
    if not options.prompt and not options.prompts:
        raise UserError("give at least one --prompt, or --prompts FILE")
    prompts = _given(options.prompt, options.image) + (
        read_prompts(options.prompts) if options.prompts else []
    )
    check_folder(options.folder)
    config = load_source("sample", options.config, overrides)
    from sage_fast.commands.sample_videos import generate, save_videos
    from sage_fast.loading import load_setup, resolve
    from sage_fast.util.seeding import sample_seeds
    from sage_fast.util.videos import check_encoder

    folder = options.folder
    check_encoder()
    setup = load_setup(resolve(config), prompts, rewards=False)
    for note in setup.model.notes:
        log.info(f"note: {note}")
    keys = [prompt.key for prompt in prompts]
    seeds = sample_seeds(config.seed, 0, 0, range(len(prompts)), "sample-command")
    for place, seed in setup.eval_seeds.items():
        seeds[place] = seed
    with writing(folder):
        setup.encode(folder / "embeddings")
        videos = generate(setup, keys, seeds)
        files = save_videos(videos, keys, folder, setup.model.spec.fps)
        print(printable("\n".join(map(str, files))))


def _given(texts: Sequence[str], images: Sequence[str]) -> list[Prompt]:
    """Return the prompts of the command line."""
    if len(images) not in (0, min(1, len(texts)), len(texts)):
        raise UserError(
            f"--image: {len(images)} for {len(texts)} of --prompt; expected one for all, or one "
            "for each"
        )
    prompts = []
    for text, image in zip(texts, itertools.cycle(images or [""])):
        where = f"--image {image!r}" if image else f"--prompt {text!r}"
        prompts.append(Prompt(text=text.strip(), image=image, where=where))
        prompts[-1].check()
    return prompts
