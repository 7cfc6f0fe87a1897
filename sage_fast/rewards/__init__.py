"""Rewards: one small interface, and the composite that training maximises.

A reward is a class with a method `score(videos, prompts) -> {part: Tensor [B]}`: videos float32
`[B, F, 3, H, W]` in [0, 1], and a list of B prompts. It is created with the keyword arguments of
`reward.args`. A function of the same form works too.
"""

from sage_fast.config.reward_names import SHIPPED
from sage_fast.rewards.composite import CompositeReward, Judge, load_rewards
from sage_fast.rewards.interface import Reward, Scores, join_scores
from sage_fast.rewards.load import load_reward

__all__ = [
    "SHIPPED",
    "CompositeReward",
    "Judge",
    "Reward",
    "Scores",
    "join_scores",
    "load_reward",
    "load_rewards",
]
