"""`sage-fast sample`: sample videos of given prompts with the ODE."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sage_fast.config.schema import Config
from sage_fast.data.prompts import Prompt
from sage_fast.run.evaluation import generate
from sage_fast.run.folder import save_videos
from sage_fast.run.setup import load_setup
from sage_fast.util.console import Say
from sage_fast.util.errors import UserError
from sage_fast.util.files import writing
from sage_fast.util.seeding import sample_seeds


def sample(config: Config, prompts: Sequence[Prompt], folder: Path, *, quiet: bool, tell: Say) -> list[Path]:
    """Write one video per prompt and a contact sheet into `folder`; return the video files.

    A prompt's own seed is used if it has one.

    Raises:
        UserError: `folder` is a file, or as `load_setup`.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--folder {str(folder)!r}: a file; expected a folder, which is made if it does not exist")
    setup = load_setup(config, prompts, rewards=False)
    for note in setup.model.notes:
        tell(f"note: {note}")
    texts = [prompt.text for prompt in prompts]
    seeds = sample_seeds(config.seed, 0, 0, range(len(prompts)), "sample-command")
    for place, seed in setup.eval_seeds.items():
        seeds[place] = seed
    with writing(folder):
        setup.encode(folder / "embeddings", quiet=quiet)
        videos = generate(config, setup.model, texts, setup.embeddings, seeds, quiet=quiet)
        return save_videos(videos, texts, folder, setup.model.fps)
