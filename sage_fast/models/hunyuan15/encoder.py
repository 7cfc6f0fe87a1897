"""A checkpoint's encoders: load them without the rest, encode prompts and images, and fingerprint their files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Pipeline
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts, format_text_input
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from PIL import Image
from safetensors import safe_open
from torch import Tensor

from sage_fast.models.hub import HUB_SECONDS, progress_bars_of, reachable
from sage_fast.models.hunyuan15.conditioning import TextEmbedding
from sage_fast.models.interface import Encoder
from sage_fast.models.spec import MAX_MODULES, few_modules
from sage_fast.util.captions import Caption
from sage_fast.util.errors import UserError, first_line
from sage_fast.util.images import read_image

ENCODERS = ("text_encoder", "text_encoder_2")
PARTS = (*ENCODERS, "tokenizer", "tokenizer_2")
IMAGE_PARTS = ("image_encoder", "feature_extractor", "vae")
IMAGE_TOKENS = 729
"""Tokens of an image in published checkpoints: SigLIP's 27 x 27 patches."""
SCALED = {"I8", "U8", "F8_E4M3", "F8_E5M2"}
"""Types of weights that mean nothing without scales, which another program keeps in its own way."""
BLOCK, BLOCKS = 4096, 256
"""Sampled blocks for the fingerprint of a large file: bytes per block and number of blocks. In 5 GB, one per 20 MB."""

BYTES_OF_A_TOKEN, MAX_TOKENS = 4, 1000
"""Bytes of English per token of the published tokenizer, and the length at which the pipeline truncates a prompt."""


def load_encoder(path: str, dtype: torch.dtype, device: torch.device, size: tuple[int, int] | None = None) -> Encoder:
    """Load a checkpoint's encoders and nothing else; dropping the returned function releases them.

    Args:
        path: the checkpoint.
        dtype: dtype of the encoders and their embeddings.
        device: device they run on; the embeddings are on the CPU.
        size: (height, width) of the videos, to which images are resized and cropped; None for text-to-video.

    Raises:
        UserError: they are missing or incomplete, do not fit each other or the transformer, or the tokenizer does not
            match the pipeline's crop.
    """
    source = reachable(path)
    cls: Any = HunyuanVideo15Pipeline if size is None else diffusers.HunyuanVideo15ImageToVideoPipeline
    parts: dict[str, Any] = {"transformer": None, "scheduler": None, "guider": None}
    try:
        widths: Any = AutoencoderKLHunyuanVideo15.load_config(source, subfolder="transformer")
        if size is None:
            with torch.device("meta"), few_modules():  # the pipeline reads only sizes from it
                parts["vae"] = AutoencoderKLHunyuanVideo15.from_config(
                    AutoencoderKLHunyuanVideo15.load_config(source, subfolder="vae")
                )
        for file in (file for part in PARTS for file in Path(source, part).glob("*config.json")):
            for key, count in json.loads(file.read_text()).items():
                if ("layers" in key or key == "extra_ids") and isinstance(count, int) and count > MAX_MODULES:
                    raise OSError(f"{file.parent.name}/{file.name} has {key} {count}; expected at most {MAX_MODULES}")
        with progress_bars_of(source), few_modules():
            for part in ENCODERS if size is None else (*ENCODERS, "image_encoder"):
                for file in Path(source, part).glob("*.safetensors"):
                    with safe_open(file, "pt") as opened:
                        kinds = {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118
                    if odd := kinds & SCALED:
                        raise OSError(f"{part}/{file.name} holds weights in {odd.pop()}; expected floats")
                _, kind = cls.load_config(source)[part]
                encoder, found = getattr(transformers, kind).from_pretrained(
                    source, subfolder=part, dtype=dtype, output_loading_info=True
                )
                if lacking := sorted(found["missing_keys"]):  # transformers would fill them with random numbers
                    raise OSError(f"{part} lacks {len(lacking)} weights, such as {lacking[0]}")
                own = encoder.config.hidden_size
                if (width := widths.get(f"{part.replace('encoder', 'embed')}_dim", own)) != own:
                    raise OSError(f"{part} has width {own}; the transformer expects {width}")
                parts[part] = encoder
            pipeline = cls.from_pretrained(source, **parts, dtype=dtype)
        _check_tokens(pipeline)
    except Exception as error:  # whatever odd files make these packages raise
        raise UserError(f"model.path = {path!r}: cannot read the encoders: {first_line(error)}") from error
    encoders = [pipeline.text_encoder, pipeline.text_encoder_2]
    if size is not None:
        pipeline.vae.decoder = None
        encoders += [pipeline.image_encoder, pipeline.vae]
    for encoder in encoders:
        encoder.to(device)
    return lambda caption: _encode(pipeline, caption, device, size)


def encoder_version(path: str, parts: Sequence[str] = PARTS) -> str | None:
    """Return a fingerprint of the files of a checkpoint's encoders. Cheap: of large files it reads a part.

    None if a local checkpoint lacks one of the `parts`.

    Raises:
        UserError: the hub does not answer.
    """
    source = reachable(path)
    folder = Path(source)
    if folder.is_dir():
        if not all((folder / part).is_dir() for part in parts):
            return None
        files = [file for part in parts for file in (folder / part).rglob("*") if file.is_file()]
        names = {file.relative_to(folder).as_posix(): _content(file) for file in files}
    else:
        try:
            found = HfApi().model_info(source, files_metadata=True, timeout=HUB_SECONDS).siblings or []
        except (HTTPError, OSError) as error:
            raise UserError(f"model.path = {path!r}: the hub does not list its files: {first_line(error)}") from error
        listed = [file for file in found if file.rfilename.split("/")[0] in parts]
        names = {file.rfilename: str(file.lfs.sha256 if file.lfs else file.blob_id) for file in listed}
    return hashlib.sha256(repr(sorted(names.items())).encode()).hexdigest()[:32]


def _content(file: Path) -> str:
    """Return a fingerprint of a file. In the hub's cache it is the blob's name, as the hub itself reports it."""
    if file.is_symlink() and (blob := file.readlink()).parent.name == "blobs":
        return blob.name
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        for block in range(BLOCKS):
            opened.seek(max(size - BLOCK, 0) * block // (BLOCKS - 1))
            digest.update(opened.read(BLOCK))
            if size <= BLOCK:
                break
    return digest.hexdigest()


def _check_tokens(pipeline: Any) -> None:
    """Check that the pipeline's crop, which drops a fixed number of leading tokens, removes just the system message.

    Raises:
        ValueError: this tokenizer or chat template puts the start of the prompt elsewhere, or gives tokens that the
            encoder does not know.
    """
    for part, tokenizer in zip(ENCODERS, (pipeline.tokenizer, pipeline.tokenizer_2)):
        if (known := getattr(pipeline, part).config.vocab_size) < len(tokenizer):
            raise ValueError(f"{part} has {known} tokens, and its tokenizer {len(tokenizer)}")
    chats = format_text_input(["a", "z"], pipeline.system_message)
    first, second = pipeline.tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    start = next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), -1)
    crop = pipeline.prompt_template_encode_start_idx
    if start != crop:
        harm = "words of the prompt would be lost" if start < crop else "the system message would be left in"
        raise ValueError(
            f"the tokenizer begins the prompt at token {start}, and the pipeline crops {crop}: {harm}; expected the "
            "tokenizer of the published checkpoint"
        )


