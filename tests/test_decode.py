"""The decode against the stock autoencoder's, its memory against a count, and what it chooses for a
given memory."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sage_fast.models.hunyuan15.decode import MEMORY_FRACTION, VideoDecoder, choose, free_bytes
from sage_fast.models.hunyuan15.vae import decode_frames, peak_bytes, video_shape
from sage_fast.ops.norm_silu import norm_silu_reference
from sage_fast.rewards import CompositeReward, Scores, join_scores
from sage_fast.rollout.scoring import VideoScorer
from sage_fast.testbed.tiny_model import load_vae
from sage_fast.util.live_bytes import LiveBytes
from sage_fast.util.meters import Stopwatch
from tests.tiny import BrightnessReward, keys_of, settings, tiny_model, tiny_trainer

MIB = 2**20
CPU = torch.device("cpu")


def real_layout() -> AutoencoderKLHunyuanVideo15:
    """Five stages and a spatial ratio of 16 as published; narrow, random."""
    torch.manual_seed(0)
    return AutoencoderKLHunyuanVideo15(
        latent_channels=32, block_out_channels=(8, 16, 16, 32, 64), layers_per_block=1,
        spatial_compression_ratio=16
    ).eval()  # fmt: skip


@pytest.fixture(scope="module", params=["testbed", "real layout"])
def vae(request: pytest.FixtureRequest) -> AutoencoderKLHunyuanVideo15:
    return load_vae() if request.param == "testbed" else real_layout()


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def stock(vae: AutoencoderKLHunyuanVideo15, latents: Tensor) -> Tensor:
    """What the pipeline shows: one video at a time, since that is what the stock attention mask
    allows."""
    latents = latents.to(vae.dtype) / vae.config.scaling_factor
    videos = torch.cat([vae.decode(latent, return_dict=False)[0] for latent in latents.split(1)])
    return (videos.float() * 0.5 + 0.5).clamp(0, 1).transpose(1, 2)


def latents_of(
    vae: AutoencoderKLHunyuanVideo15, *shape: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    return torch.randn(shape[0], vae.config.latent_channels, *shape[1:], dtype=dtype)


def forced(vae: AutoencoderKLHunyuanVideo15, latents: Tensor, **changes: int) -> VideoDecoder:
    """A decoder with another plan than the one it would choose."""
    decoder = VideoDecoder(copy.deepcopy(vae))
    shape: Any = tuple(latents.shape[1:])
    decoder.plans[shape] = dataclasses.replace(decoder.plan(shape), **changes)
    return decoder


@pytest.mark.parametrize(
    "shape", [(3, 5, 4, 4), (1, 1, 3, 5), (2, 4, 2, 3)], ids=["testbed", "one frame", "odd"]
)
def test_decode_equals_stock(vae: AutoencoderKLHunyuanVideo15, shape: tuple[int, ...]) -> None:
    """Whole, in pieces of time, and one video at a time: the same to rounding."""
    latents = latents_of(vae, *shape)
    expected = stock(vae, latents)
    assert expected.std() > 0.01
    for changes in ({}, {"frames": 1}, {"frames": 3}, {"samples": 1}, {"samples": 2, "frames": 2}):
        videos = forced(vae, latents, **changes)(latents)
        assert videos.dtype == torch.float32
        torch.testing.assert_close(
            videos, expected, rtol=0, atol=1e-5, msg=lambda text, c=changes: f"{c}: {text}"
        )


def test_decode_keeps_the_layout_it_is_given(vae: AutoencoderKLHunyuanVideo15) -> None:
    """As `sage-fast bench rollout --path contiguous` measures it; a run makes everything
    channels-last."""
    latents = latents_of(vae, 2, 4, 3, 4)
    expected = torch.cat([vae.decode(latent, return_dict=False)[0] for latent in latents.split(1)])
    for frames in (4, 2, 1):
        pieces = list(decode_frames(vae.decoder, latents, frames))
        assert all(piece.is_contiguous() for piece in pieces)
        torch.testing.assert_close(torch.cat(pieces, dim=2), expected, rtol=0, atol=2e-5)


def test_bfloat16_is_as_near_to_float32_as_stock(vae: AutoencoderKLHunyuanVideo15) -> None:
    latents = latents_of(vae, 2, 4, 3, 4)
    exact = stock(vae, latents)
    rounded = copy.deepcopy(vae)
    torch.nn.Module.to(rounded, torch.bfloat16)
    error_of_stock = (stock(rounded, latents) - exact).norm()
    for frames in (4, 1):
        assert (
            forced(rounded, latents, frames=frames)(latents) - exact
        ).norm() <= 1.2 * error_of_stock


def test_weights_and_stock_decode_stay(vae: AutoencoderKLHunyuanVideo15) -> None:
    ours = copy.deepcopy(vae)
    decoder = VideoDecoder(ours)
    latents = latents_of(vae, 1, 3, 4, 4)
    decoder(latents)
    assert all(
        torch.equal(tensor, ours.state_dict()[name]) for name, tensor in vae.state_dict().items()
    )
    torch.testing.assert_close(stock(ours, latents), stock(vae, latents), rtol=0, atol=1e-5)


def test_zero_pixels_stay_finite() -> None:
    """F.normalize divides by max(norm, 1e-12)."""
    vae = real_layout()
    vae.decoder.conv_in.conv.bias.zero_()
    latents = torch.zeros(1, 32, 2, 2, 2)
    torch.testing.assert_close(VideoDecoder(vae)(latents), stock(vae, latents), rtol=0, atol=1e-5)


# -- memory ----------------------------------------------------------------------------------------


class Live(LiveBytes):
    """Counts what `norm_silu` makes within itself as well."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.sage_fast.norm_silu.default:
            with self:
                return norm_silu_reference(*args)
        return super().run(func, args, kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 5, 4, 4), (1, 3, 8, 6)])
