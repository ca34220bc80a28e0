"""Returns, GAE and whitening against a plain loop over each sequence, and against numbers worked by hand."""

import math
from itertools import pairwise

import pytest
import torch
from algorithm_cases import packed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from algorithms.returns import Moments, gae, moments, token_rewards, whiten

# One turn of two tokens, a tool output of one, a second turn of one; then a sequence of one response token.
MASK = torch.tensor([True, True, False, True, True])
LAYOUT = {"response_mask": MASK, "cu_seqlens": packed(4, 1)}


def looped_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, cu_seqlens: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    """The textbook recursion, backwards over the response tokens of each sequence, in Python floats."""
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for start, end in pairwise(cu_seqlens.tolist()):
        next_value = next_advantage = 0.0
        for t in range(end - 1, start - 1, -1):
            if mask[t]:
                delta = rewards[t].item() + gamma * next_value - values[t].item()
                next_value, next_advantage = values[t].item(), delta + gamma * gae_lambda * next_advantage
                advantages[t], returns[t] = next_advantage, next_advantage + next_value
    return advantages, returns


def ragged(seed: int, lengths: list[int], padding: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards, values (NaN off the mask), mask and cu_seqlens of a multi-turn batch with padding behind it."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    mask = torch.rand(num_tokens, generator=generator) < 0.6
    mask = torch.cat([mask, torch.zeros(padding, dtype=torch.bool)])
    rewards, values = torch.randn(2, num_tokens + padding, generator=generator)
    return rewards.where(mask, math.nan), values.where(mask, math.nan), mask, packed(*lengths)


def returns_of(rewards: Tensor, *, gamma: float, response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Discounted sums of the rewards: GAE with lambda = 1, whose returns hold no value."""
    values = torch.zeros_like(rewards)
    _, returns = gae(rewards, values, gamma=gamma, gae_lambda=1.0, response_mask=response_mask, cu_seqlens=cu_seqlens)
    return returns


def test_the_reward_lies_on_the_last_response_token() -> None:
    mask = torch.tensor([0, 1, 0, 1, 0, 0, 1, 1, 0], dtype=torch.bool)
    layout = {"response_mask": mask, "cu_seqlens": packed(0, 5, 1, 2)}
    rewards = torch.tensor([9.0, 1.0, 7.0, 2.0])  # the first sequence is empty, the third has no response token
    found = token_rewards(rewards, penalty=None, **layout)
    assert found.dtype == torch.float32 and found.tolist() == [0, 0, 0, 1, 0, 0, 0, 2, 0]
    penalty = torch.tensor([math.nan, 0.5, math.nan, 0.25, math.nan, math.nan, -1.0, 0.125, math.nan])
    found = token_rewards(rewards, penalty=penalty, **layout)
    assert found.tolist() == [0, -0.5, 0, 0.75, 0, 0, 1, 1.875, 0]


def test_returns_skip_tool_outputs_without_a_discount() -> None:
    rewards = torch.tensor([1.0, 2.0, math.nan, 4.0, 8.0])
    assert returns_of(rewards, gamma=0.5, **LAYOUT).tolist() == [3, 4, 0, 4, 8]
    assert returns_of(rewards, gamma=0.0, **LAYOUT).tolist() == [1, 2, 0, 4, 8]
    assert returns_of(rewards, gamma=1.0, **LAYOUT).tolist() == [7, 6, 0, 4, 8]


def test_gae_by_hand() -> None:
    # gamma = lambda = 1/2. delta: 0 + 1.5 - 1 = 0.5; 0 + 1 - 3 = -2; 4 - 2 = 2; 8 - 5 = 3.
    rewards = torch.tensor([0.0, 0.0, math.nan, 4.0, 8.0])
    values = torch.tensor([1.0, 3.0, math.inf, 2.0, 5.0])
    advantages, returns = gae(rewards, values, gamma=0.5, gae_lambda=0.5, **LAYOUT)
    assert advantages.tolist() == [0.125, -1.5, 0, 2, 3]
    assert returns.tolist() == [1.125, 1.5, 0, 4, 8]
    assert advantages.dtype == returns.dtype == torch.float32


@pytest.mark.parametrize("gamma", [0.0, 0.9, 0.95, 1.0])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.9, 0.95, 1.0])
def test_gae_is_the_plain_loop(gamma: float, gae_lambda: float) -> None:
    for seed, lengths in enumerate([[7, 0, 1, 40, 3], [0], [1], [], [130, 65, 64]]):
        rewards, values, mask, cu_seqlens = ragged(seed, lengths, padding=seed)
        layout = {"response_mask": mask, "cu_seqlens": cu_seqlens}
        advantages, returns = gae(rewards, values, gamma=gamma, gae_lambda=gae_lambda, **layout)
        expected = looped_gae(rewards, values, mask, cu_seqlens, gamma=gamma, gae_lambda=gae_lambda)
        torch.testing.assert_close(advantages, torch.tensor(expected[0]), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(returns, torch.tensor(expected[1]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 0.95, 1.0])
def test_returns_are_the_plain_loop(gamma: float) -> None:
    rewards, _, mask, cu_seqlens = ragged(3, [50, 0, 17, 1, 128], padding=4)
    found = returns_of(rewards, response_mask=mask, cu_seqlens=cu_seqlens, gamma=gamma)
    zeros = torch.zeros(len(mask))
    _, expected = looped_gae(rewards, zeros, mask, cu_seqlens, gamma=gamma, gae_lambda=1.0)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_a_long_response_keeps_float64_accuracy() -> None:
    # 0.999^(n - 1) of the only reward, n = 3000: about 0.05 is left at the first token.
    num_tokens = 3000
    layout = {"response_mask": torch.ones(num_tokens, dtype=torch.bool), "cu_seqlens": packed(num_tokens)}
    rewards = token_rewards(torch.ones(1, dtype=torch.float64), penalty=None, **layout)
    found = returns_of(rewards, gamma=0.999, **layout)
    exact = torch.tensor([0.999**n for n in range(num_tokens - 1, -1, -1)], dtype=torch.float64)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=0)


def test_a_discount_that_underflows_leaves_the_near_rewards() -> None:
    layout = {"response_mask": torch.ones(64, dtype=torch.bool), "cu_seqlens": packed(64)}
    found = returns_of(torch.ones(64), gamma=1e-200, **layout)
    assert found.tolist() == [1.0] * 64


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    gamma=st.floats(0, 1),
    gae_lambda=st.floats(0, 1),
    data=st.data(),
)
def test_a_sequence_alone_is_a_sequence_in_a_pack(
    seed: int, lengths: list[int], gamma: float, gae_lambda: float, data: st.DataObject
) -> None:
    rewards, values, mask, cu_seqlens = ragged(seed, lengths, padding=0)
    chosen = data.draw(st.integers(0, len(lengths) - 1))
    start, end = cu_seqlens.tolist()[chosen : chosen + 2]
    # What the other sequences hold must not matter, not even if it is not a number.
    inside = torch.zeros(len(mask), dtype=torch.bool)
    inside[start:end] = True
    rewards, values = rewards.where(inside, math.nan), values.where(inside, math.inf)
    whole = gae(rewards, values, response_mask=mask, cu_seqlens=cu_seqlens, gamma=gamma, gae_lambda=gae_lambda)
    alone = gae(
        rewards[start:end],
        values[start:end],
        response_mask=mask[start:end],
        cu_seqlens=packed(end - start),
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
    torch.testing.assert_close(whole[0][start:end], alone[0])
    torch.testing.assert_close(whole[1][start:end], alone[1])


# ---------------------------------------------------------------- whitening


def test_whitening_by_hand() -> None:
    # 2, 0, 0, 0: mean 1/2, biased variance 3/4.
    values = torch.tensor([2.0, math.nan, 0.0, 0.0, 0.0])
    mask = torch.tensor([True, False, True, True, True])
    found = whiten(values, mask, epsilon=1e-9)
    torch.testing.assert_close(found, torch.tensor([1.5, 0, -0.5, -0.5, -0.5]) / math.sqrt(0.75))
    assert moments(values, mask).sums.tolist() == [4, 2, 4]
    wide = whiten(values, mask, epsilon=1.0)
    torch.testing.assert_close(wide, torch.tensor([1.5, 0, -0.5, -0.5, -0.5]) / (math.sqrt(0.75) + 1))


def test_moments_of_parts_add_up() -> None:
    generator = torch.Generator().manual_seed(0)
    values = 5 + torch.randn(40, generator=generator)
    mask = torch.rand(40, generator=generator) < 0.7
    ranks = [moments(part, where) for part, where in zip(values.split(13), mask.split(13), strict=True)]
    step = Moments(torch.zeros(3, dtype=torch.float64))
    for rank in ranks:
        step = step.merge(rank)
    pieces = [whiten(v, m, epsilon=1e-6, over=step) for v, m in zip(values.split(13), mask.split(13), strict=True)]
    torch.testing.assert_close(torch.cat(pieces), whiten(values, mask, epsilon=1e-6))
    kept = values[mask].double()
    torch.testing.assert_close(step.mean, kept.mean())
    torch.testing.assert_close(step.variance, kept.var(correction=0))


def test_counts_as_weights_are_repetitions() -> None:
    values, counts = torch.tensor([1.0, 4.0, 9.0]), torch.tensor([3, 0, 2])
    repeated = values.repeat_interleave(counts)
    assert torch.equal(moments(values, counts).sums, moments(repeated, torch.ones(5)).sums)


@pytest.mark.parametrize("value", [0.9, 1e6, -3e-7, 0.0])
def test_equal_values_whiten_to_exactly_zero(value: float) -> None:
    mask = torch.ones(1000, dtype=torch.bool)
    assert whiten(torch.full((1000,), value), mask, epsilon=1e-12).abs().max().item() == 0


def test_a_small_spread_on_a_large_mean_survives() -> None:
    values = torch.tensor([1000.0, 1000.25] * 50)
    found = whiten(values, torch.ones(100, dtype=torch.bool), epsilon=1e-9)
    torch.testing.assert_close(found, torch.tensor([-1.0, 1.0] * 50), rtol=1e-5, atol=0)


def test_one_token_and_no_token_whiten_to_zero() -> None:
    assert whiten(torch.tensor([3.0]), torch.tensor([True]), epsilon=1e-6).tolist() == [0]
    assert whiten(torch.tensor([3.0]), torch.tensor([False]), epsilon=1e-6).tolist() == [0]
    assert whiten(torch.zeros(0), torch.zeros(0, dtype=torch.bool), epsilon=1e-6).tolist() == []


# ---------------------------------------------------------------- edges


def test_empty_batches() -> None:
    layout = {"response_mask": torch.zeros(0, dtype=torch.bool), "cu_seqlens": packed(0, 0)}
    none = torch.zeros(0)
    assert token_rewards(torch.ones(2), penalty=none, **layout).tolist() == []
    assert [part.tolist() for part in gae(none, none, gamma=0.9, gae_lambda=0.9, **layout)] == [[], []]


def test_nothing_carries_a_gradient() -> None:
    rewards, values = torch.ones(5, requires_grad=True), torch.ones(5, requires_grad=True)
    outputs = [
        token_rewards(torch.ones(2, requires_grad=True), penalty=values, **LAYOUT),
        *gae(rewards, values, gamma=0.9, gae_lambda=0.9, **LAYOUT),
        whiten(values, MASK, epsilon=1e-6),
        moments(values, MASK).sums,
    ]
    assert not any(output.requires_grad for output in outputs)


def test_wrong_shapes_and_dtypes_are_named() -> None:
    with pytest.raises(ValueError, match=r"rewards must be \[N\].*\(2\), got \[3\]"):
        token_rewards(torch.ones(3), penalty=None, **LAYOUT)
    with pytest.raises(ValueError, match=r"rewards must be float32, got torch\.int64"):
        token_rewards(torch.ones(2, dtype=torch.long), penalty=None, **LAYOUT)
    with pytest.raises(ValueError, match="penalty must have the shape"):
        token_rewards(torch.ones(2), penalty=torch.ones(4), **LAYOUT)
    with pytest.raises(ValueError, match="token_rewards must have the shape"):
        gae(torch.ones(4), torch.ones(5), gamma=1.0, gae_lambda=1.0, **LAYOUT)
    with pytest.raises(ValueError, match=r"values must be float32, got torch\.bfloat16"):
        gae(torch.ones(5), torch.ones(5, dtype=torch.bfloat16), gamma=1.0, gae_lambda=1.0, **LAYOUT)
    with pytest.raises(ValueError, match="values must have the shape"):
        whiten(torch.ones(4), MASK, epsilon=1e-6)


def test_no_value_is_read_on_the_host() -> None:
    with torch.device("meta"):
        rewards, values = torch.empty(3), torch.empty(9)
        layout = {"response_mask": torch.empty(9, dtype=torch.bool), "cu_seqlens": torch.empty(4, dtype=torch.int32)}
    per_token = token_rewards(rewards, penalty=values, **layout)
    outputs = [
        per_token,
        *gae(per_token, values, gamma=0.9, gae_lambda=0.9, **layout),
        whiten(values, layout["response_mask"], epsilon=1e-6),
    ]
    assert all(output.is_meta and output.shape == (9,) for output in outputs)
