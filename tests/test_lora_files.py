"""LoRA files of other programs: their layouts, what they state of the scale, and what may not
act."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sage_fast.models.hunyuan15.lora_names import comfyui, original
from sage_fast.models.lora.adapter import LORA_FILE, load_lora, write_adapter
from sage_fast.models.lora.convert import converted, read_lora
from sage_fast.util.errors import UserError
from tests.tiny_checkpoint import tiny_transformer

LAYOUTS = {"original": original, "comfyui": comfyui}
METADATA = "lora_adapter_metadata"


def adapted(
    rank: int = 4, alpha: int = 6, targets: str = r".*\.(to_[qkv]|linear)", **fields: Any
) -> Any:
    """A network with an adapter whose factors are all random."""
    torch.manual_seed(0)
    network: Any = tiny_transformer()
    network.add_adapter(
        LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, **fields),
        adapter_name="default",
    )
    for name, p in network.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(p)
    return network


def updates(network: Any) -> dict[str, Tensor]:
    """Layer -> what its adapter adds to the weight."""
    found = {n: m for n, m in network.named_modules() if hasattr(m, "lora_A")}
    return {name: layer.get_delta_weight("default").detach() for name, layer in found.items()}


def own_file(network: Any, folder: Path) -> tuple[dict[str, Tensor], LoraConfig]:
    network.save_lora_adapter(folder, weight_name=LORA_FILE)
    return read_lora(folder / LORA_FILE)


def loaded(path: Path) -> Any:
    network = tiny_transformer()
    load_lora(network, path, "transformer", LAYOUTS.values())
    return network


def assert_same(path: Path, network: Any) -> None:
    found, expected = updates(loaded(path)), updates(network)
    assert found.keys() == expected.keys()
    for name, update in expected.items():
        torch.testing.assert_close(found[name], update, rtol=1e-5, atol=1e-5, msg=name)


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        loaded(path)
    assert "\n" not in str(error.value)
    return str(error.value)


# -- layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix",
    ["", "transformer.", "diffusion_model.", "base_model.model.", "model.diffusion_model."],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_exported_layout_is_read_again(layout: str, prefix: str, tmp_path: Path) -> None:
    network = adapted()
    moved = converted(*own_file(network, tmp_path), LAYOUTS[layout])
    file = tmp_path / "theirs.safetensors"
    save_file(
        {prefix + key.removeprefix("diffusion_model."): tensor for key, tensor in moved.items()},
        file,
    )
    assert_same(file, network)
    assert {
        len(m.lora_A["default"].weight) for m in loaded(file).modules() if hasattr(m, "lora_A")
    } == {4}


def test_a_layer_of_a_fused_one_without_an_adapter_stays_without(tmp_path: Path) -> None:
    network = adapted(targets=r".*\.to_[qv]")
    file = tmp_path / "theirs.safetensors"
    save_file(converted(*own_file(network, tmp_path), comfyui), file)
    assert_same(file, network)


@pytest.mark.parametrize(
    ("zero", "fields"),
    [("to_k", {}), ("to_k", {"rank_pattern": {"to_k": 2}}), ("to_[kq]", {}), ("to_.|linear", {})],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_factor_b_of_zeros_keeps_its_layer_and_rank(
    layout: str, zero: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """As before training, and of the text's queries of the last block, which nothing reads."""
    network = adapted(**fields)
    for name, p in network.named_parameters():
        if re.search(rf"\.({zero})\.lora_B", name):
            nn.init.zeros_(p)
    save_file(
        converted(*own_file(network, tmp_path), LAYOUTS[layout]), tmp_path / "theirs.safetensors"
    )
    assert_same(tmp_path / "theirs.safetensors", network)
    again, expected = (
        {name: p for name, p in made.named_parameters() if ".lora_A" in name}
        for made in (loaded(tmp_path / "theirs.safetensors"), network)
    )
    assert again.keys() == expected.keys()
    for name, factor in expected.items():
        assert torch.equal(again[name], factor), name


