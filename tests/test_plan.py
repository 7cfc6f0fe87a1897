"""Every formula of the plan against a count that PyTorch makes."""

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sage_fast.config import ModelConfig, build
from sage_fast.plan import checkpointed_activation_bytes, format_plan, forward_flops, plan
from sage_fast.policy.hunyuan import add_lora
from tests.tiny import settings, tiny_model

PUBLISHED = build({"sampling.num_frames": 81, "sampling.height": 480, "sampling.width": 832, "kl.strategy": "dual"})


def forward(transformer: torch.nn.Module, space: tuple[int, int, int], text: int, device: str) -> torch.Tensor:
    config = transformer.config
    with torch.device(device):
        return transformer(
            torch.randn(1, config.in_channels, *space), torch.full((1,), 500.0),
            torch.randn(1, text, config.text_embed_dim), torch.ones(1, text, dtype=torch.int64),
            encoder_hidden_states_2=torch.zeros(1, 0, config.text_embed_2_dim),
            encoder_attention_mask_2=torch.zeros(1, 0, dtype=torch.int64),
            image_embeds=torch.zeros(1, 0, config.image_embed_dim), return_dict=False,
        )[0]  # fmt: skip


@pytest.mark.parametrize(("space", "text"), [((5, 6, 7), 9), ((2, 16, 16), 40)])
def test_forward_flops(space: tuple[int, int, int], text: int) -> None:
    transformer = HunyuanVideo15Transformer3DModel(
        num_attention_heads=8, attention_head_dim=32, num_layers=3, num_refiner_layers=1, rope_axes_dim=(8, 12, 12),
        text_embed_dim=48, text_embed_2_dim=8, image_embed_dim=8,
    )  # fmt: skip
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter, torch.no_grad():  # the CPU's fused attention is not counted
        forward(transformer, space, text, "cpu")
    tokens = space[0] * space[1] * space[2]
    assert forward_flops(transformer.config, tokens, text) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_published_model() -> None:
    """DESIGN section 8: 8.3 B parameters, 32,760 tokens, 6.6e14 FLOPs a forward, 73 % of it attention."""
    result = plan(PUBLISHED)
    assert result.parameters == pytest.approx(8.3e9, rel=0.01)
    assert result.latent_shape == (32, 21, 30, 52)
    assert result.tokens == 32_760
    assert result.flops["forward"] == pytest.approx(6.6e14, rel=0.01)
    text = format_plan(result)
    assert "8.3" in text
    assert "32,760" in text


def test_trained_parameters_are_those_of_peft() -> None:
    config = settings()
    policy = tiny_model(config).policy
    result = plan(config, dict(policy.transformer.config))
    assert result.trainable == sum(p.numel() for p in policy.parameters().values())
    assert result.parameters == sum(p.numel() for n, p in policy.transformer.named_parameters() if ".lora_" not in n)
    full = settings(model__tuning="full")
    assert plan(full, dict(policy.transformer.config)).trainable > 0.8 * result.parameters


def test_checkpointed_activations() -> None:
    """Bytes kept for the backward, block by block, as autograd saves them."""

    def saved(layers: int) -> int:
        transformer = HunyuanVideo15Transformer3DModel(
            num_attention_heads=4, attention_head_dim=16, num_layers=layers, num_refiner_layers=1, text_embed_dim=32,
            rope_axes_dim=(4, 6, 6), text_embed_2_dim=8, image_embed_dim=8,
        )  # fmt: skip
        model = ModelConfig()
        add_lora(transformer, rank=4, alpha=4, targets=model.lora_targets, seed=0)
        transformer.enable_gradient_checkpointing()
        weights = {p.untyped_storage().data_ptr() for p in transformer.parameters()}
        storages: dict[int, tuple[int, torch.Tensor]] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward(transformer, (3, 8, 8), 16, "cpu")
        return sum(size for size, _ in storages.values())

    architecture = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2}
    assert saved(5) - saved(3) == checkpointed_activation_bytes(architecture, 3 * 64 + 16, 4)


def test_counts_of_an_iteration() -> None:
    config = settings(sampling__guidance_scale=3.0, train__timestep_fraction=0.5, sampling__steps=8)
    result = plan(config, dict(tiny_model(config).policy.transformer.config))
    assert result.samples == 6
    assert result.forwards == {"rollout": 6 * 8 * 2, "training": 6 * 4 * 2, "anchor": 6 * 4 * 2}
    assert result.memory["trajectories (fp32 latents)"] == 4 * 1280 * 6 * 5
