"""Configuration of the policy loss: surrogate, aggregation, entropy bonus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from algorithms.config.checked import Checked, Problem


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
