"""A checkpoint's text encoders: load them without the rest, encode prompts, and fingerprint their files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Pipeline
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import format_text_input
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError

from sage_fast.models.hub import HUB_SECONDS, progress_bars_of, reachable
from sage_fast.models.hunyuan15.text import TextEmbedding
from sage_fast.models.protocol import Encoder
from sage_fast.util.errors import UserError, first_line
from sage_fast.util.images import Caption

PARTS = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
BLOCK, BLOCKS = 4096, 256
"""Sampled blocks for the fingerprint of a large file: bytes per block and number of blocks. In 5 GB, one per 20 MB."""

BYTES_OF_A_TOKEN, MAX_TOKENS = 4, 1000
"""Bytes of English per token of the published tokenizer, and the length at which the pipeline truncates a prompt."""


def load_encoder(path: str, dtype: torch.dtype, device: torch.device) -> Encoder:
    """Load a checkpoint's text encoders and nothing else; dropping the returned function releases them.

    Args:
        path: the checkpoint.
        dtype: dtype of the encoders and their embeddings.
        device: device they run on; the embeddings are on the CPU.

    Raises:
        UserError: they are missing or incomplete, or the tokenizer does not match the pipeline's crop.
    """
    source = reachable(path)
    try:
        with torch.device("meta"):  # the pipeline reads only sizes from it
            vae = AutoencoderKLHunyuanVideo15.from_config(
                AutoencoderKLHunyuanVideo15.load_config(source, subfolder="vae")
            )
        parts: dict[str, Any] = {"transformer": None, "vae": vae, "scheduler": None, "guider": None}
        with progress_bars_of(source):
            pipeline = HunyuanVideo15Pipeline.from_pretrained(source, **parts, dtype=dtype)
    except (OSError, ValueError) as error:
        raise UserError(f"model.path = {path!r}: cannot read the text encoders: {error}") from error
    _check_crop(pipeline, path)
    for encoder in (pipeline.text_encoder, pipeline.text_encoder_2):
        encoder.to(device)
    return lambda caption: _encode(pipeline, caption.text, device)


def encoder_version(path: str) -> str | None:
    """Return a fingerprint of the files of the text encoders and tokenizers. Cheap: of large files it reads a part.

    None if a local checkpoint lacks its text encoders.

    Raises:
        UserError: the hub does not answer.
    """
    source = reachable(path)
    folder = Path(source)
    if folder.is_dir():
        if not all((folder / part).is_dir() for part in PARTS):
            return None
        files = [file for part in PARTS for file in (folder / part).rglob("*") if file.is_file()]
        names = {file.relative_to(folder).as_posix(): _content(file) for file in files}
    else:
        try:
            found = HfApi().model_info(source, files_metadata=True, timeout=HUB_SECONDS).siblings or []
        except (HTTPError, OSError) as error:
            raise UserError(f"model.path = {path!r}: the hub does not list its files: {first_line(error)}") from error
        listed = [file for file in found if file.rfilename.split("/")[0] in PARTS]
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


def _check_crop(pipeline: HunyuanVideo15Pipeline, path: str) -> None:
    """Check that the pipeline's crop, which drops a fixed number of leading tokens, removes just the system message.

    Raises:
        UserError: this tokenizer or chat template puts the start of the prompt elsewhere.
    """
    chats = format_text_input(["a", "z"], pipeline.system_message)
    first, second = pipeline.tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    start = next(i for i, (a, b) in enumerate(zip(first, second)) if a != b)
    crop = pipeline.prompt_template_encode_start_idx
    if start != crop:
        harm = "words of the prompt would be lost" if start < crop else "the system message would be left in"
        raise UserError(
            f"model.path = {path!r}: its tokenizer begins the prompt at token {start}, and the pipeline crops {crop}: "
            f"{harm}; expected the tokenizer of the published checkpoint"
        )


@torch.no_grad()
def _encode(pipeline: HunyuanVideo15Pipeline, prompt: str, device: torch.device) -> TextEmbedding:
    """Encode one prompt with the text encoders of a published checkpoint, as the diffusers pipeline does."""
    text, text_mask, glyphs, glyphs_mask = pipeline.encode_prompt(prompt, device=device, batch_size=1)
    return TextEmbedding(text=text[0][text_mask[0].bool()].cpu(), glyphs=glyphs[0][glyphs_mask[0].bool()].cpu())


def random_encoder(config: Any) -> Encoder:
    """Return an encoder whose random embeddings depend only on the prompt's text; published shapes, no glyphs.

    Args:
        config: the transformer's config.
    """

    def encode(caption: Caption) -> TextEmbedding:
        text = caption.text.encode()
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1)
        tokens = min(1 + len(text) // BYTES_OF_A_TOKEN, MAX_TOKENS)
        return TextEmbedding(
            text=torch.randn(tokens, config.text_embed_dim, generator=generator),
            glyphs=torch.zeros(0, config.text_embed_2_dim),
        )

    return encode