@torch.no_grad()
def _encode(pipeline: Any, caption: Caption, device: torch.device, size: tuple[int, int] | None) -> TextEmbedding:
    """Encode a prompt, and with a size its image, as the pipeline of the checkpoint does."""
    text, text_mask, glyphs, glyphs_mask = pipeline.encode_prompt(caption.text, device=device, batch_size=1)
    own, quoted = text[0][text_mask[0].bool()].cpu(), glyphs[0][glyphs_mask[0].bool()].cpu()
    embedding = TextEmbedding(text=own, glyphs=quoted, notes=_cuts(pipeline, caption.text))
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
        "tokens": (len(tokens) - pipeline.prompt_template_encode_start_idx, pipeline.tokenizer_max_length),
        "tokens in quotes": (len(quoted), pipeline.tokenizer_2_max_length),
    }
    start = f"prompt {text[:60]!r} has"
    return tuple(f"{start} {n} {what}; {limit} are read" for what, (n, limit) in counts.items() if n > limit)


@torch.no_grad()
def encode_image(
    pipeline: Any, image: Image.Image, size: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return `image` and `frame` of a `TextEmbedding`, as the pipeline makes them."""
    image = pipeline.video_processor.resize(image, *size, resize_mode="crop")
    tokens = pipeline.encode_image(image, batch_size=1, device=device, dtype=dtype)
    one_frame = torch.empty(1, 1, 1, 1, 1)  # only its number of frames is read
    frame, _ = pipeline.prepare_cond_latents_and_mask(one_frame, image, 1, *size, dtype, device)
    return {"image": tokens[0].cpu(), "frame": frame[0].cpu()}


def random_encoder(config: Any, frame: Sequence[int] | None = None) -> Encoder:
    """Return an encoder whose random embeddings depend only on the caption; published shapes, no glyphs.

    Args:
        config: the transformer's config.
        frame: (C, 1, H, W) of the latents of an image, of which only the path counts; None for text-to-video.
    """

    def encode(caption: Caption) -> TextEmbedding:
        tokens = min(1 + len(caption.text.encode()) // BYTES_OF_A_TOKEN, MAX_TOKENS)
        (text,) = _drawn(caption.text, (tokens, config.text_embed_dim))
        embedding = TextEmbedding(text=text, glyphs=torch.zeros(0, config.text_embed_2_dim))
        if frame is None:
            return embedding
        image, latents = _drawn(caption.image, (IMAGE_TOKENS, config.image_embed_dim), frame)
        return dataclasses.replace(embedding, image=image, frame=latents)

    return encode


def _drawn(name: str, *shapes: Sequence[int]) -> list[Tensor]:
    """Return random tensors that follow from a name."""
    digest = hashlib.sha256(name.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return [torch.randn(tuple(shape), generator=generator) for shape in shapes]