def test_a_fused_adapter_of_zeros_with_ranks_that_its_parts_share_is_read(tmp_path: Path) -> None:
    moved = converted(*own_file(adapted(), tmp_path), comfyui)
    shared = {
        key: tensor[:4] if "lora_A" in key else 0 * tensor[:, :4] for key, tensor in moved.items()
    }
    save_file(
        {key: tensor.contiguous() for key, tensor in shared.items()},
        tmp_path / "theirs.safetensors",
    )
    again = loaded(tmp_path / "theirs.safetensors")
    assert {len(p) for name, p in again.named_parameters() if ".lora_A" in name} == {4}
    assert not any(update.any() for update in updates(again).values())


@pytest.mark.parametrize("prefix", ["lora_unet_", "lora_transformer_", "transformer."])
@pytest.mark.parametrize("layout", [*LAYOUTS, None])
def test_kohya_style(layout: str | None, prefix: str, tmp_path: Path) -> None:
    """down, up and alpha, with underscores for dots."""
    network = adapted()
    tensors, config = own_file(network, tmp_path)
    scale = 1.0 if layout else config.lora_alpha / config.r
    moved = converted(tensors, config, LAYOUTS[layout]) if layout else tensors
    kohya: dict[str, Tensor] = {}
    for key, tensor in moved.items():
        layer, _, factor = (
            key.removeprefix("diffusion_model.").removesuffix(".weight").rpartition(".")
        )
        name = prefix + (layer.replace(".", "_") if prefix.endswith("_") else layer)
        kohya[f"{name}.{ {'lora_A': 'lora_down', 'lora_B': 'lora_up'}[factor] }.weight"] = tensor
        if factor == "lora_A":
            kohya[f"{name}.alpha"] = torch.tensor(scale * len(tensor))
    save_file(kohya, tmp_path / "kohya.safetensors")
    assert_same(tmp_path / "kohya.safetensors", network)


def test_a_trained_adapter_of_a_layout_goes_on_and_is_saved(tmp_path: Path) -> None:
    network = adapted()
    save_file(converted(*own_file(network, tmp_path), comfyui), tmp_path / "theirs.safetensors")
    again = loaded(tmp_path / "theirs.safetensors")
    trained = {name for name, p in again.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in again.named_parameters() if ".lora_" in name}
    again.save_lora_adapter(tmp_path / "again", weight_name=LORA_FILE)
    assert_same(tmp_path / "again" / LORA_FILE, network)
    stock = tiny_transformer()
    stock.load_lora_adapter(
        tmp_path / "again", weight_name=LORA_FILE, prefix=None, adapter_name="default"
    )
    for name, update in updates(stock).items():
        torch.testing.assert_close(update, updates(network)[name], rtol=1e-5, atol=1e-5)


def test_ranks_of_their_own(tmp_path: Path) -> None:
    network = adapted(
        rank_pattern={"to_k": 2, r"transformer_blocks\.0\.attn\.to_v": 3}, alpha_pattern={"to_k": 5}
    )
    assert_same(tmp_path / LORA_FILE, own_file(network, tmp_path) and network)
    tensors = load_file(tmp_path / LORA_FILE)
    save_file(tensors, tmp_path / "bare.safetensors")
    bare = updates(loaded(tmp_path / "bare.safetensors"))
    for name, update in bare.items():
        a, b = (tensors[f"{name}.lora_{x}.weight"] for x in "AB")
        torch.testing.assert_close(update, b @ a)


# -- what a file states of its scale ---------------------------------------------------------------


def header(entries: dict[str, str]) -> Callable[[Path, dict[str, Tensor]], Path]:
    def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
        save_file(tensors, folder / "theirs.safetensors", entries)
        return folder / "theirs.safetensors"

    return write


