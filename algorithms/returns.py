"""Rewards per token -> returns, advantages per token (GAE), and whitening with statistics that add up over ranks.

All tensors are packed. The recursion of each sequence runs over its response tokens only: prompts and tool outputs
between turns are skipped, without a discount, and a turn bootstraps from the first response token of the next one. The
state after the last response token is terminal: its value is 0.

No function carries a gradient or reads a value on the host. T: packed tokens, N: sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.masked import divide_by_count, require_packed, segment_expand

ROUNDING = 1e-12
"""A variance below this fraction of the mean square is a rounding error of equal values in float64 sums."""


def token_rewards(rewards: Tensor, *, penalty: Tensor | None, response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The reward of each sequence on its last response token, minus a cost per token -> [T] float32, 0 off the mask.

    Args:
        rewards: [N] float32, one outcome per sequence; dropped where a sequence has no response token.
        penalty: [T] float32 in units of reward, read on the mask only, for example
            `algorithms.reference.reference_kl_penalty`; None for no penalty.
        response_mask: [T] bool.
        cu_seqlens: [N+1] int32, first token of each sequence.

    Raises ValueError for a wrong shape or dtype.
    """
    if rewards.shape != (cu_seqlens.numel() - 1,):
        raise ValueError(
            f"rewards must be [N], one per sequence of cu_seqlens ({cu_seqlens.numel() - 1}), got {list(rewards.shape)}"
        )
    num_tokens = response_mask.shape[0]
    with torch.no_grad():
        outcome = segment_expand(rewards, cu_seqlens, num_tokens=num_tokens)
        require_packed(response_mask, rewards=outcome)
        last = response_mask & (_next_response(response_mask, cu_seqlens) == num_tokens)
        outcome = torch.where(last, outcome, 0.0)
        if penalty is None:
            return outcome
        require_packed(response_mask, penalty=penalty)
        return outcome - torch.where(response_mask, penalty, 0.0)


