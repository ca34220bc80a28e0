"""Rewards: SampleGroup -> the same group with text, correct and reward filled in. No torch here.

`REWARDS` is the table of reward functions; `rollout/collect.py` and `rollout/evaluate.py` call the `Scorer`.
"""

from rollout.rewards.functions import REWARDS, RewardFn, exact_match, gsm8k, reward_names
from rollout.rewards.overlong import overlong_penalty
from rollout.rewards.scorer import Scorer

__all__ = ["REWARDS", "RewardFn", "Scorer", "exact_match", "gsm8k", "overlong_penalty", "reward_names"]
