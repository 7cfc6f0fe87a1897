"""A second model through the protocol: Wan 2.1 (diffusers' classes, tiny and random), whose text is
padded with zeros and read by cross-attention. All that it needs is in this file, and nothing else
in the tree knows it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.cli import main
from sage_fast.commands.export_formats import export
from sage_fast.config.loader import dump
from sage_fast.config.schema import Config, SamplingConfig
from sage_fast.models.checkpointing import MODES
from sage_fast.models.decoder import Decoder
from sage_fast.models.find import family_note, find_spec
from sage_fast.models.hunyuan15.spec import HunyuanVideo15
from sage_fast.models.interface import Condition, Encoder
from sage_fast.models.load import load_model
from sage_fast.models.lora.adapter import LORA_FILE
from sage_fast.models.policy import Policy
from sage_fast.models.random_weights import random_module
from sage_fast.models.registry import SHIPPED
from sage_fast.models.spec import Spec
from sage_fast.rollout.loop import initial_latents, rollout
from sage_fast.util.captions import Caption
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_metrics
from tests.pretend_cuda import CUDA, PretendCuda
from tests.ranks import command_on_ranks
from tests.test_cost import live_activations
from tests.tiny import CPU, settings

WORDS, WIDTH = 8, 12  # tokens of every prompt, values of each
DENOISER = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "text_dim": WIDTH,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 4,
}
VAE = {"base_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text(Condition):
    """`[WORDS, WIDTH]`, zeros after the last word: the published model attends to its padding."""

    text: Tensor

    @property
    def tokens(self) -> int:
        return WORDS


class Inputs(NamedTuple):
    """Noise levels and texts `[B, WORDS, WIDTH]`: of all steps `[T]` (the schedule), or of one
    forward `[B]`."""

    sigma: Tensor
    text: Tensor
    negative: Inputs | None = None

    def at(self, steps: Tensor) -> Inputs:
        sigma = self.sigma[steps].expand(len(self.text))
        return Inputs(
            sigma=sigma, text=self.text, negative=self.negative.at(steps) if self.negative else None
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    sigmas: Tensor
    embeddings: Mapping[Any, Text]
    guided: bool

    def of(self, keys: Sequence[Any]) -> Inputs:
        texts = [self.embeddings[key] for key in keys]
        negative = [self.embeddings[text.negative].text for text in texts] if self.guided else None
        away = Inputs(sigma=self.sigmas, text=torch.stack(negative)) if negative else None
        return Inputs(
            sigma=self.sigmas, text=torch.stack([text.text for text in texts]), negative=away
        )

    def at(self, keys: Sequence[Any], steps: Tensor) -> Inputs:
        return self.of(keys).at(steps)


class WanPolicy(Policy):
    blocks = "blocks"

    def velocity(self, x: Tensor, inputs: Inputs) -> Tensor:
        with self._autocast():
            network = self.networks["denoiser"]
            return network(
                x.to(self.dtype), 1000 * inputs.sigma, inputs.text.to(self.dtype), return_dict=False
            )[0]

    def conditioning_table(self, sigmas: Tensor, embeddings: Mapping[Any, Text]) -> Table:
        return Table(
            sigmas=sigmas.to(self.device, torch.float32),
            embeddings=embeddings,
            guided=self.uses_guidance,
        )


class WanDecoder(Decoder):
    @torch.no_grad()
    def __call__(self, latents: Tensor) -> Tensor:
        config = self.vae.config
        mean, std = (
            torch.tensor(row)[:, None, None, None]
            for row in (config.latents_mean, config.latents_std)
        )
        video = self.vae.decode((latents * std + mean).to(self.vae.dtype), return_dict=False)[0]
        return (video.float() * 0.5 + 0.5).clamp(0, 1).transpose(1, 2)


class Wan(Spec):
    title = "Wan"
    published = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    networks: ClassVar = {"denoiser": WanTransformer3DModel}
    autoencoder = AutoencoderKLWan
    condition = Text
    randoms: ClassVar[tuple[str, ...]] = ("random:wan-tiny", "random:wan-tiny-3-blocks")
    hub_names = r"wan-?2\.1"
    fps = 16
    text_tokens = WORDS
    lora_targets = r"blocks\.\d+\.(attn[12]\.(to_[qkv]|to_out\.0)|ffn\.net\.(0\.proj|2))"

    def published_sizes(self, part: str) -> Mapping[str, Any]:
        if part == "vae":
            return VAE
        return DENOISER | {"num_layers": 3 if self.path.endswith("-3-blocks") else 4}

    @property
    def patch(self) -> int:
        return math.prod(self.meta("denoiser").config.patch_size)

    def latent_shape(self, sampling: SamplingConfig) -> tuple[int, int, int, int]:
        return 16, (sampling.num_frames - 1) // 4 + 1, sampling.height // 8, sampling.width // 8

    def assumed_condition(self) -> Text:
        return Text(text=torch.zeros(WORDS, WIDTH))

    def policy(
        self, networks: Mapping[str, Any], *, dtype: torch.dtype, guidance_scale: float
    ) -> WanPolicy:
        return WanPolicy(networks, dtype=dtype, guidance_scale=guidance_scale)

    def decoder(self, vae: Any) -> WanDecoder:
        return WanDecoder(vae)

    def load_encoder(
        self, dtype: torch.dtype, device: torch.device, sampling: SamplingConfig
    ) -> Encoder:
        def encode(caption: Caption) -> Text:
            rows = torch.zeros(WORDS, WIDTH)
            for row, word in enumerate(caption.text.split()[:WORDS]):
                rows[row] = torch.randn(
                    WIDTH, generator=torch.Generator().manual_seed(sum(word.encode()))
                )
            return Text(text=rows)

        return encode


class NoRandoms(Wan):
    title = "Wan 2"
    randoms: ClassVar[tuple[str, ...]] = ()


REWARD = "def brightness(videos, prompts):\n    return {'mean': videos.mean((1, 2, 3, 4))}\n"


def config_of(folder: Path, **overrides: Any) -> Config:
    return settings(
        model__path=f"{__name__}:Wan:{folder / 'wan'}", reward__name="any_video:brightness",
        reward__weights={"mean": 1.0}, data__prompts="prompts.txt",
        data__eval_prompts="prompts.txt",
        sampling__steps=3, eval__steps=1, train__optimizer_steps=2, train__learning_rate=1e-2,
        train__iterations=1, tracking__trackers=[], output="run", **overrides,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint in diffusers format, two prompts, a reward, and a run by the command."""
    folder = tmp_path_factory.mktemp("wan")
    torch.manual_seed(0)
    WanTransformer3DModel(**DENOISER).save_pretrained(folder / "wan" / "denoiser")
    AutoencoderKLWan(**VAE).save_pretrained(folder / "wan" / "vae")
    (folder / "any_video.py").write_text(REWARD)
    (folder / "prompts.txt").write_text("an otter juggles three stones\nsnow falls\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "wan.yaml").write_text(dump(config_of(folder)))
        assert main(["train", "wan.yaml", "--quiet"]) == 0
        yield folder


def test_a_run_trains_evaluates_and_leaves_weights(folder: Path) -> None:
    (row,) = read_metrics(folder / "run" / "metrics.jsonl")
    assert min(row["reward/std"], row["grad_norm"]) > 0
    assert row["log_prob/parity"] < 1e-6
    before, after = (
        json.loads((folder / "run" / "eval" / f"{name}.json").read_text())
        for name in ("before", "after")
    )
    assert before["reward"] != after["reward"]
    tensors = load_file(folder / "run" / "weights" / LORA_FILE)
    assert "blocks.1.attn2.to_k.lora_B.weight" in tensors
    assert any(tensor.any() for name, tensor in tensors.items() if ".lora_B." in name)


def test_a_resume_goes_on_as_if_never_stopped(folder: Path) -> None:
    assert (
        main(["train", "wan.yaml", "--quiet", "--train.iterations", "2", "--output", "whole"]) == 0
    )
    assert main(["train", "run/config.yaml", "--quiet", "--resume", "--train.iterations", "2"]) == 0
    whole, resumed = (read_metrics(folder / name / "metrics.jsonl") for name in ("whole", "run"))
    for key in ("reward/mean", "grad_norm", "kl/anchor", "ratio/max"):
        assert whole[1][key] == resumed[1][key], key


def test_two_ranks_of_zero3_train_as_one_process(folder: Path) -> None:
    words = ["train", "wan.yaml", "--train.engine", "zero3", "--output", "zero3", "--quiet"]
    command_on_ranks(words, folder, DS_ACCELERATOR="cpu")
    (one, *_), (two,) = (read_metrics(folder / name / "metrics.jsonl") for name in ("run", "zero3"))
    for key in ("reward/mean", "grad_norm"):
        assert two[key] == pytest.approx(one[key], rel=1e-3), key


def test_the_plan_counts_this_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "wan.yaml", "--dry-run", "--gpus", "2"]) == 0
    text = capsys.readouterr().out
    model = load_model(config_of(folder).model, SamplingConfig(), CPU, 0)
    base = sum(p.numel() for name, p in model.policy.named_parameters() if ".lora_" not in name)
    trained = sum(p.numel() for p in model.policy.parameters().values())
    assert f"= {base:,}" in text
    assert f"= {trained:,}" in text
    assert "16 x 3 x 4 x 4" in text


