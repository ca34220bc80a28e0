"""Configuration of the algorithms, readable without torch.

Every choice between algorithms is a choice of a type; every default stands here, once. The command line
composes and checks these classes before torch or Ray is imported, which is why they do not live beside the
tensor code that they configure. `algorithms.correction` and `algorithms.loss` re-export them.
"""

from algorithms.config.advantage import AdvantageConfig, Estimator
from algorithms.config.checked import Checked, ConfigError, Problem
from algorithms.config.correction import (
    MAX_LOG_RATIO,
    BypassConfig,
    BypassLoss,
    CorrectionConfig,
    Level,
    MISBound,
    MISConfig,
    PPOISConfig,
    RecomputeConfig,
    RejectedDenominator,
    TISConfig,
    VanillaISConfig,
)
from algorithms.config.loss import Aggregation, LossConfig

__all__ = [
    "MAX_LOG_RATIO",
    "AdvantageConfig",
    "Aggregation",
    "BypassConfig",
    "BypassLoss",
    "Checked",
    "ConfigError",
    "CorrectionConfig",
    "Estimator",
    "Level",
    "LossConfig",
    "MISBound",
    "MISConfig",
    "PPOISConfig",
    "Problem",
    "RecomputeConfig",
    "RejectedDenominator",
    "TISConfig",
    "VanillaISConfig",
]