def kohya(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Without a network-wide alpha in the header, and with alphas of one element."""
    alphas = {
        k.replace("lora_A.weight", "alpha"): torch.tensor([16.0]) for k in tensors if "lora_A" in k
    }
    return header({"ss_network_alpha": "None", "ss_network_dim": "Dynamic"})(
        folder, tensors | alphas
    )


def peft_folder(
    folder: Path, tensors: dict[str, Tensor], prefix: str = "base_model.model."
) -> Path:
    (folder / "peft").mkdir()
    LoraConfig(r=4, lora_alpha=16, target_modules=["to_q"]).save_pretrained(folder / "peft")
    save_file(
        {f"{prefix}{k}": t for k, t in tensors.items()},
        folder / "peft" / "adapter_model.safetensors",
    )
    return folder / "peft"


@pytest.mark.parametrize(
    "write",
    [
        header({"lora_alpha": "16", "r": "4"}),
        header({"lora_alpha": "16"}),
        header({"transformer.lora_alpha": "16.0", "transformer.r": "4"}),
        header({"alpha": "16", "rank": "4", "format": "pt"}),
        header({"ss_network_alpha": "16", "ss_network_dim": "4"}),
        header(
            {
                METADATA: json.dumps(
                    {"transformer.r": 4, "transformer.lora_alpha": 16, "text_encoder.r": 8}
                )
            }
        ),
        header({METADATA: json.dumps({"lora_alpha": 16, "lora_dropout": 0.5, "bias": "none"})}),
        header({METADATA: json.dumps({"r": 4}), "lora_alpha": "16"}),
        header({"lora_alpha": "8", "use_rslora": "True"}),
        header({"alpha_pattern": '{".*": 16}', "lora_alpha": "3"}),
        header({"network_alpha": "16", "network_dim": "4", "peft_type": "LORA"}),
        peft_folder,
        lambda folder, tensors: peft_folder(folder, tensors) / "adapter_model.safetensors",
        lambda folder, tensors: peft_folder(folder, tensors, "") / "adapter_model.safetensors",
        lambda folder, tensors: (
            peft_folder(folder, tensors, "transformer.") / "adapter_model.safetensors"
        ),
        kohya,
    ],
)
def test_alpha_is_found_wherever_it_stands(
    write: Callable[[Path, dict[str, Tensor]], Path], tmp_path: Path
) -> None:
    network = adapted(alpha=16)
    assert_same(write(tmp_path, own_file(network, tmp_path)[0]), network)


def test_without_an_alpha_the_rank_is_taken_with_a_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = adapted(alpha=4)
    file = header({"format": "pt"})(tmp_path, own_file(network, tmp_path)[0])
    with caplog.at_level(logging.INFO, "sage_fast"):
        assert_same(file, network)
    assert "states no alpha" in " ".join(caplog.text.split())
    caplog.clear()
    with caplog.at_level(logging.INFO, "sage_fast"):
        loaded(tmp_path / LORA_FILE)
    assert not caplog.text


def test_layers_without_an_alpha_beside_others_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = own_file(adapted(alpha=4), tmp_path)[0]
    first = min(tensors).removesuffix(".lora_A.weight")
    with caplog.at_level(logging.INFO, "sage_fast"):
        loaded(header({"format": "pt"})(tmp_path, tensors | {f"{first}.alpha": torch.tensor(8.0)}))
    assert "states no alpha" in " ".join(caplog.text.split())


# -- what tensors say, tensors decide --------------------------------------------------------------

RANKS = {
    "rank_pattern": {"to_k": 2, r"transformer_blocks\.0\.attn\.to_v": 3},
    "alpha_pattern": {"to_k": 5},
}
"""Ranks and alphas of layers that are not the main ones, 4 and 6."""


def kohya_file(network: Any, folder: Path, entries: dict[str, str]) -> Path:
    """Write an adapter as kohya's scripts do: an alpha as a tensor for each layer, and a header."""
    tensors, _ = own_file(network, folder)
    written: dict[str, Tensor] = {}
    for name, module in network.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        key = "lora_unet_" + name.replace(".", "_")
        written[f"{key}.lora_down.weight"] = tensors[f"{name}.lora_A.weight"].clone()
        written[f"{key}.lora_up.weight"] = tensors[f"{name}.lora_B.weight"].clone()
        written[f"{key}.alpha"] = torch.tensor(
            module.scaling["default"] * len(tensors[f"{name}.lora_A.weight"])
        )
    save_file(written, folder / "kohya.safetensors", entries)
    return folder / "kohya.safetensors"


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"ss_network_dim": "4", "ss_network_alpha": "6"},
        {"ss_network_dim": "128", "ss_network_alpha": "64.0"},
        {"ss_network_dim": "Dynamic", "ss_network_alpha": "Dynamic"},
        {"ss_network_dim": "4", "rank": "8", "network_dim": "five", "lora_rank": "[1]"},
        {"ss_network_alpha": "6", "network_alpha": "12", "alpha": "none of these"},
        {"rank_pattern": "3", "r": "64"},
        {
            "ss_network_module": "networks.dylora",
            "ss_network_args": '{"conv_dim": "2"}',
            "ss_mixed_precision": "fp16",
        },
        {"ss_bucket_info": "[" * 100_000},
    ],
    ids=lambda entries: str(entries)[:60],
)
def test_a_kohya_file_with_ranks_per_layer_is_whole_whatever_its_header_says(
    entries: dict[str, str], tmp_path: Path
) -> None:
    network = adapted(**RANKS)
    assert_same(kohya_file(network, tmp_path, entries), network)


