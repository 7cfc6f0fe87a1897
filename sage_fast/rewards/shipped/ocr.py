"""Rendered text: whether a video shows the words that its prompt has in quotation marks, read by
PP-OCRv6.

The weights come with the package rapidocr and run on the CPU.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sage_fast.rewards.interface import Metadata
from sage_fast.rewards.shipped.frame_reward import FrameReward, levels
from sage_fast.util.encoders import reading
from sage_fast.util.errors import UserError

try:
    import onnxruntime  # noqa: F401 the engine that rapidocr imports late
    from rapidocr import RapidOCR
except ImportError as missing:
    raise UserError(
        f"the reward 'ocr' needs packages: pip install 'sage-fast[ocr]' ({missing})"
    ) from missing

_TYPED = dict.fromkeys((0x2018, 0x2019, 0x2BC, 0x2032), "'") | dict.fromkeys(
    (0x2010, 0x2013, 0x2014, 0x2212), "-"
)
"""Apostrophes and dashes of typography -> those that are read."""
_QUOTED = re.compile(r"\"(.*?)\"|“(.*?)”")


class OCRReward(FrameReward):
    """Scores `ocr`, `ocr_best`, `ocr_stays` and `ocr_share`, each in [0, 1].

    The score of a text in a frame is max(0, 1 - d / n): n is the length of the text, d its edit
    distance to the nearest run of lines that are read there. Case, spaces and the width of letters
    do not count. The score of a frame is the mean over the texts of the prompt.

    Args:
        num_frames: as for `FrameReward`.
    """

    gpu_bytes = 0.0
    reader: Any

    def __init__(self, *, num_frames: int = 8) -> None:
        super().__init__("cpu", num_frames)
        # Frames are searched as they are, where rapidocr would enlarge them to 736 pixels; 32 x 32
        # ones grow to 320.
        settings = {
            "Global.log_level": "critical",
            "Global.use_cls": False,
            "Det.limit_side_len": 320,
        }
        threads = {"EngineConfig.onnxruntime.intra_op_num_threads": torch.get_num_threads()}
        self.network = nn.Identity()
        with reading("reward 'ocr'", "rapidocr"):
            self.reader = RapidOCR(params=settings | threads)
        self.try_once("reward 'ocr'")

    @staticmethod
    def check_prompt(prompt: str, metadata: Metadata) -> list[str]:
        """Return the texts that a video of this prompt should show, as they are compared.

        Raises:
            ValueError: there are none.
        """
        named = metadata.get("text", quoted(prompt))
        listed = [named] if isinstance(named, str) else named
        if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
            raise ValueError(f"text = {str(named)[:60]!r}: expected a text, or a list of them")
        if not (texts := [text for text in map(_plain, listed) if text]):
            raise ValueError(
                "no text in quotation marks; the key 'text' of a .jsonl file can name it"
            )
        return texts

    def score(
        self,
        videos: Tensor,
        prompts: Sequence[str],
        fps: float | None = None,
        metadata: Sequence[Metadata] | None = None,
    ) -> dict[str, Tensor]:
        """Score videos as `FrameReward.score`; `text` in the metadata of a prompt replaces its
        quoted texts."""
        told = zip(prompts, metadata or [{}] * len(prompts))
        return super().score(videos, ["\n".join(self.check_prompt(*each)) for each in told], fps)

    def of_frames(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> dict[str, Tensor]:
        """Return each part, float32 `[B]`; a prompt is its texts, one a line."""
        told = [(video, texts.split("\n")) for video, texts in zip(videos, prompts)]
        scores = torch.tensor(
            [[self._of_frame(frame, texts) for frame in video] for video, texts in told]
        )
        neighbours = scores.unfold(1, min(2, scores.shape[1]), 1)
        parts = {"ocr": scores, "ocr_stays": neighbours.amin(2), "ocr_share": (scores == 1).float()}
        return {"ocr_best": scores.amax(1)} | {
            part: values.mean(1) for part, values in parts.items()
        }

    def _of_frame(self, frame: Tensor, texts: Sequence[str]) -> float:
        # blue first
        image = levels(frame.nan_to_num()).byte().flip(0).permute(1, 2, 0).contiguous().numpy()
        lines = [_plain(line) for line in self.reader(image).txts or ()]
        return sum(similarity(text, lines) for text in texts) / len(texts)


def quoted(prompt: str) -> list[str]:
    """Return the texts in straight or curly double quotation marks, each once, as HunyuanVideo 1.5
    reads them."""
    return list(dict.fromkeys(straight or curly for straight, curly in _QUOTED.findall(prompt)))


def _plain(text: str) -> str:
    """Return a text without what does not count: case, spaces and the width of letters."""
    return "".join(unicodedata.normalize("NFKC", text).translate(_TYPED).casefold().split())


def similarity(text: str, lines: Sequence[str]) -> float:
    """Return 1 - d / n: n is the length of `text`, d its edit distance to the nearest run of lines,
    or to no line."""
    ends = [0, *itertools.accumulate(map(len, lines))]
    read = "".join(lines)
    # a run begins where a line ends
    row = [j - max(end for end in ends if end <= j) for j in range(len(read) + 1)]
    for i, letter in enumerate(text, start=1):
        corner, row[0] = row[0], i
        for j, other in enumerate(read, start=1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (letter != other))
    return 1 - min(row[end] for end in ends) / len(text)
