"""Exact expectations by enumeration: every sequence of 3 tokens over a vocabulary of 3, tabular policies, float64.

A policy is a table of logits, one row per prefix. Sampling from mu is replaced by all sequences y, weighted with
mu(y): `coefficients` carries mu(y), so the loss is an exact expectation and its gradient can be compared with the
gradient of J = E_pi[A(y)] to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from algorithm_cases import packed
from torch import Tensor

from algorithms.correction import (
    BypassConfig,
    BypassLoss,
    CorrectionConfig,
    Level,
    MISConfig,
    PPOISConfig,
    RecomputeConfig,
    TISConfig,
    VanillaISConfig,
    correct,
)
from algorithms.diagnostics import mismatch_stats
from algorithms.kl import k1, k3
from algorithms.loss import LossConfig, policy_loss

VOCABULARY = 3


@dataclass
class Problem:
    """Two tabular policies and an advantage per sequence; S sequences of length L, T = S L tokens."""

    logits: Tensor
    """[prefixes, V] of pi, with gradient."""
    rollout_logits: Tensor
    """[prefixes, V] of mu."""
    advantages: Tensor
    """[S]"""
    states: Tensor
    """[S, L] prefix of each token."""
    tokens: Tensor
    """[S, L]"""

    def logprobs(self, logits: Tensor) -> Tensor:
        """[S, L] log-prob of every token of every sequence."""
        return logits.log_softmax(-1)[self.states, self.tokens]

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def true_gradient(self) -> Tensor:
        """Gradient of -E_pi[A]."""
        expected = (self.logprobs(self.logits).sum(1).exp() * self.advantages).sum()
        (gradient,) = torch.autograd.grad(-expected, self.logits)
        return gradient


def problem(seed: int, *, noise: float, length: int = 3) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    prefixes = [p for n in range(length) for p in product(range(VOCABULARY), repeat=n)]
    number = {prefix: n for n, prefix in enumerate(prefixes)}
    sequences = list(product(range(VOCABULARY), repeat=length))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = normal(len(prefixes), VOCABULARY)
    return Problem(
        logits=logits.clone().requires_grad_(),
        rollout_logits=logits + noise * normal(len(prefixes), VOCABULARY),
        advantages=normal(len(sequences)),
        states=torch.tensor([[number[y[:t]] for t in range(length)] for y in sequences]),
        tokens=torch.tensor(sequences),
    )


def expected_gradient(case: Problem, config: CorrectionConfig) -> Tensor:
    """Gradient of E_mu[policy_loss] at pi_theta = pi_old, by enumeration."""
    logprobs = case.logprobs(case.logits).flatten()
    rollout = case.logprobs(case.rollout_logits)
    mask = torch.ones(logprobs.numel(), dtype=torch.bool)
    output = policy_loss(
        logprobs,
        entropy=None,
        advantages=case.advantages.repeat_interleave(case.length),
        response_mask=mask,
        correction=correct(
            config,
            old_logprobs=logprobs.detach(),
            rollout_logprobs=rollout.flatten(),
            response_mask=mask,
            cu_seqlens=packed(*[case.length] * len(case.tokens)),
        ),
        coefficients=rollout.sum(1).exp().repeat_interleave(case.length),
        correction_config=config,
        loss_config=LossConfig(),
    )
    (gradient,) = torch.autograd.grad(output.loss, case.logits)
    return gradient


def bias(config: CorrectionConfig, *, noise: float, length: int = 3, problems: int = 4) -> list[float]:
    """Relative error of the expected gradient, one per random problem."""
    errors = []
    for seed in range(problems):
        case = problem(seed, noise=noise, length=length)
        truth = case.true_gradient()
        errors.append(((expected_gradient(case, config) - truth).norm() / truth.norm()).item())
    return errors


def test_sequence_vanilla_is_is_unbiased() -> None:
    assert max(bias(VanillaISConfig(level=Level.sequence), noise=0.5)) < 1e-12


def test_other_modes_are_biased() -> None:
    others: list[CorrectionConfig] = [PPOISConfig(), RecomputeConfig(), VanillaISConfig(), TISConfig(), MISConfig()]
    for config in others:
        assert min(bias(config, noise=0.5)) > 1e-3, config
    total = {config.mode: sum(bias(config, noise=0.2)) for config in others}
    assert total["ppo_is"] > total["vanilla_is"] > 0


def test_without_mismatch_every_anchored_mode_is_unbiased() -> None:
    configs: list[CorrectionConfig] = [PPOISConfig(), RecomputeConfig(), TISConfig(), MISConfig(), BypassConfig()]
    for config in configs:
        assert max(bias(config, noise=0.0)) < 1e-12, config


@pytest.mark.parametrize("level", Level)
def test_with_one_token_every_level_is_unbiased(level: Level) -> None:
    assert max(bias(VanillaISConfig(level=level), noise=0.5, length=1)) < 1e-12


def test_bypass_reinforce_with_one_token_is_unbiased_without_its_cap() -> None:
    config = BypassConfig(loss=BypassLoss.reinforce, cap=1e6)
    assert max(bias(config, noise=0.5, length=1)) < 1e-12
    assert max(bias(BypassConfig(loss=BypassLoss.reinforce, cap=1.0), noise=0.5, length=1)) > 1e-3


def test_truncation_loses_exactly_the_mass_above_the_cap() -> None:
    cap = 1.2
    case = problem(4, noise=0.5)
    lost = expected_gradient(case, VanillaISConfig(level=Level.sequence)) - expected_gradient(
        case, TISConfig(level=Level.sequence, cap=cap)
    )
    rollout = case.logprobs(case.rollout_logits).detach().sum(1)
    log_pi = case.logprobs(case.logits).sum(1)
    excess = ((log_pi.detach() - rollout).exp() - cap).clamp(min=0)
    assert excess.max() > 0
    (expected,) = torch.autograd.grad(-(rollout.exp() * excess * case.advantages * log_pi).sum(), case.logits)
    torch.testing.assert_close(lost, expected, rtol=0, atol=1e-14)


def test_the_expectation_of_k3_is_the_kl_and_that_of_its_mirror_is_not() -> None:
    for seed in range(10):
        case = problem(seed, noise=0.5)
        with torch.no_grad():
            rollout = case.logprobs(case.rollout_logits)
            delta = case.logprobs(case.logits) - rollout
            mu = rollout.sum(1, keepdim=True).exp()
            # The chain rule: KL of the sequences = sum over tokens of E_mu[KL of the next token].
            kl = -(mu * delta).sum().item()
            assert kl > 0
            assert (mu * k3(delta)).sum().item() == pytest.approx(kl, rel=1e-12)
            assert (mu * k1(delta)).sum().item() == pytest.approx(kl, rel=1e-12)
            assert abs((mu * k3(-delta)).sum().item() / kl - 1) > 1e-3


def test_the_k3_metric_has_the_direction_of_kl_mu_pi() -> None:
    # One token: mu = (0.7, 0.3), pi = (0.5, 0.5). Seven samples of the first and three of the second are exact.
    mu, pi = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])
    samples = torch.tensor([0] * 7 + [1] * 3)
    stats = mismatch_stats(
        old_logprobs=pi.log()[samples],
        rollout_logprobs=mu.log()[samples],
        response_mask=torch.ones(10, dtype=torch.bool),
        cu_seqlens=packed(*[1] * 10),
        correction=None,
    )
    kl = (mu * (mu / pi).log()).sum().item()
    reverse = (pi * (pi / mu).log()).sum().item()
    assert abs(kl - reverse) > 1e-3
    assert stats.metrics()["mismatch/k3"] == pytest.approx(kl, rel=1e-5)
    assert stats.metrics()["mismatch/k1"] == pytest.approx(kl, rel=1e-5)