def test_a_header_with_the_main_rank_beside_a_configuration_informs(tmp_path: Path) -> None:
    """The alpha is that of the header or the configuration, the rank of each layer that of its
    tensors."""
    network = adapted(rank_pattern={"to_k": 2})
    tensors, _ = own_file(network, tmp_path)
    assert_same(
        header({"ss_network_dim": "4", "ss_network_alpha": "6"})(tmp_path, tensors), network
    )
    assert_same(
        header({METADATA: json.dumps({"r": 4, "lora_alpha": 6})})(tmp_path, tensors), network
    )


def test_a_configuration_without_a_layer_of_its_rank_is_refused_unless_the_tensors_have_the_alphas(
    tmp_path: Path,
) -> None:
    """alpha / rank would be a guess."""
    network = adapted()
    tensors, _ = own_file(network, tmp_path)
    write = header({METADATA: json.dumps({"r": 8, "lora_alpha": 6, "rank_pattern": {"to_q": 3}})})
    assert "its r is " in refusal(write(tmp_path, tensors))
    layers = {key.removesuffix(".lora_A.weight") for key in tensors if ".lora_A." in key}
    assert_same(
        write(tmp_path, tensors | {f"{layer}.alpha": torch.tensor(6.0) for layer in layers}),
        network,
    )


@pytest.mark.parametrize(
    "form",
    ["{0}.default.weight", "{0}.my_style.weight", "{0}.style-2.weight", "{0}.my_style", "{0}"],
)
@pytest.mark.parametrize("prefix", ["", "base_model.model.", "transformer."])
def test_an_adapter_of_any_name_is_whole(form: str, prefix: str, tmp_path: Path) -> None:
    network = adapted(alpha=4)
    tensors, _ = own_file(network, tmp_path)
    named = {
        prefix + form.format(key.removesuffix(".weight")): tensor for key, tensor in tensors.items()
    }
    save_file(named, tmp_path / "theirs.safetensors")
    assert_same(tmp_path / "theirs.safetensors", network)


def test_a_file_of_two_adapters_is_refused_by_their_names(tmp_path: Path) -> None:
    tensors, _ = own_file(adapted(), tmp_path)
    both = {
        key.replace(".weight", f".{name}.weight"): tensor.clone()
        for name in ("style", "motion")
        for key, tensor in tensors.items()
    }
    assert "holds the adapters motion, style; expected one" in refusal(header({})(tmp_path, both))


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "with a byte-order mark"])
def test_a_byte_order_mark_is_no_part_of_a_configuration(mark: str, tmp_path: Path) -> None:
    network = adapted(alpha=16)
    file = peft_folder(tmp_path, own_file(network, tmp_path)[0])
    config = (file if file.is_dir() else file.parent) / "adapter_config.json"
    config.write_text(mark + config.read_text(), encoding="utf-8")
    assert_same(file, network)


