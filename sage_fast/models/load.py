"""Load the model that `model.path` names: policy, decoder and text encoders."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import ConfigMixin
from diffusers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError, safe_open

from sage_fast.config.fields import is_hub_id
from sage_fast.config.rank_checks import check_heads
from sage_fast.config.schema import ModelConfig, SamplingConfig
from sage_fast.models.attention.backends import ATTENTION, check_attention
from sage_fast.models.attention.sequence import SequenceParallel
from sage_fast.models.attention.trial import Trial, fastest, measure_attention, try_attention
from sage_fast.models.hub import progress_bars_of, reachable
from sage_fast.models.lora.adapter import ADAPTER, add_lora, load_lora
from sage_fast.models.model import Model
from sage_fast.models.policy import Policy
from sage_fast.models.random_weights import is_random, random_module
from sage_fast.models.registry import CHECKPOINTS, SHIPPED, default_family, family, split_path
from sage_fast.models.spec import Spec
from sage_fast.util.errors import UserError, first_line, nearest
from sage_fast.util.files import read_text
from sage_fast.util.ranks import all_gather_object, sequence_group, sequence_size

JSON_TYPES: dict[type, Any] = {
    int: (int, float),
    float: (int, float),
    str: str,
    tuple: (list, tuple),
}
"""Type of a field's default -> what config.json may hold."""
FLOATS = ("F32", "BF16", "F16", "F64")
"""Types of weights in a file that are read as they are meant."""


class _ConfigReader(ConfigMixin):
    """Reader for the config.json of any part."""

    config_name = "config.json"


def read_config(setting: str, source: str, part: str) -> dict[str, Any]:
    """Read the config.json of a part, from a folder or the hub.

    Raises:
        UserError: it is missing or cannot be read.
    """
    if Path(source).is_dir() and not (Path(source) / part / "config.json").is_file():
        raise UserError(
            f"{setting} = {source!r}: no checkpoint in diffusers format; {part}/config.json is "
            "missing"
        )
    try:
        config = _ConfigReader.load_config(source, subfolder=part)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{setting} = {source!r}: cannot read the {part}'s config.json: {first_line(error)}"
        ) from error
    if not isinstance(config, dict):
        raise UserError(f"{setting} = {source!r}: the {part}'s config.json holds no mapping")
    if config.get("quantization_config"):
        raise UserError(
            f"{setting} = {source!r}: its {part} is quantized; expected weights in float32 or "
            "bfloat16"
        )
    return config


def find_spec(path: str, *, fetch: bool = False) -> Spec:
    """Return the spec of the model that `model.path` names, from its configuration files alone.

    Args:
        path: one of `CHECKPOINTS`, a folder, a hub id, `random:NAME`, or any of these prefixed with
            `package.module:Name:`.
        fetch: download missing configuration files from the hub. Otherwise a hub id gets the
            published sizes of the family in its prefix, or of the default family.

    Raises:
        UserError: `path` is neither a checkpoint folder nor shaped like a hub id, names an unknown
            random model, has no matching family, or is a checkpoint for another task.
    """
    given = path
    named, path = split_path(path)
    if is_random(path):
        return _find_random(path)
    # settings name a folder of theirs by its whole path
    if is_hub_id(path) and Path(path).is_dir():
        raise UserError(
            f"model.path = {given!r}: a hub id, and a folder of that name is in the current folder "
            f"but not beside the settings; --model.path ./{path} is the folder"
        )
    path = str(CHECKPOINTS.get(path, path))
    if Path(path).is_file() or Path(path).suffix in (
        ".safetensors",
        ".gguf",
        ".ckpt",
        ".pt",
        ".bin",
    ):
        raise UserError(
            f"model.path = {given!r}: a single file; expected a folder in diffusers format"
        )
    if not Path(path).is_dir():
        if not is_hub_id(path):
            raise UserError(
                f"model.path = {given!r}: no such folder; {nearest(Path(path).name, CHECKPOINTS)}; "
                "or a local folder in diffusers format, or a hub id such as "
                f"{(named or default_family()).published}"
            )
        if not fetch:
            return (named or default_family())(path)
    source = reachable(path)
    cls = named or _family_in(given, source)
    parts = (*cls.networks, "vae")
    configs = {part: read_config("model.path", cls.source(part, source), part) for part in parts}
    if (kind := configs["vae"].get("_class_name")) not in (None, known := cls.autoencoder.__name__):
        raise UserError(f"model.path = {given!r}: its vae is a {kind}; expected {known}")
    spec = cls(path, configs)
    for part in parts:
        for key, value in spec.known_fields(part).items():
            usual = (
                inspect.signature({**cls.networks, "vae": cls.autoencoder}[part])
                .parameters[key]
                .default
            )
            if not isinstance(value, JSON_TYPES.get(type(usual), object)):
                raise UserError(
                    f"model.path = {given!r}: {part}/config.json describes no model: {key} is "
                    f"{value!r}; expected a value like {usual!r}"
                )
    spec.check()
    return spec


