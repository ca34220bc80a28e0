"""Configuration of the policy loss: one dataclass per surrogate, each with aggregation and entropy bonus.

    surrogate   loss of one token, to be minimised; r = pi_theta / anchor, sg: stop-gradient
    ppo_clip    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
    gspo        ppo_clip on the geometric mean of r over the response
    cispo       -sg(clip(r, low, high)) A log pi_theta
    reinforce   -A log pi_theta
    dppo_tv     -r A, no gradient where the probability of the token has moved by more than `threshold`
    dppo_kl     -r A, no gradient where the KL divergence of the move exceeds `threshold`
    sapo        -(4 / tau) sigmoid(tau (r - 1)) A

At r = 1 the gradient of every surrogate is -A grad log pi_theta.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Final

from algorithms.config.custom import Custom
from algorithms.config.rules import Checked, Problem, above, as_yaml, at_least, ruled, within

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.loss import Surrogate, SurrogateTokens

_GSPO_CLIP = within(0, 0.05, "()", because="the mean log-ratio of a response never gets that far")
"""Rule of a GSPO clip, which refuses values >= 0.05: see `GSPOConfig`."""
_TOKEN_CLIP = "A clip of the token's ratio is loss=ppo_clip."
RATIO_CAP = 20.0
"""Upper bound of DPPO's detached ratio, the value of the paper and of verl; a capped token keeps its gradient."""
TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05
"""tau of SAPO where A > 0 and where A <= 0, no unit, the values of the paper: the gate closes sooner where the
probability of a token is lowered, because this raises the probabilities of all others."""
MAX_KL_THRESHOLD = 13
"""Largest useful threshold of DPPO's KL, nats: a larger threshold never drops a token, because 1 - p is bounded below
by 1e-6, and log 1e6 = 13.8."""


class Divisor(Enum):
    """The number by which the sum of an optimizer step is divided, over all ranks."""

    tokens = "tokens"
    sequences = "sequences"
    none = "none"


class Aggregation(Enum):
    """Aggregation of per-token losses into one number, which decides the weight of long responses."""

    token_mean = "token_mean"
    """Sum over tokens / all response tokens of the optimizer step (DAPO)."""
    seq_mean_token_mean = "seq_mean_token_mean"
    """Mean over the tokens of a response, then over responses (GRPO)."""
    seq_mean_token_sum = "seq_mean_token_sum"
    """Sum over the tokens of a response, then mean over responses."""
    fixed_length = "fixed_length"
    """Sum over the tokens of a response / `loss.fixed_length_tokens`, then mean over responses (Dr.GRPO)."""
    token_sum = "token_sum"
    """Sum over all response tokens, without a divisor."""

    @property
    def divisor(self) -> Divisor:
        """The divisor of the step; with rejected_denominator=drop it counts the kept tokens or responses."""
        match self:
            case Aggregation.token_mean:
                return Divisor.tokens
            case Aggregation.token_sum:
                return Divisor.none
        return Divisor.sequences


@dataclass(kw_only=True, slots=True)
class CustomAggregation(Custom):
    """An aggregation of a user. Its formula is the divisor; it may hold {kept}, "" or "_kept": "N_tokens{kept}"."""

    divisor: ClassVar[Divisor] = Divisor.tokens
    """The count of the optimizer step by which the coefficients are divided."""

    @abstractmethod
    def __call__(self, mask: Tensor, cu_seqlens: Tensor, *, num_tokens: float, num_sequences: float) -> Tensor:
        """The factor of each token's loss, [T] float32, 0 off the mask [T] bool; the counts are of the whole step."""
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class LossConfig(Checked):
    """Keys of every surrogate: aggregation of the per-token losses, and entropy bonus."""

    surrogate: ClassVar[str] = ""
    """Name in `algorithms.loss.SURROGATES`; this base has none."""
    aggregation: Aggregation | CustomAggregation = Aggregation.token_mean
    """Aggregation of per-token losses into one number. Vetted: token_mean (DAPO), seq_mean_token_mean (GRPO)."""
    fixed_length_tokens: int | None = None
    """Divisor of aggregation=fixed_length, in tokens; usually sampling.max_new_tokens."""
    entropy_coef: float = ruled(0.0, at_least(0), remedy="Vetted: 0.")
    """Weight of the entropy bonus, loss per nat of entropy; 0 turns the bonus off. Vetted: 0."""

    def conflicts(self) -> Iterator[Problem]:
        if self.aggregation is Aggregation.fixed_length and not (self.fixed_length_tokens or 0) > 0:
            yield self.broken(
                "fixed_length_tokens",
                "must be > 0 with aggregation=fixed_length",
                "Usually the value of sampling.max_new_tokens.",
            )
        if self.aggregation is not Aggregation.fixed_length and self.fixed_length_tokens is not None:
            yield self.broken(
                "fixed_length_tokens",
                f"has no effect with aggregation={as_yaml(self.aggregation)}",
                "Remove it, or use loss.aggregation=fixed_length.",
            )


@dataclass(kw_only=True, slots=True)
class PPOClipConfig(LossConfig):
    """PPO-clip on the ratio of each token (https://arxiv.org/abs/1707.06347)."""

    surrogate: ClassVar[str] = "ppo_clip"
    clip_low: float = ruled(0.2, within(0, 1, "()"), remedy="Vetted: 0.2.")
    """PPO clip below, a distance of the ratio from 1: the ratio is clipped at 1 - clip_low. Vetted: 0.2."""
    clip_high: float = ruled(0.2, above(0), remedy="Vetted: 0.2 or 0.28.")
    """PPO clip above, a distance of the ratio from 1: the ratio is clipped at 1 + clip_high. Vetted: 0.2 (GRPO), 0.28
    (DAPO clip-higher)."""
    dual_clip: float | None = ruled(None, above(1), remedy="Vetted: 3.0.")
    """Bound c, a ratio, on the loss of negative advantages, -A * c; null turns the bound off. Vetted: 3.0 (PPO), 10.0
    (DAPO)."""


