"""Configuration of the algorithms, readable without torch.

Every choice between algorithms is a choice of a type; every default stands here, once. The command line
composes and checks these classes before torch or Ray is imported, which is why they do not live beside the
tensor code that they configure. `algorithms.correction` and `algorithms.loss` re-export them.

`Checked` is the base of every config dataclass of the project: a class states its rules in `problems()`, and
building an instance that breaks one raises `ConfigError` with all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

MAX_LOG_RATIO = 20.0
"""Bound on |log-ratio| before exp: e^20 and its square are finite in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One broken rule of a configuration: which key, which rule, what was given, and the way out."""

    key: str
    """Dotted path of the key, relative to the config that reports it."""
    rule: str
    """The rule in words, for example "must be > 0"."""
    value: object
    """What was given."""
    remedy: str = ""
    """What to write instead: a value, an allowed set, or another key."""

    def under(self, prefix: str) -> Problem:
        """The same problem, seen from the config that holds this one under `prefix`."""
        return replace(self, key=f"{prefix}.{self.key}" if prefix else self.key)

    def __str__(self) -> str:
        shown = self.value.name if isinstance(self.value, Enum) else repr(self.value)
        text = f"{self.key} {self.rule}, got {shown}."
        return f"{text} {self.remedy}" if self.remedy else text


class ConfigError(ValueError):
    """A configuration that breaks one or more rules; `problems` holds all of them."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in problems))


class Checked:
    """Base of config dataclasses: `problems()` yields the broken rules, construction refuses them."""

    def problems(self) -> Iterator[Problem]:
        """Yield every rule that the values of this config break; subclasses override."""
        yield from ()

    def __post_init__(self) -> None:
        found = list(self.problems())
        if found:
            raise ConfigError(found)


class Level(Enum):
    """Over which tokens a log-ratio is accumulated before it becomes a weight."""

    token = "token"
    """Delta_t: each token by itself. Low variance, biased over long responses."""
    sequence = "sequence"
    """Sum of Delta over the response. Unbiased, variance grows with length."""
    geometric = "geometric"
    """Mean of Delta over the response: the length-normalised product."""


class MISBound(Enum):
    """What happens to a weight outside [low, high] under `correction=mis`."""

    mask = "mask"
    """The weight's tokens are rejected (IcePop)."""
    truncate = "truncate"
    """The weight is cut to `high`; tokens below `low` are rejected."""


class BypassLoss(Enum):
    """The objective of `correction=bypass`."""

    ppo_clip = "ppo_clip"
    """PPO-clip on pi_theta / pi_rollout."""
    reinforce = "reinforce"
    """REINFORCE weighted with the detached, truncated pi_theta / pi_rollout; no clip."""


class RejectedDenominator(Enum):
    """Whether rejected tokens stay in the denominator of the loss."""

    keep = "keep"
    """Divide by all response tokens: rejection shrinks the gradient (safe; default)."""
    drop = "drop"
    """Divide by the kept response tokens: constant scale, needs a forward before the first update."""


@dataclass(kw_only=True, slots=True)
class CorrectionConfig(Checked):
    """How the gap between the rollout engine and the trainer is corrected. Choose with `correction=<mode>`."""

    mode: ClassVar[str] = ""
    needs_old_logprobs: ClassVar[bool] = True
    """Whether pi_old must be known when a rollout is used for more than one optimizer step."""

    @property
    def needs_prepass(self) -> bool:
        """Whether pi_old must be known before the first update even with one optimizer step per rollout."""
        return False


@dataclass(kw_only=True, slots=True)
class RecomputeConfig(CorrectionConfig):
    """PPO ratio against pi_old, no weight: the mismatch is ignored by the loss (and still measured)."""

    mode: ClassVar[str] = "recompute"


@dataclass(kw_only=True, slots=True)
class PPOISConfig(CorrectionConfig):
    """PPO ratio against pi_rollout: the correction sits inside the clip. pi_old is kept for the metrics."""

    mode: ClassVar[str] = "ppo_is"