def check_weights(spec: Spec) -> None:
    """Check that a local folder holds the weights that its config.json asks for; reads headers
    alone.

    Raises:
        UserError: one is missing, or has another shape or type, or a file is damaged.
    """
    for part in (*spec.networks, "vae"):
        _check_part(spec, "model.path", spec.source(part, spec.path), part)


def _check_part(spec: Spec, setting: str, source: str, part: str) -> None:
    """Check one part as `check_weights` does; what is not a local folder passes, and is checked
    once it is loaded."""
    if not Path(source).is_dir():
        return
    folder, start = Path(source, part), f"{setting} = {source!r}:"
    name = (
        SAFE_WEIGHTS_INDEX_NAME
        if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file()
        else SAFETENSORS_WEIGHTS_NAME
    )
    if not (folder / name).is_file():
        raise UserError(
            f"{start} {part}/ holds no {name} and no index; save_pretrained writes them, without a "
            "variant"
        )
    expected = {key: list(tensor.shape) for key, tensor in spec.meta(part).state_dict().items()}
    given: dict[str, tuple[list[int], str, str]] = {}
    files = {"": name}  # a file without an index lists its weights itself
    try:
        if name == SAFE_WEIGHTS_INDEX_NAME:
            index = json.loads(read_text(folder / name))
            files, _ = dict(index["weight_map"]), dict(index["metadata"])
            if outside := [file for file in files.values() if Path(file).name != file]:
                raise ValueError(
                    f"it names {outside[0]!r}; expected files beside it, as save_pretrained writes "
                    "them"
                )
        for name in sorted({*files.values()}):
            with safe_open(folder / name, "pt") as opened:
                for key in (
                    opened.keys()
                    if "" in files
                    else [key for key, file in files.items() if file == name]
                ):
                    found = opened.get_slice(key)
                    given[key] = found.get_shape(), found.get_dtype(), name
    except (
        SafetensorError,
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as error:
        raise UserError(f"{start} cannot read {part}/{name}: {error}") from error
    for key, (shape, dtype, name) in given.items():
        what = f"{start} {key} has shape {shape} and type {dtype} in {part}/{name}"
        if shape != expected.get(key):
            raise UserError(
                f"{what}; its config.json asks for {expected.get(key, 'no such weight')}"
            )
        if dtype not in FLOATS:
            raise UserError(f"{what}; expected one of {', '.join(FLOATS)}")
    if lacking := sorted(expected.keys() - given.keys()):
        raise UserError(f"{start} {part} lacks {len(lacking)} weights, such as {lacking[0]}")


def _family_in(path: str, source: str) -> type[Spec]:
    """Return the family whose first network is in a checkpoint."""
    held, problems = [], []
    for class_name, name in SHIPPED.items():
        cls = family(name)
        try:
            held.append(read_config("model.path", source, cls.main_network()).get("_class_name"))
        except UserError as error:
            problems.append(error)
        if class_name in held:
            return cls
    expected = f"expected one of {list(SHIPPED)}"
    raise UserError(f"model.path = {path!r} holds a {held[0]}; {expected}") if held else problems[0]


def _find_random(path: str) -> Spec:
    found = {name: cls for cls in map(family, SHIPPED.values()) for name in cls.randoms}
    if path not in found:
        raise UserError(f"model.path = {path!r}: {nearest(path, found)}")
    return found[path](path)


def _load(
    spec: Spec, setting: str, source: str, part: str, dtype: torch.dtype, device: torch.device
) -> Any:
    """Load a part onto the device, strictly: unlike plain `from_pretrained`, never fill in random
    weights.

    Files are mapped, and each tensor is cast and moved by itself: the ranks of a node share the
    files' pages, and none holds the model in host memory. Only `random:NAME` gives random weights.
    """
    if is_random(source):
        return random_module(spec, part, dtype, device)
    _check_part(spec, setting, source, part)
    cls = {**spec.networks, "vae": spec.autoencoder}[part]
    options: dict[str, Any] = {
        "subfolder": part,
        "device_map": {"": device},
        "use_safetensors": True,
    }
    try:
        with progress_bars_of(source):
            module, found = cls.from_pretrained(
                source, dtype=dtype, output_loading_info=True, **options
            )
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        SafetensorError,
        NotImplementedError,
    ) as error:
        raise UserError(
            f"{setting} = {source!r}: cannot read the weights in {part}/: {first_line(error)}"
        ) from error
    if odd := [*found["missing_keys"], *found["unexpected_keys"]]:  # of a download
        raise UserError(
            f"{setting} = {source!r}: {len(odd)} weights in {part}/ do not fit its config.json: "
            f"{odd[0]}"
        )
    return module