def test_random_weights_of_a_family_of_ones_own(folder: Path) -> None:
    """A whole run, without a checkpoint."""
    words = ["wan.yaml", "--model.path", f"{__name__}:Wan:random:wan-tiny", "--output", "random"]
    assert main(["train", *words, "--dry-run"]) == 0
    assert main(["train", *words, "--quiet"]) == 0
    (row,) = read_metrics(folder / "random" / "metrics.jsonl")
    assert row["grad_norm"] > 0

    spec = find_spec(f"{__name__}:Wan:random:wan-tiny-3-blocks")
    assert isinstance(spec, Wan)
    assert len(spec.meta("denoiser").blocks) == 3


@pytest.mark.parametrize("name", ["random:wan-tine", "random:hunyuanvideo15-480p"])
def test_a_family_knows_its_own_random_models_alone(name: str) -> None:
    with pytest.raises(UserError, match="random:wan-tiny"):
        find_spec(f"{__name__}:Wan:{name}")


def test_a_family_without_random_models_says_so() -> None:
    with pytest.raises(UserError, match="Wan 2 has no models with random weights"):
        find_spec(f"{__name__}:NoRandoms:random:wan-tiny")


def test_a_config_that_no_class_takes_is_named(folder: Path) -> None:
    """`build` raises as the class does, and `meta` says whose mistake it is."""
    spec = Wan(str(folder / "wan"), {"denoiser": DENOISER | {"attention_head_dim": -3}})
    with pytest.raises(UserError, match=r"denoiser/config.json describes no model"):
        spec.meta("denoiser")


