"""Rewards: one small interface, and the composite that training maximises.

A reward is a class made with the keyword arguments of `reward.args`, with `score(videos, prompts) -> {part: Tensor
[B]}`, videos float32 `[B, F, 3, H, W]` in [0, 1] and prompts a list of B strings. A callable of the same form serves
too.
"""

from sage_fast.rewards.composite import CompositeReward, Judge
from sage_fast.rewards.interface import Reward, Scores, join_scores
from sage_fast.rewards.load import SHIPPED, load_reward

__all__ = ["SHIPPED", "CompositeReward", "Judge", "Reward", "Scores", "join_scores", "load_reward"]
