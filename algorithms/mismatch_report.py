"""The sums of a step -> `mismatch/*` metrics, on the host. `MismatchStats.metrics` reads the device once.

The metrics, each with `mismatch/` in front. Delta = log pi_old - log mu, clamped to +-20 where it is exponentiated and
in k3; rho = exp(Delta). Means are over valid response tokens if nothing else is said: both log-probs finite, log mu <=
1e-4. Sequence means are over the responses with a valid token, whose number T_i counts; S_i = sum of Delta.

    k1, k2, k3                 -Delta, Delta^2 / 2, rho - 1 - Delta (`algorithms.kl`): KL(mu || pi_old), nats
    k3_p99, k3_max             quantile of k3 over tokens, within 1.6 %; maximum
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
    khat/{token,seq}           Pareto shape of the tail of rho, of exp(S_i) (`LogRatios.pareto_k`); None where the raw
                               ESS exceeds 0.99: such weights have no tail that matters
    is/raw_{mean,max}          rho of the token; the maximum within 0.8 % if every Delta is below 0
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

Means of a function of Delta alone come from a table with bins of 1/128 octave and are exact to 1.5e-5
(`algorithms.sketch`). All sums are float64. ess: Kong, "A note on importance sampling using standardized weights"
(1992). khat: arXiv:1507.02646. eff_lr, and lengths of kept and rejected responses: what rejection and weights take
from the gradient, which the loss does not show. A metric without anything to average is None, never 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from algorithms.config import MAX_LOG_RATIO
from algorithms.config.spec import HARMLESS_ESS
from algorithms.kl import bounded_exp, k2, k3
from algorithms.mismatch_stats import NUM_LAGS, SCALARS
from algorithms.sketch import KEPT_KIND, REJECTED_KIND, SEQUENCE_KIND, SKETCH_SIZE, LogRatios
from algorithms.stats import Stats, max_or_none, mean_or_none
from algorithms.token_sums import MISMATCH_MAXES

P99: Final = 0.99
Metrics = dict[str, float | None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MismatchStats(Stats):
    """How far pi_old and mu are apart, and what the correction did about it."""

    criteria: tuple[str, ...] = ()
    """[V] names of the rejection criteria, in the order of the config. The sizes of `sums` depend on V only."""

    def merge(self, other: Self) -> Self:
        """The statistics of both, on the device.

        Raises:
            ValueError: the two rejected by different criteria.
        """
        if other.criteria != self.criteria:
            raise ValueError(f"statistics of different criteria do not add up: {self.criteria} and {other.criteria}.")
        # A dataclass with slots is a new class: super() without arguments would look for the old one.
        return super(MismatchStats, self).merge(other)

    def metrics(self) -> Metrics:
        """`mismatch/*`, as listed at the top of this file. Reads the device, once."""
        return _Host.read(self).metrics()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Host:
    """The statistics of a step on the host."""

    sums: dict[str, float]
    maxes: dict[str, float]
    by_criterion: dict[str, tuple[float, float]]
    """Tokens and sequences that each criterion rejects."""
    by_lag: list[tuple[float, float]]
    """k3 and tokens of each lag."""
    kept: LogRatios
    rejected: LogRatios
    both: LogRatios
    sequences: LogRatios

    @classmethod
    def read(cls, stats: MismatchStats) -> Self:
        numbers = torch.cat([stats.maxes, stats.sums]).cpu()
        sizes = [len(MISMATCH_MAXES), len(SCALARS), len(stats.criteria), len(stats.criteria), 2 * NUM_LAGS, SKETCH_SIZE]
        maxes, scalars, tokens, sequences, lags, sketch = torch.split(numbers, sizes)
        touched = zip(tokens.tolist(), sequences.tolist(), strict=True)
        return cls(
            sums=dict(zip(SCALARS, scalars.tolist(), strict=True)),
            maxes=dict(zip(MISMATCH_MAXES, maxes.tolist(), strict=True)),
            by_criterion=dict(zip(stats.criteria, touched, strict=True)),
            by_lag=[(k3_sum, count) for k3_sum, count in lags.view(2, NUM_LAGS).t().tolist()],
            kept=LogRatios.from_flat(sketch, KEPT_KIND),
            rejected=LogRatios.from_flat(sketch, REJECTED_KIND),
            both=LogRatios.from_flat(sketch, KEPT_KIND, REJECTED_KIND),
            sequences=LogRatios.from_flat(sketch, SEQUENCE_KIND),
        )

    def metrics(self) -> Metrics:
        metrics = {
            **self._divergences(),
            **self._probabilities(),
            **self._perplexities(),
            **self._weights(),
            **self._rejection(),
            **self._learning_rate(),
            **self._counts(),
        }
        return {f"mismatch/{name}": value for name, value in metrics.items()}

    def _divergences(self) -> Metrics:
        valid, both = self.sums["valid"], self.both
        low, high = self._range()
        entropy = mean_or_none(self.sums["entropy"], self.sums["entropy_tokens"])
        mean_k3 = mean_or_none(both.total(k3), valid)
        lags = {
            f"by_lag/{lag}{'+' if lag == NUM_LAGS - 1 else ''}/k3": k3_sum / count
            for lag, (k3_sum, count) in enumerate(self.by_lag)
            if count
        }
        return {
            "k1": mean_or_none(-both.total(), valid),
            "k2": mean_or_none(both.total(k2), valid),
            "k3": mean_k3,
            "k3_p99": both.quantile(P99, k3),
            "k3_max": max_or_none(max(_k3_of(low), _k3_of(high)), valid),
            "js": mean_or_none(both.total(_jensen_shannon), valid),
            "chi2_token": mean_or_none(both.total(_chi_squared), valid),
            "chi2_seq": mean_or_none(self.sums["ratio_squared"] - self.sums["sequences"], self.sums["sequences"]),
            "tv": mean_or_none(both.total(_total_variation), valid),
            "abs_logdiff_mean": mean_or_none(both.total(torch.abs), valid),
            "abs_logdiff_max": max_or_none(max(-low, high), valid),
            "mult_err": mean_or_none(both.total(_multiplicative_error), valid),
            "k3_over_entropy": None if mean_k3 is None or not entropy else mean_k3 / entropy,
            **lags,
        }

    def _range(self) -> tuple[float, float]:
        """Smallest and largest Delta. Where all have one sign, tokens off the mask hide the one next to 0."""
        if not self.both.counts.numel():
            return 0.0, 0.0
        low, high = -self.maxes["minus_delta"], self.maxes["delta"]
        if high <= 0:
            high = min(float(self.both.log_ratios.max()), 0.0)
        if low >= 0:
            low = max(float(self.both.log_ratios.min()), 0.0)
        return low, high

    def _probabilities(self) -> Metrics:
        sums, valid = self.sums, self.sums["valid"]
        return {
            "prob_diff_mean": mean_or_none(sums["abs_prob_diff"], valid),
            "prob_diff_max": max_or_none(self.maxes["prob_diff"], valid),
            "pearson": self._pearson() if valid else None,
        }

    def _pearson(self) -> float | None:
        """Correlation of p = pi_old and q = mu from the moments of q and p - q, which keeps 1 - r accurate."""
        sums, valid = self.sums, self.sums["valid"]
        mean_q, mean_d = sums["rollout_prob"] / valid, sums["prob_diff"] / valid
        var_q = sums["rollout_prob_squared"] / valid - mean_q**2
        var_d = sums["prob_diff_squared"] / valid - mean_d**2
        cov = sums["prob_product"] / valid - mean_q * mean_d
        var_p = var_q + 2 * cov + var_d
        # Rounding leaves about 1e-16 of the mean square where all probabilities are equal.
        if min(var_q, var_p) <= 1e-14 * (mean_q**2 + mean_d**2):
            return None
        return max(-1.0, min(1.0, (var_q + cov) / math.sqrt(var_q * var_p)))

    def _perplexities(self) -> Metrics:
        sums, num = self.sums, self.sums["sequences"]
        return {
            "ppl/train": mean_or_none(sums["train_ppl"], num),
            "ppl/rollout": mean_or_none(sums["rollout_ppl"], num),
            "ppl/log_diff": mean_or_none(sums["log_ppl_diff"], num),
            "ppl/log_abs_diff": mean_or_none(sums["abs_log_ppl_diff"], num),
            "ppl/ratio": mean_or_none(sums["ppl_ratio"], num),
        }

    def _weights(self) -> Metrics:
        sums, valid, num = self.sums, self.sums["valid"], self.sums["sequences"]
        corrected, corrected_num = sums["corrected_valid"], sums["corrected_sequences"]
        ratio, squared = self.both.total(bounded_exp), self.both.total(lambda x: bounded_exp(x).square())
        ess_token = mean_or_none(ratio**2, valid * squared)
        ess_seq = mean_or_none(sums["ratio"] ** 2, num * sums["ratio_squared"])
        return {
            "ess/raw_token": ess_token,
            "ess/raw_seq": ess_seq,
            "ess/applied_token": mean_or_none(sums["weight"] ** 2, corrected * sums["weight_squared"]),
            "ess/applied_seq": mean_or_none(sums["mean_weight"] ** 2, corrected_num * sums["mean_weight_squared"]),
            "khat/token": self._tail_shape(self.both, ess_token),
            "khat/seq": self._tail_shape(self.sequences, ess_seq),
            "is/raw_mean": mean_or_none(ratio, valid),
            "is/raw_max": max_or_none(math.exp(_clamped(self._range()[1])), valid),
            "is/applied_mean": mean_or_none(sums["weight"], corrected),
            "is/clip_frac_hi": mean_or_none(sums["clipped"], corrected),
            "is/clip_frac_lo": mean_or_none(sums["raised"], corrected),
            "is/clip_mass": mean_or_none(sums["cut_weight"], sums["raw_weight"]),
        }

    @staticmethod
    def _tail_shape(log_ratios: LogRatios, ess: float | None) -> float | None:
        return None if ess is None or ess > HARMLESS_ESS else log_ratios.pareto_k()

    def _rejection(self) -> Metrics:
        sums = self.sums
        tokens = sums["corrected_tokens"]
        whole, touched = sums["kept_responses"], sums["rejected_responses"]
        corrected = bool(sums["corrected_valid"])
        by_criterion: Metrics = {}
        for name, (rejected, sequences) in self.by_criterion.items():
            by_criterion[f"rs/{name}_frac"] = mean_or_none(rejected, tokens)
            by_criterion[f"rs/{name}_seq_frac"] = mean_or_none(sequences, whole + touched)
        return {
            "rs/token_frac": mean_or_none(tokens - sums["kept"], tokens),
            "rs/seq_frac": mean_or_none(touched, whole + touched),
            **by_criterion,
            "rs/kept_len": mean_or_none(sums["kept_len"], whole),
            "rs/rejected_len": mean_or_none(sums["rejected_len"], touched),
            "rs/kept_reward": mean_or_none(sums["kept_reward"], sums["rewarded_kept"]),
            "rs/rejected_reward": mean_or_none(sums["rejected_reward"], sums["rewarded_rejected"]),
            "rs/kept_k3": mean_or_none(self.kept.total(k3), self.kept.num()) if corrected else None,
            "rs/rejected_k3": mean_or_none(self.rejected.total(k3), self.rejected.num()) if corrected else None,
        }

    def _learning_rate(self) -> Metrics:
        """sum |w A| / sum |A|; with s = sum |A| and d = sum A, the positive part of sum |A| is (s + d) / 2."""
        sums = self.sums
        size, signed = sums["abs_advantage"], sums["advantage"]
        weighted, weighted_signed = sums["weighted_abs_advantage"], sums["weighted_advantage"]
        positive, negative = (size + signed) / 2, (size - signed) / 2
        # One sign only leaves rounding in the other.
        floor = 1e-12 * size
        return {
            "eff_lr": mean_or_none(weighted, size),
            "eff_lr_pos": (weighted + weighted_signed) / 2 / positive if positive > floor else None,
            "eff_lr_neg": (weighted - weighted_signed) / 2 / negative if negative > floor else None,
        }

    def _counts(self) -> Metrics:
        sums = self.sums
        return {
            "kept_frac": mean_or_none(sums["kept"], sums["corrected_tokens"]),
            "invalid_tokens": sums["tokens"] - sums["valid"],
            "invalid_samples": sums["invalid_samples"],
            "k3_clamped_tokens": self.both.total(_beyond_clamp),
            "num_tokens": sums["tokens"],
        }


def _clamped(value: float) -> float:
    return max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, value))


def _k3_of(delta: float) -> float:
    """k3 of one log-ratio."""
    return float(k3(torch.tensor(delta, dtype=torch.float64)))


def _chi_squared(delta: Tensor) -> Tensor:
    """rho^2 - 1."""
    return torch.expm1(2 * delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def _total_variation(delta: Tensor) -> Tensor:
    """|rho - 1| / 2."""
    return torch.expm1(delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).abs() / 2


def _multiplicative_error(delta: Tensor) -> Tensor:
    """exp |Delta|."""
    return delta.abs().clamp(max=MAX_LOG_RATIO).exp()


def _jensen_shannon(delta: Tensor) -> Tensor:
    """[log 2 - log(1 + rho) + rho (log 2 + log rho - log(1 + rho))] / 2, with u = Delta / 2 as
    sqrt(rho) [u sinh u - cosh u log cosh u]: both terms are of the size of u^2, so that little cancels."""
    u = delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) / 2
    half_sinh = torch.sinh(u / 2)
    cosh_minus_1 = 2 * half_sinh * half_sinh
    return torch.exp(u) * (u * torch.sinh(u) - (1 + cosh_minus_1) * torch.log1p(cosh_minus_1))


def _beyond_clamp(delta: Tensor) -> Tensor:
    return (delta.abs() > MAX_LOG_RATIO).to(delta.dtype)
