"""HPSv3 on a tiny Qwen2-VL in the published layout, against a computation that shares nothing with it."""

import hashlib
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sage_fast.rewards.hpsv3 import TEMPLATE, HPSv3Reward
from sage_fast.util.errors import UserError
from tests.test_videoalign import Reference, size, videos
from tests.tiny_rewards import hpsv3_shapes, published_config, published_weights, write_qwen2_vl

PROMPTS = ["a red ball", "two dogs run over a {green} lawn"]


def write_hpsv3(folder: Path, weights: dict[str, Tensor]) -> Path:
    """Write the folder MizzenAI/HPSv3."""
    folder.mkdir()
    save_file(weights, folder / "HPSv3.safetensors")
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Base model, and weights as published."""
    base = write_qwen2_vl(tmp_path_factory.mktemp("hpsv3") / "base")
    return base, published_weights(base, hpsv3_shapes)


@pytest.fixture
def reward(tiny: tuple[Path, dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HPSv3Reward:
    base, weights = tiny
    monkeypatch.setattr(HPSv3Reward, "min_frame_pixels", 8 * 28 * 28)
    monkeypatch.setattr(HPSv3Reward, "max_frame_pixels", 8 * 28 * 28)
    return HPSv3Reward(str(write_hpsv3(tmp_path / "HPSv3", weights)), base=str(base), num_frames=2)


def test_scores_are_those_of_an_independent_computation(
    tiny: tuple[Path, dict[str, Tensor]], reward: HPSv3Reward
) -> None:
    """The mean over the first and last frame of the first output at <|Reward|>; 56 x 112 pixels stay."""
    base, weights = tiny
    clips = videos(2, 9, 56, 112)
    scores = reward.score(clips, PROMPTS)["hpsv3"]

    def score(model: Reference, frame: Tensor, prompt: str) -> Tensor:
        twice = (frame * 255).round().expand(2, -1, -1, -1).numpy()
        x = model.read(twice, "image", TEMPLATE.replace("{text_prompt}", prompt))[0]
        x = model.linear("rm_head.3", model.linear("rm_head.0", x).clamp(min=0)).clamp(min=0)
        return model.linear("rm_head.5", x)[0]

    model = Reference(base, weights, tokens=["<|Reward|>"])
    right = torch.stack([
        torch.stack([score(model, clip[i], prompt) for i in (0, 8)]) for clip, prompt in zip(clips, PROMPTS)
    ])  # fmt: skip
    assert (scores.double() - right.mean(1)).abs().max() < 1e-4
    assert scores.dtype == torch.float32
    for defect in ({"three_d": True}, {"rounded": False}):
        wrong = score(Reference(base, weights, tokens=["<|Reward|>"], **defect), clips[0, 0], PROMPTS[0])
        assert (wrong - right[0, 0]).abs() > 5e-3, f"{defect} would not be seen"
    clips[1, 8, 0, 3, 3] = math.nan
    assert reward.score(clips, PROMPTS)["hpsv3"].isfinite().tolist() == [True, False]
    assert reward.score(clips[:1, :1], PROMPTS[:1])["hpsv3"].isfinite().all(), "a video of fewer frames"
    with pytest.raises(ValueError, match="holds a special token"):
        reward.score(clips[:1], ["a <|Reward|>"])


def test_the_prompt_and_the_size_are_the_published_ones(tiny: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    digest = "f6ee57479d4e9eee76b49c00dc962e1e696a5a2b3cc32cebd9b1fa76fe27502c"  # spaces at the ends of lines count
    assert hashlib.sha256(TEMPLATE.encode()).hexdigest() == digest
    base, weights = tiny
    published = HPSv3Reward(str(write_hpsv3(tmp_path / "HPSv3", weights)), base=str(base))
    assert size(published, 480, 848) == (336, 588)
    assert size(published, 32, 32) == (448, 448)
    assert published.choose(81) == [0, 11, 23, 34, 46, 57, 69, 80]


@pytest.mark.parametrize(("key", "value", "why"), [
    ("rm_head.5.bias", None, 'Missing key.*"rm_head.5.bias"'),
    ("rm_head.0.weight", torch.zeros(1024, 31), r"size mismatch for rm_head.0.weight: .*\[1024, 31\]"),
    ("rm_head.7.weight", torch.zeros(1), 'Unexpected key.*"rm_head.7.weight"'),
    ("visual.merger.ln_q.bias", None, 'Missing key.*"visual.merger.ln_q.bias"'),
    ("model.visual.merger.ln_q.bias", torch.zeros(1), 'Unexpected key.*"language_model.visual.merger.ln_q.bias"'),
])  # fmt: skip
def test_weights_are_loaded_strictly(
    key: str, value: Tensor | None, why: str, tiny: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    """No part of the head is ever random."""
    base, weights = tiny
    wrong = {name: tensor for name, tensor in weights.items() if name != key} | ({} if value is None else {key: value})
    with pytest.raises(UserError, match=f"the checkpoint does not fit .*\n.*{why}"):
        HPSv3Reward(str(write_hpsv3(tmp_path / "HPSv3", wrong)), base=str(base))


def test_what_else_is_refused(tiny: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    base, _ = tiny
    for given, why in (
        ({"path": "someone/HPSv3"}, "hf download MizzenAI/HPSv3 --local-dir HPSv3"),
        ({"path": str(base)}, r"expected a folder with HPSv3.safetensors"),
        ({"base": str(tmp_path)}, "expected a folder or hub id of Qwen2-VL-7B-Instruct"),
        ({"num_frames": 0}, "num_frames = 0: expected at least 1"),
    ):
        with pytest.raises(UserError, match=why):
            HPSv3Reward(**({"path": str(tmp_path), "base": str(base)} | given))


def test_the_published_file_is_loaded_whole() -> None:
    config = published_config(3584, 18944, heads=28, key_heads=4)  # Qwen2-VL-7B-Instruct
    shapes = hpsv3_shapes(config)
    # A report of what is in the file: github.com/MizzenAI/HPSv3, issue 15.
    assert shapes["model.embed_tokens.weight"] == (151658, 3584)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (512, 3584)
    assert shapes["visual.merger.mlp.2.weight"] == (3584, 5120)
    config.text_config.vocab_size += 1
    weights = {key: torch.empty(shape, dtype=torch.bfloat16, device="meta") for key, shape in shapes.items()}
    reward = nn.Sequential(
        nn.Linear(3584, 1024), nn.ReLU(), nn.Dropout(), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    ).to("meta")
    loader = object.__new__(HPSv3Reward)
    loader.config, loader.dtype = config, torch.bfloat16
    network = loader.build(reward, weights)
    assert 2 * sum(p.numel() for p in network.parameters() if p.dtype == torch.bfloat16) == HPSv3Reward.gpu_bytes
    assert {p.dtype for p in network.rm_head.parameters()} == {torch.float32}
