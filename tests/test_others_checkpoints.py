"""Checkpoints of other programs and versions: what their configurations say, and their weights."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLTextModel, T5EncoderModel

from sage_fast.config.schema import ModelConfig, SamplingConfig
from sage_fast.models.find import find_spec
from sage_fast.models.headers import check_weights
from sage_fast.models.load import load_model
from sage_fast.testbed import BASE
from sage_fast.testbed.tiny_model import TestbedTransformer
from sage_fast.util.errors import UserError
from tests.tiny import CPU
from tests.tiny_checkpoint import GUIDANCE_SCALE, write_tiny_checkpoint

SAMPLING = SamplingConfig(num_frames=17, height=32, width=32)
INDEX = "diffusion_pytorch_model.safetensors.index.json"


@pytest.fixture
def testbed(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BASE, tmp_path / "testbed"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def loaded(path: Path) -> Any:
    return load_model(ModelConfig(path=str(path), dtype="float32"), SAMPLING, CPU, 0)


# -- config.json -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ("transformer", {"text_embed_2_hidden_dim": 8}),
        ("transformer", {"a_field_of_tomorrow": None, "another": [1, 2]}),
        ("vae", {"use_tiling": True}),
    ],
)
def test_a_field_that_the_class_does_not_know_is_a_note(
    testbed: Path, part: str, fields: dict[str, Any]
) -> None:
    expected = loaded(testbed)
    assert expected.notes == []
    change(testbed / part / "config.json", **fields)
    check_weights(find_spec(str(testbed)))
    found = loaded(testbed)
    (note,) = found.notes
    assert note.endswith(f"fields of config.json are not known here: {sorted(fields)}")
    weights = [dict(model.policy.named_parameters()) for model in (found, expected)]
    assert all(torch.equal(p, weights[1][name]) for name, p in weights[0].items())


@pytest.mark.parametrize(
    "fields",
    [{"num_layers": "three"}, {"patch_size": None}, {"attention_head_dim": []},
     {"mlp_ratio": "four"},
     {"rope_theta": None}, {"rope_theta": "256"}, {"qk_norm": None}, {"rope_axes_dim": None}],
    ids=str,
)  # fmt: skip
def test_values_of_another_type_are_one_line(testbed: Path, fields: dict[str, Any]) -> None:
    change(testbed / "transformer" / "config.json", **fields)
    for call in (lambda: check_weights(find_spec(str(testbed))), lambda: loaded(testbed)):
        assert "transformer/config.json describes no model: " in refusal(call)


@pytest.mark.parametrize("value", [None, "1.03", [1]], ids=str)
@pytest.mark.parametrize("field", ["scaling_factor", "spatial_compression_ratio"])
def test_values_of_another_type_in_the_autoencoder_are_one_line(checkpoint: Path, tmp_path: Path,
    field: str, value: Any
) -> None:  # fmt: skip
    copied = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    change(copied / "vae" / "config.json", **{field: value})
    assert f"vae/config.json describes no model: {field} is " in refusal(
        lambda: check_weights(find_spec(str(copied)))
    )
    assert " vae/" in refusal(lambda: loaded(copied))


@pytest.mark.parametrize("axes", [[4, 4, 4], [4, 4, 4, 4], [3, 7, 6], ["4", "6", "6"], []], ids=str)
def test_rotary_axes_that_do_not_fill_a_head_are_one_line(testbed: Path, axes: list[Any]) -> None:
    change(testbed / "transformer" / "config.json", rope_axes_dim=axes)
    text = refusal(lambda: find_spec(str(testbed)))
    assert (
        f"its transformer has rope_axes_dim = {axes}; expected 3 even numbers with the sum 16"
        in text
    )


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"], ids=["deep", "long"])
@pytest.mark.parametrize(
    "file", ["transformer/config.json", "vae/config.json", f"transformer/{INDEX}"]
)
def test_json_that_python_cannot_hold_is_one_line(testbed: Path, file: str, text: str) -> None:
    (testbed / file).write_text(text)
    for call in (lambda: check_weights(find_spec(str(testbed))), lambda: loaded(testbed)):
        assert "cannot read " in refusal(call)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"], ids=["deep", "long"])
@pytest.mark.parametrize(
    "file", ["model_index.json", "scheduler/scheduler_config.json", "guider/guider_config.json"]
)
def test_json_that_says_nothing_is_as_none(
    checkpoint: Path, tmp_path: Path, file: str, text: str
) -> None:
    copied = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    (copied / file).write_text(text)
    spec = find_spec(str(copied))
    spec.notes(SAMPLING)
    assert (spec.takes_images, spec.distillation) == (False, None)


@pytest.mark.parametrize("part", ["transformer", "vae"])
@pytest.mark.parametrize("method", ["bitsandbytes", "torchao", "gguf"])
def test_quantized_weights_are_one_line(testbed: Path, part: str, method: str) -> None:
    change(
        testbed / part / "config.json",
        quantization_config={"quant_method": method, "load_in_4bit": True},
    )
    assert f"its {part} is quantized; expected weights in float32" in refusal(
        lambda: find_spec(str(testbed))
    )


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ("transformer", {"num_attention_heads": 2}),
        ("transformer", {"text_embed_dim": 8}),
        ("vae", {"block_out_channels": [8, 16, 32, 32]}),
    ],
)
def test_weights_of_another_shape_are_one_line_before_they_are_loaded(
    testbed: Path, part: str, fields: dict[str, Any]
) -> None:
    change(testbed / part / "config.json", **fields)
    for call in (lambda: check_weights(find_spec(str(testbed))), lambda: loaded(testbed)):
        assert (
            f" in {part}/diffusion_pytorch_model.safetensors; its config.json asks for ["
            in refusal(call)
        )


def test_one_tensor_of_another_shape_is_named(testbed: Path) -> None:
    file = testbed / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["proj_out.bias"] = tensors["proj_out.bias"][:-1].contiguous()
    save_file(tensors, file, {"format": "pt"})
    assert "proj_out.bias has shape [31] and type F16 in" in refusal(
        lambda: check_weights(find_spec(str(testbed)))
    )
    file.write_bytes(file.read_bytes()[:100])
    assert f"cannot read transformer/{file.name}: " in refusal(
        lambda: check_weights(find_spec(str(testbed)))
    )


def test_another_autoencoder_is_not_taken_for_ours(testbed: Path) -> None:
    change(testbed / "vae" / "config.json", _class_name="AutoencoderKLWan")
    assert "its vae is a AutoencoderKLWan; expected AutoencoderKLHunyuanVideo15" in refusal(
        lambda: find_spec(str(testbed))
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_weights_of_another_type_are_refused(testbed: Path, dtype: torch.dtype) -> None:
    """A cast would give other numbers than the program that wrote them meant."""
    file = testbed / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["proj_out.weight"] = tensors["proj_out.weight"].to(dtype)
    save_file(tensors, file, {"format": "pt"})
    assert "; expected one of F32, BF16" in refusal(lambda: check_weights(find_spec(str(testbed))))


def sharded(folder: Path) -> dict[str, str]:
    """Write the weights again in two files with an index; return key -> file."""
    TestbedTransformer.from_pretrained(folder).save_pretrained(folder, max_shard_size="40KB")
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    return dict(json.loads((folder / INDEX).read_text())["weight_map"])


def test_the_weights_of_a_checkpoint_are_what_its_index_lists(testbed: Path) -> None:
    folder = testbed / "transformer"
    files = sharded(folder)
    assert len({*files.values()}) > 1
    (folder / "old_backup.safetensors").write_bytes(b"torn")
    save_file(
        {"proj_out.bias": torch.zeros(3)}, folder / "diffusion_pytorch_model.fp16.safetensors"
    )
    check_weights(find_spec(str(testbed)))
    loaded(testbed)
    last = max(files.values())
    (folder / last).rename(folder / "elsewhere")
    assert f"cannot read transformer/{last}" in refusal(
        lambda: check_weights(find_spec(str(testbed)))
    )
    (folder / "elsewhere").rename(folder / last)
    for text in ("[]", "{", '{"weight_map": 3}', "{}"):
        (folder / INDEX).write_text(text)
        assert f"cannot read transformer/{INDEX}" in refusal(
            lambda: check_weights(find_spec(str(testbed)))
        )


@pytest.mark.parametrize("part", ["transformer", "vae"])
@pytest.mark.parametrize(
    "name",
    ["diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.bin", "model.safetensors",
     "diffusion_pytorch_model.non_ema.bin", ""],
)  # fmt: skip
def test_weights_under_another_name_are_one_line_that_names_both(
    testbed: Path, part: str, name: str
) -> None:
    file = testbed / part / "diffusion_pytorch_model.safetensors"
    if name.endswith("bin"):
        torch.save(load_file(file), file.with_name(name))
    elif name:
        shutil.copy(file, file.with_name(name))
    file.unlink()
    for call in (lambda: check_weights(find_spec(str(testbed))), lambda: loaded(testbed)):
        assert f"{part}/ holds no {file.name} and no index; save_pretrained writes them" in refusal(
            call
        )


@pytest.mark.parametrize(
    "place", ["../other/{}", "{folder}/../other/{}", "./{}", "sub/../../other/{}"]
)
def test_an_index_names_files_beside_it(testbed: Path, place: str) -> None:
    """What lies outside the checkpoint is not read, were it a sound file."""
    folder, other = testbed / "transformer", testbed / "other"
    files = sharded(folder)
    shutil.copytree(folder, other)
    named = {key: place.format(file, folder=folder) for key, file in files.items()}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": named}))
    for call in (lambda: check_weights(find_spec(str(testbed))), lambda: loaded(testbed)):
        assert f"cannot read transformer/{INDEX}: it names " in refusal(call)


def test_a_weight_that_no_file_holds_is_refused(testbed: Path) -> None:
    file = testbed / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors["proj_out.bias"]
    save_file(tensors, file, {"format": "pt"})
    for call in (lambda: check_weights(find_spec(str(testbed))), lambda: loaded(testbed)):
        assert "lacks 1 weights, such as proj_out.bias" in refusal(call)


def test_a_weight_in_another_file_than_the_index_says(testbed: Path) -> None:
    folder = testbed / "transformer"
    files = sharded(folder)
    first, last = min(files.values()), max(files.values())
    key = next(key for key, file in files.items() if file == first)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files | {key: last}}))
    assert key in refusal(lambda: loaded(testbed))


@pytest.mark.parametrize(
    "index",
    [
        {"metadata": {}},
        {"weight_map": {"proj_out.bias": 1}, "metadata": {}},
        {"weight_map": {}},
        {"no.such": "x"},
    ],
    ids=str,
)
def test_an_index_of_another_form_is_one_line(testbed: Path, index: dict[str, Any]) -> None:
    (testbed / "transformer" / INDEX).write_text(json.dumps(index))
    assert "transformer" in refusal(lambda: check_weights(find_spec(str(testbed))))
    assert "transformer" in refusal(lambda: loaded(testbed))


@pytest.mark.parametrize("name", ["index", "file"])
def test_a_weight_that_nothing_asks_for_is_refused_at_the_dry_run_too(
    testbed: Path, name: str
) -> None:
    folder = testbed / "transformer"
    file = folder / "diffusion_pytorch_model.safetensors"
    if name == "file":
        save_file(load_file(file) | {"ema.bias": torch.zeros(3)}, file, {"format": "pt"})
    else:
        files = sharded(folder)
        (folder / INDEX).write_text(
            json.dumps({"metadata": {}, "weight_map": files | {"ema.bias": max(files.values())}})
        )
    assert "ema.bias" in refusal(lambda: check_weights(find_spec(str(testbed))))
    assert "ema.bias" in refusal(lambda: loaded(testbed))


@pytest.mark.parametrize("key", ["proj_out.bias", "x_embedder.proj.weight"])
def test_a_weight_that_the_index_does_not_list_is_refused_at_the_dry_run_too(
    testbed: Path, key: str
) -> None:
    """It is in a file, and is not loaded."""
    folder = testbed / "transformer"
    files = sharded(folder)
    del files[key]
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert f"lacks 1 weights, such as {key}" in refusal(
        lambda: check_weights(find_spec(str(testbed)))
    )
    assert key in refusal(lambda: loaded(testbed))


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2"])
@pytest.mark.parametrize("damage", ["lacks", "torn", "shape", "config"])
def test_text_encoders_are_whole(checkpoint: Path, tmp_path: Path, part: str, damage: str) -> None:
    """transformers fills missing weights with random numbers."""
    copied = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    file = copied / part / "model.safetensors"
    tensors = load_file(file)
    key = next(key for key in sorted(tensors) if "norm" in key)
    if damage == "lacks":
        del tensors[key]
        save_file(tensors, file, {"format": "pt"})
    elif damage == "shape":
        tensors[key] = tensors[key][:-1].contiguous()
        save_file(tensors, file, {"format": "pt"})
    elif damage == "torn":
        file.write_bytes(file.read_bytes()[:100])
    else:
        (copied / part / "config.json").write_text("[1]")
    spec = find_spec(str(copied))
    text = refusal(lambda: spec.load_encoder(torch.float32, CPU, SAMPLING))
    assert "cannot read the encoders: " in text
    assert damage != "lacks" or f"{part} lacks 1 weights, such as " in text


def encoder_refusal(checkpoint: Path) -> str:
    spec = find_spec(str(checkpoint))
    return refusal(lambda: spec.load_encoder(torch.float32, CPU, SAMPLING)).partition(
        "cannot read the encoders: "
    )[2]


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("model_index.json", {"text_encoder": ["transformers", "Qwen9Model"]}),
        ("model_index.json", {"text_encoder_2": [None, None]}),
        ("model_index.json", {"text_encoder_2": 3}),
        ("text_encoder/config.json", {"num_hidden_layers": 1}),
        ("text_encoder/config.json", {"num_attention_heads": None}),
        ("text_encoder_2/config.json", {"d_model": "24"}),
        ("text_encoder_2/config.json", {"quantization_config": [1]}),
        ("tokenizer/tokenizer_config.json", {"chat_template": "{% for"}),
        ("tokenizer/tokenizer_config.json", {"chat_template": "{{ 'x' }}"}),
        ("tokenizer/tokenizer_config.json", {"chat_template": "{{ 1 / 0 }}"}),
        ("tokenizer/tokenizer_config.json", {"chat_template": None}),
    ],
    ids=str,
)
def test_encoders_and_tokenizers_of_another_form_are_one_line(
    checkpoint: Path, tmp_path: Path, file: str, fields: dict[str, Any]
) -> None:
    copied = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    (copied / "tokenizer" / "chat_template.jinja").unlink()
    template = {"chat_template": (checkpoint / "tokenizer" / "chat_template.jinja").read_text()}
    change(copied / "tokenizer" / "tokenizer_config.json", **template)
    find_spec(str(copied)).load_encoder(torch.float32, CPU, SAMPLING)
    change(copied / file, **fields)
    assert encoder_refusal(copied)


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_encoders_in_another_type_are_refused(
    checkpoint: Path, tmp_path: Path, part: str, dtype: torch.dtype
) -> None:
    """transformers casts them without the scales that another program keeps elsewhere."""
    copied = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    file = copied / part / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {key: p.to(dtype) if p.ndim == 2 else p for key, p in tensors.items()},
        file,
        {"format": "pt"},
    )
    assert f"{part}/model.safetensors holds weights in " in encoder_refusal(copied)
    save_file(tensors | {"position_ids": torch.arange(3)}, file, {"format": "pt"})
    find_spec(str(copied)).load_encoder(torch.float32, CPU, SAMPLING)


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2"])
def test_encoders_of_another_model_are_one_line(
    checkpoint: Path, tmp_path: Path, part: str
) -> None:
    """Words of another width fit no transformer; tokens without a row of the embedding stop a
    GPU."""
    copied = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    loader = Qwen2_5_VLTextModel if part == "text_encoder" else T5EncoderModel
    network = loader.from_pretrained(checkpoint / part)
    network.resize_token_embeddings(100)
    network.save_pretrained(copied / part)
    assert f"{part} has 100 tokens, and its tokenizer " in encoder_refusal(copied)
    config = network.config
    config.hidden_size, config.vocab_size = 16, 400
    if part == "text_encoder":
        config.rope_parameters["mrope_section"] = [1, 1, 2]
    loader(config).save_pretrained(copied / part)
    assert f"{part} has width 16; the transformer expects " in encoder_refusal(copied)


def test_a_stale_index_beside_newer_weights_is_a_note(testbed: Path) -> None:
    """diffusers loads what the index names."""
    folder = testbed / "transformer"
    network = TestbedTransformer.from_pretrained(folder)
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    network.save_pretrained(folder, max_shard_size="500KB")
    assert loaded(testbed).notes == []
    save_file({name: 2 * p for name, p in network.state_dict().items()},
        folder / "diffusion_pytorch_model.safetensors",
              {"format": "pt"})  # fmt: skip
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    os.utime(index, (0, 0))
    (note,) = loaded(testbed).notes
    assert note.endswith(
        "is newer than its index, whose files are loaded: remove the index to load it"
    )
    index.unlink()
    model = loaded(testbed)
    assert model.notes == []
    assert torch.equal(
        model.policy.networks["transformer"].proj_out.bias, 2 * network.proj_out.bias
    )


# -- scheduler and guider --------------------------------------------------------------------------


def notes(checkpoint: Path, tmp_path: Path, part: str, **fields: Any) -> list[str]:
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    change(other / part / f"{part}_config.json", **fields)
    spec = find_spec(str(other))
    return spec.notes(SamplingConfig(guidance_scale=GUIDANCE_SCALE))


@pytest.mark.parametrize(
    ("part", "fields", "words"),
    [
        (
            "scheduler",
            {"shift": None},
            "sampling.shift = 5, and the checkpoint's scheduler has shift None",
        ),
        (
            "scheduler",
            {"shift": "5"},
            "sampling.shift = 5, and the checkpoint's scheduler has shift '5'",
        ),
        (
            "scheduler",
            {"use_dynamic_shifting": True},
            "the checkpoint's scheduler has use_dynamic_shifting True",
        ),
        (
            "scheduler",
            {"use_karras_sigmas": True},
            "the checkpoint's scheduler has use_karras_sigmas True",
        ),
        (
            "scheduler",
            {"shift_terminal": 0.02},
            "the checkpoint's scheduler has shift_terminal 0.02",
        ),
        (
            "scheduler",
            {"stochastic_sampling": True},
            "the checkpoint's scheduler has stochastic_sampling True",
        ),
        ("guider", {"guidance_rescale": 0.7}, "the checkpoint's guider has guidance_rescale 0.7"),
        ("guider", {"stop": 0.8}, "the checkpoint's guider has stop 0.8"),
        (
            "guider",
            {"use_original_formulation": True},
            "the checkpoint's guider has use_original_formulation True",
        ),
        ("guider", {"guidance_scale": None}, "and the checkpoint's guider has None"),
        (
            "guider",
            {"_class_name": "SkipLayerGuidance"},
            "the checkpoint's guider is SkipLayerGuidance (guidance_scale",
        ),
    ],
    ids=str,
)
def test_what_samples_otherwise_is_said(
    checkpoint: Path, tmp_path: Path, part: str, fields: dict[str, Any], words: str
) -> None:
    (note,) = notes(checkpoint, tmp_path, part, **fields)
    assert words in note


def test_another_scheduler_is_not_taken_for_ours(checkpoint: Path, tmp_path: Path) -> None:
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    )
    (note,) = notes(
        checkpoint, tmp_path, "scheduler", **scheduler.config, _class_name="UniPCMultistepScheduler"
    )
    assert note.startswith("the checkpoint's scheduler is UniPCMultistepScheduler (")
    assert "flow_shift 5.0" in note


@pytest.mark.parametrize("text", ["[1]", '"text"', "3", "[]", "{", "null"])
@pytest.mark.parametrize("part", ["scheduler", "guider"])
def test_a_part_that_states_nothing_is_said(
    checkpoint: Path, tmp_path: Path, part: str, text: str
) -> None:
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    (other / part / f"{part}_config.json").write_text(text)
    (note,) = find_spec(str(other)).notes(SamplingConfig(guidance_scale=GUIDANCE_SCALE))
    assert note.startswith("the checkpoint lacks scheduler/ or guider/")
    assert find_spec(str(other)).distillation is None


def test_what_does_not_act_is_not_said(checkpoint: Path, tmp_path: Path) -> None:
    assert (
        notes(
            checkpoint, tmp_path, "scheduler", base_shift=0.3, max_shift=2.0, a_field_of_tomorrow=3
        )
        == []
    )