@dataclass(kw_only=True, slots=True)
class VanillaISConfig(CorrectionConfig):
    """PPO ratio against pi_old, weighted with the unbounded rho = pi_old / pi_rollout."""

    mode: ClassVar[str] = "vanilla_is"
    level: Level = Level.token
    """Tokens over which rho is accumulated. Vetted: token."""


@dataclass(kw_only=True, slots=True)
class TISConfig(CorrectionConfig):
    """Truncated importance sampling: PPO ratio against pi_old, weighted with min(rho, cap)."""

    mode: ClassVar[str] = "tis"
    level: Level = Level.token
    """Tokens over which rho is accumulated. Vetted: token."""
    cap: float = 2.0
    """Upper bound C of the weight, a ratio; larger means less bias and more variance. Vetted: 2.0 (token)."""

    def problems(self) -> Iterator[Problem]:
        if not self.cap > 0:
            yield Problem(
                key="cap",
                rule="must be > 0",
                value=self.cap,
                remedy="Use correction=vanilla_is for a weight without a cap.",
            )


@dataclass(kw_only=True, slots=True)
class MISConfig(CorrectionConfig):
    """Masked importance sampling: rho bounded to [low, high], with a veto on catastrophic tokens."""

    mode: ClassVar[str] = "mis"
    level: Level = Level.token
    """Tokens over which rho is accumulated. Vetted: token (IcePop) and sequence."""
    bound: MISBound = MISBound.mask
    """What happens outside [low, high]. Vetted: mask."""
    low: float = 0.5
    """Lower bound of rho, a ratio. Vetted: 0.5."""
    high: float = 2.0
    """Upper bound of rho, a ratio. Vetted: 2.0."""
    veto: float = 1e-4
    """A response with any token whose rho is below this is rejected whole; 0 turns the veto off. Vetted: 1e-4."""
    rejected_denominator: RejectedDenominator = RejectedDenominator.keep
    """Whether rejected tokens stay in the denominator of the loss. Vetted: keep."""

    @property
    def needs_prepass(self) -> bool:
        return self.rejected_denominator is RejectedDenominator.drop

    def problems(self) -> Iterator[Problem]:
        if not 0 < self.low < self.high:
            yield Problem(
                key="low",
                rule=f"must satisfy 0 < low < high (high is {self.high})",
                value=self.low,
                remedy="Bounds are on rho = pi_train / pi_rollout, for example low=0.5 high=2.0.",
            )
        elif not self.low <= 1 <= self.high:
            yield Problem(
                key="low",
                rule=f"and high={self.high} must enclose 1, or on-policy tokens are rejected",
                value=self.low,
                remedy="For example low=0.5 high=2.0.",
            )
        if self.veto != 0 and not 2.1e-9 < self.veto < 1:
            yield Problem(
                key="veto",
                rule="must be 0 (off) or lie in (2.1e-9, 1): log-ratios are clamped to +-20",
                value=self.veto,
                remedy="Vetted: 1e-4.",
            )


@dataclass(kw_only=True, slots=True)
class BypassConfig(CorrectionConfig):
    """No pi_old at all: the loss is anchored on pi_rollout and no extra forward is ever run."""

    mode: ClassVar[str] = "bypass"
    needs_old_logprobs: ClassVar[bool] = False
    loss: BypassLoss = BypassLoss.ppo_clip
    """PPO-clip on pi_theta/pi_rollout, or REINFORCE with a detached truncated weight. Vetted: ppo_clip."""
    cap: float = 2.0
    """Upper bound of the detached weight of `loss=reinforce`, a ratio. Vetted: 2.0."""

    def problems(self) -> Iterator[Problem]:
        if not self.cap > 0:
            yield Problem(key="cap", rule="must be > 0", value=self.cap, remedy="Vetted: 2.0.")


