"""Rewards: samples -> the same samples with text, correct and reward filled in. This package does not import torch.

`RULES` is the table of built-in rules, `custom.py` loads functions of the user; `rollout/collect/collector.py` and
`rollout/collect/evaluate.py` call the `Scorer`.
"""

from rollout.rewards.rules import RULES, rule_names
from rollout.rewards.scorer import RewardError, Scorer, ScoreStats, function_problem

__all__ = ["RULES", "RewardError", "ScoreStats", "Scorer", "function_problem", "rule_names"]