# -- what may not act ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"lora_bias": True},
        {"fan_in_fan_out": True},
        {"modules_to_save": ["proj_out"]},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"layer_replication": [[0, 1], [0, 1]]},
        {"use_qalora": True},
        {"a_field_of_tomorrow": 3},
        {"peft_type": "LOHA"},
        {"r": 8},
        {"lora_alpha": 0},
        {"lora_alpha": "16"},
        {"lora_alpha": float("nan")},
        {"alpha_pattern": {"to_q": -1}},
        {"alpha_pattern": {"(": 1}},
        {"rank_pattern": {"to_q": 3}},
        {"alpha_pattern": 3},
        {"use_rslora": "false"},
        {"lora_alpha": 10**400},
        {"lora_alpha": 1e300},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_a_field_that_cannot_be_honoured_is_refused_by_name(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    tensors, _ = own_file(adapted(), tmp_path)
    given = {"r": 4, "lora_alpha": 6} | fields
    text = refusal(header({METADATA: json.dumps(given)})(tmp_path, tensors))
    (name,) = fields
    words = {"rank_pattern": "its r is 3", "alpha_pattern": "alpha"}
    assert words.get(name, "alpha" if name == "lora_alpha" else f"its {name} is ") in text


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"use_dora": "true"}, "its use_dora is True"),
        (
            {"lora_alpha": "16", METADATA: '{"lora_alpha": 8}'},
            "states lora_alpha twice, as 8 and 16",
        ),
        ({"alpha": "8", "network_alpha": "16"}, "states lora_alpha twice"),
        ({METADATA: "[" * 100_000}, "cannot be read"),
        ({METADATA: '"r"'}, "cannot be read"),
        ({"lora_alpha": "[" * 100_000}, "cannot be read"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_a_header_that_cannot_be_honoured_is_refused(
    entries: dict[str, str], words: str, tmp_path: Path
) -> None:
    tensors, _ = own_file(adapted(), tmp_path)
    assert words in refusal(header(entries)(tmp_path, tensors))


def test_nothing_else_of_a_configuration_acts(tmp_path: Path) -> None:
    """Dropout and a mode of inference are in files of runs that trained with them."""
    network = adapted()
    tensors, config = own_file(network, tmp_path)
    config.lora_dropout, config.inference_mode, config.exclude_modules = 0.9, True, [".*"]
    config.init_lora_weights, config.layers_to_transform = "gaussian", [7]
    write_adapter(tmp_path / "theirs.safetensors", tensors, config)
    again = tiny_transformer()
    base = {name: p.detach().clone() for name, p in again.named_parameters()}
    load_lora(again, tmp_path / "theirs.safetensors", "transformer")
    assert not [m for m in again.modules() if isinstance(m, nn.Dropout) and m.p]
    for name, p in again.named_parameters():
        assert p.requires_grad == (".lora_" in name)
        if not p.requires_grad:
            assert torch.equal(p, base[name.replace(".base_layer", "")]), name
    assert_same(tmp_path / "theirs.safetensors", network)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("transformer_blocks.0.attn.to_q.lora_magnitude_vector", "holds '"),
        ("transformer_blocks.0.attn.to_q.lora_B.bias", "holds '"),
        ("transformer.transformer_blocks.0.attn.to_q.lora_A.weight", "is missing"),
        ("transformer_blocks.0.attn.to_q.diff_b", "holds '"),
        ("transformer_blocks.9.attn.to_q.alpha", "is missing"),
        (
            "transformer_blocks.0.attn.to_q.lora_down.weight",
            "holds A of transformer_blocks.0.attn.to_q twice",
        ),
        (
            "transformer_blocks.0.attn.to_q.lora_A.default.weight",
            "holds A of transformer_blocks.0.attn.to_q twice",
        ),
    ],
)
def test_a_tensor_too_many_is_refused(key: str, words: str, tmp_path: Path) -> None:
    tensors, _ = own_file(adapted(), tmp_path)
    tensors[key] = torch.ones(4, 32) if "lora_A" in key else torch.ones(1)
    assert words in refusal(header({})(tmp_path, tensors))


def test_a_layer_in_two_layouts_is_refused(tmp_path: Path) -> None:
    tensors, config = own_file(adapted(), tmp_path)
    both = {k: t.clone() for k, t in (tensors | converted(tensors, config, comfyui)).items()}
    assert " twice" in refusal(header({})(tmp_path, both))


@pytest.mark.parametrize("kind", "AB")
def test_a_kernel_of_another_size_is_refused(kind: str, tmp_path: Path) -> None:
    tensors, _ = own_file(adapted(targets="x_embedder.proj"), tmp_path)
    key = f"x_embedder.proj.lora_{kind}.weight"
    tensors[key] = tensors[key].repeat(1, 1, 3, 3, 3)
    assert f"was made for another model: x_embedder.proj.lora_{kind}" in refusal(
        header({})(tmp_path, tensors)
    )
