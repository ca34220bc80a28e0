"""The sketch of log-ratios: bins, merging, quantiles, and the Pareto shape against an exact fit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.kl import k3
from algorithms.sketch import (
    KEPT_KIND,
    REJECTED_KIND,
    SEQUENCE_KIND,
    SKETCH_SIZE,
    UNREAD_KIND,
    LogRatios,
    add_log_ratios,
    flat_sketch,
    new_table,
)

CPU = torch.device("cpu")


def sketch(values: torch.Tensor) -> LogRatios:
    table = new_table(CPU)
    add_log_ratios(table, values)
    return LogRatios.from_flat(flat_sketch(table), KEPT_KIND)


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@settings(max_examples=200, deadline=None)
@given(st.floats(-1e30, 1e30, allow_subnormal=False))
def test_one_value_comes_back_exactly(value: float) -> None:
    found = sketch(doubles(value))
    assert found.counts.tolist() == [1.0] and found.log_ratios.tolist() == [value]


@settings(max_examples=200, deadline=None)
@given(st.floats(1e-6, 60), st.floats(0.0101, 10), st.booleans())
def test_bins_are_narrow_at_every_scale(value: float, step: float, negative: bool) -> None:
    # A bin is 1/128 of its octave: 1 % apart is always apart.
    sign = -1 if negative else 1
    assert sketch(sign * doubles(value, value * (1 + step)).clamp(max=63.0 * 64 / 63)).num() == 2
    if value * (1 + step) < 64:
        assert len(sketch(sign * doubles(value, value * (1 + step))).counts) == 2
    assert len(sketch(doubles(value, -value)).counts) == 2


def test_values_of_a_bin_share_their_mean_and_the_sum_is_exact() -> None:
    found = sketch(doubles(1.0, 1.003, 1.006))
    assert found.counts.tolist() == [3.0] and found.log_ratios.tolist() == pytest.approx([1.003])
    values = torch.randn(10_000, dtype=torch.float64)
    assert sketch(values).total() == pytest.approx(values.sum().item(), abs=1e-10)
    assert len(sketch(doubles(100.0, 500.0, 1e30)).counts) == 1, "beyond 64 nats there is one bin"
    assert len(sketch(doubles(0.0, 1e-12, 1e-10)).counts) == 1, "bins end at 2^-29"


def test_means_of_k3_at_every_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(100_000, generator=generator, dtype=torch.float64)
    for scale in (1e-6, 1e-4, 1e-2, 0.3, 1.0):
        exact = (torch.expm1(scale * normal) - scale * normal).sum().item()
        assert sketch(scale * normal).total(k3) == pytest.approx(exact, rel=1.5e-5)
    assert sketch(torch.zeros(10, dtype=torch.float64)).total(k3) == 0


def test_kinds_stay_apart_and_add_up() -> None:
    table = new_table(CPU)
    kinds = torch.tensor([KEPT_KIND, REJECTED_KIND, REJECTED_KIND, SEQUENCE_KIND, UNREAD_KIND], dtype=torch.int32)
    add_log_ratios(table, doubles(0.5, -0.25, 0.5, -7.0, 3.0), kind=kinds)
    flat = flat_sketch(table)
    assert flat.shape == (SKETCH_SIZE,)
    assert LogRatios.from_flat(flat, KEPT_KIND).log_ratios.tolist() == [0.5]
    assert sorted(LogRatios.from_flat(flat, REJECTED_KIND).log_ratios.tolist()) == [-0.25, 0.5]
    assert LogRatios.from_flat(flat, SEQUENCE_KIND).log_ratios.tolist() == [-7.0]
    both = LogRatios.from_flat(flat, KEPT_KIND, REJECTED_KIND)
    assert dict(zip(both.log_ratios.tolist(), both.counts.tolist(), strict=True)) == {0.5: 2.0, -0.25: 1.0}
    assert flat.view(2, 2, -1)[:, 0].sum() == 4, "what nobody reads is not reduced"


def test_sketches_of_parts_add_up() -> None:
    values = torch.randn(1000, dtype=torch.float64)
    table, whole = new_table(CPU), new_table(CPU)
    add_log_ratios(whole, values)
    for part in values.split([1, 0, 400, 599]):
        add_log_ratios(table, part)
    torch.testing.assert_close(flat_sketch(table), flat_sketch(whole), rtol=1e-13, atol=1e-13)


def test_quantiles() -> None:
    values = torch.linspace(-3, 3, 100_001, dtype=torch.float64)
    found = sketch(values)
    for fraction in (0.01, 0.5, 0.9, 0.99):
        exact = k3(values).quantile(fraction).item()
        assert found.quantile(fraction, k3) == pytest.approx(exact, rel=0.016)
    assert sketch(doubles(0.5)).quantile(0.99, k3) == k3(doubles(0.5)).item()
    assert sketch(doubles(*[0.0] * 99, 1.0)).quantile(0.99, torch.abs) == 0.0
    assert sketch(doubles(*[0.0] * 98, 1.0, 1.0)).quantile(0.99, torch.abs) == 1.0
    assert sketch(doubles()).quantile(0.99, k3) is None


def exact_pareto_k(log_weights: torch.Tensor) -> float:
    """PSIS without bins: every weight of the tail enters by itself."""
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
    found = sketch(log_weights).pareto_k()
    assert found == pytest.approx(exact_pareto_k(log_weights), abs=0.6 * standard_error(k, num))
    assert found == pytest.approx(k, abs=3 * standard_error(k, num))


def test_pareto_k_is_exact_with_one_weight_per_bin() -> None:
    log_weights = torch.linspace(0.01, 1.5, 60, dtype=torch.float64)
    assert len(sketch(log_weights).counts) == 60
    assert sketch(log_weights).pareto_k() == pytest.approx(exact_pareto_k(log_weights), abs=1e-12)


@pytest.mark.parametrize("sigma", [0.02, 0.3, 1.0, 3.0])
def test_pareto_k_of_lognormal_weights(sigma: float) -> None:
    generator = torch.Generator().manual_seed(1)
    log_weights = sigma * torch.randn(20_000, generator=generator, dtype=torch.float64)
    found = sketch(log_weights).pareto_k()
    assert found == pytest.approx(exact_pareto_k(log_weights), abs=0.3 * standard_error(0.0, 20_000))


def test_pareto_k_needs_a_tail() -> None:
    assert sketch(doubles()).pareto_k() is None
    assert sketch(torch.randn(20, dtype=torch.float64)).pareto_k() is None
    assert sketch(torch.zeros(1000, dtype=torch.float64)).pareto_k() is None
    assert sketch(doubles(*[0.0] * 997, 1.0, 2.0, 3.0)).pareto_k() is None


def test_weights_beyond_the_clamp_do_not_stretch_the_tail() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    capped, beyond = values.clone(), values.clone()
    capped[:3], beyond[:3] = 20.0, 63.0
    assert sketch(beyond).pareto_k() == sketch(capped).pareto_k()
