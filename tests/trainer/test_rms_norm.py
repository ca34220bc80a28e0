"""RMSNorm with one kernel for its backward pass: values to the bit, gradients at least as exact, and whose norms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from trainer.scoring.rms_norm import is_plain_norm, use_fused_norms

EPSILON = 1e-5


def _exact(states: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients by states and weight in float64."""
    states, weight = (each.detach().double().requires_grad_() for each in (states, weight))
    out = weight * states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + EPSILON)
    by_states, by_weight = torch.autograd.grad(out, (states, weight), grad.double())
    return by_states, by_weight


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 40, 64), (1, 40, 3, 64), (7, 64)])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
def test_values_to_the_bit_and_gradients(kind: type[nn.Module], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    norm = kind(64, eps=EPSILON)
    # States and gradients with a mean that is not 0, which LayerNorm would take away.
    norm.weight.data = 0.5 + torch.rand(64, generator=generator)
    norm = norm.to(dtype)
    (weight,) = norm.parameters()
    states = (0.7 + torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
    grad = (0.3 + torch.randn(shape, generator=generator)).to(dtype)
    usual = norm(states)
    usual_grads = torch.autograd.grad(usual, (states, weight), grad)
    use_fused_norms(norm)
    fused = norm(states)
    assert fused.grad_fn is not None and fused.grad_fn.name() == "_RMSNormBackward"
    assert torch.equal(fused, usual)
    found = torch.autograd.grad(fused, (states, weight), grad)
    exact = _exact(states, weight, grad)
    for mine, theirs, true in zip(found, usual_grads, exact, strict=True):
        assert mine.dtype == dtype and mine.shape == true.shape
        assert _error(mine, true) <= max(1.5 * _error(theirs, true), 1e-6)


def test_a_gradient_that_nobody_asks_for() -> None:
    norm = LlamaRMSNorm(8)
    use_fused_norms(norm)
    states = torch.randn(5, 8)
    norm(states).sum().backward()
    assert norm.weight.grad is not None
    norm.weight.requires_grad_(False)
    norm.weight.grad = None
    norm(states.requires_grad_()).sum().backward()
    assert states.grad is not None and norm.weight.grad is None


def test_other_norms_are_left_alone() -> None:
    class Wide(LlamaRMSNorm):
        """A norm that rounds after the product with the weights."""

        def forward(self, hidden_states: Tensor) -> Tensor:
            wide = hidden_states.float()
            rate = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return (self.weight.float() * wide * rate).to(hidden_states.dtype)

    class Gated(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
            normed = super().forward(hidden_states)
            return normed if gate is None else normed * gate

    assert is_plain_norm(LlamaRMSNorm(64).to("meta"))
    for other in (GemmaRMSNorm(64), Wide(64), Gated(64), nn.LayerNorm(64), nn.RMSNorm(64), nn.Linear(4, 4)):
        assert not is_plain_norm(other), other
