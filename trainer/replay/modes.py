"""The corrections for scoring a step: modes, presets and the run's own, or a reason against one. No torch import."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from algorithms.config import (
    PRESETS,
    BaselineScope,
    BypassConfig,
    BypassLoss,
    ConfigError,
    CorrectionConfig,
    CustomCorrection,
    LossConfig,
    MISConfig,
    PPOISConfig,
    Problem,
    RecomputeConfig,
    TISConfig,
    VanillaISConfig,
)
from algorithms.config.spec import CorrectionSpec
from rollout.user_code.custom_class import load_class
from rollout.user_code.custom_code import is_custom, own_line, similar_custom
from trainer.compose.unknown_keys import nearest
from trainer.config.train import TrainConfig

OWN: type[CustomCorrection] = CustomCorrection  # type: ignore[type-abstract]
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
    config: TrainConfig
    """The run's config with this correction."""

    @property
    def identity(self) -> tuple[CorrectionSpec, LossConfig]:
        """The computation of the mode: two modes with equal identity compute the same."""
        return self.config.correction.spec(), self.config.policy_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedMode:
    """A correction that cannot be used on a step, and why."""

    name: str
    refusal: str


def all_names() -> list[str]:
    """All names for `modes=`, in the order of the table."""
    return [RUN, *MODES, *PRESETS]


def of_bundle() -> list[str]:
    """The names for a bundle, whose own correction nobody knows."""
    return [*MODES, *PRESETS]


def name_problems(names: Sequence[str], *, known: Sequence[str] | None = None) -> list[Problem]:
    """A problem for every name that is not among the `known`, without them among all names."""
    known = all_names() if known is None else known
    problems = []
    for name in names:
        if is_custom(name):
            try:
                load_class(name, OWN)
            except ValueError as error:
                problems.append(Problem(key="modes", rule=str(error), value=name, remedy=similar_custom(name)))
        elif name not in known:
            close = nearest(name, known)
            hint = f"Did you mean {close}? " if close else ""
            remedy = f"{hint}Names: {', '.join(known)}."
            problems.append(Problem(key="modes", rule="must be names of modes and presets", value=name, remedy=remedy))
    return problems


def chosen_modes(
    config: TrainConfig, names: Sequence[str], *, optimizer_steps: int, has_old_logprobs: bool
) -> tuple[list[Mode], list[RefusedMode]]:
    """The modes `names` in the config of the run, the run's own first, and those that cannot be used on the step.

    `has_old_logprobs`: True if log pi_old of every token was recorded from a separate forward.
    """
    modes: list[Mode] = []
    refused: list[RefusedMode] = []
    own = {name: None for name in names if is_custom(name)}
    for name, known in {RUN: config.correction, **MODES, **PRESETS, **own}.items():
        if name != RUN and name not in names:
            continue
        refusal = ""
        correction = known or config.correction
        try:
            correction = known or load_class(name, OWN)()
            of_mode = replace(config, correction=correction)
        except ConfigError as error:
            refusal = " ".join(str(problem) for problem in error.problems)
        except (Exception, SystemExit) as error:  # of a __post_init__
            refusal = f"{type(error).__name__}: {error}{own_line(traceback.format_exc())}"
        if not refusal and optimizer_steps > 1 and correction.needs_old_logprobs and not has_old_logprobs:
            refusal = (
                f"it needs pi_old of every token, and with correction={config.correction.mode} the run had it for the "
                f"first of {optimizer_steps} optimizer steps only"
            )
        if not refusal and name != RUN and config.has_critic and config.advantage.baseline_scope is BaselineScope.kept:
            refusal = (
                "advantages of gae with advantage.baseline_scope=kept are those of what the run's own correction keeps"
            )
        if refusal:
            refused.append(RefusedMode(name=name, refusal=refusal))
        else:
            modes.append(Mode(name=name, config=of_mode))
    return modes, refused
