"""Load the weights of a model and make them trainable: policy, decoder and text encoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError

from sage_fast.config.rank_checks import check_heads
from sage_fast.config.schema import ModelConfig, SamplingConfig
from sage_fast.models.attention.backends import check_attention
from sage_fast.models.attention.choose import choose_attention
from sage_fast.models.attention.sequence import SequenceParallel
from sage_fast.models.find import find_spec
from sage_fast.models.headers import check_part, check_same
from sage_fast.models.hub import progress_bars_of, reachable
from sage_fast.models.model import Model
from sage_fast.models.random_weights import is_random, random_module
from sage_fast.models.spec import Spec
from sage_fast.models.streaming import BlockStream
from sage_fast.models.trainable import make_trainable
from sage_fast.util.errors import UserError, first_line
from sage_fast.util.ranks import sequence_group


def load_model(
    config: ModelConfig,
    sampling: SamplingConfig,
    device: torch.device,
    seed: int,
    *,
    needs_agreement: bool = True,
    spec: Spec | None = None,
    streamed: int = 0,
) -> Model:
    """Load a checkpoint and make it trainable.

    Trained weights have the stored values, in float32: full fine-tuning loads whole networks so,
    whatever their files and `model.dtype`; an adapter is always float32.

    Args:
        needs_agreement: whether rollouts and training must round alike; see `choose_attention`.
        spec: that of `config.path`, if it is known.
        streamed: number of blocks whose frozen weights stay in host memory (`models.streaming`).

    Raises:
        UserError: the checkpoint is missing, incomplete or for another task, the LoRA weights fit
            another model, or the attention backend is missing or wrong.
    """
    dtype = getattr(torch, config.dtype)
    check_attention(config.attention, device, dtype)
    spec = spec or find_spec(config.path, fetch=True)
    check_heads(config.sequence_parallel, spec.heads)
    loaded = reachable(spec.path)

    # the device may be too small for all of it
    place = torch.device("cpu") if streamed else device
    networks = _load_networks(spec, config, loaded, place, device)
    vae = _load(spec, "model.path", spec.source("vae", loaded), "vae", dtype, device)
    for network in networks.values():
        make_trainable(spec, network.eval(), config, seed, config.weights)
    vae.eval().requires_grad_(False)

    policy = spec.policy(networks, dtype=dtype, guidance_scale=sampling.guidance_scale)
    if streamed:
        policy.stream = BlockStream(policy, streamed, device)
    group = sequence_group()
    if group is not None:
        policy.sequence = SequenceParallel(group, device)
    notes = _notes(spec, sampling, loaded)
    model = Model(spec=spec, policy=policy, decoder=spec.decoder(vae), notes=notes)
    choose_attention(model, config.attention, sampling, needs_agreement)
    return model


def _load_networks(
    spec: Spec, config: ModelConfig, loaded: str, place: torch.device, device: torch.device
) -> dict[str, Any]:
    """Load the networks of the policy to `place`, in float32 if they are trained whole.

    Args:
        device: as for `_load`.
    """
    # Updates of the size of lr would vanish in bf16 rounding. An engine may round what forwards
    # read afterwards.
    dtype = getattr(torch, config.dtype) if config.trains_adapter else torch.float32
    setting = "model.path"
    source = loaded
    if not config.trains_adapter and config.weights is not None:
        setting = "model.weights"
        source = config.weights
        for part in spec.networks:
            check_same(source, part, json.loads(spec.meta(part).to_json_string()))
    networks = {}
    for part in spec.networks:
        networks[part] = _load(spec, setting, source, part, dtype, place, device)
    return networks


def _load(
    spec: Spec,
    setting: str,
    source: str,
    part: str,
    dtype: torch.dtype,
    place: torch.device,
    device: torch.device | None = None,
) -> Any:
    """Load a part to `place`, strictly: unlike plain `from_pretrained`, never fill in random
    weights.

    Files are mapped, and each tensor is cast and moved by itself: the ranks of a node share the
    files' pages, and none holds the model in host memory. Only `random:NAME` gives random weights.

    Args:
        device: on which random weights are drawn; None: `place`.
    """
    if is_random(source):
        drawn_on = device or place
        return random_module(spec, part, dtype, drawn_on, None if place == drawn_on else place)
    check_part(spec, setting, source, part)
    options: dict[str, Any] = {
        "subfolder": part,
        "device_map": {"": place},
        "use_safetensors": True,
    }
    try:
        with progress_bars_of(source):
            module, found = spec.part_class(part).from_pretrained(
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
    odd = [*found["missing_keys"], *found["unexpected_keys"]]  # of a download
    if odd:
        raise UserError(
            f"{setting} = {source!r}: {len(odd)} weights in {part}/ do not fit its config.json: "
            f"{odd[0]}"
        )
    return module


def _notes(spec: Spec, sampling: SamplingConfig, loaded: str) -> list[str]:
    """Return what a user should know of a checkpoint.

    Args:
        loaded: where its files are.
    """
    if is_random(spec.path):
        notes = [
            f"model.path = {spec.path}: the weights are random; times and memory count, videos and "
            "rewards do not"
        ]
    else:
        notes = list(spec.notes(sampling))

    for part in (*spec.networks, "vae"):
        single = Path(spec.source(part, loaded), part, SAFETENSORS_WEIGHTS_NAME)
        index = single.with_name(SAFE_WEIGHTS_INDEX_NAME)
        if single.is_file() and index.is_file() and single.stat().st_mtime > index.stat().st_mtime:
            notes.append(
                f"{single} is newer than its index, whose files are loaded: remove the index to "
                "load it"
            )

    unknown: set[str] = set()
    for config in spec.configs.values():
        unknown |= {key for key in config if not key.startswith("_")}
    for part in spec.configs:
        unknown -= spec.known_fields(part).keys()
    if unknown:
        notes.append(
            f"model.path = {spec.path!r}: fields of config.json are not known here: "
            f"{sorted(unknown)}"
        )
    return notes
