"""Statistics of the mismatch and of its correction: sums over micro-batches -> `mismatch/*`.

`mismatch_stats` sums on the device; `MismatchStats.merge` adds micro-batches, an all-reduce adds ranks; then
`MismatchStats.metrics` divides, on the host. Every metric is measured on the ORIGINAL response mask, before any bound,
in every mode. A metric without a token or sequence to average is None, never 0. docs/corrections.md, "What is logged",
lists the metrics.

Delta = log pi_old - log mu, clamped to +-20 where it is exponentiated; rho = exp(Delta). T: packed tokens,
N: sequences, K: sums, M: maxima.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

from algorithms.config import MAX_LOG_RATIO, CustomMetric
from algorithms.config.rejection import REJECTED_RESPONSES, REJECTED_TOKENS, rejected_metrics
from algorithms.config.spec import HARMLESS_ESS
from algorithms.correction import Correction
from algorithms.kl import bounded_exp, k1, k2, k3
from algorithms.masked import masked_max
from algorithms.stats import Stats, max_or_none, mean_or_none
from algorithms.tail import pareto_k, quantile
from algorithms.tokens import Tokens


def _jensen_shannon(delta: Tensor) -> Tensor:
    """[log 2 - log(1 + rho) + rho (log 2 + log rho - log(1 + rho))] / 2, with u = Delta / 2 as
    sqrt(rho) [u sinh u - cosh u log cosh u]: both terms are of the size of u^2, so that few digits cancel.
    """
    u = delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) / 2
    half_sinh = torch.sinh(u / 2)
    cosh_minus_1 = 2 * half_sinh * half_sinh
    return torch.exp(u) * (u * torch.sinh(u) - (1 + cosh_minus_1) * torch.log1p(cosh_minus_1))


DIVERGENCES: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "js": _jensen_shannon,
    "chi2_token": lambda delta: bounded_exp(delta).square() - 1,
    "tv": lambda delta: (bounded_exp(delta) - 1).abs() / 2,
    "mult_err": lambda delta: bounded_exp(delta.abs()),
    "abs_logdiff_mean": torch.abs,
    "is/raw_mean": bounded_exp,
}
"""Metric -> a function of Delta, float64; the metric is the mean of the function over valid tokens."""
MEANS: Final[dict[str, tuple[str, ...]]] = {
    "valid": (*DIVERGENCES, "prob_diff_mean"),
    "sequences": ("chi2_seq", "ppl/train", "ppl/rollout", "ppl/log_diff", "ppl/log_abs_diff", "ppl/ratio"),
    "corrected_valid": ("is/applied_mean", "is/clip_frac_hi", "is/clip_frac_lo"),
    "corrected_tokens": (REJECTED_TOKENS, "kept_frac"),
    "corrected_responses": (REJECTED_RESPONSES,),
    "kept_frac": ("rs/kept_k3",),
    "rejected_valid": ("rs/rejected_k3",),
    "kept_responses": ("rs/kept_len",),
    REJECTED_RESPONSES: ("rs/rejected_len",),
    "rewarded_kept": ("rs/kept_reward",),
    "rewarded_rejected": ("rs/rejected_reward",),
    "raw_weight": ("is/clip_mass",),
    "advantage_pos": ("eff_lr_pos",),
    "advantage_neg": ("eff_lr_neg",),
}
"""Denominator, by its name -> the metrics with that denominator. The numerator of a metric is the sum of its name."""
COUNTS: Final = ("num_tokens", "invalid_tokens", "invalid_samples", "k3_clamped_tokens")
"""Metrics that are sums, not divided by a count."""
OTHER_SUMS: Final = (
    *("mu", "mu_squared", "prob_diff", "prob_diff_squared", "mu_prob_diff", "rho_squared"),
    *("seq_rho", "seq_rho_squared", "applied_squared", "corrected_sequences", "seq_applied", "seq_applied_squared"),
)
NUM_LAGS: Final = 8
"""Number of buckets of the weight lag 0, 1, ...; the last bucket holds all larger lags."""
LAGS: Final = tuple(f"by_lag/{lag}{'+' if lag == NUM_LAGS - 1 else ''}/k3" for lag in range(NUM_LAGS))
LAG_SUMS: Final = (*LAGS, *(f"{name}_tokens" for name in LAGS))
"""Names of the sums of k3 and of the number of tokens of each lag bucket."""
SUMS: Final = tuple(
    dict.fromkeys((*MEANS, *(name for names in MEANS.values() for name in names), *COUNTS, *OTHER_SUMS, *LAG_SUMS))
)
MAXES: Final = ("k3_max", "abs_logdiff_max", "prob_diff_max", "delta_max")
"""Maxima over valid tokens."""


class StepContext(NamedTuple):
    """Facts besides log-probs that some metrics need; None leaves these metrics None."""

    rewards: Tensor | None = None
    """[N] float32, one per sequence."""
    lags: Tensor | None = None
    """[N] int64 >= 0, policy updates between the weights that sampled a sequence and those that are trained."""
    token_lags: Tensor | None = None
    """[T] int64 >= 0, lag of every token, where a sequence has tokens of several versions; replaces `lags`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MismatchStats(Stats):
    """Mismatch statistics of one or more micro-batches, on their device.

    Beside the sums [K] and maxima [M] this record keeps the log-ratios themselves, because quantiles and tails do not
    add up. `merge` concatenates the log-ratios of micro-batches; ranks are concatenated likewise.
    """

    criteria: tuple[str, ...]
    """[V] names of the rejection criteria, in the order of the config. The sizes of `sums` depend on V and W only."""
    own: tuple[str, ...]
    """[W] names of the user's metrics, in the order of the config."""
    token_deltas: Tensor
    """[n] float32, Delta of each token; NaN where the token is not valid."""
    sequence_deltas: Tensor
    """[m] float64, sum of Delta of each sequence; NaN where no token is valid."""

    def merge(self, other: Self) -> Self:
        """The statistics of both, on the device; a ValueError if their rejection criteria differ."""
        if other.criteria != self.criteria:
            raise ValueError(f"statistics of different criteria do not add up: {self.criteria} and {other.criteria}.")
        return type(self)(
            sums=self.sums + other.sums,
            maxes=torch.maximum(self.maxes, other.maxes),
            criteria=self.criteria,
            own=self.own,
            token_deltas=torch.cat([self.token_deltas, other.token_deltas]),
            sequence_deltas=torch.cat([self.sequence_deltas, other.sequence_deltas]),
        )

    def named_sums(self) -> dict[str, float]:
        """The sums by name. Reads the device."""
        return dict(zip(_sum_names(self.criteria, self.own), self.sums.tolist(), strict=True))

    def metrics(self) -> dict[str, float | None]:
        """All metrics `mismatch/*`. Reads the device."""
        sums, maxes = self.named_sums(), dict(zip(MAXES, self.maxes.tolist(), strict=True))
        valid = sums["valid"]
        tokens, sequences = (x[~x.isnan()].double() for x in (self.token_deltas, self.sequence_deltas))
        metrics = {name: mean_or_none(sums[name], sums[count]) for count, names in MEANS.items() for name in names}
        metrics |= {name: sums[name] for name in COUNTS}
        metrics |= {name: max_or_none(maxes[name], valid) for name in MAXES[:3]}
        for name in self.criteria:
            for metric, of in zip(rejected_metrics(name), ("corrected_tokens", "corrected_responses"), strict=True):
                metrics[metric] = mean_or_none(sums[metric], sums[of])
        ess_token = _ess(sums["is/raw_mean"], sums["rho_squared"], valid)
        ess_seq = _ess(sums["seq_rho"], sums["seq_rho_squared"], sums["sequences"])
        metrics |= {
            "k3_p99": quantile(k3(tokens), 0.99),
            "is/raw_max": math.exp(max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, maxes["delta_max"]))) if valid else None,
            "pearson": _pearson(sums) if valid else None,
            "ess/raw_token": ess_token,
            "ess/raw_seq": ess_seq,
            "ess/applied_token": _ess(sums["is/applied_mean"], sums["applied_squared"], sums["corrected_valid"]),
            "ess/applied_seq": _ess(sums["seq_applied"], sums["seq_applied_squared"], sums["corrected_sequences"]),
            "khat/token": _tail_shape(tokens, ess_token),
            "khat/seq": _tail_shape(sequences, ess_seq),
            "eff_lr": mean_or_none(
                sums["eff_lr_pos"] + sums["eff_lr_neg"], sums["advantage_pos"] + sums["advantage_neg"]
            ),
            **{name: sums[name] / sums[f"{name}_tokens"] for name in LAGS if sums[f"{name}_tokens"]},
        }
        own = {name: mean_or_none(sums[name], valid) for name in self.own}
        return {f"mismatch/{name}": value for name, value in metrics.items()} | own


