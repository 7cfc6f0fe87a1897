"""Read LoRA files of other programs: of diffusers, peft and kohya's scripts, and in the layouts
that `export` writes.

Only ranks, alphas and rank stabilisation act on the result. What tensors say, tensors decide:
ranks, and alphas where they hold them; what a header or a configuration says of these only informs.
A field that changes the result in another way is refused by name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from sage_fast.models.lora.export_target import ExportTarget
from sage_fast.util.console import wrapped
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_text

log = logging.getLogger(__name__)

ACTING = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"}
IDLE = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode",
    "runtime_config", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "lora_dropout",
    "eva_config", "megatron_core", "megatron_config", "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip
"""Fields of peft's configuration that change nothing once the factors are there."""
INITIALISATIONS = ("gaussian", "orthogonal", "eva", True, False)
"""Values of `init_lora_weights` that leave the base weights as they are."""
HEADER = {
    **{field: field for field in vars(LoraConfig()) if field not in ("r", "rank_pattern")},
    **dict.fromkeys(("alpha", "network_alpha", "ss_network_alpha"), "lora_alpha"),
}
"""Plain entry of a file's header -> the field that it states. Ranks, of which kohya's scripts write
only the most common one, are those of the tensors."""
WORDS = {"None": None, "Dynamic": None, "True": True, "False": False}
"""Values of Python that kohya's scripts write into a header."""
FACTOR = re.compile(
    r"(?P<layer>.+?)\.(?:"
    r"(?P<factor>lora_A|lora_B|lora_down|lora_up)(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?(?:\.weight)?"
    r"|(?P<alpha>alpha))"
)
"""Name of a tensor. peft names the adapter too, as in `to_q.lora_A.default.weight`."""
KINDS = {"lora_A": "A", "lora_down": "A", "lora_B": "B", "lora_up": "B", "alpha": "alpha"}
PREFIXES = r"base_model\.model\.|model\.|diffusion_model\.|pipe\.dit\.|lora_unet_|lora_transformer_"
LoraLayout = Callable[[str], ExportTarget]


class LoraFormatError(Exception):
    """What is wrong with a file, as the end of a sentence that begins with its name."""