def make_trainable(
    spec: Spec, network: Any, config: ModelConfig, seed: int = 0, weights: str | None = None
) -> None:
    """Make a network trainable: all of it, the adapter in `weights`, or a new adapter; freeze what
    no forward reads."""
    if not config.trains_adapter:
        network.requires_grad_(True)
    elif weights is not None:
        load_lora(network, Path(weights), spec.main_network(), spec.lora_layouts.values())
    else:
        targets = spec.lora_targets if config.lora_targets is None else config.lora_targets
        add_lora(
            network, rank=config.lora_rank, alpha=config.lora_alpha, targets=targets, seed=seed
        )
    if config.trains_adapter:
        # saved with it
        network.peft_config[ADAPTER].base_model_name_or_path = split_path(config.path)[1]
    spec.freeze_idle(network)


def meta_policy(spec: Spec, config: ModelConfig) -> Policy:
    """Return the configured policy on the meta device, with its adapter: no memory, no weights."""
    networks = {part: spec.meta(part) for part in spec.networks}
    with torch.device("meta"):
        for network in networks.values():
            make_trainable(spec, network, config)
        return spec.policy(networks, dtype=getattr(torch, config.dtype), guidance_scale=1.0)


def load_model(
    config: ModelConfig,
    sampling: SamplingConfig,
    device: torch.device,
    seed: int,
    *,
    needs_agreement: bool = True,
    spec: Spec | None = None,
) -> Model:
    """Load a checkpoint and make it trainable.

    Trained weights have the stored values, in float32: full fine-tuning loads whole networks so,
    whatever their files and `model.dtype`; an adapter is always float32.

    Args:
        needs_agreement: whether rollouts and training must round alike; see `choose_attention`.
        spec: that of `config.path`, if it is known.

    Raises:
        UserError: the checkpoint is missing, incomplete or for another task, the LoRA weights fit
            another model, or the attention backend is missing or wrong.
    """
    dtype = getattr(torch, config.dtype)
    check_attention(config.attention, device, dtype)
    spec = spec or find_spec(config.path, fetch=True)
    check_heads(config.sequence_parallel, spec.heads)
    loaded = reachable(spec.path)
    # Updates of the size of lr would vanish in bf16 rounding. An engine may round what forwards
    # read afterwards.
    weights = dtype if config.trains_adapter else torch.float32
    setting, source = "model.path", loaded
    if not config.trains_adapter and config.weights is not None:
        setting, source = "model.weights", config.weights
        for part in spec.networks:
            _check_same(source, part, json.loads(spec.meta(part).to_json_string()))
    networks = {part: _load(spec, setting, source, part, weights, device) for part in spec.networks}
    vae = _load(spec, "model.path", spec.source("vae", loaded), "vae", dtype, device)
    for network in networks.values():
        make_trainable(spec, network.eval(), config, seed, config.weights)
    vae.eval().requires_grad_(False)
    policy = spec.policy(networks, dtype=dtype, guidance_scale=sampling.guidance_scale)
    ignored = {
        key for part, config in spec.configs.items() for key in config if not key.startswith("_")
    }
    ignored -= {key for part in spec.configs for key in spec.known_fields(part)}
    if is_random(spec.path):
        notes = [
            f"model.path = {spec.path}: the weights are random; times and memory count, videos and "
            "rewards do not"
        ]
    else:
        notes = spec.notes(sampling)
    for part in (*spec.networks, "vae"):
        single = Path(spec.source(part, loaded), part, SAFETENSORS_WEIGHTS_NAME)
        index = single.with_name(SAFE_WEIGHTS_INDEX_NAME)
        if single.is_file() and index.is_file() and single.stat().st_mtime > index.stat().st_mtime:
            notes = [
                *notes,
                f"{single} is newer than its index, whose files are loaded: remove the index to "
                "load it",
            ]
    if ignored:
        notes = [
            *notes,
            f"model.path = {spec.path!r}: fields of config.json are not known here: "
            f"{sorted(ignored)}",
        ]
    if (group := sequence_group()) is not None:
        policy.sequence = SequenceParallel(group, device)
    model = Model(spec=spec, policy=policy, decoder=spec.decoder(vae), notes=notes)
    choose_attention(model, config.attention, sampling, needs_agreement)
    return model