@torch.no_grad()
def mismatch_stats(
    tokens: Tokens,
    correction: Correction | None = None,
    context: StepContext | None = None,
    metrics: Sequence[CustomMetric] = (),
) -> MismatchStats:
    """Mismatch statistics of one micro-batch, on its device; no value is read on the host.

    Args:
        tokens: trainer_logprobs come from the trainer's forward, never from the rollout engine; advantages for eff_lr.
        correction: The correction that was applied; None leaves the metrics of weights and of rejection None.
        context: Rewards and weight lags, each for the metrics that need it.
        metrics: The user's own.

    Raises ValueError if trainer_logprobs are None, and for a wrong shape or dtype.
    """
    if tokens.trainer_logprobs is None:
        raise ValueError("the mismatch needs trainer_logprobs, got None. Pass the log-probs that the trainer scored.")
    context = StepContext() if context is None else context
    _require_fitting(tokens, context)
    delta, mu, valid = tokens.delta.double(), tokens.rollout.double().exp(), tokens.valid
    prob_diff = tokens.train.double().exp() - mu
    sums = _token_sums(tokens, delta, mu, prob_diff) | _sequence_sums(tokens) | _lag_sums(tokens, context)
    if correction is not None:
        sums |= _correction_sums(tokens, correction, context.rewards)
    sums |= {
        metric.key: torch.where(valid, metric.fitting(metric.answer(tokens), tokens.delta).double(), 0.0).sum()
        for metric in metrics
    }
    criteria = () if correction is None else tuple(correction.rejected)
    own = tuple(metric.key for metric in metrics)
    return MismatchStats(
        sums=torch.stack([sums.get(name, mu.new_zeros(())).double() for name in _sum_names(criteria, own)]),
        maxes=torch.stack([masked_max(values, valid) for values in (k3(delta), delta.abs(), prob_diff.abs(), delta)]),
        criteria=criteria,
        own=own,
        token_deltas=torch.where(valid, tokens.delta, math.nan),
        sequence_deltas=torch.where(tokens.num_valid > 0, tokens.delta_total, math.nan),
    )


