"""CLIPScore and PickScore: how well frames match the prompt by CLIP models; mean over evenly spaced
frames.

Per frame, with cos the cosine of the embeddings of frame and prompt:

    clip_cosine    cos
    clipscore      2.5 max(cos, 0), Hessel et al. 2021 (arXiv:2104.08718), Eq. 1, without their
                   "A photo depicts"
    pickscore      exp(logit_scale) cos / 26, Kirstain et al. 2023 (arXiv:2305.01569); the factor
                   1/26 is from flow_grpo (pickscore_scorer.py) and scales it to about 0 to 1, the
                   range of the paper's Table 2
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

from sage_fast.rewards.shipped.frame_reward import TRIAL_SHAPE, FrameReward, levels
from sage_fast.util.console import wrapped
from sage_fast.util.encoders import check_finite, check_tokenizer, load_tokenizer, reading
from sage_fast.util.errors import UserError

log = logging.getLogger(__name__)

MARKS = ("<|startoftext|>", "<|endoftext|>")
"""Tokens that begin and end a text."""


class CLIPScoreReward(FrameReward):
    """Scores `clip_cosine` and `clipscore`.

    Args:
        path: folder or hub id of a `CLIPModel`.
        processor: folder or hub id of its tokenizer and image processor; None for `path`.
        num_frames, device: as for `FrameReward`.

    Raises:
        UserError: an argument is invalid, or the files it names are not as expected.
    """

    files: ClassVar = {"path": ("config.json",), "processor": ("preprocessor_config.json",)}
    gpu_bytes = 4.0 * 151_277_313

    def __init__(
        self,
        path: str = "openai/clip-vit-base-patch32",
        *,
        processor: str | None = None,
        num_frames: int = 8,
        device: str = "cpu",
    ) -> None:
        super().__init__(device, num_frames)
        processor = processor or path
        of_path = f"path = {path!r}: expected a folder or hub id of a CLIP model"
        of_processor = f"processor = {processor!r}: expected that of a CLIP model"
        with reading(of_path, "model"):
            self.network, loaded = CLIPModel.from_pretrained(
                path, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
            )
        lacking = [*loaded["missing_keys"], *loaded["mismatched_keys"]]
        if lacking:  # transformers would initialise these at random
            raise UserError(
                f"path = {path!r}: expected a CLIP model; missing or of another shape: {lacking}"
            )
        self.network.eval().requires_grad_(False)
        with reading(of_processor, "tokenizer"):
            # Marks within a prompt are read as text: only the tokenizer itself begins and ends a
            # text.
            self.tokenizer = load_tokenizer(AutoTokenizer, processor, split_special_tokens=True)
        with reading(of_processor, "image processor"):
            self.images = CLIPImageProcessorPil.from_pretrained(processor)
        self._try(of_path, of_processor)

    @torch.no_grad()
    def _try(self, of_path: str, of_processor: str) -> None:
        """Encode two words and a grey picture on the CPU.

        Args:
            of_path, of_processor: beginnings of the messages of errors, of the network and of the
                processor.

        Raises:
            UserError: a part fails or gives values that are not finite, or the parts do not fit
                each other.
        """
        grey = torch.full(TRIAL_SHAPE[1:], 0.5)[:1]
        with reading(of_processor, "tokenizer"):
            self._check_tokens()
        with reading(of_processor, "image processor"):
            pixels = check_finite(self.pixels(grey), "image processor", "a grey picture")
            side = self.network.config.vision_config.image_size
            if list(pixels.shape) != [1, 3, side, side]:
                made = f"makes a picture of shape {list(pixels.shape[1:])}"
                raise ValueError(f"{made}; the network reads [3, {side}, {side}]")
        with reading(of_path, "text_model"):
            first, second = check_finite(self._texts(["a", "z"]), "text_model", "a word")
            if torch.equal(first, second):
                raise ValueError("gives each word the same embedding")
        with reading(of_path, "vision_model"):
            seen = self.network.get_image_features(pixels).pooler_output
            check_finite(seen, "vision_model", "a grey picture")

    def _check_tokens(self) -> None:
        """Check that the network finds the end of a text where the tokenizer puts it.

        Raises:
            ValueError: it does not, or it does not know all tokens.
        """
        check_tokenizer(
            self.tokenizer,
            "text_model",
            self.network.text_model.embeddings.token_embedding.num_embeddings,
        )
        vocabulary = self.tokenizer.get_vocab()
        begin, end = (vocabulary.get(mark) for mark in MARKS)
        ids = self._tokens(["a"])["input_ids"][0].tolist()
        if (ids[0], ids[-1]) != (begin, end):
            raise ValueError(
                f"reads a word as {self.tokenizer.convert_ids_to_tokens(ids)}; expected it within "
                f"{MARKS}"
            )
        stated = self.network.config.text_config.eos_token_id
        # With the number 2, as OpenAI's files have it, the network ends a text at its highest
        # token.
        if stated != end and (stated != 2 or end != max(vocabulary.values())):
            raise ValueError(
                f"ends a text with token {end}, of {len(vocabulary)}; the network looks for "
                + ("the highest one" if stated == 2 else f"{stated} (eos_token_id)")
            )

    def _tokens(self, prompts: Sequence[str]) -> Any:
        """Return the tokens of B prompts, padded on the right and cut at the network's length."""
        return self.tokenizer(
            list(prompts),
            add_special_tokens=True,
            padding=True,
            padding_side="right",
            truncation=True,
            max_length=self.network.config.text_config.max_position_embeddings,
            return_attention_mask=True,
            return_tensors="pt",
        )

    def _texts(self, prompts: Sequence[str]) -> Tensor:
        """Return the embeddings of B prompts, `[B, width]`."""
        # transformers 5 returns an object with the projected embedding in pooler_output; 4 returned
        # the embedding.
        return self.network.get_text_features(
            **self._tokens(prompts).to(self.network.device)
        ).pooler_output

    def pixels(self, frames: Tensor) -> Tensor:
        """Prepare float frames `[n, 3, H, W]` in [0, 1] as pictures of 8 bits; return float32 `[n,
        3, S, S]`."""
        pictures = levels(frames).byte().permute(0, 2, 3, 1).cpu().numpy()
        return self.images(list(pictures), return_tensors="pt")["pixel_values"].to(frames.device)

    def cosines(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Tensor]:
        """Return, for each video, the cosines of its frames with its prompt."""
        longest = self.network.config.text_config.max_position_embeddings
        for prompt, ids in zip(prompts, self.tokenizer(list(prompts), verbose=False)["input_ids"]):
            if len(ids) > longest:
                _note_cut(prompt, len(ids), longest)
        texts = self._texts(prompts)
        images = self.network.get_image_features(
            torch.cat([self.pixels(frames) for frames in videos])
        ).pooler_output
        each = F.normalize(images.float(), dim=-1).split([len(frames) for frames in videos])
        return [frames @ text for frames, text in zip(each, F.normalize(texts.float(), dim=-1))]

    def of_frames(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> dict[str, Tensor]:
        """Return each part, float32 `[B]`."""
        cosines = self.cosines(videos, prompts)
        return {
            "clip_cosine": torch.stack([each.mean() for each in cosines]),
            "clipscore": torch.stack([2.5 * each.clamp(min=0).mean() for each in cosines]),
        }


@functools.cache
def _note_cut(prompt: str, tokens: int, longest: int) -> None:
    """Log once that CLIP does not read a whole prompt."""
    log.warning(wrapped(f"note: prompt {prompt[:60]!r} has {tokens} tokens; CLIP reads {longest}"))


class PickScoreReward(CLIPScoreReward):
    """Scores `pickscore`; arguments as for `CLIPScoreReward`."""

    gpu_bytes = 4.0 * 986_109_441

    def __init__(
        self,
        path: str = "yuvalkirstain/PickScore_v1",
        *,
        processor: str | None = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        num_frames: int = 8,
        device: str = "cpu",
    ) -> None:
        super().__init__(path, processor=processor, num_frames=num_frames, device=device)

    def of_frames(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> dict[str, Tensor]:
        """Return the part, float32 `[B]`."""
        scale = self.network.logit_scale.exp() / 26
        return {
            "pickscore": torch.stack(
                [scale * each.mean() for each in self.cosines(videos, prompts)]
            )
        }