@pytest.fixture
def two_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package ship a second family."""
    monkeypatch.setitem(SHIPPED, "WanTransformer3DModel", f"{__name__}:Wan")


@pytest.mark.usefixtures("two_families")
@pytest.mark.parametrize(
    ("hub_id", "family"),
    [
        ("hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v", HunyuanVideo15),
        ("tencent/hunyuanvideo-1.5", HunyuanVideo15),
        ("someone/HunyuanVideo1.5-lora-merged", HunyuanVideo15),
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", Wan),
        ("someone/wan-2.1-tuned", Wan),
    ],
)
def test_a_hub_id_names_its_family(hub_id: str, family: type[Spec]) -> None:
    """Without its files: a dry run downloads nothing."""
    spec = find_spec(hub_id)
    assert type(spec) is family
    assert spec.path == hub_id
    assert family_note(spec) == ""


@pytest.mark.usefixtures("two_families")
@pytest.mark.parametrize("hub_id", ["someone/testbed", "hunyuanvideo-community/HunyuanVideo"])
def test_a_hub_id_of_no_known_name_is_assumed_to_be_of_the_default_family(hub_id: str) -> None:
    spec = find_spec(hub_id)
    assert type(spec) is HunyuanVideo15
    note = family_note(spec)
    assert note.startswith(f"model.path = {hub_id!r}: assumed to be HunyuanVideo 1.5")
    assert f"{__name__}:Wan:{hub_id}" in note
    assert "testbed" not in note.replace(hub_id, "")

    for name, family in SHIPPED.items():
        if name != "TestbedTransformer":
            assert family_note(find_spec(f"{family}:{hub_id}")) == ""


@pytest.mark.usefixtures("two_families")
def test_the_dry_run_says_that_it_assumes_a_family(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for hub_id, notes in {"someone/video-model": 1, "someone/wan2.1-tuned": 0}.items():
        assert main(["train", "wan.yaml", "--model.path", hub_id, "--dry-run", "--gpus", "1"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert text.count("assumed to be HunyuanVideo 1.5") == notes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_have_the_buffers_and_dtypes_of_a_loaded_checkpoint(
    folder: Path, dtype: torch.dtype
) -> None:
    """Rotary frequencies are computed when the network is built, and diffusers keeps modules in
    float32."""
    loaded = WanTransformer3DModel.from_pretrained(folder / "wan" / "denoiser", dtype=dtype)
    drawn = random_module(Wan("random:wan-tiny"), "denoiser", dtype, CPU)
    assert {name: p.dtype for name, p in drawn.named_parameters()} == {
        name: p.dtype for name, p in loaded.named_parameters()
    }
    buffers = dict(loaded.named_buffers())
    assert buffers
    assert {*buffers} == {name for name, _ in drawn.named_buffers()}
    for name, buffer in drawn.named_buffers():
        assert buffer.dtype == buffers[name].dtype
        assert torch.equal(buffer, buffers[name]), name
    for name, p in drawn.named_parameters():
        assert p.isfinite().all(), name


def test_random_weights_are_drawn_without_those_of_the_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Building allocates no matrix: `AutoencoderKLWan` and the transformer initialise nothing."""
    filled: list[torch.Size] = []
    monkeypatch.setattr(
        torch.nn.Linear,
        "reset_parameters",
        lambda linear: filled.append(linear.weight.shape) if not linear.weight.is_meta else None,
    )
    random_module(Wan("random:wan-tiny"), "denoiser", torch.float32, CPU)
    assert not filled


