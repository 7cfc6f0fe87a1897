"""The random numbers themselves: Philox words, the shape of the normals, and that no two uses share
any."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy import stats

from sage_fast.ops.philox import (
    STREAM_INITIAL_LATENTS,
    STREAM_TRANSITION,
    philox4x32,
    philox_normal,
)

ONES = 0xFFFFFFFF
COUNT = 200_000


def normal(
    seed: int, step: int = 0, count: int = COUNT, stream: int = STREAM_TRANSITION
) -> torch.Tensor:
    return philox_normal(torch.tensor([seed]), torch.tensor(step), (count,), stream)[0]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        pytest.param(
            (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8), id="zeros"
        ),
        pytest.param(
            (ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD), id="ones"
        ),
        pytest.param(
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
            id="digits of pi",
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, expected):
    words = philox4x32([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])
    assert tuple(int(word) for word in words) == expected


def test_normal_is_box_muller_of_the_words_of_its_block():
    seed, step, element = 0x123456789ABCDEF0, 7, 4 * 11 + 3
    words = philox4x32(
        [torch.tensor(c) for c in (11, 0, step, STREAM_TRANSITION)],
        [torch.tensor(seed & ONES), torch.tensor(seed >> 32)],
    )
    u2, u3 = ((int(word) // 256) / 2**24 + 2**-25 for word in words[2:])
    expected = (-2 * torch.tensor(u2).log()).sqrt() * torch.sin(2 * torch.pi * torch.tensor(u3))
    torch.testing.assert_close(normal(seed, step, 60)[element], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_noise_is_standard_normal(seed):
    noise = normal(seed).double().numpy()
    error = COUNT**-0.5
    assert abs(noise.mean()) < 4 * error
    assert abs(noise.var() - 1) < 4 * 2**0.5 * error
    assert abs(stats.skew(noise)) < 4 * 6**0.5 * error
    assert abs(stats.kurtosis(noise)) < 4 * 24**0.5 * error
    assert stats.kstest(noise, "norm").pvalue > 1e-4


def test_each_position_of_a_block_is_standard_normal():
    for position in range(4):
        assert stats.kstest(normal(3).double().numpy()[position::4], "norm").pvalue > 1e-4, (
            f"position {position}"
        )


def test_neighbours_within_a_block_are_independent():
    block = normal(5).double().view(-1, 4).T
    limit = 4 * (COUNT // 4) ** -0.5
    assert (torch.corrcoef(block) - torch.eye(4)).abs().max() < limit
    # Box-Muller pairs share a radius: their squares would be correlated if the angle were wrong.
    assert (torch.corrcoef(block.square()) - torch.eye(4)).abs().max() < limit


# Streams that a run really draws from, and seeds that differ in one bit of either half.
USES = {
    "base": normal(1234, 3),
    "next seed": normal(1235, 3),
    "next high word": normal(1234 + 2**32, 3),
    "negative seed": normal(-1234, 3),
    "next step": normal(1234, 4),
    "seed and step swapped": normal(3, 1234),
    "initial latents": normal(1234, 3, stream=STREAM_INITIAL_LATENTS),
}


@pytest.mark.parametrize(
    ("one", "other"), list(itertools.combinations(USES, 2)), ids=lambda name: name.replace(" ", "-")
)
def test_uses_are_independent(one, other):
    a, b = USES[one].double(), USES[other].double()
    limit = 4.5 * COUNT**-0.5
    for lag in (0, 1, 4):
        assert abs(torch.corrcoef(torch.stack([a[lag:], b[: COUNT - lag]]))[0, 1]) < limit, (
            f"lag {lag}"
        )
        assert (
            abs(torch.corrcoef(torch.stack([a[lag:].abs(), b[: COUNT - lag].abs()]))[0, 1]) < limit
        ), f"lag {lag}"


def test_no_block_is_drawn_twice():
    blocks = torch.cat([noise.view(-1, 4) for noise in USES.values()])
    assert len(torch.unique(blocks, dim=0)) == len(blocks)


def test_noise_of_a_sample_does_not_depend_on_its_batch():
    seeds, steps = torch.tensor([5, 6, 7]), torch.tensor([2, 0, 1])
    batch = philox_normal(seeds, steps, (3, 7))
    for sample in range(3):
        alone = philox_normal(seeds[sample : sample + 1], steps[sample], (3, 7))
        assert torch.equal(batch[sample : sample + 1], alone), f"sample {sample}"


def test_noise_is_finite_at_the_ends_of_the_uniforms():
    seeds = torch.arange(64)
    assert philox_normal(seeds, torch.tensor(0), (50_000,)).isfinite().all()