@dataclass(kw_only=True, slots=True)
class GSPOConfig(LossConfig):
    """PPO-clip on one ratio per response: the geometric mean over its tokens (https://arxiv.org/abs/2507.18071).

    A mean over many tokens stays close to 1, so the clip is three orders of magnitude below PPO's. With a clip of 0.05
    the tokens of a response must have moved by 5 % on average before the clip acts; a value for PPO would never clip,
    without any message. Such values are therefore refused.
    """

    surrogate: ClassVar[str] = "gspo"
    clip_low: float = ruled(3e-4, _GSPO_CLIP, remedy=f"Vetted: 3e-4. {_TOKEN_CLIP}")
    """Clip below, a distance from 1: the ratio of a response is clipped at 1 - clip_low. Vetted: 3e-4."""
    clip_high: float = ruled(4e-4, _GSPO_CLIP, remedy=f"Vetted: 4e-4. {_TOKEN_CLIP}")
    """Clip above, a distance from 1: the ratio of a response is clipped at 1 + clip_high. Vetted: 4e-4."""
    aggregation: Aggregation | CustomAggregation = Aggregation.seq_mean_token_mean
    """Aggregation of per-token losses into one number. Vetted: seq_mean_token_mean, the objective of the paper."""


@dataclass(kw_only=True, slots=True)
class CISPOConfig(LossConfig):
    """REINFORCE weighted with the detached, bounded ratio (https://arxiv.org/abs/2506.13585).

    No token loses its gradient. The bounds are on the ratio itself; an epsilon of other trainers means 1 + epsilon.
    """

    surrogate: ClassVar[str] = "cispo"
    low: float = ruled(
        0.0, within(0, 1, because="it bounds the ratio, which is 1 on-policy"), remedy="Vetted: 0, no lower bound."
    )
    """Lower bound of the ratio; 0 means no lower bound, a bound above 0 raises the weight of small ratios. Vetted:
    0."""
    high: float = ruled(5.0, above(1, because="it bounds the ratio, not its distance from 1"), remedy="Vetted: 5.0.")
    """Upper bound of the ratio. Vetted: 5.0."""


@dataclass(kw_only=True, slots=True)
class ReinforceConfig(LossConfig):
    """Plain REINFORCE: no ratio and no clip; the correction's weight is the only importance weight."""

    surrogate: ClassVar[str] = "reinforce"


@dataclass(kw_only=True, slots=True)
class DPPOConfig(LossConfig):
    """Ratio times advantage inside a trust region of the token's probability (https://arxiv.org/abs/2602.04879).

    A token outside the region is dropped if its update would increase the distance. Unlike a bound on the ratio, the
    region leaves rare tokens free to move and holds likely tokens. The paper anchors the ratio on pi_rollout:
    correction=ppo_is or bypass.
    """


@dataclass(kw_only=True, slots=True)
class DPPOTVConfig(DPPOConfig):
    """DPPO with the total variation of "this token or any other": |pi_theta - anchor|, probabilities."""

    surrogate: ClassVar[str] = "dppo_tv"
    threshold: float = ruled(
        0.2, within(0, 1, "()", because="it is a difference of probabilities"), remedy="Vetted: 0.2."
    )
    """Largest move of the token's probability, in (0, 1). Vetted: 0.2."""


@dataclass(kw_only=True, slots=True)
class DPPOKLConfig(DPPOConfig):
    """DPPO with the KL divergence of "this token or any other": KL(anchor || pi_theta) of two Bernoulli laws."""

    surrogate: ClassVar[str] = "dppo_kl"
    threshold: float = ruled(
        0.05, within(0, MAX_KL_THRESHOLD, "()", because="it is a divergence in nats"), remedy="Vetted: 0.05."
    )
    """Largest Bernoulli KL(anchor || pi_theta), nats. Vetted: 0.05."""


@dataclass(kw_only=True, slots=True)
class SAPOConfig(LossConfig):
    """A smooth gate in place of the clip, which closes as the ratio leaves 1 (https://arxiv.org/abs/2511.20347)."""

    surrogate: ClassVar[str] = "sapo"
    aggregation: Aggregation | CustomAggregation = Aggregation.seq_mean_token_mean
    """Aggregation of per-token losses into one number. Vetted: seq_mean_token_mean, the objective of the paper."""


@dataclass(kw_only=True, slots=True)
class CustomLoss(LossConfig, Custom):
    """A surrogate of a user. Its formula stands before A in the objective line; it may hold {ratio} and {anchor}."""

    surrogate: ClassVar[str] = "custom"

    @abstractmethod
    def __call__(self, tokens: SurrogateTokens) -> Surrogate:
        """The surrogate of each token, with the gradient of tokens.logprobs."""
        raise NotImplementedError


LOSSES: Final[dict[str, type[LossConfig]]] = {
    kind.surrogate: kind
    for kind in (PPOClipConfig, GSPOConfig, CISPOConfig, ReinforceConfig, DPPOTVConfig, DPPOKLConfig, SAPOConfig)
}
"""Surrogate -> config class, the options of `loss=`."""