def choose_attention(
    model: Model, asked: str, sampling: SamplingConfig, needs_agreement: bool = True
) -> None:
    """Use the attention backend `asked`, or for "auto" the fastest correct one at the size of this
    run. Collective.

    Args:
        needs_agreement: whether "auto" skips a backend whose output under `no_grad`, as in a
            rollout, is not that with gradients to the bit. One that is asked for by name is used
            with a note.

    Raises:
        UserError: on any rank, the requested backend does not run, or gives wrong results.
    """
    device, dtype = model.policy.device, model.policy.dtype
    if (sample_shape := model.spec.attention_shape(sampling)) is None:
        if asked not in ("auto", model.attention):
            raise UserError(
                f"model.attention = {asked!r}: {model.spec.title} calls a kernel of its own; the "
                "nearest is 'auto'"
            )
        return
    tokens, heads, width = sample_shape
    shape = (sampling.batch_size, tokens, heads // sequence_size(), width)
    if asked == "auto":
        trials: list[dict[str, Trial]] = all_gather_object(measure_attention(shape, device, dtype))
        found = (
            (name, trial.why_skipped(needs_agreement))
            for rank in trials
            for name, trial in rank.items()
        )
        problems = {name: problem for name, problem in found if problem}
        model.notes += [
            f"attention {name!r} is skipped: {problem}" for name, problem in problems.items()
        ]
        right = {name: trial for name, trial in trials[0].items() if name not in problems}
        if problems and not right:
            raise UserError(
                "model.attention = 'auto': no backend is right here; " + "; ".join(model.notes)
            )
        model.attention_milliseconds = {name: trial.milliseconds for name, trial in right.items()}
        asked = fastest(right)
    elif not ATTENTION[asked].is_reference:
        tried: list[Trial] = all_gather_object(
            try_attention(ATTENTION[asked], shape, device, dtype)
        )
        if problem := next(filter(None, (trial.problem for trial in tried)), None):
            raise UserError(f"model.attention = {asked!r}: {problem}; the nearest choice is 'auto'")
        if problem := next(
            filter(None, (trial.why_skipped(needs_agreement) for trial in tried)), None
        ):
            model.notes.append(
                f"model.attention = {asked!r}: {problem}; train.parity_gate tells whether it "
                "matters"
            )
    model.attention = asked
    model.policy.attention = ATTENTION[asked]


def _check_same(source: str, part: str, config: Mapping[str, Any]) -> None:
    """Check that `source` holds weights for a network with this configuration, which spells out its
    defaults.

    Raises:
        UserError: it does not.
    """
    if not (Path(source) / part / "config.json").is_file():
        raise UserError(
            f"model.weights = {source!r}: expected a folder that holds {part}/config.json"
        )
    for key, value in read_config("model.weights", source, part).items():
        if key not in ("_diffusers_version", "_name_or_path") and config.get(key, value) != value:
            raise UserError(
                f"model.weights = {source!r} was made for another model: {key} is {value!r}, "
                f"model.path has {config[key]!r}"
            )
