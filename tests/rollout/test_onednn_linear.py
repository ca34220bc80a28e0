"""Linear layers on a CPU: whichever library multiplies, it is the same product with the same gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rollout.model.onednn_linear
from rollout.model.onednn_linear import Linear, linear, use_fast_products

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"),
    reason="this torch has no oneDNN",
)


@pytest.fixture(autouse=True)
def onednn_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The products that oneDNN was asked for, on every processor."""
    asked: list[Tensor] = []
    product = rollout.model.onednn_linear._product

    def counted(*arguments: Tensor) -> Tensor:
        assert all(matrix.is_contiguous() or matrix.T.is_contiguous() for matrix in arguments[:2])
        asked.append(product(*arguments))
        return asked[-1]

    monkeypatch.setattr(rollout.model.onednn_linear, "prefers_onednn", lambda: True)
    monkeypatch.setattr(rollout.model.onednn_linear, "_product", counted)
    yield asked


def values_and_gradients(
    multiply: object, *, rows: tuple[int, ...], sizes: tuple[int, int], bias: bool
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs, outputs = sizes
    states, weight = (torch.randn(*shape, inputs, generator=generator) for shape in (rows, (outputs,)))
    given = [states, weight] + ([torch.randn(outputs, generator=generator)] if bias else [])
    given = [tensor.requires_grad_() for tensor in given]
    assert callable(multiply)
    out = multiply(*given)
    upstream = torch.randn(out.shape, generator=generator)
    return [out.detach(), *torch.autograd.grad(out, given, upstream)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(48, 80), (80, 48)])
@pytest.mark.parametrize("rows", [(37,), (1, 37), (5, 7)])
def test_products_and_gradients_are_those_of_torch(
    rows: tuple[int, ...], sizes: tuple[int, int], bias: bool, onednn_everywhere: list[Tensor]
) -> None:
    expected = values_and_gradients(functional.linear, rows=rows, sizes=sizes, bias=bias)
    assert not onednn_everywhere
    found = values_and_gradients(linear, rows=rows, sizes=sizes, bias=bias)
    assert len(onednn_everywhere) == 3  # forward, and two products of the backward
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("states", "dtype"), [((1, 16), torch.float32), ((0, 16), torch.float32), ((5, 16), torch.bfloat16)]
)
def test_single_rows_no_rows_and_other_types_are_multiplied_by_torch(
    states: tuple[int, int], dtype: torch.dtype, onednn_everywhere: list[Tensor]
) -> None:
    given, weight = torch.randn(states).to(dtype), torch.randn(8, 16).to(dtype)
    assert torch.equal(linear(given, weight), functional.linear(given, weight))
    assert not onednn_everywhere


def test_operands_of_other_strides_are_written_out_first(onednn_everywhere: list[Tensor]) -> None:
    given, weight = torch.randn(40, 64)[:, ::2], torch.randn(8, 32, requires_grad=True)
    linear(given, weight).sum().backward()  # an expanded gradient: its strides are 0
    assert len(onednn_everywhere) == 2
    torch.testing.assert_close(weight.grad, given.sum(0).expand(8, 32), rtol=1e-5, atol=1e-5)


def test_no_gradient_is_computed_for_what_is_frozen(onednn_everywhere: list[Tensor]) -> None:
    states, weight = torch.randn(6, 16, requires_grad=True), torch.randn(8, 16)
    linear(states, weight).sum().backward()
    assert len(onednn_everywhere) == 2
    torch.testing.assert_close(states.grad, weight.sum(0).expand(6, 16))


def test_the_same_input_gives_the_same_bits() -> None:
    first, second = (values_and_gradients(linear, rows=(300,), sizes=(64, 96), bias=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_linear_layers_of_a_model_change_their_arithmetic_and_nothing_else(onednn_everywhere: list[Tensor]) -> None:
    class Special(nn.Linear):
        """A layer with code of its own."""

    model = nn.Sequential(nn.Linear(16, 24), nn.SiLU(), Special(24, 8))
    names, states = list(model.state_dict()), torch.randn(4, 16)
    expected = model(states)
    use_fast_products(model)
    assert [type(layer) for layer in model] == [Linear, nn.SiLU, Special]
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(states), expected)
    assert len(onednn_everywhere) == 1
