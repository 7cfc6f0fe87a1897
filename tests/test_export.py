"""Exported weights: equal updates in every layout, in peft and in diffusers, with a card."""

import ast
import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel
from PIL import Image
from safetensors import safe_open
from torch import Tensor, nn

from sage_fast import cli
from sage_fast.cli import main
from sage_fast.commands.card import model_card
from sage_fast.commands.export_formats import export
from sage_fast.config.loader import dump
from sage_fast.config.schema import ModelConfig, SamplingConfig
from sage_fast.models.find import find_spec
from sage_fast.models.hunyuan15.lora_names import comfyui, original
from sage_fast.models.load import load_model
from sage_fast.models.lora.adapter import LORA_FILE
from sage_fast.models.lora.convert import converted, read_lora
from sage_fast.models.model import Model
from sage_fast.run.checkpoint import write_manifest
from sage_fast.run.weights import save_weights
from sage_fast.run_folder import MANIFEST, STATE, TRAINING, RunFolder
from sage_fast.testbed import BASE as TESTBED
from sage_fast.testbed.tiny_model import TestbedTransformer
from sage_fast.util.errors import UserError
from tests.tiny import CPU, settings
from tests.tiny_checkpoint import tiny_transformer, write_tiny_checkpoint

# What each layer of the other checkpoints is made of, as diffusers' conversion script (original)
# and ComfyUI's own key map have it: name -> diffusers' layers, whose rows follow each other.
# Written the other way round than models/hunyuan15/lora_names.py, and in full.
OF_BLOCK = {
    "img_mod.linear": ["norm1.linear"],
    "txt_mod.linear": ["norm1_context.linear"],
    "img_attn_q": ["attn.to_q"],
    "img_attn_k": ["attn.to_k"],
    "img_attn_v": ["attn.to_v"],
    "img_attn_proj": ["attn.to_out.0"],
    "txt_attn_q": ["attn.add_q_proj"],
    "txt_attn_k": ["attn.add_k_proj"],
    "txt_attn_v": ["attn.add_v_proj"],
    "txt_attn_proj": ["attn.to_add_out"],
    "img_mlp.fc1": ["ff.net.0.proj"],
    "img_mlp.fc2": ["ff.net.2"],
    "txt_mlp.fc1": ["ff_context.net.0.proj"],
    "txt_mlp.fc2": ["ff_context.net.2"],
}
OF_COMFYUI_BLOCK = {
    "img_mod.lin": ["norm1.linear"],
    "txt_mod.lin": ["norm1_context.linear"],
    "img_attn.qkv": ["attn.to_q", "attn.to_k", "attn.to_v"],
    "img_attn.proj": ["attn.to_out.0"],
    "txt_attn.qkv": ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
    "txt_attn.proj": ["attn.to_add_out"],
    "img_mlp.0": ["ff.net.0.proj"],
    "img_mlp.2": ["ff.net.2"],
    "txt_mlp.0": ["ff_context.net.0.proj"],
    "txt_mlp.2": ["ff_context.net.2"],
}
OF_REFINER = {
    "self_attn_qkv": ["attn.to_q", "attn.to_k", "attn.to_v"],
    "self_attn_proj": ["attn.to_out.0"],
    "mlp.fc1": ["ff.net.0.proj"],
    "mlp.fc2": ["ff.net.2"],
    "adaLN_modulation.1": ["norm_out.linear"],
}
OF_COMFYUI_REFINER = {
    "self_attn.qkv": ["attn.to_q", "attn.to_k", "attn.to_v"],
    "self_attn.proj": ["attn.to_out.0"],
    "mlp.0": ["ff.net.0.proj"],
    "mlp.2": ["ff.net.2"],
    "adaLN_modulation.1": ["norm_out.linear"],
}
COMMON = {
    "img_in.proj": ["x_embedder.proj"],
    "txt_in.input_embedder": ["context_embedder.proj_in"],
    "byt5_in.fc1": ["context_embedder_2.linear_1"],
    "byt5_in.fc2": ["context_embedder_2.linear_2"],
    "byt5_in.fc3": ["context_embedder_2.linear_3"],
    "vision_in.proj.1": ["image_embedder.linear_1"],
    "vision_in.proj.3": ["image_embedder.linear_2"],
    "final_layer.adaLN_modulation.1": ["norm_out.linear"],
    "final_layer.linear": ["proj_out"],
}
TIME, TEXT_TIME = (
    "time_embed.timestep_embedder.linear_",
    "context_embedder.time_text_embed.timestep_embedder.linear_",
)
POOLED = "context_embedder.time_text_embed.text_embedder.linear_"
LAYOUTS = {
    "original": {
        **COMMON,
        **{
            f"double_blocks.{i}.{name}": (f"transformer_blocks.{i}.", place)
            for i in (0, 1)
            for name, place in OF_BLOCK.items()
        },
        **{
            f"txt_in.individual_token_refiner.blocks.0.{name}": (
                "context_embedder.token_refiner.refiner_blocks.0.",
                place,
            )
            for name, place in OF_REFINER.items()
        },
        **{f"time_in.mlp.{i}": [f"{TIME}{i // 2 + 1}"] for i in (0, 2)},
        **{f"txt_in.t_embedder.mlp.{i}": [f"{TEXT_TIME}{i // 2 + 1}"] for i in (0, 2)},
        **{f"txt_in.c_embedder.linear_{i}": [f"{POOLED}{i}"] for i in (1, 2)},
    },
    "comfyui": {
        **COMMON,
        **{
            f"double_blocks.{i}.{name}": (f"transformer_blocks.{i}.", place)
            for i in (0, 1)
            for name, place in OF_COMFYUI_BLOCK.items()
        },
        **{
            f"txt_in.individual_token_refiner.blocks.0.{name}": (
                "context_embedder.token_refiner.refiner_blocks.0.",
                place,
            )
            for name, place in OF_COMFYUI_REFINER.items()
        },
        **{f"time_in.{name}_layer": [f"{TIME}{i}"] for i, name in ((1, "in"), (2, "out"))},
        **{
            f"txt_in.t_embedder.{name}_layer": [f"{TEXT_TIME}{i}"]
            for i, name in ((1, "in"), (2, "out"))
        },
        **{
            f"txt_in.c_embedder.{name}_layer": [f"{POOLED}{i}"]
            for i, name in ((1, "in"), (2, "out"))
        },
    },
}