def is_autocast(policy: Policy) -> bool:
    return policy._autocast()._enabled


def test_weights_kept_in_float32_do_not_turn_on_autocast(folder: Path) -> None:
    """Wan's first weight is one of them. The network runs as in diffusers: autocast would round the
    modulation, which is added in float32."""
    config = dataclasses.replace(config_of(folder).model, dtype="bfloat16")
    policy = load_model(config, SamplingConfig(), CPU, 0).policy
    name, first = next(policy.named_parameters())
    assert (name, first.dtype) == ("scale_shift_table", torch.float32)
    assert not is_autocast(policy)

    stock = WanTransformer3DModel.from_pretrained(folder / "wan" / "denoiser", dtype=torch.bfloat16)
    x, text = torch.randn(1, 16, 3, 4, 4), torch.randn(1, WORDS, WIDTH)
    sigma = torch.tensor([0.7])
    with torch.no_grad():
        found = policy.velocity(x, Inputs(sigma=sigma, text=text))
        (expected,) = stock(x.bfloat16(), 1000 * sigma, text.bfloat16(), return_dict=False)
    assert torch.equal(found, expected)


def test_float32_weights_with_bfloat16_activations_run_under_autocast(folder: Path) -> None:
    """Full fine-tuning trains all weights in float32, also those that diffusers would keep so."""
    config = dataclasses.replace(config_of(folder).model, tuning="full", dtype="bfloat16")
    policy = load_model(config, SamplingConfig(), CPU, 0).policy
    assert {p.dtype for _, p in policy.named_parameters()} == {torch.float32}
    assert is_autocast(policy)


