"""How far trainer and engine are apart, and what the correction did about it: sums of micro-batches -> `mismatch/*`.

`mismatch_stats` sums on the device; `MismatchStats.merge` adds micro-batches, an all-reduce adds ranks; then
`MismatchStats.metrics` divides, on the host. Everything is on the ORIGINAL response mask, before any bound, in every
mode. A metric without anything to average is None, never 0.

The metrics, each with `mismatch/` in front. Delta = log pi_old - log mu, clamped to +-20 where it is exponentiated and
in k3; rho = exp(Delta). Means are over valid response tokens if nothing else is said: both log-probs finite, log mu <=
1e-4. Sequence means are over the responses with a valid token, whose number T_i counts; S_i = sum of Delta.

    k1, k2, k3                 -Delta, Delta^2 / 2, rho - 1 - Delta (`algorithms.kl`): KL(mu || pi_old), nats
    k3_p99, k3_max             99 % quantile (`algorithms.tail`) and maximum of k3 over tokens
    js                         [log 2 - log(1 + rho) + rho (log 2 + Delta - log(1 + rho))] / 2, nats
    chi2_token, chi2_seq       rho^2 - 1; exp(2 S_i) - 1
    tv                         |rho - 1| / 2
    abs_logdiff_{mean,max}     |Delta|, not clamped, nats
    prob_diff_{mean,max}       |pi_old - mu| of the sampled token
    pearson                    correlation of pi_old and mu over tokens; None where one of them is constant
    mult_err                   exp |Delta|
    ppl/{train,rollout}        exp(-mean log-prob of the response)
    ppl/{log_diff,log_abs_diff,ratio}   -S_i / T_i, its absolute value, exp(-S_i / T_i)
    ess/raw_{token,seq}        (sum w)^2 / (n sum w^2), a fraction; w = rho, w = exp(S_i)
    ess/applied_{token,seq}    w after bounds and rejection (0); per response the mean of its tokens' w
    khat/{token,seq}           Pareto shape of the tail of rho, of exp(S_i) (`algorithms.tail`); None where the raw ESS
                               exceeds 0.99: such weights have no tail that matters
    is/raw_{mean,max}          rho of the token
    is/applied_mean            weight after bounds and rejection
    is/clip_frac_{hi,lo}       valid tokens cut to the upper bound, raised to the lower bound
    is/clip_mass               sum of (weight before bounds - applied) over cut tokens / sum before bounds
    rs/{token,seq}_frac        response tokens that are not kept; responses that lost a token
    rs/<criterion>_{frac,seq_frac}      the same by criterion, over all response tokens / responses
    rs/{kept,rejected}_{len,reward}     response tokens and reward of responses that lost no / some token
    rs/{kept,rejected}_k3      k3 of kept tokens, of valid tokens that are not kept
    eff_lr, eff_lr_{pos,neg}   sum |w A| / sum |A| over all response tokens, with A > 0, with A < 0
    invalid_tokens, invalid_samples     response tokens that are not valid; responses with such a token
    k3_clamped_tokens          tokens with |Delta| > 20
    kept_frac, num_tokens      kept / all response tokens; all response tokens
    by_lag/<0..6,7+>/k3        k3 by weight lag of the token; absent for lags not seen
    k3_over_entropy            k3 / mean entropy

ess: Kong, "A note on importance sampling using standardized weights" (1992). eff_lr, and lengths of kept and rejected
responses: what rejection and weights take from the gradient, which the loss does not show.

T: packed tokens, N: sequences, K: sums, M: maxima.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

from algorithms.config import MAX_LOG_RATIO
from algorithms.config.spec import HARMLESS_ESS
from algorithms.correction import Correction
from algorithms.kl import bounded_exp, k2, k3
from algorithms.masked import masked_max, require_packed
from algorithms.stats import Stats, max_or_none, mean_or_none
from algorithms.tail import pareto_k, quantile
from algorithms.tokens import Tokens

NUM_LAGS: Final = 8
"""Buckets of the weight lag 0, 1, ..., the last one for all larger lags."""
LAGS: Final = (*map(str, range(NUM_LAGS - 1)), f"{NUM_LAGS - 1}+")
P99: Final = 0.99

MEANS: Final[dict[str, tuple[str, ...]]] = {
    "valid": (
        *("k1", "k2", "k3", "js", "chi2_token", "tv", "abs_logdiff_mean", "prob_diff_mean", "mult_err"),
        "is/raw_mean",
    ),
    "sequences": ("chi2_seq", "ppl/train", "ppl/rollout", "ppl/log_diff", "ppl/log_abs_diff", "ppl/ratio"),
    "corrected_valid": ("is/applied_mean", "is/clip_frac_hi", "is/clip_frac_lo"),
    "corrected_tokens": ("rs/token_frac", "kept_frac"),
    "corrected_responses": ("rs/seq_frac",),
    "kept_valid": ("rs/kept_k3",),
    "rejected_valid": ("rs/rejected_k3",),
    "kept_responses": ("rs/kept_len",),
    "rejected_responses": ("rs/rejected_len",),
    "rewarded_kept": ("rs/kept_reward",),
    "rewarded_rejected": ("rs/rejected_reward",),
    "raw_weight": ("is/clip_mass",),
}
"""Count -> the metrics that are a mean over it; the sum of a metric has its name."""
COUNTS: Final = ("num_tokens", "invalid_tokens", "invalid_samples", "k3_clamped_tokens")
"""Sums that are metrics as they are."""
OTHER_SUMS: Final = (
    *("mu", "mu_squared", "prob_diff", "prob_diff_squared", "mu_prob_diff", "rho_squared"),
    *("seq_rho", "seq_rho_squared", "applied_squared", "corrected_sequences", "seq_applied", "seq_applied_squared"),
    *("advantage_pos", "advantage_neg", "weighted_pos", "weighted_neg", "entropy", "entropy_tokens"),
    *(f"by_lag/{lag}/{name}" for name in ("k3", "tokens") for lag in LAGS),
)
SUMS: Final = (*MEANS, *(name for names in MEANS.values() for name in names), *COUNTS, *OTHER_SUMS)
MAXES: Final = ("k3_max", "abs_logdiff_max", "prob_diff_max", "delta_max")
"""Over valid tokens."""


class StepContext(NamedTuple):
    """Facts besides log-probs that some metrics need; None leaves these metrics None."""

    rewards: Tensor | None = None
    """[N] float32, one per sequence."""
    entropy: Tensor | None = None
    """[T] float32, nats."""
    lags: Tensor | None = None
    """[N] int64 >= 0, policy updates between the weights that sampled a sequence and those that are trained."""
    token_lags: Tensor | None = None
    """[T] int64 >= 0, the same of every token, where a sequence has tokens of several weights; then `lags` is not read.
    """


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MismatchStats(Stats):
    """Mismatch statistics of some micro-batches, on their device.

    Beside the sums [K] and maxima [M] there are the log-ratios themselves, because quantiles and tails do not add up:
    micro-batches and ranks are laid end to end.
    """

    criteria: tuple[str, ...]
    """[V] names of the rejection criteria, in the order of the config. The sizes of `sums` depend on V only."""
    token_deltas: Tensor
    """[n] float32, Delta of each token; NaN where the token is not valid."""
    sequence_deltas: Tensor
    """[m] float64, sum of Delta of each sequence; NaN where no token is valid."""

    def merge(self, other: Self) -> Self:
        """The statistics of both, on the device.

        Raises:
            ValueError: the two rejected by different criteria.
        """
        if other.criteria != self.criteria:
            raise ValueError(f"statistics of different criteria do not add up: {self.criteria} and {other.criteria}.")
        return type(self)(
            sums=self.sums + other.sums,
            maxes=torch.maximum(self.maxes, other.maxes),
            criteria=self.criteria,
            token_deltas=torch.cat([self.token_deltas, other.token_deltas]),
            sequence_deltas=torch.cat([self.sequence_deltas, other.sequence_deltas]),
        )

    def named_sums(self) -> dict[str, float]:
        """The sums by name. Reads the device."""
        return dict(zip(_sum_names(self.criteria), self.sums.tolist(), strict=True))

    def metrics(self) -> dict[str, float | None]:
        """`mismatch/*`, as listed at the top of this file. Reads the device."""
        sums, maxes = self.named_sums(), dict(zip(MAXES, self.maxes.tolist(), strict=True))
        token_deltas, sequence_deltas = (
            deltas[~deltas.isnan()].cpu().double() for deltas in (self.token_deltas, self.sequence_deltas)
        )
        valid, size = sums["valid"], sums["advantage_pos"] + sums["advantage_neg"]
        means = {name: mean_or_none(sums[name], sums[count]) for count, names in MEANS.items() for name in names}
        entropy = mean_or_none(sums["entropy"], sums["entropy_tokens"])
        ess = {
            "raw_token": _ess(sums["is/raw_mean"], sums["rho_squared"], valid),
            "raw_seq": _ess(sums["seq_rho"], sums["seq_rho_squared"], sums["sequences"]),
            "applied_token": _ess(sums["is/applied_mean"], sums["applied_squared"], sums["corrected_valid"]),
            "applied_seq": _ess(sums["seq_applied"], sums["seq_applied_squared"], sums["corrected_sequences"]),
        }
        by_criterion = {
            f"rs/{name}_{part}": mean_or_none(sums[f"rs/{name}_{part}"], sums[count])
            for name in self.criteria
            for part, count in (("frac", "corrected_tokens"), ("seq_frac", "corrected_responses"))
        }
        metrics = {
            **means,
            **by_criterion,
            **{name: sums[name] for name in COUNTS},
            **{f"ess/{name}": value for name, value in ess.items()},
            "k3_p99": quantile(k3(token_deltas), P99),
            "k3_max": max_or_none(maxes["k3_max"], valid),
            "abs_logdiff_max": max_or_none(maxes["abs_logdiff_max"], valid),
            "prob_diff_max": max_or_none(maxes["prob_diff_max"], valid),
            "is/raw_max": math.exp(max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, maxes["delta_max"]))) if valid else None,
            "pearson": _pearson(sums) if valid else None,
            "khat/token": _tail_shape(token_deltas, ess["raw_token"]),
            "khat/seq": _tail_shape(sequence_deltas, ess["raw_seq"]),
            "eff_lr": mean_or_none(sums["weighted_pos"] + sums["weighted_neg"], size),
            "eff_lr_pos": mean_or_none(sums["weighted_pos"], sums["advantage_pos"]),
            "eff_lr_neg": mean_or_none(sums["weighted_neg"], sums["advantage_neg"]),
            "k3_over_entropy": None if means["k3"] is None or not entropy else means["k3"] / entropy,
        }
        for lag in LAGS:
            if sums[f"by_lag/{lag}/tokens"]:
                metrics[f"by_lag/{lag}/k3"] = sums[f"by_lag/{lag}/k3"] / sums[f"by_lag/{lag}/tokens"]
        return {f"mismatch/{name}": value for name, value in metrics.items()}


@torch.no_grad()
def mismatch_stats(
    tokens: Tokens, correction: Correction | None = None, context: StepContext | None = None
) -> MismatchStats:
    """Mismatch statistics of one micro-batch, on its device; no value is read.

    Args:
        tokens: trainer_logprobs are scored by the trainer, never the rollout's own log-probs; advantages for eff_lr.
        correction: The correction that was applied; None leaves the metrics of weights and of rejection None.
        context: Rewards, entropy and weight lags, each for the metrics that need it.

    Raises:
        ValueError: trainer_logprobs are None; a wrong shape or dtype.
    """
    context = StepContext() if context is None else context
    _require_fitting(tokens, context)
    sums = _token_sums(tokens) | _sequence_sums(tokens) | _context_sums(tokens, context)
    criteria: tuple[str, ...] = ()
    if correction is not None:
        sums |= _correction_sums(tokens, correction, context)
        criteria = tuple(correction.rejected)
    zero = tokens.num_valid.new_zeros(())
    delta = tokens.delta.double()
    maxima = (k3(delta), delta.abs(), (tokens.train.double().exp() - tokens.rollout.double().exp()).abs(), delta)
    return MismatchStats(
        sums=torch.stack([sums.get(name, zero).double() for name in _sum_names(criteria)]),
        maxes=torch.stack([masked_max(values, tokens.valid) for values in maxima]),
        criteria=criteria,
        token_deltas=torch.where(tokens.valid, tokens.delta, math.nan),
        sequence_deltas=torch.where(tokens.num_valid > 0, tokens.delta_total, math.nan),
    )


def _sum_names(criteria: tuple[str, ...]) -> tuple[str, ...]:
    return (*SUMS, *(f"rs/{name}_{part}" for name in criteria for part in ("frac", "seq_frac")))


def _token_sums(tokens: Tokens) -> dict[str, Tensor]:
    """Sums over tokens, float64; Delta and both probabilities are 0 where a token is not valid."""
    delta, valid = tokens.delta.double(), tokens.valid
    clamped = delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    rho = clamped.exp()
    mu = torch.where(valid, tokens.rollout.double().exp(), 0.0)
    prob_diff = torch.where(valid, tokens.train.double().exp(), 0.0) - mu
    # Functions of Delta, which is 0 where a token is not valid: so are they, but for the last three.
    per_token = {
        "k1": -delta,
        "k2": k2(delta),
        "k3": k3(delta),
        "js": _jensen_shannon(clamped),
        "chi2_token": torch.expm1(2 * clamped),
        "tv": torch.expm1(clamped).abs() / 2,
        "abs_logdiff_mean": delta.abs(),
        "k3_clamped_tokens": delta.abs() > MAX_LOG_RATIO,
        "mu": mu,
        "mu_squared": mu.square(),
        "prob_diff": prob_diff,
        "prob_diff_mean": prob_diff.abs(),
        "prob_diff_squared": prob_diff.square(),
        "mu_prob_diff": mu * prob_diff,
        "valid": valid,
        "num_tokens": tokens.response_mask,
        "invalid_tokens": tokens.response_mask & ~valid,
        "mult_err": torch.where(valid, clamped.abs().exp(), 0.0),
        "is/raw_mean": torch.where(valid, rho, 0.0),
        "rho_squared": torch.where(valid, rho.square(), 0.0),
    }
    return {name: values.sum() for name, values in per_token.items()}


def _sequence_sums(tokens: Tokens) -> dict[str, Tensor]:
    """Sums over the sequences with a valid token, float64."""
    seen = tokens.num_valid > 0
    total, mean, rollout = tokens.delta_total, tokens.delta_mean, tokens.mean(tokens.rollout)
    rho = bounded_exp(total)
    per_sequence = {
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
    sums = {name: torch.where(seen, values, 0.0).sum() for name, values in per_sequence.items()}
    return sums | {"invalid_samples": (~tokens.complete).sum()}


def _correction_sums(tokens: Tokens, correction: Correction, context: StepContext) -> dict[str, Tensor]:
    """Sums of weights, of rejection, and of the advantages that they act on, float64."""
    valid, response, keep = tokens.valid, tokens.response_mask, correction.keep & tokens.valid
    applied = torch.where(keep, correction.weight, 0.0).double()
    raw = applied if correction.raw_weight is None else torch.where(valid, correction.raw_weight, 0.0).double()
    per_token_k3 = k3(tokens.delta.double())
    seq_applied = torch.where(tokens.num_valid > 0, tokens.mean(applied), 0.0)
    num_kept = tokens.total(keep)
    has_tokens = tokens.num_tokens > 0
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
        "rs/token_frac": (response & ~keep).sum(),
        "rs/seq_frac": touched.sum(),
        "kept_valid": keep.sum(),
        "rs/kept_k3": torch.where(keep, per_token_k3, 0.0).sum(),
        "rejected_valid": (valid & ~keep).sum(),
        "rs/rejected_k3": torch.where(valid & ~keep, per_token_k3, 0.0).sum(),
        "kept_responses": whole.sum(),
        "rejected_responses": touched.sum(),
        "rs/kept_len": torch.where(whole, tokens.num_tokens, 0.0).sum(),
        "rs/rejected_len": torch.where(touched, tokens.num_tokens, 0.0).sum(),
    }
    for name, rejected in correction.rejected.items():
        sums[f"rs/{name}_frac"] = rejected.sum()
        sums[f"rs/{name}_seq_frac"] = (tokens.total(rejected) > 0).sum()
    if context.rewards is not None:
        rewards = context.rewards.double()
        sums |= {"rewarded_kept": whole.sum(), "rs/kept_reward": torch.where(whole, rewards, 0.0).sum()}
        sums |= {"rewarded_rejected": touched.sum(), "rs/rejected_reward": torch.where(touched, rewards, 0.0).sum()}
    if tokens.advantages is not None:
        advantages = torch.where(response, tokens.advantages, 0.0).double()
        for sign, size in (("pos", advantages.clamp(min=0)), ("neg", (-advantages).clamp(min=0))):
            sums |= {f"advantage_{sign}": size.sum(), f"weighted_{sign}": (applied * size).sum()}
    return sums


def _context_sums(tokens: Tokens, context: StepContext) -> dict[str, Tensor]:
    """Entropy, and k3 by weight lag, of valid tokens, float64."""
    sums: dict[str, Tensor] = {}
    if context.entropy is not None:
        sums["entropy"] = torch.where(tokens.valid, context.entropy, 0.0).double().sum()
        sums["entropy_tokens"] = tokens.valid.sum()
    lags = context.token_lags
    if lags is None and context.lags is not None:
        lags = tokens.expand(context.lags)
    if lags is not None:
        columns = torch.stack([k3(tokens.delta.double()), tokens.valid.double()])
        by_lag = columns.new_zeros(2, NUM_LAGS).index_add(1, lags.clamp(0, NUM_LAGS - 1), columns)
        for name, row in zip(("k3", "tokens"), by_lag, strict=True):
            sums |= {f"by_lag/{lag}/{name}": value for lag, value in zip(LAGS, row, strict=True)}
    return sums


def _require_fitting(tokens: Tokens, context: StepContext) -> None:
    if tokens.trainer_logprobs is None:
        raise ValueError("the mismatch needs trainer_logprobs, got None. Pass the log-probs that the trainer scored.")
    if context.entropy is not None:
        require_packed(tokens.response_mask, entropy=context.entropy)
    num_sequences = tokens.cu_seqlens.numel() - 1
    for name, tensor in (("rewards", context.rewards), ("lags", context.lags)):
        if tensor is not None and tensor.shape != (num_sequences,):
            raise ValueError(f"{name} must be [N] = [{num_sequences}], got {list(tensor.shape)}: one per sequence.")
    lags, shape = context.token_lags, tokens.response_mask.shape
    if lags is not None and (lags.shape, lags.dtype) != (shape, torch.int64):
        raise ValueError(f"token_lags must be [T] = {list(shape)} int64, got {list(lags.shape)} {lags.dtype}.")


def _jensen_shannon(delta: Tensor) -> Tensor:
    """[log 2 - log(1 + rho) + rho (log 2 + log rho - log(1 + rho))] / 2, with u = Delta / 2 as
    sqrt(rho) [u sinh u - cosh u log cosh u]: both terms are of the size of u^2, so that little cancels."""
    u = delta / 2
    half_sinh = torch.sinh(u / 2)
    cosh_minus_1 = 2 * half_sinh * half_sinh
    return torch.exp(u) * (u * torch.sinh(u) - (1 + cosh_minus_1) * torch.log1p(cosh_minus_1))


def _ess(total: float, squared: float, num: float) -> float | None:
    """(sum w)^2 / (n sum w^2)."""
    return mean_or_none(total**2, num * squared)


def _tail_shape(deltas: Tensor, ess: float | None) -> float | None:
    """Pareto k of exp(deltas [n]); None where the effective sample size says that no tail matters."""
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