def _sum_names(criteria: tuple[str, ...], own: tuple[str, ...]) -> tuple[str, ...]:
    return (*SUMS, *(metric for name in criteria for metric in rejected_metrics(name)), *own)


def _token_sums(tokens: Tokens, delta: Tensor, mu: Tensor, prob_diff: Tensor) -> dict[str, Tensor]:
    """Sums over valid tokens, of Delta, mu and pi_old - mu [T] float64."""
    columns = {name: function(delta) for name, function in DIVERGENCES.items()} | {
        "rho_squared": bounded_exp(delta).square(),
        "k3_clamped_tokens": delta.abs() > MAX_LOG_RATIO,
        "mu": mu,
        "mu_squared": mu.square(),
        "prob_diff": prob_diff,
        "prob_diff_mean": prob_diff.abs(),
        "prob_diff_squared": prob_diff.square(),
        "mu_prob_diff": mu * prob_diff,
    }
    sums = {name: torch.where(tokens.valid, values, 0.0).sum() for name, values in columns.items()}
    mask, valid = tokens.response_mask, tokens.valid
    return sums | {"valid": valid.sum(), "num_tokens": mask.sum(), "invalid_tokens": (mask & ~valid).sum()}


def _sequence_sums(tokens: Tokens) -> dict[str, Tensor]:
    """Sums over the sequences with a valid token, float64."""
    mean, rollout, rho = tokens.delta_mean, tokens.mean(tokens.rollout), bounded_exp(tokens.delta_total)
    columns = {
        "sequences": torch.ones_like(rho),
        "chi2_seq": rho.square() - 1,
        "seq_rho": rho,
        "seq_rho_squared": rho.square(),
        "ppl/train": bounded_exp(-rollout - mean),
        "ppl/rollout": bounded_exp(-rollout),
        "ppl/log_diff": -mean,
        "ppl/log_abs_diff": mean.abs(),
        "ppl/ratio": bounded_exp(-mean),
    }
    sums = {name: torch.where(tokens.num_valid > 0, values, 0.0).sum() for name, values in columns.items()}
    return sums | {"invalid_samples": (~tokens.complete).sum()}


def _lag_sums(tokens: Tokens, context: StepContext) -> dict[str, Tensor]:
    """k3 and number of valid tokens by weight lag, float64."""
    lags = context.token_lags
    if lags is None:
        if context.lags is None:
            return {}
        lags = tokens.expand(context.lags)
    columns = torch.stack([k3(tokens.delta.double()), tokens.valid.double()])
    sums = columns.new_zeros(2, NUM_LAGS).index_add(1, lags.clamp(0, NUM_LAGS - 1), columns)
    return dict(zip(LAG_SUMS, sums.view(-1), strict=True))