def test_peak_bytes(
    vae: AutoencoderKLHunyuanVideo15, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Exact to 2 %; an upper bound where the last piece is a short one."""
    cast = copy.deepcopy(vae)
    torch.nn.Module.to(cast, dtype)
    latents = latents_of(vae, *shape, dtype=dtype)
    for frames in (shape[1], 2, 1):
        live = Live()
        with live:
            for piece in decode_frames(cast.decoder, latents, frames):
                del piece
        formula = peak_bytes(cast.decoder, tuple(latents.shape), frames, dtype.itemsize)
        few_pieces = shape[1] // frames == 1 and frames < shape[1]
        assert live.peak <= 1.001 * formula
        assert few_pieces or live.peak >= 0.98 * formula


@pytest.fixture(scope="module")
def published() -> AutoencoderKLHunyuanVideo15:
    with torch.device("meta"):
        return AutoencoderKLHunyuanVideo15()


HD = (32, 21, 30, 52)
"""Latents of 81 frames of 480 x 832."""


def test_choice_by_memory(published: AutoencoderKLHunyuanVideo15) -> None:
    def peak(frames: int) -> int:
        return peak_bytes(published.decoder, (1, *HD), frames, 2)

    def chosen(usable: int, enough: int = 10**15) -> tuple[int, int]:
        result = choose(published, HD, 2, int(usable / MEMORY_FRACTION) + 2, enough)
        assert result.bytes <= max(usable, peak(1)) + 2
        return result.samples, result.frames

    assert peak(21) / 2**30 == pytest.approx(23.6, abs=0.1)
    assert peak(1) / 2**30 == pytest.approx(4.0, abs=0.1)
    assert chosen(3 * peak(21)) == (3, 21)
    assert chosen(3 * peak(21) - 9) == (2, 21)
    assert chosen(peak(21) - 9) == (1, 11)
    assert chosen(peak(4)) == (1, 4)  # 6 pieces, 21 / 6 rounded up
    assert chosen(peak(1)) == (1, 1)
    # More than enough memory is not used for speed that is not there; the least is used even where
    # it is more.
    assert chosen(peak(21), enough=peak(4)) == (1, 4)
    assert chosen(peak(1), enough=1) == (1, 1)
    with pytest.raises(
        ValueError, match=r"latents of 21 x 30 x 52 frame by frame needs 4,0\d\d MiB.*height"
    ):
        chosen(peak(1) - 9)


def test_the_plan_says_how(published: AutoencoderKLHunyuanVideo15) -> None:
    usable = peak_bytes(published.decoder, (1, *HD), 1, 2)
    found = str(choose(published, HD, 2, int(usable / MEMORY_FRACTION) + 2, 10**15))
    assert found.startswith("1 video and 1 latent frame at a time, 4,0")


def test_video_shape(vae: AutoencoderKLHunyuanVideo15) -> None:
    latents = latents_of(vae, 2, 3, 2, 4)
    assert video_shape(vae.decoder, tuple(latents.shape)) == tuple(stock(vae, latents).shape)


def test_free_bytes() -> None:
    assert MIB < free_bytes(CPU) < 2**50


# -- chunks ----------------------------------------------------------------------------------------


class OneChunk(BrightnessReward):
    """Counts the videos that are alive when a chunk is scored."""

    def __init__(self) -> None:
        self.chunks: list[StorageWeakRef] = []
        self.sizes: list[int] = []

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        assert all(chunk.expired() for chunk in self.chunks)
        self.chunks.append(StorageWeakRef(videos.untyped_storage()))
        self.sizes.append(len(videos))
        return super().__call__(videos, prompts)


def test_chunks_score_as_one_batch_and_are_held_one_at_a_time() -> None:
    config = settings()
    model = tiny_model(config)
    latents = torch.randn(7, *model.spec.latent_shape(config.sampling))
    prompts = keys_of(f"prompt {i}" for i in range(7))
    reward = OneChunk()
    scorer = VideoScorer(model.decoder, CompositeReward(reward, config.reward), Stopwatch(CPU))
    for start in range(0, 7, 3):
        scorer.submit(latents[start : start + 3], prompts[start : start + 3])
    scores = scorer.finish()
    assert reward.sizes == [3, 3, 1]
    expected = CompositeReward(BrightnessReward(), config.reward)(model.decoder(latents), prompts)
    torch.testing.assert_close(scores.rewards, expected.rewards, rtol=0, atol=1e-6)
    assert list(scores.parts) == list(expected.parts) == ["mq", "ta", "vq"]
    for part, value in scores.parts.items():
        torch.testing.assert_close(value, expected.parts[part], rtol=0, atol=1e-6)


def test_a_part_missing_from_one_chunk_is_unknown_there() -> None:
    one, two = torch.ones(1), torch.ones(2)
    joined = join_scores(
        [
            Scores(rewards=one, parts={"vq": one}),
            Scores(rewards=two, parts={"vq": two, "clean": two}),
        ]
    )
    assert len(joined.rewards) == 3
    assert list(joined.parts) == ["clean", "vq"]
    torch.testing.assert_close(
        joined.parts["clean"], torch.tensor([torch.nan, 1, 1]), equal_nan=True
    )


def test_trainer_scores_by_chunks() -> None:
    """6 samples in chunks of 4 and 2."""
    config = settings(sampling__batch_size=4)
    reward = OneChunk()
    with torch.enable_grad():
        row = tiny_trainer(config, reward).iteration(0)
    assert reward.sizes == [4, 2]
    assert row["reward/dropped"] == 0
