"""The chunked head against autograd of the plain expression: values, gradients, dtypes, and what it keeps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.scoring import logprob_head
from trainer.scoring.logprob_head import HeadOptions, token_logprobs

TOKENS, SIZE, VOCAB = 11, 8, 40


def options(
    *, temperature: float = 1.0, chunk_tokens: int = 4, entropy_grad: bool = False, float32: bool = False
) -> HeadOptions:
    return HeadOptions(temperature=temperature, chunk_tokens=chunk_tokens, entropy_grad=entropy_grad, float32=float32)


def plain(hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> list[Tensor]:
    """Log-probs [N] and entropy [N] from all logits at once."""
    logits = linear(hidden, weight, bias) / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    return [logprobs.gather(-1, targets[:, None]).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)]


def inputs(
    *, bias: bool = True, dtype: torch.dtype = torch.float32, num_tokens: int = TOKENS
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(3)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    hidden, weight = leaf(num_tokens, SIZE), leaf(VOCAB, SIZE)
    targets = torch.randint(VOCAB, (num_tokens,), generator=generator)
    return hidden, targets, weight, leaf(VOCAB) if bias else None


def loss_of(logprobs: Tensor, entropy: Tensor, *, with_entropy: bool) -> Tensor:
    """A different upstream gradient for every token, of both signs."""
    signs = torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)
    loss = (signs * logprobs).sum()
    return loss + (signs.flip(0) * entropy).sum() if with_entropy else loss


def gradients(loss: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [tensor for tensor in tensors if tensor is not None]))


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def test_values_by_hand() -> None:
    # Logits 0 and log 3 at T = 1: p = 1/4 and 3/4.
    weight = torch.tensor([[0.0], [math.log(3)]])
    hidden, targets = torch.ones(2, 1), torch.tensor([0, 1])
    logprobs, entropy = token_logprobs(hidden, targets, weight, None, options())
    torch.testing.assert_close(logprobs, torch.tensor([0.25, 0.75]).log())
    torch.testing.assert_close(entropy, torch.full((2,), math.log(4) - 0.75 * math.log(3)))
    # At T = 1/2 the odds are squared: p = 1/10 and 9/10.
    logprobs, _ = token_logprobs(hidden, targets, weight, None, options(temperature=0.5))
    torch.testing.assert_close(logprobs, torch.tensor([0.1, 0.9]).log())


def test_gradient_by_hand() -> None:
    # d log p(0) / dz = (1 - 1/4, -3/4), and z = w h with h = 2.
    weight = torch.tensor([[0.0], [math.log(3) / 2]], requires_grad=True)
    hidden = torch.full((1, 1), 2.0, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, torch.tensor([0]), weight, None, options())
    of_hidden, of_weight = gradients(logprobs.sum(), hidden, weight)
    torch.testing.assert_close(of_weight, torch.tensor([[1.5], [-1.5]]))
    torch.testing.assert_close(of_hidden, torch.tensor([[-0.75 * math.log(3) / 2]]))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_values_and_gradients_are_those_of_the_plain_form(
    monkeypatch: pytest.MonkeyPatch, bias: bool, with_entropy: bool, temperature: float, chunk_tokens: int
) -> None:
    monkeypatch.setattr(logprob_head, "CPU_BLOCK_ELEMENTS", 3 * VOCAB)  # chunks of 4 end in a block of 1
    hidden, targets, weight, offset = inputs(bias=bias)
    expected = plain(hidden, targets, weight, offset, temperature)
    actual = token_logprobs(
        hidden,
        targets,
        weight,
        offset,
        options(temperature=temperature, chunk_tokens=chunk_tokens, entropy_grad=with_entropy),
    )
    assert relative(actual[0], expected[0]) < 1e-6
    assert relative(actual[1], expected[1]) < 1e-6
    leaves = (hidden, weight, offset)
    wanted = gradients(loss_of(*expected, with_entropy=with_entropy), *leaves)
    found = gradients(loss_of(*actual, with_entropy=with_entropy), *leaves)
    for gradient, reference in zip(found, wanted, strict=True):
        assert gradient.dtype == torch.float32
        assert relative(gradient, reference) < 1e-6


def test_gradients_by_finite_differences() -> None:
    hidden, targets, weight, bias = inputs(dtype=torch.float64, num_tokens=5)

    def both(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            tensors[0], targets, tensors[1], tensors[2], options(temperature=0.7, chunk_tokens=2, entropy_grad=True)
        )

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


def test_entropy_alone_has_a_gradient_only_if_asked_for() -> None:
    hidden, targets, weight, bias = inputs()
    wanted = gradients(plain(hidden, targets, weight, bias, 1.0)[1].sum(), hidden, weight)
    _, entropy = token_logprobs(hidden, targets, weight, bias, options(entropy_grad=True))
    for gradient, reference in zip(gradients(entropy.sum(), hidden, weight), wanted, strict=True):
        assert relative(gradient, reference) < 1e-6
    logprobs, entropy = token_logprobs(hidden, targets, weight, bias, options())
    assert logprobs.requires_grad
    assert not entropy.requires_grad


def test_large_logits_stay_finite() -> None:
    hidden, targets, weight, _ = inputs(bias=False, dtype=torch.float64)
    with torch.no_grad():
        hidden.mul_(1000)  # logits of some thousands: exp of one would overflow
    actual = token_logprobs(hidden, targets, weight, None, options(entropy_grad=True))
    expected = plain(hidden, targets, weight, None, 1.0)
    assert expected[0].min() < -1000
    torch.testing.assert_close(actual[0], expected[0])
    wanted = gradients(loss_of(*expected, with_entropy=True), hidden, weight)
    found = gradients(loss_of(*actual, with_entropy=True), hidden, weight)
    for gradient, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, reference)


def test_a_tied_weight_gets_both_gradients() -> None:
    _, targets, weight, _ = inputs()
    tokens = torch.arange(TOKENS)
    found = token_logprobs(weight[tokens], targets, weight, None, options())[0]
    wanted = plain(weight[tokens], targets, weight, None, 1.0)[0]
    assert relative(gradients(found.sum(), weight)[0], gradients(wanted.sum(), weight)[0]) < 1e-6


def test_no_tokens_have_zero_gradients() -> None:
    hidden, targets, weight, bias = inputs(num_tokens=0)
    logprobs, entropy = token_logprobs(hidden, targets, weight, bias, options(entropy_grad=True))
    assert logprobs.shape == entropy.shape == (0,)
    of_hidden, of_weight, of_bias = gradients(logprobs.sum() + entropy.sum(), hidden, weight, bias)
    assert of_hidden.shape == (0, SIZE)
    assert of_weight.eq(0).all()
    assert of_bias.eq(0).all()


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient(trained: str) -> None:
    hidden, targets, weight, _ = inputs(bias=False)
    wanted = gradients(plain(hidden, targets, weight, None, 1.0)[0].sum(), hidden, weight)
    (weight if trained == "hidden" else hidden).requires_grad_(False)
    logprobs, _ = token_logprobs(hidden, targets, weight, None, options())
    logprobs.sum().backward()
    of_hidden, of_weight = hidden.grad, weight.grad
    found, other = (of_hidden, of_weight) if trained == "hidden" else (of_weight, of_hidden)
    assert other is None
    assert found is not None
    assert relative(found, wanted[trained == "weight"]) < 1e-6


def test_a_second_backward_repeats_the_first() -> None:
    # The first one overwrites the logits that the forward left behind.
    hidden, targets, weight, bias = inputs()
    logprobs, _ = token_logprobs(hidden, targets, weight, bias, options())
    first = torch.autograd.grad(logprobs.sum(), (hidden, weight), retain_graph=True)
    for gradient, again in zip(first, torch.autograd.grad(logprobs.sum(), (hidden, weight)), strict=True):
        assert torch.equal(gradient, again)


def test_bfloat16_sums_the_weight_gradient_in_float32() -> None:
    num_tokens = 512
    hidden, targets, weight, _ = inputs(bias=False, dtype=torch.bfloat16, num_tokens=num_tokens)
    logprobs, _ = token_logprobs(hidden, targets, weight, None, options(chunk_tokens=1))
    assert logprobs.dtype == torch.float32
    gradient = gradients(logprobs.sum(), weight)[0]
    assert gradient.dtype == torch.bfloat16
    # One token at a time: what is left is the rounding of the logits, of their gradient and of the result.
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    wanted = gradients(plain(exact[0], targets, exact[1], None, 1.0)[0].sum(), exact[1])[0]
    assert relative(gradient, wanted) < 4e-3
    # A running sum in bfloat16 of the same 512 terms is worse than that bound.
    one_by_one = torch.zeros_like(gradient)
    for token in range(num_tokens):
        logprob = token_logprobs(hidden[token, None], targets[token, None], weight, None, options())[0]
        one_by_one += gradients(logprob.sum(), weight)[0]
    assert relative(one_by_one, wanted) > 4e-3


def test_float32_head_removes_the_rounding_of_bfloat16_logits() -> None:
    hidden, targets, weight, bias = inputs(dtype=torch.bfloat16)
    wide = [None if t is None else t.detach().float().requires_grad_() for t in (hidden, weight, bias)]
    assert wide[0] is not None
    assert wide[1] is not None
    expected = plain(wide[0], targets, wide[1], wide[2], 0.7)
    actual = token_logprobs(hidden, targets, weight, bias, options(temperature=0.7, entropy_grad=True, float32=True))
    rounded = token_logprobs(hidden, targets, weight, bias, options(temperature=0.7))
    assert relative(actual[0], expected[0]) < 1e-6
    assert relative(rounded[0], expected[0]) > 1e-4
    wanted = gradients(loss_of(*expected, with_entropy=True), *wide)
    found = gradients(loss_of(*actual, with_entropy=True), hidden, weight, bias)
    for gradient, reference in zip(found, wanted, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert torch.equal(gradient, reference.bfloat16()) or relative(gradient, reference) < 3e-3


def test_nothing_is_read_on_the_host() -> None:
    hidden, targets, weight, bias = (None if t is None else t.detach().to("meta") for t in inputs())
    assert hidden is not None
    assert targets is not None
    assert weight is not None
    for leaf in (hidden, weight):
        leaf.requires_grad_()
    logprobs, entropy = token_logprobs(hidden, targets, weight, bias, options(temperature=0.7, entropy_grad=True))
    of_hidden, of_weight = gradients(logprobs.sum() + entropy.sum(), hidden, weight)
    assert (of_hidden.shape, of_weight.shape) == (hidden.shape, weight.shape)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns, elements, and the products taken."""

    elements = 0
    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_than_one_chunk_of_logits_exists_and_the_last_is_computed_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(logprob_head, "CPU_BLOCK_ELEMENTS", 3 * VOCAB)
    hidden, targets, weight, _ = inputs(bias=False, dtype=dtype, num_tokens=64)
    with Largest() as largest:
        logprobs, _ = token_logprobs(hidden, targets, weight, None, options(chunk_tokens=16))
        assert largest.products == 4
        logprobs.sum().backward()
    assert largest.elements == 16 * VOCAB  # also more than the weight and the hidden states have
    assert largest.products == 4 + 3 + 2 * 4