def open_adapter(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the header of a safetensors file.

    Raises:
        LoraFormatError: it is damaged.
    """
    try:
        with safe_open(file, "pt") as opened:
            return load_file(file), opened.metadata() or {}
    except SafetensorError as error:
        raise LoraFormatError(f": not a safetensors file: {error}") from error


def read_adapter(
    file: Path, part: str, layers: Mapping[str, torch.Size], layouts: Iterable[LoraLayout]
) -> tuple[dict[str, Tensor], LoraConfig]:
    """Read a LoRA; return its float32 factors under diffusers' names, and a configuration of
    nothing else.

    Args:
        part: name of the network, which a pipeline puts before each layer's.
        layers: layer -> shape of its weight.
        layouts: the other layouts of the checkpoint.

    Raises:
        LoraFormatError: it is damaged, no LoRA, made for another model, or has a field that cannot
            be honoured.
    """
    tensors, header = open_adapter(file)
    groups, odd = _groups(tensors)
    if not any("A" in group for group in groups.values()):
        raise LoraFormatError(": holds no LoRA in diffusers format (`<layer>.lora_A.weight`)")
    if odd:
        raise LoraFormatError(
            f": holds {odd[0]!r}; expected nothing but `<layer>.lora_A.weight` and "
            "`<layer>.lora_B.weight`"
        )
    beside = file.with_name("adapter_config.json")
    is_peft = file.stem == "adapter_model" or any(
        name.startswith("base_model.model.") for name in groups
    )
    has_alphas = all("alpha" in group for group in groups.values())
    fields = _fields(
        header, beside if is_peft and beside.is_file() else None, part, alpha_acts=not has_alphas
    )
    if "lora_alpha" not in fields and not has_alphas:
        log.info(
            wrapped(
                f"note: model.weights = {file}: states no alpha, so that the rank is taken for it"
            )
        )
    known = _known(layers, layouts)
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    alphas: dict[str, float] = {}
    file_ranks = {len(group["A"]) for group in groups.values() if "A" in group and group["A"].ndim}
    for name, group in groups.items():
        bare = re.sub(rf"^(?:{re.escape(part)}\.|{PREFIXES})*", "", name)
        a, b = _factors(name, group)
        alpha = _alpha(bare, group.get("alpha"), fields, len(a), file_ranks)
        targets = known.get(bare.replace(".", "_"), ())
        for layer, down, up in _split(name, a, b, targets, layers):
            if layer in factors:
                raise LoraFormatError(f": holds the layer {layer} twice")
            factors[layer] = down.float().contiguous(), up.float().contiguous()
            # The scale of the update stays: alpha / rank, or with rsLoRA alpha / sqrt(rank).
            exponent = 0.5 if fields.get("use_rslora") else 1
            alphas[layer] = alpha * (len(down) / len(a)) ** exponent
    ranks = {layer: len(down) for layer, (down, _) in factors.items()}
    # the most common ones; the patterns hold the others
    r = Counter(ranks.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    config = LoraConfig(
        r=r,
        lora_alpha=alpha,
        rank_pattern={f"^{layer}": rank for layer, rank in ranks.items() if rank != r},
        alpha_pattern={f"^{layer}": value for layer, value in alphas.items() if value != alpha},
        use_rslora=bool(fields.get("use_rslora")),
        target_modules="|".join(map(re.escape, factors)),
    )
    found = {}
    for layer, (down, up) in factors.items():
        found[f"{layer}.lora_A.weight"] = down
        found[f"{layer}.lora_B.weight"] = up
    return found, config


def _groups(tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Return layer -> its tensors A, B and alpha, and the names that are none of these.

    Raises:
        LoraFormatError: a layer has one twice, or the file holds more than one adapter.
    """
    matches = {key: FACTOR.fullmatch(key) for key in tensors}
    names = sorted({match["adapter"] for match in matches.values() if match and match["adapter"]})
    if len(names) > 1:
        raise LoraFormatError(f": holds the adapters {', '.join(names)}; expected one")
    groups: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, match in matches.items():
        if match is None:
            continue
        layer, kind = match["layer"], KINDS[match["factor"] or match["alpha"]]
        if kind in groups[layer]:
            raise LoraFormatError(f": holds {kind} of {layer} twice")
        groups[layer][kind] = tensors[key]
    return groups, [key for key, match in matches.items() if match is None]


def _fields(
    header: Mapping[str, str], beside: Path | None, part: str, *, alpha_acts: bool
) -> dict[str, Any]:
    """Return what a file states of its LoRA, by peft's names.

    Its configuration is in its header or in a file beside it; plain entries of the header count
    too.

    Args:
        alpha_acts: whether some layer has no alpha of its own, so that one stated twice is
            ambiguous.

    Raises:
        LoraFormatError: it cannot be read, or a field cannot be honoured.
    """

    def of_part(entries: Mapping[str, Any]) -> dict[str, Any]:  # a pipeline names each part's
        own = {
            key.removeprefix(f"{part}."): value
            for key, value in entries.items()
            if key.startswith(f"{part}.")
        }
        return {key: value for key, value in (own or entries).items() if value is not None}

    try:
        if (text := header.get(LORA_ADAPTER_METADATA_KEY)) is None and beside is not None:
            text = read_text(beside)
        fields = of_part({} if text is None else dict(json.loads(text)))
        entries = {key.removeprefix(f"{part}."): value for key, value in header.items()}
        plain = {key: _plain(value) for key, value in entries.items() if key in HEADER}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise LoraFormatError(f": its configuration cannot be read: {error}") from error
    for key, value in plain.items():
        field = HEADER[key]
        differs = value is not None and fields.setdefault(field, value) != value
        if differs and (alpha_acts or field not in ("lora_alpha", "alpha_pattern")):
            raise LoraFormatError(f": states {field} twice, as {fields[field]!r} and {value!r}")
    defaults = vars(LoraConfig()) | {"peft_type": "LORA"}
    if not isinstance(fields.get("use_rslora", False), bool):
        raise LoraFormatError(
            f": its use_rslora is {fields['use_rslora']!r}; expected true or false"
        )
    for key, value in fields.items():
        acts = value and key not in ACTING | IDLE and value != defaults.get(key)
        if acts and not (key == "init_lora_weights" and value in INITIALISATIONS):
            raise LoraFormatError(
                f": its {key} is {value!r}, which changes the result and cannot be honoured here"
            )
    return fields


def _plain(value: str) -> Any:
    """Return what an entry of a header states: JSON, a word of Python, or the text itself."""
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(value)
    return WORDS.get(value, value)


def _known(
    layers: Iterable[str], layouts: Iterable[LoraLayout]
) -> dict[str, list[tuple[str, ExportTarget]]]:
    """Return the inverse of the tables by which `export` writes.

    Its keys are a layer's name in any layout, without prefix and with `_` for `.`; its values are
    our layers, and where they are in that layer.
    """
    known: dict[str, list[tuple[str, ExportTarget]]] = {}
    for target_of in (*layouts, ExportTarget):
        found: dict[str, list[tuple[str, ExportTarget]]] = defaultdict(list)
        for layer in layers:
            with contextlib.suppress(UserError):  # a layer that only diffusers has
                target = target_of(layer)
                found[re.sub(rf"^(?:{PREFIXES})", "", target.layer).replace(".", "_")].append(
                    (layer, target)
                )
        known |= found
    return known


def _factors(name: str, group: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return A and B of a layer of a file.

    Raises:
        LoraFormatError: one is missing, not finite, of an unknown type, or they do not fit each
            other.
    """
    for kind in "AB":
        if kind not in group:
            there = next(f"lora_{other}.weight" if other in "AB" else other for other in group)
            raise LoraFormatError(
                f": {name}.{there} is there and {name}.lora_{kind}.weight is missing"
            )
        if group[kind].dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise LoraFormatError(
                f": {name}.lora_{kind}.weight is {group[kind].dtype}; expected float32, bfloat16 "
                "or float16"
            )
        if not group[kind].isfinite().all():
            raise LoraFormatError(f": {name}.lora_{kind}.weight is not finite")
    a, b = group["A"], group["B"]
    if a.ndim < 2 or b.ndim < 2 or not 0 < len(a) == b.shape[1]:
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        raise LoraFormatError(
            f": the factors of {name} have the shapes {shapes}; expected one rank above 0"
        )
    return a, b


def _split(
    name: str,
    a: Tensor,
    b: Tensor,
    targets: Sequence[tuple[str, ExportTarget]],
    layers: Mapping[str, torch.Size],
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each of our layers that a layer of a file stands for, with its own A and B.

    Of the ranks of a layer that fuses several, each of these gets those that its rows of B use.
    Layers whose rows are 0 share the ranks that none uses: a factor that has not been trained keeps
    its layer.

    Raises:
        LoraFormatError: our model has no such layer, or one of another size.
    """
    another = f" was made for another model: {name}.lora_"
    if not targets:
        raise LoraFormatError(f"{another}A.weight has shape {list(a.shape)}, no such layer here")
    fused = targets[0][1].fused
    for layer, target in targets:
        shape = layers[layer]
        for kind, factor, axis, width in (("A", a, 1, shape[1]), ("B", b, 0, shape[0] * fused)):
            kernel = shape[2:] if kind == "A" else torch.Size([1] * len(shape[2:]))
            if factor.shape[axis] != width or factor.shape[2:] != kernel:
                raise LoraFormatError(
                    f"{another}{kind}.weight has shape {list(factor.shape)}, expected width {width}"
                )
        up = b.chunk(fused)[target.position]
        up = torch.cat(up.chunk(2)[::-1]) if target.swaps_halves else up
        used = _ranks(b.flatten(1).chunk(fused))[target.position]
        if len(a[used]):
            yield layer, a[used], up[:, used]


def _ranks(parts: Sequence[Tensor]) -> Tensor:
    """Return which ranks are whose, bool `[parts, ranks]`, of the rows of B of each part of a
    layer."""
    used = torch.stack([part.any(0) for part in parts])
    if len(parts) == 1:
        return used.new_ones(used.shape)
    idle = (~used.any(1)).nonzero()
    spare = (~used.any(0)).nonzero()
    for i, part in enumerate(idle):
        # in equal shares if that comes out even
        mine = spare.chunk(len(idle))[i] if len(spare) % len(idle) == 0 else spare
        used[part, mine] = True
    return used


def _alpha(
    layer: str, stated: Tensor | None, fields: Mapping[str, Any], rank: int, file_ranks: set[int]
) -> float:
    """Return the alpha of a layer of this rank: of a tensor, or of the fields; the rank itself if
    none is stated.

    Args:
        stated: alpha as a tensor of the file, which decides alone; None if it holds none.
        file_ranks: ranks of all layers of the file.

    Raises:
        LoraFormatError: it is no number above 0, or it is that of another rank than the tensors
            have.
    """
    if stated is not None:
        return _checked_alpha(layer, stated.squeeze().tolist())

    def of_layer(field: str, pattern: str) -> tuple[Any, bool]:
        """Return the value of a field for this layer, and whether it is the layer's own."""
        try:
            values = dict(fields.get(pattern, {}))
            key = get_pattern_key(list(values), layer)
        except (re.error, TypeError, ValueError) as error:
            raise LoraFormatError(
                f": its {pattern} is no mapping of regular expressions: {error}"
            ) from error
        return values.get(key, fields.get(field)), key in values

    # A configuration's alpha counts for its own rank: with another one, the scale alpha / rank
    # would be a guess.
    r, is_own = of_layer("r", "rank_pattern")
    if r not in (None, rank) and (is_own or r not in file_ranks):
        raise LoraFormatError(f": its r is {r!r}, and the factors of {layer} have rank {rank}")
    alpha, _ = of_layer("lora_alpha", "alpha_pattern")
    return rank if alpha is None else _checked_alpha(layer, alpha)


def _checked_alpha(layer: str, alpha: Any) -> float:
    # beyond, sums overflow
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e6:
        raise LoraFormatError(f": the alpha of {layer} is {alpha!r}; expected a number above 0")
    return alpha
