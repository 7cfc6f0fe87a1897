"""What is on the device only while it is used: the autoencoder and rewards where training has no
room for them, the model while prompts are encoded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.config.schema import RewardConfig, SamplingConfig
from sage_fast.models.decoder import ParkedDecoder
from sage_fast.models.encoders import place
from sage_fast.models.find import find_spec
from sage_fast.models.load import load_model
from sage_fast.parallel import fit
from sage_fast.rewards.composite import CompositeReward
from sage_fast.util.captions import Caption
from sage_fast.util.parking import Parked
from tests.pretend_cuda import CUDA, PretendCuda
from tests.test_streaming import BLOCKS, MODES, assert_equal, model_of, two_iterations
from tests.tiny import keys_of, settings, tiny_model
from tests.tiny_checkpoint import write_tiny_checkpoint

CPU = torch.device("cpu")


def places(network: nn.Module) -> set[str]:
    return {tensor.device.type for tensor in [*network.parameters(), *network.buffers()]}


def test_a_parked_decoder_decodes_as_before_and_leaves_the_device() -> None:
    with PretendCuda():
        model = tiny_model(settings(), device=CUDA)
        latents = torch.randn(2, 32, 3, 4, 4).to(CUDA)
        expected = model.decoder(latents).cpu()
        plan = str(model.decoder.plan((32, 3, 4, 4)))
        decoder = ParkedDecoder(model.decoder, CUDA)
        assert places(decoder.vae) == {"cpu"}
        for _ in range(2):
            assert torch.equal(decoder(latents).cpu(), expected)
            assert places(decoder.vae) == {"cpu"}
        assert str(decoder.plan((32, 3, 4, 4))) == plan
        assert places(decoder.vae) == {"cpu"}


class Scorer(nn.Module):
    """A reward that is a network."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.seen: set[str] = set()

    def forward(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        self.seen = places(self)
        return {"score": self.layer(videos.mean((1, 3, 4)))[:, 0]}


def test_a_parked_reward_scores_as_before_and_leaves_the_device() -> None:
    with PretendCuda():
        reward = nn.Module.to(Scorer(), CUDA)
        config = RewardConfig(name="mine:Scorer", weights={"score": 1.0})
        scorer = CompositeReward(reward, config)
        videos, keys = torch.rand(2, 4, 3, 8, 8).to(CUDA), keys_of(["a", "b"])
        expected = scorer(videos, keys)
        assert scorer.bytes_on(CUDA) == 16
        scorer.park(CUDA)
        assert places(reward) == {"cpu"}
        for _ in range(2):
            assert torch.equal(scorer(videos, keys).rewards, expected.rewards)
            assert reward.seen == {"cuda"}
            assert places(reward) == {"cpu"}
        assert scorer.bytes_on(CUDA) == 0


class OnTwoDevices(nn.Module):
    """A reward whose last layer is in host memory, whatever happens to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Module.to(nn.Linear(3, 4), CUDA)
        self.last = nn.Linear(4, 1)
        self.register_buffer("empty", torch.empty(0), persistent=False)

    def forward(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        return {"score": self.last(self.layer(videos.mean((1, 3, 4))).cpu())[:, 0]}


def test_what_a_parked_reward_has_in_host_memory_stays_there() -> None:
    with PretendCuda():
        reward = OnTwoDevices()
        config = RewardConfig(name="mine:OnTwoDevices", weights={"score": 1.0})
        scorer = CompositeReward(reward, config)
        videos, keys = torch.rand(2, 4, 3, 8, 8).to(CUDA), keys_of(["a", "b"])
        expected = scorer(videos, keys).rewards
        assert not expected.isnan().any()
        scorer.park(CUDA)
        for _ in range(2):
            assert torch.equal(scorer(videos, keys).rewards, expected)
            assert places(reward) == {"cpu"}


def test_rewards_may_share_a_parked_network() -> None:
    with PretendCuda():
        network = nn.Module.to(nn.Linear(2, 2), CUDA)
        both = [Parked([network], CUDA), Parked([network], CUDA)]
        for parked in [*both, *both]:
            assert places(network) == {"cpu"}
            with parked.on_device():
                assert places(network) == {"cuda"}


def test_what_did_not_fit_comes_back_later() -> None:
    """A full device is no reason to leave half of a network in host memory for good."""
    with PretendCuda(), pytest.MonkeyPatch.context() as patch:
        network = nn.Module.to(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), CUDA)
        parked = Parked([network], CUDA)
        to = Tensor.to

        def full(tensor: Tensor, *given: Any, **others: Any) -> Tensor:
            if tensor.data_ptr() == network[1].weight.data_ptr():
                raise torch.OutOfMemoryError("full")
            return to(tensor, *given, **others)

        patch.setattr(Tensor, "to", full)
        with pytest.raises(torch.OutOfMemoryError), parked.on_device():
            pass
        assert places(network) == {"cpu"}
        patch.undo()
        with parked.on_device():
            assert places(network) == {"cuda"}


@pytest.mark.parametrize("count", [0, 2, BLOCKS])
def test_a_model_leaves_for_the_encoders_and_comes_back(count: int) -> None:
    expected = two_iterations(model_of(CPU, 0, MODES[0]), CPU)
    with PretendCuda():
        model = model_of(CUDA, count, MODES[0])
        before = {name: p.device for name, p in model.policy.named_parameters()}
        model.policy.refresh()
        with model.off_device():
            assert places(model.policy.transformer) == places(model.decoder.vae) == {"cpu"}
            for linear in model.policy.forward.fused_linears:
                assert linear._buffer.device == CPU
        assert {name: p.device for name, p in model.policy.named_parameters()} == before
        assert places(model.decoder.vae) == {"cuda"}
        assert_equal(two_iterations(model, CUDA), expected)


def test_an_encoder_larger_than_the_memory_gives_the_same_numbers(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path, seed=1)

    def encoded(patch: pytest.MonkeyPatch, free: float) -> list[Tensor]:
        patch.setattr(
            "sage_fast.models.hunyuan15.encoder.place",
            lambda networks, device, _: place(networks, device, free),
        )
        spec = find_spec(str(checkpoint))
        encode = spec.load_encoder(torch.float32, CPU, SamplingConfig())
        return [*encode(Caption('a ball with "text"')).tensors().values()]

    with pytest.MonkeyPatch.context() as patch:
        expected = encoded(patch, 1e12)
        assert_equal(encoded(patch, 0.0), expected)


def test_nothing_leaves_a_device_with_room() -> None:
    """What leaves first is the autoencoder, then the rewards; and only where streaming does not
    do."""
    config = settings(model__gradient_checkpointing="auto", kl__strategy="none")
    spec = find_spec(config.model.path)
    resolved = ResolvedConfig(config)
    needed = least_memory(config, spec, resolved)
    others = {fit.AUTOENCODER: 1e6, fit.REWARDS: 2e6}
    rates = fit.Rates(flops=1e12)
    found = []
    for spare in (3e6, 2e6, 0.0):
        policy = load_model(config.model, config.sampling, CPU, 0).policy
        policy.states.device = CUDA
        memory = (needed + 1) + spare
        fitting = fit.Fitting(resolved, spec, policy, ranks=1)
        _, parked = fitting.beside(others, memory, rates)
        found.append(parked)
    assert found == [[], [fit.AUTOENCODER], [fit.AUTOENCODER, fit.REWARDS]]


def least_memory(config: Any, spec: Any, resolved: ResolvedConfig) -> float:
    """Bytes in which training fits with all blocks streamed and everything recomputed."""
    low, high = 0.0, 1e9
    policy = load_model(config.model, config.sampling, CPU, 0).policy
    policy.states.device = CUDA
    while high - low > 1:
        middle = (low + high) / 2
        rates = fit.Rates(flops=1e12)
        found = fit.Fitting(resolved, spec, policy, ranks=1).best(middle, rates)
        low, high = (low, middle) if found.fits else (middle, high)
    return high