def made_of(layout: str) -> dict[str, list[str]]:
    return {
        name: [place[0] + layer for layer in place[1]] if isinstance(place, tuple) else place
        for name, place in LAYOUTS[layout].items()
    }


@pytest.fixture(
    scope="module",
    params=[None, r"transformer_blocks\.\d+\.(attn\.to_[qv]|ff\.net\.2)"],
    ids=["all", "some"],
)
def adapted(request: pytest.FixtureRequest) -> nn.Module:
    """The real class with adapters of random weights on every layer that can have one, or on a
    few."""
    torch.manual_seed(0)
    network = tiny_transformer()
    layers = [name for name, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv3d)]
    network.add_adapter(
        LoraConfig(r=3, lora_alpha=7, target_modules=request.param or layers),
        adapter_name="default",
    )
    for name, p in network.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(p)
    return network


def update_of(layer: Any) -> Tensor:
    """What the adapter adds to a weight."""
    if not isinstance(layer.base_layer, nn.Conv3d):
        return layer.get_delta_weight("default")
    # peft takes a 1 x 1 x 1 kernel for a 2-D one
    a, b = (
        layer.lora_A["default"].weight,
        layer.lora_B["default"].weight,
    )
    return layer.scaling["default"] * (b.flatten(1) @ a.flatten(1)).reshape(
        layer.base_layer.weight.shape
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_the_updates_are_those_of_the_adapter(adapted: Any, tmp_path: Path, layout: str) -> None:
    adapted.save_lora_adapter(tmp_path, weight_name=LORA_FILE)
    tensors, config = read_lora(tmp_path / LORA_FILE)
    moved = converted(tensors, config, {"original": original, "comfyui": comfyui}[layout])
    expected = {n: update_of(m) for n, m in adapted.named_modules() if hasattr(m, "lora_A")}
    for name, layers in made_of(layout).items():
        key = f"diffusion_model.{name}"
        have = [layer for layer in layers if layer in expected]
        assert (f"{key}.lora_A.weight" in moved) == bool(have)
        if not have:
            continue
        a, b = moved.pop(f"{key}.lora_A.weight"), moved.pop(f"{key}.lora_B.weight")
        assert a.dtype == b.dtype == torch.float32
        update = (b.flatten(1) @ a.flatten(1)).unflatten(1, a.shape[1:])
        # (shift, scale) there, (scale, shift) in diffusers
        if name == "final_layer.adaLN_modulation.1":
            update = torch.cat(update.chunk(2)[::-1])
        for layer, rows in zip(layers, update.chunk(len(layers)), strict=True):
            if layer in expected:
                torch.testing.assert_close(
                    rows, expected[layer], rtol=1e-5, atol=1e-5, msg=f"{name}: {layer}"
                )
                del expected[layer]
            else:
                assert not rows.any()
    assert not moved
    assert not expected


def test_a_layer_of_another_name_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"'transformer_blocks\.0\.attn\.to_x': HunyuanVideo 1\.5 has no layer"
    ):
        original("transformer_blocks.0.attn.to_x")
    with pytest.raises(UserError, match="no layer"):
        comfyui("single_blocks.0.attn.to_q")


