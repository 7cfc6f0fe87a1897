"""Seeds as pure functions of their purpose: the same on any number of ranks, with nothing to save
for a resume."""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor


def derive_seed(run_seed: int, purpose: str, *index: int) -> int:
    """Derive a 63-bit seed from the run's seed, a purpose and any number of indices."""
    message = purpose.encode() + struct.pack(f"<{1 + len(index)}q", run_seed, *index)
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1


def sample_seeds(
    run_seed: int, iteration: int, prompt: int, samples: range, purpose: str = "sample"
) -> Tensor:
    """Return the noise keys of a group, int64 `[len(samples)]`: one per (iteration, prompt,
    sample), on any rank."""
    return torch.tensor(
        [derive_seed(run_seed, purpose, iteration, prompt, sample) for sample in samples]
    )


def permutation(length: int, run_seed: int, purpose: str, *index: int) -> list[int]:
    """Return a seeded random permutation of `range(length)`."""
    generator = torch.Generator().manual_seed(derive_seed(run_seed, purpose, *index))
    return torch.randperm(length, generator=generator).tolist()