def _correction_sums(tokens: Tokens, correction: Correction, rewards: Tensor | None) -> dict[str, Tensor]:
    """Sums over weights, rejected tokens, and the advantages of both, float64."""
    valid, response, keep = tokens.valid, tokens.response_mask, correction.keep & tokens.valid
    applied = torch.where(keep, correction.weight, 0.0).double()
    raw = applied if correction.raw_weight is None else torch.where(valid, correction.raw_weight, 0.0).double()
    per_token_k3 = k3(tokens.delta.double())
    seq_applied = tokens.mean(applied)
    has_tokens, num_kept = tokens.num_tokens > 0, tokens.total(keep)
    whole, touched = has_tokens & (num_kept == tokens.num_tokens), num_kept < tokens.num_tokens
    sums = {
        "corrected_tokens": response.sum(),
        "corrected_valid": valid.sum(),
        "corrected_sequences": (tokens.num_valid > 0).sum(),
        "corrected_responses": has_tokens.sum(),
        "is/applied_mean": applied.sum(),
        "applied_squared": applied.square().sum(),
        "seq_applied": seq_applied.sum(),
        "seq_applied_squared": seq_applied.square().sum(),
        "raw_weight": raw.sum(),
        "is/clip_mass": torch.where(keep, raw - applied, 0.0).clamp(min=0).sum(),
        "is/clip_frac_hi": (keep & (applied < raw)).sum(),
        "is/clip_frac_lo": (keep & (applied > raw)).sum(),
        "kept_frac": keep.sum(),
        "rejected_valid": (valid & ~keep).sum(),
        REJECTED_TOKENS: (response & ~keep).sum(),
        REJECTED_RESPONSES: touched.sum(),
        "rs/kept_k3": torch.where(keep, per_token_k3, 0.0).sum(),
        "rs/rejected_k3": torch.where(valid & ~keep, per_token_k3, 0.0).sum(),
        "kept_responses": whole.sum(),
        "rs/kept_len": torch.where(whole, tokens.num_tokens, 0.0).sum(),
        "rs/rejected_len": torch.where(touched, tokens.num_tokens, 0.0).sum(),
    }
    for name, rejected in correction.rejected.items():
        sums |= zip(rejected_metrics(name), (rejected.sum(), (tokens.total(rejected) > 0).sum()), strict=True)
    if rewards is not None:
        for name, responses in (("kept", whole), ("rejected", touched)):
            total = torch.where(responses, rewards.double(), 0.0).sum()
            sums |= {f"rewarded_{name}": responses.sum(), f"rs/{name}_reward": total}
    if tokens.advantages is not None:
        advantages = torch.where(response, tokens.advantages, 0.0).double()
        for name, size in (("pos", advantages.clamp(min=0)), ("neg", (-advantages).clamp(min=0))):
            sums |= {f"advantage_{name}": size.sum(), f"eff_lr_{name}": (applied * size).sum()}
    return sums


def _require_fitting(tokens: Tokens, context: StepContext) -> None:
    num_sequences, shape, lags = tokens.cu_seqlens.numel() - 1, tokens.response_mask.shape, context.token_lags
    for name, tensor in (("rewards", context.rewards), ("lags", context.lags)):
        if tensor is not None and tensor.shape != (num_sequences,):
            raise ValueError(f"{name} must be [N] = [{num_sequences}], got {list(tensor.shape)}: one per sequence.")
    if lags is not None and (lags.shape, lags.dtype) != (shape, torch.int64):
        raise ValueError(f"token_lags must be [T] = {list(shape)} int64, got {list(lags.shape)} {lags.dtype}.")


def _ess(total: float, squared: float, num: float) -> float | None:
    """Effective sample size as a fraction: (sum w)^2 / (n sum w^2)."""
    return mean_or_none(total**2, num * squared)


def _tail_shape(deltas: Tensor, ess: float | None) -> float | None:
    """Pareto k of exp(deltas [n]); None where the effective sample size is so large that no tail matters."""
    if ess is None or ess > HARMLESS_ESS:
        return None
    return pareto_k(deltas.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def _pearson(sums: dict[str, float]) -> float | None:
    """Correlation of p = pi_old and q = mu from the moments of q and p - q, which keeps 1 - r accurate."""
    valid = sums["valid"]
    mean_q, mean_d = sums["mu"] / valid, sums["prob_diff"] / valid
    var_q = sums["mu_squared"] / valid - mean_q**2
    var_d = sums["prob_diff_squared"] / valid - mean_d**2
    cov = sums["mu_prob_diff"] / valid - mean_q * mean_d
    var_p = var_q + 2 * cov + var_d
    # Rounding leaves about 1e-16 of the mean square where all probabilities are equal.
    if min(var_q, var_p) <= 1e-14 * (mean_q**2 + mean_d**2):
        return None
    return max(-1.0, min(1.0, (var_q + cov) / math.sqrt(var_q * var_p)))