@torch.no_grad()
def test_alpha_of_a_layer_and_rank_stabilised_scale(tmp_path: Path) -> None:
    """The scale is the one that peft multiplies by."""
    network: Any = tiny_transformer()
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=r".*\.to_[qk]", alpha_pattern={"to_k": 9}, use_rslora=True
    )
    network.add_adapter(config, adapter_name="default")
    for name, p in network.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(p)
    network.save_lora_adapter(tmp_path, weight_name=LORA_FILE)
    moved = converted(*read_lora(tmp_path / LORA_FILE), original)
    for part in "qk":
        key = f"diffusion_model.double_blocks.1.img_attn_{part}"
        update = moved[f"{key}.lora_B.weight"] @ moved[f"{key}.lora_A.weight"]
        expected = getattr(network.transformer_blocks[1].attn, f"to_{part}").get_delta_weight(
            "default"
        )
        torch.testing.assert_close(update, expected, rtol=1e-5, atol=1e-5)


# -- a run -----------------------------------------------------------------------------------------

BASE = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
PROMPTS = [f"prompt {i}" for i in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The testbed's base with an adapter of random weights."""
    model = load_model(
        ModelConfig(dtype="float32", lora_rank=3, lora_alpha=7), SamplingConfig(), CPU, seed=0
    )
    for name, p in model.policy.networks["transformer"].named_parameters():
        if ".lora_" in name:
            nn.init.normal_(p, std=0.3)
    return model


@pytest.fixture
def run(tmp_path: Path, model: Model) -> Path:
    """A finished run with these weights, whose reward has a secret from the environment."""
    run = tmp_path / "red-circles"
    (run / "eval").mkdir(parents=True)
    write_manifest(run / "weights", save_weights(model.policy, run / "weights"), iteration=7)
    config = settings(output=str(run), reward__args={"api_key": "${API_KEY}", "fps": 2})
    (run / "config.yaml").write_text(dump(config))
    for name, by in (("before", 0.0), ("after", 0.25)):
        scores = {
            "iteration": 7 if by else 0,
            "prompts": PROMPTS,
            "seeds": list(range(6)),
            "weights": {},
        }
        values = [i + by * (i + 1) for i in range(6)]
        (run / "eval" / f"{name}.json").write_text(
            json.dumps(scores | {"reward": values, "parts": {"vq": values}})
        )
    return run


@torch.no_grad()
def test_peft_and_diffusers_load_what_is_exported(run: Path, model: Model, tmp_path: Path) -> None:
    assert cli.main(["export", str(run), str(tmp_path / "out"), "--base", BASE]) == 0
    base = TestbedTransformer.from_pretrained(TESTBED, subfolder="transformer")
    inputs = {
        "hidden_states": torch.randn(1, 65, 2, 4, 4),
        "timestep": torch.tensor([300.0]),
        "encoder_hidden_states": torch.randn(1, 3, base.config.text_embed_dim),
        "encoder_attention_mask": torch.ones(1, 3, dtype=torch.bool),
        "encoder_hidden_states_2": torch.zeros(1, 1, 8),
        "encoder_attention_mask_2": torch.zeros(1, 1, dtype=torch.bool),
        "image_embeds": torch.zeros(1, 2, 8),
    }
    expected = model.policy.networks["transformer"](**inputs).sample
    unadapted = base(**inputs).sample
    assert (expected - unadapted).abs().max() > 0.01

    tuned = PeftModel.from_pretrained(base, tmp_path / "out")
    torch.testing.assert_close(tuned(**inputs).sample, expected, rtol=0, atol=0)
    assert tuned.peft_config["default"].base_model_name_or_path == BASE

    stock = TestbedTransformer.from_pretrained(TESTBED, subfolder="transformer")
    stock.load_lora_adapter(tmp_path / "out", weight_name=LORA_FILE, prefix=None)
    torch.testing.assert_close(stock(**inputs).sample, expected, rtol=0, atol=0)


def test_every_file_names_its_base(run: Path, tmp_path: Path) -> None:
    files = {path.name: path for path in export(run, tmp_path / "out", BASE)}
    formats = {f"red-circles-{layout}.safetensors" for layout in LAYOUTS}
    assert (
        files.keys()
        == {LORA_FILE, "adapter_model.safetensors", "adapter_config.json", "README.md"} | formats
    )
    for name in formats:
        with safe_open(files[name], "pt") as opened:
            assert opened.metadata()["base_model"] == BASE
    assert read_lora(files[LORA_FILE])[1].base_model_name_or_path == BASE
    assert json.loads(files["adapter_config.json"].read_text())["base_model_name_or_path"] == BASE
    assert ModelCard.load(files["README.md"]).data.base_model == BASE


@pytest.mark.filterwarnings("error")
def test_a_run_writes_its_base_into_its_weights_without_asking_the_hub(
    run: Path, model: Model
) -> None:
    save_weights(model.policy, run / "weights")
    assert read_lora(run / "weights" / LORA_FILE)[1].base_model_name_or_path == "testbed"


def test_a_local_base_stays_out_of_the_files(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path of this machine says nothing to others, and is nobody's business."""
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    assert "note: model.path = 'testbed' is no hub id: --base HUB_ID" in capsys.readouterr().out
    assert read_lora(tmp_path / "out" / LORA_FILE)[1].base_model_name_or_path is None


def test_a_relative_base_is_no_hub_id_in_another_folder(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "config.yaml").write_text(dump(settings(model__path="bases/tiny")))
    (run / "run.json").write_text('{"model_is_local": true}')
    assert "model.path = 'bases/tiny': a folder where the run began, and none here" in message(
        "export", str(run), str(tmp_path / "out"), capsys=capsys
    )
    shutil.copytree(TESTBED, tmp_path / "bases" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", str(run), "out"]) == 2, (
        "a path of the run's settings is not one of the current folder"
    )
    shutil.copytree(TESTBED, run / "bases" / "tiny")
    assert cli.main(["export", str(run), "out"]) == 0


@pytest.mark.parametrize("damaged", ["before.json", "after.json"])
def test_a_damaged_evaluation_is_left_out_of_the_card(
    run: Path, tmp_path: Path, damaged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "eval" / damaged).write_text('{"iteration": 0, "pro')
    assert cli.main(["export", str(run), str(tmp_path / "out"), "--base", BASE]) == 0
    assert "note: left out, since it is damaged: " in " ".join(capsys.readouterr().out.split())
    assert (
        "There are no evaluations from before and after training."
        in (tmp_path / "out" / "README.md").read_text()
    )


@pytest.mark.parametrize("base", [None, BASE])
def test_the_card_has_no_path_of_this_machine(run: Path, tmp_path: Path, base: str | None) -> None:
    shutil.copytree(TESTBED, tmp_path / "private" / "bases" / "tiny")
    config = settings(output=str(run), model__path=str(tmp_path / "private" / "bases" / "tiny"),
                      data__prompts=str(tmp_path / "private" / "p.txt"))  # fmt: skip
    (run / "config.yaml").write_text(dump(config))
    export(run, tmp_path / "out", base)
    text = ModelCard.load(tmp_path / "out" / "README.md").text
    assert str(tmp_path) not in text
    shown = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.S)[1])  # type: ignore[index]
    assert shown["model"]["path"] == (base or "tiny")
    assert (shown["output"], shown["data"]["prompts"]) == (run.name, "p.txt")


