"""The corrections for scoring a step: modes, presets and the run's own, or a reason against one. No torch import."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from algorithms.config import (
    PRESETS,
    BaselineScope,
    BypassConfig,
    BypassLoss,
    ConfigError,
    CorrectionConfig,
    LossConfig,
    MISConfig,
    PPOISConfig,
    Problem,
    RecomputeConfig,
    TISConfig,
    VanillaISConfig,
)
from algorithms.config.spec import CorrectionSpec
from trainer.config.train import TrainConfig

RUN = "run"
"""Name of the correction with which the step was trained."""
MODES: Mapping[str, CorrectionConfig] = {
    "recompute": RecomputeConfig(),
    "ppo_is": PPOISConfig(),
    "vanilla_is": VanillaISConfig(),
    "tis": TISConfig(),
    "mis": MISConfig(),
    "bypass": BypassConfig(),
    "bypass_reinforce": BypassConfig(loss=BypassLoss.reinforce),
}
"""The modes with their defaults; bypass with each of its losses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """A correction by name, in the run's config."""

    name: str
    config: TrainConfig | None
    """The run's config with this correction; None if the correction cannot be used on this step."""
    refusal: str = ""
    """Reason why the correction cannot be used; "" if it can."""

    @property
    def identity(self) -> tuple[CorrectionSpec, LossConfig] | None:
        """The computation of the mode: two modes with equal identity compute the same."""
        return None if self.config is None else (self.config.correction.spec(), self.config.policy_loss)


def all_names() -> list[str]:
    """All names for `modes=`, in the order of the table."""
    return [RUN, *MODES, *PRESETS]


def name_problems(names: Sequence[str]) -> list[Problem]:
    """A problem for every unknown name."""
    known = all_names()
    problems = []
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]}? " if close else ""
            remedy = f"{hint}Names: {', '.join(known)}."
            problems.append(Problem(key="modes", rule="must be names of modes and presets", value=name, remedy=remedy))
    return problems


def chosen_modes(
    config: TrainConfig, names: Sequence[str], *, optimizer_steps: int, has_old_logprobs: bool
) -> list[Mode]:
    """The modes `names`, the run's own first, in the config of the run.

    `has_old_logprobs`: True if log pi_old of every token was recorded from a separate forward.
    """
    corrections = {RUN: config.correction, **MODES, **PRESETS}
    wanted = [RUN, *(name for name in all_names() if name in names and name != RUN)]
    return [
        _mode(name, config, corrections[name], optimizer_steps=optimizer_steps, has_old_logprobs=has_old_logprobs)
        for name in wanted
    ]


def _mode(
    name: str, config: TrainConfig, correction: CorrectionConfig, *, optimizer_steps: int, has_old_logprobs: bool
) -> Mode:
    try:
        fitted = replace(config, correction=correction)
    except ConfigError as error:
        return Mode(name=name, config=None, refusal=" ".join(str(problem) for problem in error.problems))
    if optimizer_steps > 1 and correction.needs_old_logprobs and not has_old_logprobs:
        refusal = (
            f"it needs pi_old of every token, and with correction={config.correction.mode} the run had it for the "
            f"first of {optimizer_steps} optimizer steps only"
        )
        return Mode(name=name, config=None, refusal=refusal)
    if name != RUN and config.has_critic and config.advantage.baseline_scope is BaselineScope.kept:
        refusal = (
            "advantages of gae with advantage.baseline_scope=kept are those of what the run's own correction keeps"
        )
        return Mode(name=name, config=None, refusal=refusal)
    return Mode(name=name, config=fitted)
