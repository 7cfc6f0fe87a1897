"""The loss that the judges are trained with."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from sage_fast.testbed.judge import JudgeNetwork
from sage_fast.testbed.world import World
from studies.testbed.corruptions import random_clip


def judge_loss(
    network: JudgeNetwork,
    videos: Tensor,
    words: Mapping[str, Tensor],
    clean: Tensor,
    legible: Mapping[str, Tensor],
) -> Tensor:
    """Compute the cross-entropy with graded targets, from the true word (legible) to a uniform one
    (erased).

    Args:
        network: network in training.
        videos: [B, F, 3, H, W].
        words: what is classified -> int64 [B], the class.
        clean: [B], from 1 for a rendered clip to 0 for a clip that is fully corrupted.
        legible: what is classified -> [B], from 1 for a legible attribute to 0 for an erased one.
    """
    logits, clean_logit = network(videos)
    loss = 4.0 * binary_cross_entropy_with_logits(clean_logit, clean)
    for name, size in network.class_counts.items():
        share = legible[name][:, None]
        target = share * one_hot(words[name], size) + (1 - share) / size
        loss = loss - (target * logits[name].log_softmax(dim=1)).sum(dim=1).mean()
    return loss


def loss_of_clips(
    world: World, network: JudgeNetwork, batch: int, generator: torch.Generator
) -> Tensor:
    """Draw clips of a world's random captions, clean and corrupted, and compute the judge's
    loss."""
    scenes = world.scenes
    chosen = [scenes[i] for i in torch.randint(len(scenes), (batch,), generator=generator).tolist()]
    videos, clean, visible = zip(*(random_clip(world, scene, generator) for scene in chosen))
    visible_by_attribute = {
        name: torch.tensor([row[name] for row in visible]) for name in world.attributes
    }
    words = {
        name: torch.tensor([known.index(world.words_of(scene)[name]) for scene in chosen])
        for name, known in world.attributes.items()
    }
    return judge_loss(
        network, torch.stack(videos), words, torch.tensor(clean), visible_by_attribute
    )