def gae(
    token_rewards: Tensor, values: Tensor, *, response_mask: Tensor, cu_seqlens: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation -> advantages [T], returns [T]; float32, 0 off the mask, not whitened.

        delta_t = r_t + gamma V_u - V_t,  A_t = delta_t + gamma lambda A_u,  R_t = A_t + V_t

    with u the next response token of the sequence; V_u and A_u are 0 behind the last one. The recursion runs over the
    returns, R_t = r_t + gamma ((1 - lambda) V_u + lambda R_u): with lambda = 1 no value enters the returns.

    Args:
        token_rewards: [T] float32 from `token_rewards`, read on the mask only.
        values: [T] float32, V of the critic at the state before token t, in units of reward; read on the mask only.
        response_mask: [T] bool.
        cu_seqlens: [N+1] int32, first token of each sequence.
        gamma: Discount per response token, in [0, 1].
        gae_lambda: lambda, in [0, 1].

    Raises ValueError for a wrong shape or dtype.

    Source: https://arxiv.org/abs/1506.02438, eq. 16.
    """
    require_packed(response_mask, token_rewards=token_rewards, values=values)
    with torch.no_grad():
        following = _next_response(response_mask, cu_seqlens)
        masked_values = torch.where(response_mask, values.double(), 0.0)
        one_step = torch.where(response_mask, token_rewards.double(), 0.0)
        if gae_lambda != 1:
            one_step = one_step + gamma * (1 - gae_lambda) * _at(masked_values, following, beyond=0.0)
        returns = _accumulate(one_step, following, factor=gamma * gae_lambda)
        returns = torch.where(response_mask, returns, 0.0)
        return (returns - masked_values).to(values.dtype), returns.to(values.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Weighted mean and variance as sums, which add up over micro-batches and ranks."""

    sums: Tensor
    """[3] float64: sum of weights, of weight x value, of weight x value^2. Reduce over ranks with SUM."""

    def merge(self, other: Moments) -> Moments:
        """The moments of both, on the device."""
        return Moments(self.sums + other.sums)

    @property
    def mean(self) -> Tensor:
        """Weighted mean, scalar float64; 0 without weight."""
        return divide_by_count(self.sums[1], self.sums[0])

    @property
    def variance(self) -> Tensor:
        """Biased variance (/ n), scalar float64; exactly 0 for equal values, and without weight.

        A standard deviation below a millionth of the root mean square cannot be told from rounding, and counts as 0.
        """
        mean_square = divide_by_count(self.sums[2], self.sums[0])
        variance = mean_square - self.mean.square()
        return torch.where(variance > ROUNDING * mean_square, variance, 0.0)

    def standardise(self, values: Tensor, *, epsilon: float) -> Tensor:
        """(values - mean) / (std + epsilon), elementwise, float64; 0 where there is no spread to divide by."""
        variance = self.variance
        standard = (values.double() - self.mean) / (variance.sqrt() + epsilon)
        return torch.where(variance > 0, standard, 0.0)


def moments(values: Tensor, weights: Tensor) -> Moments:
    """Moments of values [T]; `weights` [T] is a mask, or counts >= 0. Values without weight may be NaN."""
    weights = weights.detach().double()
    present = torch.where(weights > 0, values.detach().double(), 0.0)
    return Moments(torch.stack([weights, weights * present, weights * present.square()]).sum(dim=1))


def whiten(values: Tensor, mask: Tensor, *, epsilon: float, over: Moments | None = None) -> Tensor:
    """(values - mean) / (std + epsilon) on the mask -> [T], same dtype, 0 off the mask.

    Args:
        values: [T] float32; may be NaN off the mask.
        mask: [T] bool.
        epsilon: Added to the standard deviation, in the unit of the values.
        over: The moments of the whole step, reduced over its micro-batches and ranks; None takes those of `values`
            alone, which is right for one rank with one micro-batch.

    The standard deviation is the biased one: whitened values then have a mean square of 1 for any count, one token
    needs no case of its own, and n - 1 would not make the estimate unbiased, as tokens of one response are not
    independent. Raises ValueError for a wrong shape or dtype.
    """
    require_packed(mask, values=values)
    with torch.no_grad():
        over = moments(values, mask) if over is None else over
        return torch.where(mask, over.standardise(values, epsilon=epsilon), 0.0).to(values.dtype)


def _next_response(response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Index of the next response token behind t in the sequence of t -> [T] int64; T where there is none."""
    num_tokens = response_mask.shape[0]
    positions = torch.arange(num_tokens, device=response_mask.device)
    candidates = torch.where(response_mask, positions, num_tokens)
    # The index is shifted by one token, because the running minimum from the right includes t itself.
    behind = torch.cat([candidates[1:], candidates.new_full((min(num_tokens, 1),), num_tokens)])
    following = behind.flip(0).cummin(0).values.flip(0)
    ends = segment_expand(cu_seqlens[1:].long(), cu_seqlens, num_tokens=num_tokens)
    return torch.where(following < ends, following, num_tokens)


def _accumulate(values: Tensor, following: Tensor, *, factor: float) -> Tensor:
    """Solution x [T] of x_t = values_t + factor x_following(t), x = 0 beyond the last token.

    Pointer doubling: after k rounds x_t holds 2^k terms, and `following` jumps over 2^k tokens. The factor of a jump
    is a number of the host, so the rounds end at log2(T), or as soon as the factor has underflowed to 0.
    """
    num_tokens = values.shape[0]
    span = 1
    while span < num_tokens and factor != 0:
        values = values + factor * _at(values, following, beyond=0.0)
        following = _at(following, following, beyond=num_tokens)
        factor, span = factor * factor, 2 * span
    return values


def _at(values: Tensor, index: Tensor, *, beyond: float) -> Tensor:
    """values[index] -> [T], `beyond` where the index is T."""
    return torch.cat([values, values.new_full((1,), beyond)])[index]
