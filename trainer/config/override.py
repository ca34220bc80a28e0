"""What one rollout step is trained with instead of the config: the decision of the guard, on its way to the ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from algorithms.config import CorrectionConfig

if TYPE_CHECKING:
    from trainer.config.train import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOverride:
    """The parts of a step that are not as configured."""

    correction: CorrectionConfig | None = None
    """Instead of that of the config; None for that."""
    learns: bool = True
    """False: the policy is scored and measured, and stays as it is."""

    def applied(self, config: TrainConfig) -> TrainConfig:
        """The config of the step. Raises ConfigError if the correction does not go with the rest."""
        return config if self.correction is None else replace(config, correction=self.correction)


AS_CONFIGURED = StepOverride()
