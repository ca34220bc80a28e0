"""The tail of a sample: quantiles, and the Pareto shape against a fit written out weight by weight."""

import math

import pytest
import torch

from algorithms.kl import k3
from algorithms.tail import pareto_k, quantile


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_quantiles() -> None:
    values = k3(torch.linspace(-3, 3, 100_001, dtype=torch.float64))
    for fraction in (0.01, 0.5, 0.9, 0.99):
        assert quantile(values, fraction) == pytest.approx(values.quantile(fraction).item(), rel=1e-3)
        assert quantile(values, fraction) in values
    assert quantile(k3(doubles(0.5)), 0.99) == k3(doubles(0.5)).item()
    assert quantile(doubles(*[0.0] * 99, 1.0), 0.99) == 0.0
    assert quantile(doubles(*[0.0] * 98, 1.0, 1.0), 0.99) == 1.0
    assert quantile(doubles(), 0.99) is None


def exact_pareto_k(log_weights: torch.Tensor) -> float:
    """PSIS, weight by weight."""
    weights = log_weights.sort(descending=True).values.exp()
    size = math.ceil(min(len(weights) / 5, 3 * math.sqrt(len(weights))))
    tail = (weights[:size] - weights[size]).flip(0)
    grid = 30 + int(math.sqrt(size))
    quarter = tail[int(size / 4 + 0.5) - 1].item()
    thetas, scores = [], []
    for index in range(1, grid + 1):
        theta = (1 - math.sqrt(grid / (index - 0.5))) / (3 * quarter) + 1 / tail[-1].item()
        shape = torch.log1p(-theta * tail).mean().item()
        thetas.append(theta)
        scores.append(size * (math.log(-theta / shape) - shape - 1))
    posterior = torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()
    best = sum(theta * weight for theta, weight in zip(thetas, posterior, strict=True))
    k = torch.log1p(-best * tail).mean().item()
    return (size * k + 5) / (size + 10)


def standard_error(k: float, num: int) -> float:
    return (1 + k) / math.sqrt(math.ceil(min(num / 5, 3 * math.sqrt(num))))


@pytest.mark.parametrize("k", [0.2, 0.5, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("num", [50, 1000, 100_000])
def test_pareto_k_of_pareto_weights(k: float, num: int) -> None:
    generator = torch.Generator().manual_seed(num)
    log_weights = -k * torch.rand(num, generator=generator, dtype=torch.float64).clamp(min=1e-8).log() - 1
    found = pareto_k(log_weights)
    assert found == pytest.approx(exact_pareto_k(log_weights), abs=1e-9)
    assert found == pytest.approx(k, abs=3 * standard_error(k, num))


def test_pareto_k_of_few_weights() -> None:
    log_weights = torch.linspace(0.01, 1.5, 60, dtype=torch.float64)
    assert pareto_k(log_weights) == pytest.approx(exact_pareto_k(log_weights), abs=1e-12)


@pytest.mark.parametrize("sigma", [0.02, 0.3, 1.0, 3.0])
def test_pareto_k_of_lognormal_weights(sigma: float) -> None:
    generator = torch.Generator().manual_seed(1)
    log_weights = sigma * torch.randn(20_000, generator=generator, dtype=torch.float64)
    assert pareto_k(log_weights) == pytest.approx(exact_pareto_k(log_weights), abs=1e-9)


def test_pareto_k_needs_a_tail() -> None:
    assert pareto_k(doubles()) is None
    assert pareto_k(torch.randn(20, dtype=torch.float64)) is None
    assert pareto_k(torch.zeros(1000, dtype=torch.float64)) is None
    assert pareto_k(doubles(*[0.0] * 997, 1.0, 2.0, 3.0)) is None
