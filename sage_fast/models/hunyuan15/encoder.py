"""The text encoders of a checkpoint: load them, alone and only where a prompt is to be encoded, and tell them apart."""

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
from sage_fast.util.errors import UserError

PARTS = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
BLOCK, BLOCKS = 4096, 256
"""Bytes, and how many of them, that tell the contents of a large file: in one of 5 GB, a block of every 20 MB."""

BYTES_OF_A_TOKEN, MAX_TOKENS = 4, 1000
"""Of a prompt: what a token of the published tokenizer holds of English, and the length that the pipeline cuts at."""


def load_encoder(path: str, dtype: torch.dtype, device: torch.device) -> Encoder:
    """Load the text encoders, and nothing else of a checkpoint; they are released with the function that is returned.

    Args:
        path: of the checkpoint.
        dtype: of the encoders and of what they give.
        device: where they run; what they give is on the CPU.

    Raises:
        UserError: they are missing or incomplete, or the tokenizer is not the one that the pipeline crops for.
    """
    source = reachable(path)
    try:
        with torch.device("meta"):  # of which the pipeline reads sizes, and no weights
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
    return lambda prompt: _encode(pipeline, prompt, device)


def encoder_version(path: str) -> str | None:
    """Changes when a file of the text encoders or tokenizers does; cheap, since of large files it reads a part.

    None if the checkpoint is there without its text encoders.

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
            why = str(error).strip().splitlines()[0]
            raise UserError(f"model.path = {path!r}: the hub does not tell its files: {why}") from error
        of_encoders = [file for file in found if file.rfilename.split("/")[0] in PARTS]
        names = {file.rfilename: str(file.lfs.sha256 if file.lfs else file.blob_id) for file in of_encoders}
    return hashlib.sha256(repr(sorted(names.items())).encode()).hexdigest()[:32]


def _content(file: Path) -> str:
    """What tells the contents of a file; the hub's own name of them in its cache, so that it is the same there."""
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
    """The pipeline drops a fixed number of first tokens, its system message: what is left must begin with the prompt.

    Raises:
        UserError: this tokenizer or chat template makes another number of them.
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
    """Embeddings made up from the text of a prompt: the same for the same text, of the published shapes, no glyphs.

    Args:
        config: the transformer's.
    """

    def encode(prompt: str) -> TextEmbedding:
        text = prompt.encode()
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1)
        tokens = min(1 + len(text) // BYTES_OF_A_TOKEN, MAX_TOKENS)
        return TextEmbedding(
            text=torch.randn(tokens, config.text_embed_dim, generator=generator),
            glyphs=torch.zeros(0, config.text_embed_2_dim),
        )

    return encode