def test_the_card_has_the_table_and_the_settings(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out", BASE)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.tags == ["text-to-video", "sage-fast", "lora"]
    assert card.data.base_model_relation == "adapter"
    # differences are 0.25 (i + 1): mean 0.875, standard error 0.25 sqrt(3.5 / 6), times Student's t
    # of 5: 2.5706
    assert "| +0.8750 ± 0.4908 |" in card.text
    assert re.search(r"reward +\| 2.5000 ± [\d.]+ \| 3.3750 ± ", card.text)
    assert "7 iterations" in card.text
    shown = yaml.safe_load(re.search(r"```yaml\n(.*?)```", card.text, re.S)[1])  # type: ignore[index]
    assert shown["reward"]["args"] == {"api_key": "${API_KEY}", "fps": 2}
    assert shown["sampling"]["eta"] == 0.7


def test_the_licence_is_the_models_own() -> None:
    spec = find_spec("random:hunyuanvideo15-480p")
    card = ModelCard(
        model_card(RunFolder("none"), settings(), spec, iteration=1, base=BASE, files=[])
    )
    assert (card.data.license, card.data.license_name) == ("other", "tencent-hunyuan-community")
    assert (
        card.data.license_link
        == "https://github.com/Tencent-Hunyuan/HunyuanVideo-1.5/blob/main/LICENSE"
    )


@pytest.mark.parametrize(("tuning", "task"), [("lora", "t2v"), ("full", "t2v"), ("lora", "i2v")])
def test_the_code_of_the_card_samples_at_the_scale_of_the_training(
    tuning: Literal["lora", "full"], task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run it in the exported folder, on a tiny checkpoint of the real classes."""
    checkpoint, run = write_tiny_checkpoint(tmp_path / "model", seed=1, task=task), tmp_path / "run"
    parts = ModelConfig(path=str(checkpoint), tuning=tuning, dtype="float32", lora_rank=2)
    model = load_model(parts, SamplingConfig(), CPU, seed=0)
    for p in model.policy.networks["transformer"].parameters():
        if p.requires_grad:
            nn.init.normal_(p, std=0.1)
    write_manifest(run / "weights", save_weights(model.policy, run / "weights"), iteration=3)
    small = {"num_frames": 5, "height": 32, "width": 32, "guidance_scale": 1.5}
    config = settings(
        output=str(run),
        **{f"sampling__{key}": value for key, value in small.items()},
        eval__steps=2,
    )
    (run / "config.yaml").write_text(dump(dataclasses.replace(config, model=parts)))
    export(run, tmp_path / "out", BASE)
    card = (tmp_path / "out" / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", card, re.S)[1]  # type: ignore[index]
    monkeypatch.chdir(tmp_path / "out")
    Image.new("RGB", (32, 32), "red").save("image.png")
    names: dict[str, Any] = {}
    exec(
        compile(code.replace(BASE, str(checkpoint)).replace('"cuda"', '"cpu"'), "card", "exec"),
        names,
    )
    assert Path("video.mp4").stat().st_size > 300
    assert names["pipe"].guider.guidance_scale == 1.5
    tuned = {
        name.replace(".default_0.", ".default."): p
        for name, p in names["pipe"].transformer.named_parameters()
    }
    for name, weight in model.policy.snapshot().items():
        own = tuned[name.removeprefix("transformer.")].float()  # bfloat16 there
        torch.testing.assert_close(own, weight, rtol=0.01, atol=1e-3)


def test_what_export_prints_steers_no_terminal(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(tmp_path / "a\x1b[2J"), "--base", BASE]) == 0
    assert "a\\x1b[2J/README.md" in (out := capsys.readouterr().out)
    assert "\x1b" not in out


def test_the_card_has_no_scores_of_other_weights(run: Path, tmp_path: Path) -> None:
    """A run that was resumed and stopped has newer weights than the last evaluation."""
    shutil.copytree(run / "weights", run / "checkpoints" / "iteration-000012")
    export(run, tmp_path / "out", BASE)
    text = ModelCard.load(tmp_path / "out" / "README.md").text
    assert "12 iterations" in text
    assert (
        "The weights of iteration 12 were not evaluated: eval/after.json is of iteration 7." in text
    )
    assert "3.3750" not in text


def test_the_card_names_the_scale_of_the_evaluations(tmp_path: Path) -> None:
    config = settings(sampling__guidance_scale=1.0, eval__guidance_scale=6.0)
    card = model_card(
        RunFolder("none"), config, find_spec("testbed"), iteration=1, base=None, files=[]
    )
    assert "Trained at guidance scale 1," in card
    assert f"evaluated at guidance scale 6 with {config.eval.steps} steps of the ODE" in " ".join(
        card.split()
    )


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_the_card_passes_the_negative_prompt_to_the_pipeline(scale: float) -> None:
    """In quotes of Python, if guidance reads it."""
    negative = '\u8272\u8c03 "bright", worst\nquality'
    config = settings(sampling__guidance_scale=scale, data__negative_prompt=negative)
    card = model_card(
        RunFolder("none"), config, find_spec("testbed"), iteration=1, base=None, files=[]
    )
    (call,) = [line for line in card.splitlines() if line.startswith("video = pipe(")]
    call = call.removeprefix("video = ").removesuffix(".frames[0]")
    (node,) = ast.parse(call).body
    assert isinstance(node, ast.Expr)
    assert isinstance(node.value, ast.Call)
    given = {word.arg: ast.literal_eval(word.value) for word in node.value.keywords}
    assert given.get("negative_prompt") == (None if scale == 1 else negative)


def message(*command: str, capsys: pytest.CaptureFixture[str], status: int = 2) -> str:
    assert cli.main([*command]) == status
    return capsys.readouterr().err.strip()


def test_errors(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert message("export", str(run), str(run), capsys=capsys).endswith(
        "expected a new or an empty folder; nothing was changed"
    )
    assert "'nowhere': no such file or folder; expected a run" in message(
        "export", "nowhere", out, capsys=capsys
    )
    assert "is no run folder: config.yaml is missing" in message(
        "export", str(tmp_path), out, capsys=capsys
    )
    assert "--base '/data/model': expected a hub id such as" in message(
        "export", str(run), out, "--base", "/data/model", capsys=capsys
    )
    assert "--base '../model': expected a hub id" in message(
        "export", str(run), out, "--base", "../model", capsys=capsys
    )
    (run / "weights" / LORA_FILE).write_bytes(b"torn")
    assert "no checkpoint can be used (weights: " in message("export", str(run), out, capsys=capsys)
    write_manifest(run / "weights", [run / "weights" / LORA_FILE], iteration=7)
    assert "not a LoRA as a run saves it" in message("export", str(run), out, capsys=capsys)
    (run / "weights" / MANIFEST).write_text("{}")
    assert "(weights: manifest.json is not what was written)" in message(
        "export", str(run), out, capsys=capsys
    )
    shutil.rmtree(run / "weights")
    assert "has neither a checkpoint nor weights" in message("export", str(run), out, capsys=capsys)
    assert not Path(out).exists()


def test_folders_that_are_there(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert cli.main(["export", str(run), str(tmp_path / "link"), "--base", BASE]) == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "empty" / LORA_FILE).is_file()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert message("export", str(run), ".", capsys=capsys).endswith(
        "'.': the current folder; expected another one"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "empty",
        "here",
        "link",
        "red-circles",
    ]


def test_all_weights(tmp_path: Path) -> None:
    """A fully tuned run is exported as it is."""
    run = tmp_path / "full"
    model = load_model(ModelConfig(tuning="full"), SamplingConfig(), CPU, seed=0)
    write_manifest(run / "weights", save_weights(model.policy, run / "weights"), iteration=3)
    (run / "config.yaml").write_text(dump(settings(model__tuning="full", output=str(run))))
    files = {
        str(path.relative_to(tmp_path / "out")) for path in export(run, tmp_path / "out", BASE)
    }
    assert files == {
        "README.md",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors",
    }
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.base_model_relation == "finetune"
    again = load_model(
        ModelConfig(tuning="full", weights=str(tmp_path / "out")), SamplingConfig(), CPU, seed=0
    )
    assert all(map(torch.equal, again.policy.snapshot().values(), model.policy.snapshot().values()))


def test_a_checkpoint_without_what_a_resume_reads(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best one, which is older than the newest weights."""
    checkpoint = run / "checkpoints" / "iteration-000005"
    shutil.copytree(run / "weights", checkpoint, ignore=shutil.ignore_patterns(MANIFEST))
    (checkpoint / TRAINING).mkdir()
    (checkpoint / STATE).write_bytes(b"large")
    write_manifest(checkpoint, [checkpoint / STATE, checkpoint / LORA_FILE])
    shutil.rmtree(checkpoint / TRAINING)
    write_manifest(checkpoint, [checkpoint / LORA_FILE])
    files = {path.name for path in export(checkpoint, tmp_path / "best", BASE)}
    assert files == {path.name for path in export(run, tmp_path / "newest", BASE)}
    assert "in 5 iterations" in " ".join((tmp_path / "best" / "README.md").read_text().split())
    (checkpoint / LORA_FILE).write_bytes(b"torn")
    assert f"{str(checkpoint)!r}: damaged: {LORA_FILE} has 4 bytes of" in message(
        "export", str(checkpoint), str(tmp_path / "out"), capsys=capsys
    )
