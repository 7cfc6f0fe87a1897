"""A checkpoint's encoders: load them without the rest, and encode prompts and images."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import (
    extract_glyph_texts,
    format_text_input,
)
from PIL import Image
from torch import Tensor

from sage_fast.models.encoders import classes_of, drawn, load_network, place
from sage_fast.models.hub import progress_bars_of, reachable, stated_config
from sage_fast.models.hunyuan15.conditioning import TextEmbedding
from sage_fast.models.interface import Encoder
from sage_fast.util.captions import Caption
from sage_fast.util.encoders import (
    check_finite,
    check_tokenizer,
    grey_picture,
    load_tokenizer,
    reading,
)
from sage_fast.util.environment import free_bytes
from sage_fast.util.images import read_image

ENCODERS = ("text_encoder", "text_encoder_2")
TOKENIZERS = ("tokenizer", "tokenizer_2")
PARTS = (*ENCODERS, *TOKENIZERS)
IMAGE_PARTS = ("image_encoder", "feature_extractor", "vae")
IMAGE_TOKENS = 729
"""Tokens of an image in published checkpoints: SigLIP's 27 x 27 patches."""
ENCODING = 1
"""Version of `_encode`, part of the fingerprint: raise it when equal files give other embeddings.
"""
TRIAL = Caption('"word"')
"""What the text encoders are tried with; ByT5 reads what is in quotes."""

BYTES_OF_A_TOKEN, MAX_TOKENS = 4, 1000
"""Bytes of English per token of the published tokenizer, and the length at which the pipeline
truncates a prompt."""


def load_encoder(
    path: str, dtype: torch.dtype, device: torch.device, size: tuple[int, int] | None = None
) -> Encoder:
    """Load a checkpoint's encoders and nothing else; dropping the returned function releases them.

    Each is tried once: the cost is that of one more prompt, and of one more image.

    Args:
        path: the checkpoint.
        dtype: dtype of the encoders and their embeddings.
        device: device they run on; the embeddings are on the CPU.
        size: (height, width) of the videos, to which images are resized and cropped; None for
            text-to-video.

    Raises:
        UserError: they are missing or incomplete, do not fit each other or the transformer, fail on
            a word or a grey picture, or the tokenizer does not match the pipeline's crop.
    """
    source = reachable(path)
    start = f"model.path = {path!r}: cannot read the encoders"
    cls: Any = (
        HunyuanVideo15Pipeline if size is None else diffusers.HunyuanVideo15ImageToVideoPipeline
    )
    parts: dict[str, Any] = {"transformer": None, "scheduler": None, "guider": None}
    with reading(start, "transformer"):
        widths: Any = AutoencoderKLHunyuanVideo15.load_config(source, subfolder="transformer")
    with reading(start, "model_index.json"):
        wanted = PARTS if size is None else (*PARTS, "image_encoder", "feature_extractor")
        kinds = classes_of(stated_config(cls, source), wanted)
    with progress_bars_of(source):
        for part, kind in kinds.items():
            with reading(start, part):
                if part.endswith("encoder") or part in ENCODERS:
                    parts[part] = load_network(kind, source, part, dtype)
                    check_width(part, parts[part].config.hidden_size, widths)
                elif part in TOKENIZERS:
                    parts[part] = load_tokenizer(kind, source, subfolder=part)
                else:
                    parts[part] = kind.from_pretrained(source, subfolder=part)
        with reading(start, "vae"):
            parts["vae"] = _load_vae(source, dtype, encodes=size is not None)
    with reading(start, "model_index.json"):
        pipeline = cls(**parts)
    for part, network in zip(TOKENIZERS, ENCODERS, strict=True):
        with reading(start, part):
            rows = parts[network].get_input_embeddings().num_embeddings
            check_tokenizer(parts[part], network, rows)
    with reading(start, "tokenizer"):
        _check_tokens(pipeline)
    networks = [*ENCODERS, "image_encoder", "vae"] if size is not None else [*ENCODERS]
    free = math.inf if device.type == "cpu" else free_bytes(device)
    place([parts[part] for part in networks], device, free)
    _try_texts(pipeline, start, device, widths)
    if size is not None:
        try_images(pipeline, start, size, device, dtype)
    return lambda caption: _encode(pipeline, caption, device, size)