def test_autocast_follows_a_change_of_the_weights_and_reads_them_all_only_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may round them after a first forward: here all but those that diffusers keeps in
    float32."""
    config = dataclasses.replace(config_of(folder).model, tuning="full", dtype="bfloat16")
    policy = load_model(config, SamplingConfig(), CPU, 0).policy
    network = policy.networks["denoiser"]
    reads = Mock(side_effect=network.modules)
    monkeypatch.setattr(network, "modules", reads)
    assert [is_autocast(policy) for _ in range(3)] == [True] * 3
    assert reads.call_count == 1

    for name, p in network.named_parameters():
        if not {*name.split(".")} & {*network._keep_in_fp32_modules}:
            p.data = p.data.bfloat16()
    assert next(network.parameters()).dtype == torch.float32
    assert [is_autocast(policy) for _ in range(3)] == [False] * 3
    assert reads.call_count == 2

    for p in network.parameters():
        p.data = p.data.float()
    assert is_autocast(policy)


def test_streamed_blocks_leave_buffers_on_the_device(folder: Path) -> None:
    """Also those that are loaded to host memory with the network."""
    for path in (f"{__name__}:Wan:random:wan-tiny", f"{__name__}:Wan:{folder / 'wan'}"):
        config = dataclasses.replace(config_of(folder).model, path=path)
        with PretendCuda():
            model = load_model(config, SamplingConfig(), CUDA, 0, streamed=1)
            network = model.policy.networks["denoiser"]
            assert {buffer.device.type for buffer in network.buffers()} == {"cuda"}
            hosted = [name for name, p in network.named_parameters() if p.device.type == "cpu"]
            assert hosted
            assert all(name.startswith("blocks.") for name in hosted)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("mode", MODES)
def test_its_activations_are_counted(folder: Path, mode: str, guidance: float) -> None:
    """As tensors that are alive on the CPU, with no formula of the family's."""
    config = config_of(folder, sampling__guidance_scale=guidance, sampling__num_frames=33)
    model = load_model(config.model, config.sampling, CPU, 0)
    counted = model.spec.cost(config).activations[mode]
    batch = config.train.batch_size
    live = live_activations(
        model.spec, model.policy, mode, model.spec.latent_shape(config.sampling), batch, guidance
    )
    assert counted == pytest.approx(live, rel=0.01)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_conditions_are_keyed_by_anything(folder: Path, guidance: float) -> None:
    """And a sample comes out the same beside another one and alone."""
    config = config_of(folder, sampling__guidance_scale=guidance)
    model = load_model(config.model, config.sampling, CPU, 0)
    encode, keys = model.load_encoder(config.sampling), [("snow", 1), ("snow", 2)]
    texts = {keys[0]: "snow falls", keys[1]: "snow melts", None: ""}
    conditions = {
        key: dataclasses.replace(encode(Caption(text)), negative=None)
        for key, text in texts.items()
    }
    table = transition_table(sigma_schedule(3, 3.0), "sage", 0.7)
    shape, seeds = model.spec.latent_shape(config.sampling), torch.arange(2)
    known, noise = (
        model.policy.conditioning_table(table.sigmas[:-1], conditions),
        initial_latents(seeds, shape, CPU),
    )
    given = model.policy, table, table.coefficients(), known
    both, alone = (
        rollout(*given, keys, seeds, noise),
        rollout(*given, keys[1:], seeds[1:], noise[1:]),
    )
    torch.testing.assert_close(both[1:], alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(
        both[1:], rollout(*given, keys[:1], seeds[1:], noise[1:]), rtol=1e-4, atol=1e-5
    )


def test_ranks_cannot_share_a_sample_of_it(folder: Path) -> None:
    config = config_of(folder, model__sequence_parallel=2)
    with pytest.raises(ValueError, match="a divisor of the transformer's 1 attention heads"):
        load_model(config.model, config.sampling, CPU, 0)


def test_a_lora_without_other_layouts_is_exported_for_diffusers_and_peft(folder: Path) -> None:
    files = {file.name: file for file in export(folder / "run", folder / "out", "someone/wan")}
    weights = {LORA_FILE, "adapter_model.safetensors", "adapter_config.json"}
    assert files.keys() == {*weights, "README.md"}
    tuned = PeftModel.from_pretrained(
        WanTransformer3DModel.from_pretrained(folder / "wan" / "denoiser"), folder / "out"
    )
    stored = load_file(files[LORA_FILE])
    loaded = {
        name.replace(".default", "").removeprefix("base_model.model."): p
        for name, p in tuned.named_parameters()
    }
    assert stored
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())
    assert "license" not in (card := files["README.md"].read_text()).split("---")[1]
    assert [word in card for word in ("pipe.denoiser.load", str(folder))] == [True, False]
