"""Whether a model can take the prompts."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from sage_fast.config.schema import Config, DataConfig
from sage_fast.data.prompt_habits import notes_on_words
from sage_fast.data.prompts import FORMATS, SETS, Prompt, captions_of, read_prompts
from sage_fast.models.random_weights import is_random
from sage_fast.models.spec import Spec
from sage_fast.util.errors import UserError
from sage_fast.util.images import read_image
from sage_fast.util.ranks import fail_together, rank, world_size


def check_prompt_sets(
    data: DataConfig,
    model_path: str,
    spec: Spec,
    train: Sequence[Prompt],
    heldout: Sequence[Prompt],
) -> None:
    """Check that prompts of a shipped set, by its name or in a file, suit the model; random weights
    take any.

    Raises:
        UserError: the set was made for another model.
    """
    unsuited = [] if is_random(spec.path) else SETS.keys() - {*spec.prompt_sets}
    captions = {prompt.text for name in unsuited for prompt in read_prompts(name)}
    for key, prompts in (("prompts", train), ("eval_prompts", heldout)):
        if captions.issuperset(prompt.text for prompt in prompts):
            raise UserError(
                f"data.{key} = {getattr(data, key)!r}: captions of the testbed's balls, "
                f"not for model.path = {model_path!r}; expected a file of other prompts: {FORMATS}"
            )


def notes_on_prompts(*sets: Sequence[Prompt]) -> list[str]:
    """Return notes on prompts that hold what another program may take for an instruction; a line of
    each kind."""
    notes: dict[str, None] = {}
    for prompts in sets:
        texts = []
        for prompt in prompts:
            texts.append((prompt.text, prompt.where))
            if prompt.negative:
                texts.append((prompt.negative, prompt.negative_where or prompt.where))
        notes |= dict.fromkeys(notes_on_words(texts))
    return [*notes]


def idle_negatives(config: Config, prompts: Iterable[Prompt]) -> str | None:
    """Return a note on negative prompts that no forward reads; None if there are none."""
    is_guided = config.sampling.guidance_scale != 1 or config.eval_guidance_scale != 1
    if is_guided or not any(prompt.negative for prompt in prompts):
        return None
    return "negative prompts have no effect: sampling.guidance_scale = 1 turns guidance off"


def shared_prompts(train: Sequence[Prompt], heldout: Sequence[Prompt]) -> str | None:
    """Return a note on held-out prompts that are trained on; None if there are none."""
    keys = {prompt.key for prompt in train}
    shared = [prompt.key for prompt in heldout if prompt.key in keys]
    if not shared:
        return None
    return (
        f"{len(shared)} of {len(heldout)} prompts of data.eval_prompts are also in data.prompts, "
        f"such as {str(shared[0])!r}: their scores say little about new prompts"
    )


def check_task(prompts: Sequence[Prompt], spec: Spec) -> None:
    """Check that every prompt has an image if the model takes images, and that none has one
    otherwise.

    Raises:
        UserError: one is not as expected.
    """
    for prompt in prompts:
        if spec.takes_images and not prompt.image:
            raise UserError(
                f"{prompt.where}: model.path = {spec.path!r} is image-to-video; expected an image "
                "for each prompt, in "
                'the key "image" of a .jsonl file, or sample --image'
            )
        if prompt.image and not spec.takes_images:
            raise UserError(
                f"{prompt.where}: image = {prompt.image!r}, and model.path = {spec.path!r} is "
                "text-to-video; an image for a reward needs another key"
            )


def check_captions(prompts: Sequence[Prompt], spec: Spec) -> None:
    """Check that a model can encode the prompts: `check_task`, their words, and that images are
    whole. Collective.

    Raises:
        UserError: it cannot.
    """
    check_task(prompts, spec)
    spec.check_prompts(caption.text for caption in captions_of(prompts).values())
    first = {prompt.caption.image: prompt for prompt in reversed(prompts) if prompt.image}
    with fail_together():
        for prompt in [*first.values()][rank() :: world_size()]:
            prompt.check(functools.partial(read_image, reduced=True))
