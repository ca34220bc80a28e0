"""Configuration of the algorithms, readable without torch.

Every choice between algorithms is a choice of a type; this package declares every default exactly once. The command
line composes and checks these classes before torch or Ray is imported, so the classes are separate from the tensor code
that they configure.
"""

from algorithms.config.advantage import AdvantageConfig, Baseline, BaselineScope, CustomEstimator, Estimator
from algorithms.config.correction import (
    BypassConfig,
    BypassLoss,
    CorrectionConfig,
    CustomConfig,
    CustomCorrection,
    MISBound,
    MISConfig,
    PPOISConfig,
    RecomputeConfig,
    TISConfig,
    VanillaISConfig,
)
from algorithms.config.custom import Custom, CustomMetric
from algorithms.config.loss import (
    Aggregation,
    CISPOConfig,
    CustomAggregation,
    CustomLoss,
    Divisor,
    DPPOConfig,
    DPPOKLConfig,
    DPPOTVConfig,
    GSPOConfig,
    LossConfig,
    PPOClipConfig,
    ReinforceConfig,
    SAPOConfig,
)
from algorithms.config.presets import PRESETS
from algorithms.config.reference import CustomKLEstimator, KLEstimator, KLPlacement, ReferenceKLConfig
from algorithms.config.rejection import CustomCriterion, RejectConfig
from algorithms.config.rules import NOT_SET, Checked, ConfigError, Problem
from algorithms.config.spec import (
    MAX_LOG_RATIO,
    Anchor,
    Bound,
    Compared,
    CorrectionSpec,
    CustomBound,
    CustomLevel,
    Level,
    RejectedDenominator,
    SelfNormalize,
    WeightSpec,
)

__all__ = [
    "MAX_LOG_RATIO", "NOT_SET", "PRESETS", "AdvantageConfig", "Aggregation", "Anchor", "Baseline", "BaselineScope",
    "Bound", "BypassConfig", "BypassLoss", "CISPOConfig", "Checked", "Compared", "ConfigError", "CorrectionConfig",
    "CorrectionSpec", "Custom", "CustomAggregation", "CustomBound", "CustomConfig", "CustomCorrection",
    "CustomCriterion", "CustomEstimator", "CustomKLEstimator", "CustomLevel", "CustomLoss", "CustomMetric",
    "DPPOConfig", "DPPOKLConfig", "DPPOTVConfig", "Divisor", "Estimator", "GSPOConfig", "KLEstimator", "KLPlacement",
    "Level", "LossConfig", "MISBound", "MISConfig", "PPOClipConfig", "PPOISConfig", "Problem", "RecomputeConfig",
    "ReferenceKLConfig", "ReinforceConfig", "RejectConfig", "RejectedDenominator", "SAPOConfig", "SelfNormalize",
    "TISConfig", "VanillaISConfig", "WeightSpec",
]  # fmt: skip
