"""k1, k2, k3: golden numbers, and the accuracy of k3 against 60-digit arithmetic."""

import math
from decimal import Decimal, localcontext

import torch

from algorithms.kl import k1, k2, k3


def exact_k3(x: float) -> float:
    """exp(x) - 1 - x with 60 digits."""
    with localcontext() as context:
        context.prec = 60
        value = Decimal(x)
        return float(value.exp() - 1 - value)


def sweep() -> torch.Tensor:
    """Both signs, 1e-10 .. 20, float32."""
    magnitudes = torch.logspace(-10, math.log10(20), 3000).clamp(max=20)
    return torch.cat([magnitudes, -magnitudes])


def test_k3_is_accurate_and_positive_from_1e_10_to_20() -> None:
    x = sweep()
    value = k3(x)
    assert value.dtype == torch.float32
    exact = torch.tensor([exact_k3(float(v)) for v in x.tolist()], dtype=torch.float64)
    relative = (value.double() - exact).abs() / exact
    assert relative.max().item() <= 5e-6
    assert relative[x.abs() > 4e-9].max().item() <= 2e-7
    assert (value > 0).all()
    # The same difference in float32 fails this at once, so the sweep can tell the two apart.
    direct = torch.expm1(x) - x
    assert ((direct.double() - exact).abs() / exact).max().item() > 0.5


def test_k3_in_float64_loses_only_the_common_digits() -> None:
    x = sweep().double()
    exact = torch.tensor([exact_k3(v) for v in x.tolist()], dtype=torch.float64)
    relative = (k3(x) - exact).abs() / exact
    assert (relative <= 4e-16 / x.abs() + 4e-16).all()
    assert (k3(torch.logspace(-300, -10, 500, dtype=torch.float64)) >= 0).all()


def test_k3_golden_tokens() -> None:
    delta = torch.tensor([0.1, -0.3, 0.9, 0.0, -2.5])
    expected = torch.tensor([0.00517092, 0.04081822, 0.55960311, 0.0, 1.58208500])
    torch.testing.assert_close(k3(delta), expected, atol=1e-7, rtol=1e-5)
    assert abs(k3(delta).mean().item() - 0.43753545) < 1e-6
    assert abs(k1(delta).mean().item() - 0.36) < 1e-6
    assert abs(k2(delta).mean().item() - 0.716) < 1e-6


def test_k1_keeps_its_sign() -> None:
    assert k1(torch.tensor([2.0, -3.0])).tolist() == [-2.0, 3.0]
    assert k2(torch.tensor([2.0, -3.0])).tolist() == [2.0, 4.5]


def test_k3_is_clamped_at_20_nats() -> None:
    at_bound = k3(torch.tensor([20.0, -20.0]))
    assert k3(torch.tensor([60.0, -60.0])).tolist() == at_bound.tolist()
    assert k3(torch.tensor([math.inf, -math.inf])).tolist() == at_bound.tolist()
    torch.testing.assert_close(at_bound, torch.tensor([math.exp(20) - 21, math.exp(-20) + 19]).float())
    assert math.isnan(k3(torch.tensor([math.nan])).item())


def test_k3_gradient_is_expm1_and_finite_everywhere() -> None:
    x = sweep()
    x = x[x.abs() < 20].requires_grad_()
    k3(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.expm1(x.detach()), rtol=1e-5, atol=0)
    edge = torch.tensor([0.0, 60.0, -60.0, math.inf, -math.inf], requires_grad=True)
    k3(edge).sum().backward()
    assert edge.grad is not None and edge.grad.tolist() == [0, 0, 0, 0, 0]
