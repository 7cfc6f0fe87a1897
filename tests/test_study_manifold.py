"""The distance to the nearest true clip, against clips whose distance is known and a search without
shortcuts."""

import pytest
import torch

from studies.paper.manifold import manifold_distances, nearest_clips
from studies.shapes.world import SHAPES
from studies.testbed.render import render, start_range

pytestmark = pytest.mark.soak


def test_a_true_clip_is_found_where_it_starts() -> None:
    """At random starts between pixels, of every shape, colour and motion; and what is added in a
    corner is its distance."""
    scenes = SHAPES.scenes[::9]
    generator = torch.Generator().manual_seed(5)
    clips = torch.stack([render(SHAPES, scene, generator) for scene in scenes])
    found = nearest_clips(clips)
    assert [clip.scene for clip in found] == scenes
    assert max(clip.distance for clip in found) < 3e-4
    for clip, video in zip(found, clips):
        again = render(SHAPES, clip.scene, start=clip.start)
        assert clip.distance == pytest.approx(
            float((again - video).double().square().mean().sqrt()), rel=1e-9
        )
    noisy = clips[:2] + 0.05 * torch.randn(clips[:2].shape, generator=generator)
    assert manifold_distances(noisy).tolist() == pytest.approx([0.05, 0.05], rel=0.01)


def test_it_agrees_with_a_search_of_every_start() -> None:
    """A clip that no scene has: a blend of two, under noise.

    Each scene from 64 starts, the one found from 1600.
    """
    generator = torch.Generator().manual_seed(2)
    captions = ("a red circle moves left quickly", "a yellow square moves left quickly")
    blend = sum(render(SHAPES, SHAPES.parse(caption), generator) for caption in captions) / 2
    video = (blend + 0.1 * torch.randn(blend.shape, generator=generator)).clamp(0, 1)
    [found] = nearest_clips(video[None])
    for scenes, starts in ((SHAPES.scenes, 8), ([found.scene], 40)):
        least = min(
            float((video - render(SHAPES, scene, start=(x, y))).square().mean().sqrt())
            for scene in scenes
            for (low_x, low_y), (high_x, high_y) in [start_range(SHAPES, scene)]
            for x in torch.linspace(low_x, high_x, starts).tolist()
            for y in torch.linspace(low_y, high_y, starts).tolist()
        )
        assert found.distance <= least + 1e-6