def _load_vae(source: str, dtype: torch.dtype, *, encodes: bool) -> Any:
    """Load the autoencoder without its decoder; unless it encodes, on the meta device, for its
    sizes alone."""
    if encodes:
        vae, found = AutoencoderKLHunyuanVideo15.from_pretrained(
            source, subfolder="vae", dtype=dtype, output_loading_info=True
        )
        if lacking := sorted(found["missing_keys"]):
            raise OSError(f"vae lacks {len(lacking)} weights, such as {lacking[0]}")
        vae.decoder = None
        return vae.eval()
    with torch.device("meta"):
        return AutoencoderKLHunyuanVideo15.from_config(
            AutoencoderKLHunyuanVideo15.load_config(source, subfolder="vae")
        )


def check_width(part: str, width: int, transformer: Mapping[str, Any]) -> None:
    """Check the width of an encoder's output against a transformer's config.

    Raises:
        OSError: they differ.
    """
    field = f"{part.replace('encoder', 'embed')}_dim"
    usual = inspect.signature(HunyuanVideo15Transformer3DModel).parameters[field].default
    if (expected := transformer.get(field, usual)) != width:
        raise OSError(f"{part} has width {width}; the transformer expects {expected}")


@torch.no_grad()
def _try_texts(pipeline: Any, start: str, device: torch.device, widths: Mapping[str, Any]) -> None:
    """Encode one word by each text encoder, as prompts are encoded.

    Raises:
        UserError: one fails, or gives another width than the transformer expects, or values that
            are not finite.
    """
    longest = pipeline.tokenizer_max_length + pipeline.prompt_template_encode_start_idx
    none = torch.zeros(1, 1, 1)
    skipped: dict[str, Any] = {"prompt_embeds": none, "prompt_embeds_mask": none[0]}
    skipped_2: dict[str, Any] = {"prompt_embeds_2": none, "prompt_embeds_mask_2": none[0]}
    with reading(start, "text_encoder"):
        positions = pipeline.text_encoder.config.max_position_embeddings
        if positions < longest:
            raise ValueError(
                f"has {positions} positions (max_position_embeddings); prompts have up to {longest}"
            )
        text, *_ = pipeline.encode_prompt(TRIAL.text, device=device, **skipped_2)
        check_width("text_encoder", text.shape[-1], widths)
        check_finite(text, "text_encoder", f"the word {TRIAL.text}")
    with reading(start, "text_encoder_2"):
        _, _, glyphs, _ = pipeline.encode_prompt(TRIAL.text, device=device, **skipped)
        check_width("text_encoder_2", glyphs.shape[-1], widths)
        check_finite(glyphs, "text_encoder_2", f"the word {TRIAL.text}")


