"""Rewards: samples -> the same samples with text, correct and reward filled in. This package does not import torch.

`RULES` is the table of built-in rules, `custom.py` loads functions of the user; `rollout/collect/collector.py` and
`rollout/collect/evaluate.py` call the `Scorer`.
"""

from rollout.rewards.answer_rules import RULES
from rollout.rewards.references import judgement, unusable_references
from rollout.rewards.scorer import RewardError, Scorer, ScoreStats, try_reward
from rollout.rewards.votes import Vote

__all__ = ["RULES", "RewardError", "ScoreStats", "Scorer", "Vote", "judgement", "try_reward", "unusable_references"]
