"""What the page calls the arms of the first forty iterations."""

from __future__ import annotations

from studies.demo.early import DEMO, ENDPOINT, GROWING, HAND_OVER, NFT, QUARTER, RANK

TITLES = {
    DEMO: "SAGE-GRPO",
    NFT: "DiffusionNFT",
    ENDPOINT: "SAGE-GRPO, endpoint direction",
    HAND_OVER: "SAGE-GRPO, hand-over in 20 iterations",
    GROWING: "SAGE-GRPO, growing batch",
    QUARTER: "SAGE-GRPO, anchor on a quarter",
    RANK: "SAGE-GRPO, ranks",
}
