"""What sampling and training need: the model, the reward, the prompts and their embeddings."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.config.schema import Config
from sage_fast.data.embeddings import cache_key, encode_cached
from sage_fast.models.interface import Condition
from sage_fast.models.model import Model
from sage_fast.rewards.interface import Scorer
from sage_fast.rollout.graphs import StepGraphs
from sage_fast.util.captions import Caption, prompt_key, split_key
from sage_fast.util.files import fingerprint
from sage_fast.util.ranks import check_agreement


@dataclasses.dataclass(kw_only=True)
class Setup:
    """What `sage_fast.loading.load_setup` returns; `encode` fills `embeddings`.

    Attributes:
        judge: reward that evaluations alone use.
        graphs: CUDA graphs of the model's steps, for training and evaluation; None if they run
            without.
        prompts, eval_prompts: keys (`Prompt.key`).
        captions: key -> what to encode, for these, the empty and the negative prompts.
        negatives: key -> negative prompt, where it is not empty.
        contents: setting -> what its files and code hold, with a digest; on rank 0.
        eval_seeds: index in `eval_prompts` -> seed, for prompts with a seed of their own.
    """

    resolved: ResolvedConfig
    model: Model
    reward: Scorer
    prompts: list[str]
    eval_prompts: list[str]
    judge: Scorer | None = None
    graphs: StepGraphs | None = None
    captions: dict[str, Caption] = dataclasses.field(default_factory=dict)
    negatives: dict[str, str] = dataclasses.field(default_factory=dict)
    contents: dict[str, str] = dataclasses.field(default_factory=dict)
    eval_seeds: dict[int, int] = dataclasses.field(default_factory=dict)
    embeddings: dict[Any, Condition] = dataclasses.field(default_factory=dict)

    @property
    def config(self) -> Config:
        return self.resolved.config

    def encode(self, cache: Path | None = None) -> None:
        """Embed all prompts, each on one rank; see `encode_cached`. Collective.

        Args:
            cache: the folder to use unless `data.embedding_cache` is set; None keeps nothing on
                disk.
        """
        self._check_same_prompts()
        configured = self.config.data.embedding_cache
        folder = Path(configured) if configured else cache
        spec, sampling = self.model.spec, self.config.sampling
        found = encode_cached(
            self.captions,
            lambda: self.model.load_encoder(sampling),
            folder,
            cache_key(spec, self.config.model.dtype, folder, sampling),
            spec.condition,
        )
        self.embeddings = {
            key: dataclasses.replace(
                made, negative=prompt_key(self.negatives.get(key, ""), image=split_key(key)[1])
            )
            for key, made in found.items()
        }

    def _check_same_prompts(self) -> None:
        """Check that all ranks have read the same prompts: each node may have a copy of the file.

        Collective.
        """
        negatives = sorted(self.negatives.items())
        read = {
            "data.prompts": (self.prompts, negatives),
            "data.eval_prompts": (self.eval_prompts, negatives, self.eval_seeds),
        }
        digests = {name: fingerprint(repr(content).encode()) for name, content in read.items()}
        check_agreement(digests, ": copy the prompt file to every node")
