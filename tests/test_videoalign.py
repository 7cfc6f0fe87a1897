"""VideoAlign on a tiny Qwen2-VL in the published layout, against a computation that shares nothing
with it."""

import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

from sage_fast.rewards.shipped.frame_reward import levels, resize
from sage_fast.rewards.shipped.videoalign import TEMPLATE, VideoAlignReward
from sage_fast.util.errors import UserError
from tests.tiny_rewards import (
    ALPHA,
    INFERENCE_CONFIG,
    QWEN2_VL_CHAT_TEMPLATE,
    RANK,
    model_config,
    published_config,
    published_shapes,
    published_weights,
    write_qwen2_vl,
    write_video_reward,
)

PROMPTS = [
    "a red ball",
    "two dogs run over a {green} lawn, and a bird looks at them for a long, long time",
]


class Small(VideoAlignReward):
    """With frames of 4 to 12 tokens."""

    min_frame_pixels = 4 * 28 * 28

    def __init__(self, path: str, **given: Any) -> None:
        super().__init__(path, **given)
        self.max_frame_pixels = 12 * 28 * 28


CLOSE = (
    1e-4  # of raw scores of about 5; each defect below changes them by more than 50 times as much
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Tensor]]:
    """Base model, checkpoint, and the weights in it."""
    folder = tmp_path_factory.mktemp("videoalign")
    base = write_qwen2_vl(folder / "base")
    weights = published_weights(base)
    return base, write_video_reward(folder / "VideoReward", weights), weights


@pytest.fixture(scope="module")
def reward(tiny: tuple[Path, Path, dict[str, Tensor]]) -> VideoAlignReward:
    base, checkpoint, _ = tiny
    return Small(str(checkpoint), base=str(base))


def videos(count: int, frames: int = 20, height: int = 56, width: int = 84) -> Tensor:
    """Whole levels, as in a file."""
    draw = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, frames, 3, height, width), generator=draw) / 255


def size(reward: VideoAlignReward, height: int, width: int) -> tuple[int, int]:
    """Size of a frame as the network sees it."""
    _, (_, rows, columns) = reward.patches(torch.zeros(2, 3, height, width))
    return 14 * rows, 14 * columns