@torch.no_grad()
def try_images(
    pipeline: Any, start: str, size: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> None:
    """Encode one grey picture by the image encoder and the autoencoder, as images are encoded.

    Args:
        start: beginning of the message of an error.
        size, device, dtype: as for `encode_image`.

    Raises:
        UserError: a part fails, or gives values that are not finite, or the parts do not fit each
            other.
    """
    picture = grey_picture(*size)
    with reading(start, "feature_extractor"):
        pixels = pipeline.feature_extractor(images=[picture], return_tensors="pt")["pixel_values"]
        side = pipeline.image_encoder.config.image_size
        if list(pixels.shape) != [1, 3, side, side]:
            made = f"makes a picture of shape {list(pixels.shape[1:])}"
            raise ValueError(f"{made}; image_encoder reads [3, {side}, {side}]")
        check_finite(pixels, "feature_extractor", "a grey picture")
    with reading(start, "image_encoder"):
        tokens = pipeline.encode_image(picture, batch_size=1, device=device, dtype=dtype)
        check_finite(tokens, "image_encoder", "a grey picture")
    with reading(start, "vae"):
        frame = encode_image(pipeline, picture, size, device, dtype)["frame"]
        check_finite(frame, "vae", "a grey picture")


def _check_tokens(pipeline: Any) -> None:
    """Check that the pipeline's crop, which drops a fixed number of leading tokens, removes just
    the system message.

    Raises:
        ValueError: this tokenizer or chat template puts the start of the prompt elsewhere.
    """
    chats = format_text_input(["a", "z"], pipeline.system_message)
    first, second = pipeline.tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    # where two chats that differ in the prompt alone begin to differ
    differing = [i for i, (a, b) in enumerate(zip(first, second)) if a != b]
    start = differing[0] if differing else -1
    crop = pipeline.prompt_template_encode_start_idx
    if start != crop:
        harm = (
            "words of the prompt would be lost"
            if start < crop
            else "the system message would be left in"
        )
        raise ValueError(
            f"the tokenizer begins the prompt at token {start}, and the pipeline crops {crop}: "
            f"{harm}; expected the tokenizer of the published checkpoint"
        )


@torch.no_grad()
def _encode(
    pipeline: Any, caption: Caption, device: torch.device, size: tuple[int, int] | None
) -> TextEmbedding:
    """Encode a prompt, and with a size its image, as the pipeline of the checkpoint does."""
    text, text_mask, glyphs, glyphs_mask = pipeline.encode_prompt(
        caption.text, device=device, batch_size=1
    )
    words = text[0][text_mask[0].bool()].cpu()
    quoted = glyphs[0][glyphs_mask[0].bool()].cpu()
    embedding = TextEmbedding(text=words, glyphs=quoted, notes=_cuts(pipeline, caption.text))
    if size is None:
        return embedding
    image = encode_image(pipeline, read_image(caption.image), size, device, text.dtype)
    return dataclasses.replace(embedding, **image)


def _cuts(pipeline: Any, text: str) -> tuple[str, ...]:
    """Return a note for each encoder that does not read the whole prompt."""
    chat = format_text_input([text], pipeline.system_message)
    (tokens,) = pipeline.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    quoted = pipeline.tokenizer_2(extract_glyph_texts(text) or "")["input_ids"]
    counts = {
        "tokens": (
            len(tokens) - pipeline.prompt_template_encode_start_idx,
            pipeline.tokenizer_max_length,
        ),
        "tokens in quotes": (len(quoted), pipeline.tokenizer_2_max_length),
    }
    start = f"prompt {text[:60]!r} has"
    return tuple(
        f"{start} {n} {what}; {limit} are read" for what, (n, limit) in counts.items() if n > limit
    )


@torch.no_grad()
def encode_image(
    pipeline: Any,
    image: Image.Image,
    size: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return `image` and `frame` of a `TextEmbedding`, as the pipeline makes them."""
    image = pipeline.video_processor.resize(image, *size, resize_mode="crop")
    tokens = pipeline.encode_image(image, batch_size=1, device=device, dtype=dtype)
    one_frame = torch.empty(1, 1, 1, 1, 1)  # only its number of frames is read
    frame, _ = pipeline.prepare_cond_latents_and_mask(one_frame, image, 1, *size, dtype, device)
    return {"image": tokens[0].cpu(), "frame": frame[0].cpu()}


def random_encoder(config: Any, frame: Sequence[int] | None = None) -> Encoder:
    """Return an encoder whose random embeddings depend only on the caption; published shapes, no
    glyphs.

    Args:
        config: the transformer's config.
        frame: (C, 1, H, W) of the latents of an image, of which only the path counts; None for
            text-to-video.
    """

    def encode(caption: Caption) -> TextEmbedding:
        tokens = min(1 + len(caption.text.encode()) // BYTES_OF_A_TOKEN, MAX_TOKENS)
        (text,) = drawn(caption.text, (tokens, config.text_embed_dim))
        embedding = TextEmbedding(text=text, glyphs=torch.zeros(0, config.text_embed_2_dim))
        if frame is None:
            return embedding
        image, latents = drawn(caption.image, (IMAGE_TOKENS, config.image_embed_dim), frame)
        return dataclasses.replace(embedding, image=image, frame=latents)

    return encode
