"""Divergences by enumeration: what the estimators and the metrics expect to be under mu, and the ranges they keep.

A metric is a mean over sampled tokens with equal weights. A rollout policy of rational probabilities makes that mean
an expectation: every response is in the batch as often as its probability says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from algorithm_cases import packed
from enumeration_cases import random_case
from torch import Tensor

from algorithms.config import TISConfig
from algorithms.correction import correct
from algorithms.kl import k1, k2, k3
from algorithms.mismatch import mismatch_stats
from algorithms.tokens import Tokens

ACCURACY = 1e-4
"""Relative."""


def test_the_expectations_of_k1_and_k3_are_the_kl_and_that_of_the_mirror_is_not() -> None:
    for seed in range(10):
        case = random_case(seed, noise=0.5)
        delta, mu = case.log_rho(), case.mu().unsqueeze(1)
        # The chain rule: KL of the responses = sum over tokens of E_mu[KL of the next token].
        kl = -(mu * delta).sum().item()
        responses = (mu.squeeze(1) * -delta.sum(1)).sum().item()
        assert kl > 0 and responses == pytest.approx(kl, rel=1e-12)
        assert (mu * k3(delta)).sum().item() == pytest.approx(kl, rel=1e-12)
        assert (mu * k1(delta)).sum().item() == pytest.approx(kl, rel=1e-12)
        mirrored = (mu * k3(-delta)).sum().item()
        assert abs(mirrored / kl - 1) > 1e-3
        # What the mirror does estimate, chi^2(mu || pi) - KL(mu || pi): E_mu[1 / rho] - 1 is chi^2, token by token.
        chi_squared = (mu * torch.expm1(-delta)).sum().item()
        assert mirrored == pytest.approx(chi_squared - kl, rel=1e-12)
        assert (mu * k2(delta)).sum().item() == pytest.approx(kl, rel=0.5)


def test_k3_is_never_negative_and_zero_only_without_a_gap() -> None:
    for seed in range(10):
        delta = random_case(seed, noise=10.0 ** -(seed % 7)).log_rho()
        assert (k3(delta) >= 0).all() and (k3(delta) > 0).any()
        assert (k3(delta.float()) >= 0).all()
    assert k3(torch.zeros(3)).tolist() == [0, 0, 0]


# ---------------------------------------------------------------- metrics


@dataclass(frozen=True, kw_only=True)
class Samples:
    """A batch that holds response y mu(y) x 12 times: two tokens out of two, mu = (2/3, 1/3), then (1/2, 1/2) after
    the first token and (1/4, 3/4) after the second."""

    log_mu: Tensor
    """[4, 2] of the responses 00, 01, 10, 11."""
    log_pi: Tensor
    times: Tensor
    """[4]"""

    def metrics(self) -> dict[str, float | None]:
        old, rollout = (values.repeat_interleave(self.times, dim=0).flatten() for values in (self.log_pi, self.log_mu))
        layout = {"response_mask": torch.ones(24, dtype=torch.bool), "cu_seqlens": packed(*[2] * 12)}
        correction = correct(TISConfig().spec(), Tokens(trainer_logprobs=old, rollout_logprobs=rollout, **layout))
        found = mismatch_stats(Tokens(trainer_logprobs=old, rollout_logprobs=rollout, **layout), correction).metrics()
        return {name.removeprefix("mismatch/"): value for name, value in found.items()}

    def expectation(self, values: Tensor) -> float:
        """Mean over tokens of E_mu[values], values [4, 2]."""
        return ((self.log_mu.sum(1, keepdim=True).exp() * values).sum() / 2).item()


def samples(seed: int, *, noise: float) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    rollout = torch.tensor([[2 / 3, 1 / 3], [1 / 2, 1 / 2], [1 / 4, 3 / 4]], dtype=torch.float64).log()
    trainer = (rollout + noise * torch.randn(3, 2, generator=generator, dtype=torch.float64)).log_softmax(1)

    def responses(table: Tensor) -> Tensor:
        return torch.stack([torch.stack([table[0, a], table[1 + a, b]]) for a in (0, 1) for b in (0, 1)])

    return Samples(log_mu=responses(rollout), log_pi=responses(trainer), times=torch.tensor([4, 4, 1, 3]))


@pytest.mark.parametrize("noise", [0.03, 0.5, 2.0])
def test_metrics_are_the_divergences_between_the_policies(noise: float) -> None:
    for seed in range(3):
        batch = samples(seed, noise=noise)
        assert torch.equal((batch.log_mu.sum(1).exp() * 12).round().long(), batch.times)
        metrics = batch.metrics()
        mu, pi = batch.log_mu, batch.log_pi
        rho = (pi - mu).exp()
        half = ((pi.exp() + mu.exp()) / 2).log()
        kl = batch.expectation(mu - pi)
        expected = {
            "k1": kl,
            "k3": kl,
            # E_mu[rho f] = E_pi[f] of the last token, given what mu sampled before it.
            "js": (batch.expectation(mu - half) + batch.expectation(rho * (pi - half))) / 2,
            "tv": batch.expectation((rho - 1).abs()) / 2,
            "chi2_token": batch.expectation(rho.square() - 1),
            "chi2_seq": (mu.sum(1).exp() * (rho.prod(1).square() - 1)).sum().item(),
            "is/raw_mean": 1.0,
        }
        assert kl > 0
        # E_mu[rho] = 1, so the effective sample size is 1 / (1 + chi^2).
        expected["ess/raw_token"] = 1 / (1 + expected["chi2_token"])
        expected["ess/raw_seq"] = 1 / (1 + expected["chi2_seq"])
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=ACCURACY), (name, noise)


def test_the_k3_metric_has_the_direction_of_kl_mu_pi() -> None:
    batch = samples(0, noise=2.0)
    metric, delta = batch.metrics()["k3"], batch.log_pi - batch.log_mu
    assert metric == pytest.approx(batch.expectation(-delta), rel=ACCURACY)
    for other in (delta.exp() * delta, torch.expm1(-delta) + delta):  # KL(pi || mu) given the prefix, and the mirror
        assert metric != pytest.approx(batch.expectation(other), rel=0.05)


@pytest.mark.parametrize("noise", [0.01, 1.0, 5.0, 40.0])
def test_ranges(noise: float) -> None:
    for seed in range(5):
        metrics = samples(seed, noise=noise).metrics()
        for name in ("js", "tv", "k2", "k3", "chi2_token", "chi2_seq", "k3_max", "abs_logdiff_mean"):
            value = metrics[name]
            assert value is not None and value >= 0, name
        assert metrics["js"] is not None and metrics["js"] <= math.log(2) * (1 + ACCURACY)
        assert metrics["tv"] is not None and metrics["tv"] <= 1 + ACCURACY
        assert metrics["mult_err"] is not None and metrics["mult_err"] >= 1
        for name in ("ess/raw_token", "ess/raw_seq", "ess/applied_token", "ess/applied_seq"):
            value = metrics[name]
            assert value is not None and 0 < value <= 1 + 1e-12, name


def test_policies_without_common_support_reach_the_ends_of_the_ranges() -> None:
    # One token each, mu all on the tokens that pi almost never takes: JS -> log 2, TV -> 1/2 of |0 - 1| here, because
    # the other half of the distance lies on tokens that mu never samples.
    metrics = mismatch_stats(
        Tokens(
            trainer_logprobs=torch.full((4,), -60.0),
            rollout_logprobs=torch.zeros(4),
            response_mask=torch.ones(4, dtype=torch.bool),
            cu_seqlens=packed(1, 1, 1, 1),
        )
    ).metrics()
    assert metrics["mismatch/js"] == pytest.approx(math.log(2) / 2, rel=ACCURACY)
    assert metrics["mismatch/tv"] == pytest.approx(1 / 2, rel=ACCURACY)
    assert metrics["mismatch/ess/raw_token"] == pytest.approx(1)
    assert metrics["mismatch/k1"] == pytest.approx(60, rel=ACCURACY)
    # K3 is clamped where it would be exponentiated: e^-20 - 1 + 20.
    assert metrics["mismatch/k3"] == pytest.approx(19, rel=ACCURACY)
    assert metrics["mismatch/k3_clamped_tokens"] == 4


def test_without_mismatch_every_metric_is_0_or_1() -> None:
    batch = samples(0, noise=1.0)
    same = replace(batch, log_pi=batch.log_mu).metrics()
    zero = (
        *("k1", "k2", "k3", "k3_max", "js", "tv", "chi2_token", "chi2_seq", "abs_logdiff_mean", "abs_logdiff_max"),
        *("prob_diff_mean", "prob_diff_max", "ppl/log_diff", "ppl/log_abs_diff", "invalid_tokens"),
        *("is/clip_frac_hi", "is/clip_mass", "rs/token_frac", "rs/seq_frac", "k3_clamped_tokens"),
    )
    one = (
        *("is/raw_mean", "is/raw_max", "is/applied_mean", "mult_err", "ppl/ratio", "kept_frac", "pearson"),
        *("ess/raw_token", "ess/raw_seq", "ess/applied_token", "ess/applied_seq"),
    )
    assert {name: same[name] for name in zero} == dict.fromkeys(zero, 0)
    assert {name: same[name] for name in one} == pytest.approx(dict.fromkeys(one, 1), abs=1e-12)