class Reference:
    """Qwen2-VL as its paper has it, in float64, from the file's own keys, with the LoRA beside its
    layer.

    Args:
        tokens: special tokens of the reward.
        three_d: positions of M-RoPE, as transformers 5 would give them, in place of one place after
            the other.
        lora: with the LoRA.
        rounded: rotary frequencies in bfloat16.
    """

    def __init__(
        self,
        base: Path,
        weights: dict[str, Tensor],
        three_d: bool = False,
        lora: bool = True,
        rounded: bool = True,
        tokens: Sequence[str] = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"),
    ) -> None:
        self.weights = {
            key.removeprefix("base_model.model."): value.double() for key, value in weights.items()
        }
        self.three_d, self.lora, self.rounded = three_d, lora, rounded
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        self.special = [len(self.tokenizer) + i for i in range(len(tokens))]
        self.tokenizer.add_tokens(list(tokens), special_tokens=True)

    def frequencies(self, theta: float, width: int) -> Tensor:
        exact = torch.tensor([theta ** -(2 * i / width) for i in range(width // 2)])
        return (exact.bfloat16() if self.rounded else exact).double()

    def linear(self, name: str, x: Tensor) -> Tensor:
        adapted = f"{name}.base_layer.weight" in self.weights
        layer = f"{name}.base_layer" if adapted else name
        y = x @ self.weights[f"{layer}.weight"].T
        if f"{layer}.bias" in self.weights:
            y = y + self.weights[f"{layer}.bias"]
        if adapted and self.lora:
            a, b = (self.weights[f"{name}.lora_{which}.default.weight"] for which in "AB")
            y = y + ALPHA / RANK * (x @ a.T @ b.T)
        return y

    def layer_norm(self, name: str, x: Tensor) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-6).sqrt()
        return x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def rms_norm(self, name: str, x: Tensor) -> Tensor:
        return (
            x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.weights[f"{name}.weight"]
        )

    @staticmethod
    def rotate(x: Tensor, angles: Tensor) -> Tensor:
        """The halves of x `[N, heads, D]` as real and imaginary parts, turned by angles `[N, D /
        2]`."""
        half = x.shape[-1] // 2
        turned = (
            torch.complex(x[..., :half], x[..., half:])
            * torch.polar(torch.ones_like(angles), angles)[:, None]
        )
        return torch.cat([turned.real, turned.imag], dim=-1)

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -math.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)

    def see(self, frames: np.ndarray) -> tuple[Tensor, int, int]:
        """Tokens of frames `[n, 3, H, W]` 0 to 255, patch by patch, and how many are in a row and
        column."""
        mean = np.array([0.48145466, 0.4578275, 0.40821073])[:, None, None]
        std = np.array([0.26862954, 0.26130258, 0.27577711])[:, None, None]
        pixels = (frames / 255 - mean) / std
        rows, columns = frames.shape[2] // 28, frames.shape[3] // 28
        conv = self.weights["visual.patch_embed.proj.weight"]
        angles, seen = [], []
        frequencies = self.frequencies(10000.0, 8)
        for pair in range(0, len(frames), 2):
            x = []
            for row in range(rows):
                for column in range(columns):
                    for h, w in ((2 * row + i, 2 * column + j) for i in range(2) for j in range(2)):
                        patch = pixels[
                            pair : pair + 2, :, 14 * h : 14 * h + 14, 14 * w : 14 * w + 14
                        ]
                        x.append(torch.einsum("dcthw,tchw->d", conv, torch.from_numpy(patch)))
                        angles.append(torch.cat([h * frequencies, w * frequencies]))
            seen.append(self.tower(torch.stack(x), torch.stack(angles[-len(x) :])))
        return torch.cat(seen), rows, columns

    def tower(self, x: Tensor, angles: Tensor) -> Tensor:
        """The tokens of two frames, which see only each other."""
        for block in ("visual.blocks.0", "visual.blocks.1"):
            y = self.linear(f"{block}.attn.qkv", self.layer_norm(f"{block}.norm1", x))
            q, k, v = y.unflatten(-1, (3, 2, 16)).unbind(1)
            y = self.attend(self.rotate(q, angles), self.rotate(k, angles), v, causal=False)
            x = x + self.linear(f"{block}.attn.proj", y)
            y = self.linear(f"{block}.mlp.fc1", self.layer_norm(f"{block}.norm2", x))
            x = x + self.linear(f"{block}.mlp.fc2", y / (1 + torch.exp(-1.702 * y)))
        y = self.layer_norm("visual.merger.ln_q", x).reshape(len(x) // 4, -1)
        y = torch.nn.functional.gelu(self.linear("visual.merger.mlp.0", y))
        return self.linear("visual.merger.mlp.2", y)

    def places(self, before: int, after: int, t: int, h: int, w: int) -> Tensor:
        """`[3, L]`"""
        if not self.three_d:
            return torch.arange(before + t * h * w + after).expand(3, -1)
        grid = torch.cartesian_prod(torch.arange(t), torch.arange(h), torch.arange(w)).T + before
        end = torch.arange(after) + grid.max() + 1
        return torch.cat([torch.arange(before).expand(3, -1), grid, end.expand(3, -1)], dim=1)

    def score(self, frames: np.ndarray, prompt: str) -> Tensor:
        """Raw VQ, MQ, TA of the chosen frames, 0 to 255."""
        read = self.read(frames, "video", TEMPLATE.replace("{text_prompt}", prompt))
        return (read @ self.weights["rm_head.weight"].T)[:, 0]

    def read(self, frames: np.ndarray, kind: str, request: str) -> Tensor:
        """The last hidden states at the special tokens."""
        seen, rows, columns = self.see(frames)
        content = [{"type": kind}, {"type": "text", "text": request}]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        before, after = (self.tokenizer.encode(part) for part in text.split(f"<|{kind}_pad|>"))
        embed = self.weights["model.embed_tokens.weight"]
        x = torch.cat([embed[before], seen, embed[after]])
        places = self.places(len(before), len(after), len(frames) // 2, rows, columns).double()
        section = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2])  # mrope_section
        angles = places[section].T * self.frequencies(1e6, 16)
        for layer in ("model.layers.0", "model.layers.1"):
            y = self.rms_norm(f"{layer}.input_layernorm", x)
            q, k, v = (
                self.linear(f"{layer}.self_attn.{n}_proj", y).unflatten(-1, (-1, 16)) for n in "qkv"
            )
            k, v = self.rotate(k, angles).repeat(1, 2, 1), v.repeat(1, 2, 1)
            x = x + self.linear(
                f"{layer}.self_attn.o_proj", self.attend(self.rotate(q, angles), k, v, causal=True)
            )
            y = self.rms_norm(f"{layer}.post_attention_layernorm", x)
            gate = self.linear(f"{layer}.mlp.gate_proj", y)
            y = gate / (1 + torch.exp(-gate)) * self.linear(f"{layer}.mlp.up_proj", y)
            x = x + self.linear(f"{layer}.mlp.down_proj", y)
        ids = [*before, *[-1] * len(seen), *after]
        return self.rms_norm("model.norm", x)[[ids.index(token) for token in self.special]]


def raw(scores: dict[str, Tensor]) -> Tensor:
    return torch.stack([scores["vq_raw"], scores["mq_raw"], scores["ta_raw"]], dim=1).double()


def test_scores_are_those_of_an_independent_computation(
    tiny: tuple[Path, Path, dict[str, Tensor]], reward: VideoAlignReward
) -> None:
    base, _, weights = tiny
    clips = videos(2)
    frames = (clips[:, [0, 6, 13, 19]] * 255).round().numpy()  # 20 frames at 24 a second: 4 of them
    scores = reward.score(clips.requires_grad_(), PROMPTS)

    model = Reference(base, weights)
    right = torch.stack([model.score(clip, prompt) for clip, prompt in zip(frames, PROMPTS)])
    assert (raw(scores) - right).abs().max() < CLOSE
    for defect in ({"three_d": True}, {"lora": False}, {"rounded": False}):
        wrong = Reference(base, weights, **defect).score(frames[0], PROMPTS[0])
        assert (wrong - right[0]).abs().max() > 50 * CLOSE, f"{defect} would not be seen"
    for i, part in enumerate(("vq", "mq", "ta")):
        mean, std = (
            INFERENCE_CONFIG[f"{part.upper()}_mean"],
            INFERENCE_CONFIG[f"{part.upper()}_std"],
        )
        torch.testing.assert_close(
            scores[part].double(), (right[:, i] - mean) / std, atol=CLOSE, rtol=0
        )
    assert scores.keys() == {"vq", "mq", "ta", "vq_raw", "mq_raw", "ta_raw"}
    assert all(
        value.dtype == torch.float32 and not value.requires_grad for value in scores.values()
    )
    assert not any(p.requires_grad for p in reward.network.parameters())
    assert not reward.network.training


def test_neither_padding_nor_the_others_of_a_batch_change_a_score(reward: VideoAlignReward) -> None:
    prompts = [*PROMPTS, "x"] * 3  # 9: two batches
    clips = videos(9)
    together = reward.score(clips, prompts)
    alone = torch.cat([raw(reward.score(clips[i : i + 1], [prompts[i]])) for i in range(9)])
    assert (raw(together) - alone).abs().max() < 1e-5
    clips[4, 0, 1, 2, 3] = math.nan
    spoilt = raw(reward.score(clips, prompts))
    assert spoilt.isfinite().all(dim=1).tolist() == [i != 4 for i in range(9)]
    assert (spoilt[:4] - alone[:4]).abs().max() < 1e-5


def test_bfloat16_scores_alike(
    tiny: tuple[Path, Path, dict[str, Tensor]], reward: VideoAlignReward
) -> None:
    base, checkpoint, _ = tiny
    clips = videos(2)
    exact = raw(reward.score(clips, PROMPTS))
    short = Small(str(checkpoint), base=str(base), dtype="bfloat16", device="cpu")
    kinds = {p.dtype for name, p in short.network.named_parameters() if name != "rm_head.weight"}
    assert kinds == {torch.bfloat16}
    scores = raw(short.score(clips, PROMPTS))
    assert (scores - exact).abs().max() < 0.5
    assert (scores.bfloat16().double() != scores).any(), "the head keeps float32"


def test_which_frames_are_looked_at(reward: VideoAlignReward) -> None:
    # vision_process.py of github.com/KwaiVGI/VideoAlign: smart_nframes, then linspace
    reward.video_fps = 24.0
    assert reward.choose(81) == [0, 16, 32, 48, 64, 80]  # 6.75 frames are 6
    assert reward.choose(121) == [0, 13, 27, 40, 53, 67, 80, 93, 107, 120]
    assert reward.choose(16) == [0, 5, 10, 15]  # at least 4
    assert reward.choose(3) == [0, 2]
    reward.video_fps = 10.0
    assert reward.choose(50) == [0, 5, 11, 16, 22, 27, 33, 38, 44, 49]
    assert reward.choose(50, 24.0) == reward.choose(50), (
        "the argument stands for the rate of the videos"
    )
    reward.video_fps = None
    assert reward.choose(50, 10.0) == [0, 5, 11, 16, 22, 27, 33, 38, 44, 49]
    assert reward.choose(81) == reward.choose(81, 24.0) == [0, 16, 32, 48, 64, 80]
    assert len(reward.choose(53, 8.0)) == 14
    assert len(reward.choose(100_000, 2.0)) == 768
    with pytest.raises(ValueError, match="at least 2 frames, got 1"):
        reward.score(videos(1, 1), ["a"])


def test_published_limits_on_pixels(tiny: tuple[Path, Path, dict[str, Tensor]]) -> None:
    base, checkpoint, _ = tiny
    published = VideoAlignReward(str(checkpoint), base=str(base))
    assert (published.fps, published.min_frame_pixels, published.max_frame_pixels) == (
        2,
        100352,
        200704,
    )
    # smart_resize of the same file
    assert size(published, 480, 848) == (336, 588)
    assert size(published, 720, 1280) == (336, 588)
    assert size(published, 848, 480) == (588, 336)
    assert size(published, 32, 32) == (336, 336)
    assert size(published, 360, 480) == (364, 476)


def test_frames_are_those_of_the_published_processor(reward: VideoAlignReward) -> None:
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 4 * 28 * 28, "longest_edge": 12 * 28 * 28}
    )
    # kept; made smaller; enlarged
    for height, width, apart in ((56, 84, 0), (200, 300, 1), (31, 47, 1)):
        # PIL also clips between its two directions: far from that
        still = 0.25 + videos(1, 1, height, width)[0] / 2
        patches, (t, h, w) = reward.patches(still.expand(2, -1, -1, -1))
        picture = (still[0] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        theirs = processor(picture, return_tensors="pt")
        assert theirs["image_grid_thw"].tolist() == [[t, h, w]]
        pixels = resize(levels(still), 14 * h, 14 * w)
        assert torch.equal(pixels, pixels.round()), "not 8 bits"
        # PIL rounds to 8 bits between its two directions, torch only at the end: one level at most.
        error = (
            (patches - theirs["pixel_values"]).abs().max()
            * 255
            * max((0.26862954, 0.26130258, 0.27577711))
        )
        assert error < apart + 0.1, (height, width)
    moving = videos(1, 4)[0]
    patches, _ = reward.patches(moving)
    pixel = (
        moving[3, 1, 14 + 5, 28 + 14 + 7] - 0.4578275
    ) / 0.26130258  # frame 3, green, row 19, column 49
    # second pair, second token, its last patch
    cell, inside = (
        24 + 1 * 4 + 3,
        (1 * 2 + 1) * 14 * 14 + 5 * 14 + 7,
    )
    torch.testing.assert_close(patches[cell, inside], pixel)


def test_the_prompt_is_word_for_word_the_published_one(reward: VideoAlignReward) -> None:
    digest = "fdb6309bac618dd0c8b1b589d3a0970a974f7856eecbb355a190b2dce54af700"
    assert hashlib.sha256(TEMPLATE.encode()).hexdigest() == digest
    content = [
        {"type": "video"},
        {"type": "text", "text": TEMPLATE.format(text_prompt="a red ball")},
    ]
    chat = reward.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        chat_template=QWEN2_VL_CHAT_TEMPLATE, tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    assert reward.text("a red ball", (2, 4, 6)) == chat.replace(
        "<|video_pad|>", "<|video_pad|>" * 12
    )


@pytest.mark.parametrize("word", ["<|TA_reward|>", "<|VQ_reward|>", "<|video_pad|>"])
def test_a_prompt_with_a_special_token_is_refused(reward: VideoAlignReward, word: str) -> None:
    with pytest.raises(ValueError, match="holds a special token"):
        reward.score(videos(1), [f"a ball {word}"])


def test_what_is_not_a_batch_of_videos(reward: VideoAlignReward) -> None:
    for bad in (videos(1)[0], videos(1).movedim(2, -1), (videos(1) * 255).to(torch.uint8)):
        with pytest.raises(ValueError, match="expected float videos"):
            reward.score(bad, ["a"])
    with pytest.raises(ValueError, match=r"got torch.float32 \[2, .*\] and 1 prompt"):
        reward.score(videos(2), ["a"])


LAYER = "base_model.model.model.layers.1."


def test_every_key_that_does_not_fit_is_named_at_once(
    tiny: tuple[Path, Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    base, _, weights = tiny
    wrong = dict(weights)
    del wrong["base_model.model.rm_head.weight"]
    del wrong["base_model.model.visual.merger.ln_q.bias"]
    del wrong[f"{LAYER}self_attn.q_proj.lora_B.default.weight"]
    # its LoRA would be lost
    wrong[f"{LAYER}mlp.up_proj.weight"] = wrong.pop(f"{LAYER}mlp.up_proj.base_layer.weight")
    wrong["base_model.model.model.embed_tokens.weight"] = torch.zeros(700, 32)
    wrong[f"{LAYER}self_attn.k_proj.lora_A.default.weight"] = torch.zeros(RANK + 1, 32)
    wrong["model.language_model.layers.0.extra"] = torch.zeros(1)
    with pytest.raises(
        UserError, match="the checkpoint does not fit Qwen2-VL-2B-Instruct"
    ) as error:
        VideoAlignReward(str(write_video_reward(tmp_path / "wrong", wrong)), base=str(base))
    listed = str(error.value)
    missing, rest = listed.split("Missing key(s)")[1].split("Unexpected key(s)")
    unknown, shapes = rest.split("size mismatch for ", 1)
    module, (q, k, up) = (
        "language_model.layers.1.",
        ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"),
    )
    assert set(re.findall('"(.*?)"', missing)) == {
        f"{module}{q}.weight", f"{module}{k}.weight", "rm_head.weight", "visual.merger.ln_q.bias",
    }  # fmt: skip
    left = [(q, "base_layer"), (q, "lora_A.default"), (k, "base_layer"), (k, "lora_A.default"), (k,
        "lora_B.default"),
            (up, "lora_A.default"), (up, "lora_B.default")]  # fmt: skip
    assert set(re.findall('"(.*?)"', unknown)) == {
        "language_model.language_model.layers.0.extra",
        *(f"{module}{layer}.{part}.weight" for layer, part in left),
    }  # fmt: skip
    assert shapes.startswith("language_model.embed_tokens.weight: ")
    assert "[700, 32]" in shapes
    assert "[617, 32]" in shapes


def test_the_published_file_has_the_keys_and_the_size_that_are_loaded() -> None:
    config = published_config(1536, 8960, heads=12, key_heads=2)  # Qwen2-VL-2B-Instruct
    shapes = published_shapes(config, rank=64)
    # loaded by UniRL (github.com/Tencent-Hunyuan/UniRL, pull request 97)
    assert len(shapes) == 1123
    tensors = 2 * sum(shape.numel() for shape in shapes.values())  # bytes, in bfloat16
    # of the file on the hub; torch.save adds a header to each tensor
    assert 0 < 5_031_072_529 - tensors < 1123 * 400
    config.text_config.vocab_size += 3
    weights = {
        key: torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for key, shape in shapes.items()
    }
    loader = object.__new__(VideoAlignReward)
    loader.config, loader.dtype = config, torch.bfloat16
    network = loader.build(weights, 64, 2.0)  # strict: each key has a place of its own
    assert (
        2 * sum(p.numel() for p in network.parameters() if p.dtype == torch.bfloat16)
        == VideoAlignReward.gpu_bytes
    )
    assert {p.dtype for p in network.rm_head.parameters()} == {torch.float32}


def test_a_rank_stabilised_lora_is_scaled_by_the_root_of_its_rank(
    tiny: tuple[Path, Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    base, _, weights = tiny
    folder = write_video_reward(tmp_path / "rslora", weights)
    config = model_config()
    config["peft_lora_config"] |= {"use_rslora": True, "lora_alpha": ALPHA / math.sqrt(RANK)}
    (folder / "model_config.json").write_text(json.dumps(config))
    same = Small(str(folder), base=str(base))
    published = Small(str(tiny[1]), base=str(base))
    for key, value in published.network.state_dict().items():
        assert torch.equal(same.network.state_dict()[key], value), key


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float16"}, r"dtype = 'float16': expected one of bfloat16, float32"),
        ({"video_fps": math.nan}, r"video_fps = nan"),
        ({"base": "{nowhere}"},
         r"base = .*nowhere.*: expected a folder or hub id of Qwen2-VL-2B-Instruct"),
        ({"base": "someone/qwen"},
         r"base = 'someone/qwen': expected a folder or hub id of Qwen2-VL-2B-Instruct"),
        ({"path": "someone/VideoReward"}, r"not found on the hub or in its cache"),
        ({"path": "{nowhere}"}, r"hf download KwaiVGI/VideoReward --local-dir"),
        ({"path": "{base}"}, r"expected the VideoAlign checkpoint, with model_config.json"),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(
    tiny: tuple[Path, Path, dict[str, Tensor]],
    tmp_path: Path,
    arguments: dict[str, Any],
    message: str,
) -> None:
    base, checkpoint, _ = tiny
    given: dict[str, Any] = {"path": str(checkpoint), "base": str(base)}
    for name, value in arguments.items():
        given[name] = (
            value.format(nowhere=tmp_path / "nowhere", base=base)
            if isinstance(value, str)
            else value
        )
    with pytest.raises((UserError, ImportError, ValueError), match=message):
        VideoAlignReward(**given)


@pytest.fixture
def folder(tiny: tuple[Path, Path, dict[str, Tensor]], tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be spoilt."""
    return write_video_reward(tmp_path / "VideoReward", tiny[2])


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("data_config", "prompt_template_type", "simple",
         "prompt_template_type = 'simple': expected"),
        ("data_config", "num_frames", 8, "num_frames = 8: expected None"),
        ("model_config", "output_dim", 3, "output_dim = 3: expected 1"),
        ("model_config", "use_special_tokens", False, "use_special_tokens = False: expected True"),
        ("inference_config", "MQ_std", ..., "KeyError: 'MQ_std'"),
        ("data_config", "fps", None, "model_config.json: not the settings of KwaiVGI/VideoReward"),
        ("peft_lora_config", "lora_alpha", ..., "KeyError: 'lora_alpha'"),
    ],
)  # fmt: skip
def test_another_kind_of_reward_model_is_refused(
    tiny: tuple[Path, Path, dict[str, Tensor]],
    folder: Path,
    section: str,
    key: str,
    value: Any,
    message: str,
) -> None:
    config = model_config()
    if value is ...:
        del config[section][key]
    else:
        config[section][key] = value
    (folder / "model_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        VideoAlignReward(str(folder), base=str(tiny[0]))


class Runs:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_what_is_not_a_file_of_tensors_is_refused(
    tiny: tuple[Path, Path, dict[str, Tensor]], folder: Path, tmp_path: Path
) -> None:
    file = folder / "checkpoint-11352" / "model.pth"
    for content, why in (
        ({"weight": Runs(tmp_path / "ran")}, "not read"),
        (b"not a checkpoint", "not read"),
        ({"step": 3}, "expected the tensors"),
        ([torch.zeros(1)], "expected the tensors"),
    ):
        file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
        with pytest.raises(UserError, match=rf"model\.pth: {why}"):
            VideoAlignReward(str(folder), base=str(tiny[0]))
    assert not (tmp_path / "ran").exists(), "a checkpoint ran code"
    file.unlink()
    with pytest.raises(
        UserError, match=r"no checkpoint-N/model\.pth in it, such as checkpoint-11352"
    ):
        VideoAlignReward(str(folder), base=str(tiny[0]))


def test_the_last_checkpoint_is_taken(
    tiny: tuple[Path, Path, dict[str, Tensor]], folder: Path
) -> None:
    (folder / "checkpoint-9999").mkdir()
    torch.save({}, folder / "checkpoint-9999" / "model.pth")
    VideoAlignReward(str(folder), base=str(tiny[0]))