class Aggregation(Enum):
    """How per-token losses become one number; decides the weight of long responses."""

    token_mean = "token_mean"
    """Sum over tokens / all response tokens of the optimizer step (DAPO)."""
    seq_mean_token_mean = "seq_mean_token_mean"
    """Mean over the tokens of a response, then over responses (GRPO)."""
    seq_mean_token_sum = "seq_mean_token_sum"
    """Sum over the tokens of a response, then mean over responses."""
    fixed_length = "fixed_length"
    """Sum over the tokens of a response / `loss.fixed_length_tokens`, then mean over responses (Dr.GRPO)."""
    token_sum = "token_sum"
    """Plain sum."""


@dataclass(kw_only=True, slots=True)
class LossConfig(Checked):
    """The policy-gradient surrogate and how it is aggregated."""

    clip_low: float = 0.2
    """PPO clip below: the ratio is clipped at 1 - clip_low. Vetted: 0.2."""
    clip_high: float = 0.2
    """PPO clip above: the ratio is clipped at 1 + clip_high. Vetted: 0.2 (GRPO), 0.28 (DAPO clip-higher)."""
    dual_clip: float | None = None
    """Bound c on the loss of negative advantages, -A * c; None turns it off. Vetted: 3.0 (PPO), 10.0 (DAPO)."""
    aggregation: Aggregation = Aggregation.token_mean
    """How per-token losses are averaged. Vetted: token_mean (DAPO), seq_mean_token_mean (GRPO)."""
    fixed_length_tokens: int | None = None
    """Divisor of aggregation=fixed_length, tokens; usually sampling.max_new_tokens."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, nats; 0 turns it off. Vetted: 0."""

    def problems(self) -> Iterator[Problem]:
        if not 0 < self.clip_low < 1:
            yield Problem(key="clip_low", rule="must lie in (0, 1)", value=self.clip_low, remedy="Vetted: 0.2.")
        if not self.clip_high > 0:
            yield Problem(key="clip_high", rule="must be > 0", value=self.clip_high, remedy="Vetted: 0.2 or 0.28.")
        if self.dual_clip is not None and not self.dual_clip > 1:
            yield Problem(key="dual_clip", rule="must be > 1 or null", value=self.dual_clip, remedy="Vetted: 3.0.")
        if self.aggregation is Aggregation.fixed_length and not (self.fixed_length_tokens or 0) > 0:
            yield Problem(
                key="fixed_length_tokens",
                rule="must be > 0 with aggregation=fixed_length",
                value=self.fixed_length_tokens,
                remedy="Usually the value of sampling.max_new_tokens.",
            )
        if self.aggregation is not Aggregation.fixed_length and self.fixed_length_tokens is not None:
            yield Problem(
                key="fixed_length_tokens",
                rule=f"has no effect with aggregation={self.aggregation.name}",
                value=self.fixed_length_tokens,
                remedy="Remove it, or use loss.aggregation=fixed_length.",
            )
        if self.entropy_coef < 0:
            yield Problem(key="entropy_coef", rule="must be >= 0", value=self.entropy_coef, remedy="Vetted: 0.")


class Estimator(Enum):
    """How rewards of a group become advantages."""

    grpo = "grpo"
    """(r - mean) / (std + epsilon), std with n - 1."""
    dr_grpo = "dr_grpo"
    """r - mean: no division by the spread."""
    rloo = "rloo"
    """r - mean of the other samples of the group."""


@dataclass(kw_only=True, slots=True)
class AdvantageConfig(Checked):
    """From the rewards of a group to one advantage per sample."""

    estimator: Estimator = Estimator.grpo
    """Which formula. Vetted: grpo."""
    epsilon: float = 1e-6
    """Added to the group's standard deviation (grpo). Vetted: 1e-6."""

    def problems(self) -> Iterator[Problem]:
        if not self.epsilon > 0:
            yield Problem(key="epsilon", rule="must be > 0", value=self.epsilon, remedy="Vetted: 1e-6.")
