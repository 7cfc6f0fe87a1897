"""`sage-fast sample`: sample videos of given prompts with the ODE."""

from __future__ import annotations

import argparse
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_fast.commands.sources import Source, as_typed, check_folder, load_source, split_output
from sage_fast.config.loader import leaves
from sage_fast.config.schema import Config
from sage_fast.data.prompts import Prompt, read_prompts
from sage_fast.util.console import leave_logs
from sage_fast.util.errors import UserError, printable
from sage_fast.util.files import writing
from sage_fast.util.launchers import speaks
from sage_fast.util.paths import TypedFile, TypedPath, as_path

log = logging.getLogger(__name__)

FOLDER = "samples"


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
        help=f"where the MP4 files go (default: {FOLDER})",
    )
    add("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    """Sample the prompts of the options, and print the video files."""
    if not options.prompt and not options.prompts:
        raise UserError("give at least one --prompt, or --prompts FILE")
    folder, settings = split_output(options, overrides)
    prompts = _given(options.prompt, options.image)
    if options.prompts:
        prompts += read_prompts(options.prompts)
    files = _sample(options.config, settings, prompts, folder or Path(FOLDER))
    if speaks():
        print(printable("\n".join(map(str, files))))


def sample(
    source: Source,
    overrides: Mapping[str, Any] | None = None,
    *,
    prompts: str | os.PathLike[str] | Sequence[str],
    image: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    folder: str | os.PathLike[str] = FOLDER,
) -> list[Path]:
    """Sample one video per prompt with the ODE, as `sage-fast sample` does.

    Nothing is overwritten: the numbers of the files go on from those in the folder.

    Args:
        source: settings, a YAML file, or a run, its folder or a checkpoint in it, whose weights are
            used.
        overrides: settings to change, as for `load`.
        prompts: a list of texts; or one text or path, the file that holds them (UTF-8 text with one
            prompt a line, or .jsonl), where a prompt's own seed is used if it has one.
        image: with a list of texts, the image of each, or one for all.
        folder: where the MP4 files and a contact sheet go; created if missing.

    Returns:
        The video files, in the order of the prompts.

    Raises:
        UserError: the source, a setting, a prompt, an image or the folder is wrong.
    """
    leave_logs()  # that of a run which this process has trained
    images = [image] if isinstance(image, str | os.PathLike) else image
    named_images = [str(as_path(each)) for each in images]
    if isinstance(prompts, str | os.PathLike):
        if images:
            raise UserError("image: goes with a list of texts; a .jsonl file names its own images")
        records = _prompts_of_file(prompts)
    else:
        records = _given(prompts, named_images)
    if not records:
        raise UserError("prompts = []: expected at least one text, or a file of them")
    return _sample(as_typed(source), leaves(dict(overrides or {})), records, as_path(folder))


def _sample(
    source: str | Config, overrides: Mapping[str, Any], prompts: Sequence[Prompt], folder: Path
) -> list[Path]:
    """Write one video per prompt and a contact sheet; return the video files.

    Raises:
        UserError: the folder is a file, or as `load_source` and `load_setup`.
    """
    check_folder(folder)
    config = load_source("sample", source, overrides)
    from sage_fast.commands.sample_videos import generate, save_videos
    from sage_fast.loading import load_setup, resolve
    from sage_fast.run.fail_fast import fail_fast
    from sage_fast.util.process_group import joined
    from sage_fast.util.ranks import broadcast_object, rank
    from sage_fast.util.seeding import sample_seeds
    from sage_fast.util.videos import check_encoder

    check_encoder()
    with joined(config.timeout_minutes), fail_fast(config.timeout_minutes, folder):
        setup = load_setup(resolve(config), prompts, rewards=False)
        for note in setup.model.notes:
            log.info(f"note: {note}")

        keys = [prompt.key for prompt in prompts]
        seeds = sample_seeds(config.seed, 0, 0, range(len(prompts)), "sample-command")
        for number, seed in setup.eval_seeds.items():
            seeds[number] = seed
        with writing(folder):
            setup.encode(folder / "embeddings")
            videos = generate(setup, keys, seeds)
            files: list[Path] = []
            if rank() == 0:  # every rank has the same videos
                names = [str(key) for key in keys]
                files = save_videos(videos, names, folder, setup.model.spec.fps)
        return broadcast_object(files, 0)


def _prompts_of_file(file: str | os.PathLike[str]) -> list[Prompt]:
    """Read the prompts of a file that a call from Python names.

    Raises:
        UserError: as `read_prompts`; a text that is no file may be meant as a prompt.
    """
    try:
        return read_prompts(str(as_path(file)))
    except UserError as error:
        if isinstance(file, str) and not os.path.exists(file):
            raise UserError(f"{error}; texts are given as a list, prompts=[...]") from error
        raise


def _given(texts: Sequence[str], images: Sequence[str]) -> list[Prompt]:
    """Return the prompts of texts and their images.

    Raises:
        UserError: a text is empty, an image cannot be used, or their numbers do not fit.
    """
    if len(images) not in (0, min(1, len(texts)), len(texts)):
        raise UserError(
            f"--image: {len(images)} for {len(texts)} of --prompt; expected one for all, or one "
            "for each"
        )
    prompts = []
    for text, image in zip(texts, itertools.cycle(images or [""])):
        where = f"--image {image!r}" if image else f"--prompt {text!r}"
        if not isinstance(text, str):
            raise UserError(f"{where}: expected a text")
        prompt = Prompt(text=text.strip(), image=image, where=where)
        prompt.check()
        prompts.append(prompt)
    return prompts
