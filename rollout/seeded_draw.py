"""Draws tokens with one seed per sample: (weights, seeds, positions) -> token ids. Torch only.

Every engine that runs Parity's own sampling draws so, in SGLang's scheduler (`rollout/sglang/cpu/srt_platform.py`) or
in an actor's process. A draw depends only on the sample's own seed, the position and the weights: not on the other
samples of the batch, not on their order of arrival.

Each likely token has a noise of its own, from seed, position and token (Gumbel-max, as a race of exponential clocks:
token i arrives at -log(u_i) / w_i, and the first one is drawn, which is i with probability w_i / sum of w). So a small
change of the weights changes a draw with little more than the probability that it must (their distance in total
variation). One number against the cumulated weights would change it far more often, because every change shifts the
bounds of all later tokens: of SmolLM2's tokens on GSM8K, bfloat16 against float32, 10 % instead of 2 %, of which 1.5 %
must. The many unlikely tokens share one clock, for the noise of a whole vocabulary would cost more than the rest.
"""

from __future__ import annotations

import math

import torch

LEAST = 2.0**-12
"""Weight over the largest one of its row from which on a token has a noise of its own. 100 tokens of SmolLM2's."""

_GOLDEN_GAMMA = -7046029254386353131
"""0x9E3779B97F4A7C15 as a signed 64-bit integer: the increment of SplitMix64 (doi.org/10.1145/2714064.2660195)."""
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


def draw(weights: torch.Tensor, *, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token per row, drawn in proportion to `weights` [B, V] float32 -> [B] int64; rows need not sum to 1.

    Seeds and positions are [B] int64. A token of weight 0 is never drawn; of a row with NaN any token.
    """
    states = _splitmix64(seeds.to(torch.int64)) + positions.to(torch.int64) * _GOLDEN_GAMMA
    rows, tokens = (weights >= LEAST * weights.amax(dim=-1, keepdim=True)).nonzero(as_tuple=True)
    likely = weights[rows, tokens].to(torch.float64)
    arrivals = _waits(_splitmix64(states)[rows] + (tokens + 1) * _GOLDEN_GAMMA) / likely
    first = torch.full_like(states, math.inf, dtype=torch.float64).scatter_reduce(0, rows, arrivals, "amin")
    drawn = torch.zeros_like(states)
    wins = arrivals == first[rows]
    drawn[rows[wins]] = tokens[wins]

    # The float32 sum is wrong by 1e-7 of it at most, and so is the probability of all unlikely tokens together.
    rest = weights.sum(dim=-1).to(torch.float64).index_add(0, rows, -likely).clamp(min=0.0)
    late = (_waits(states) / rest < first).nonzero().squeeze(-1)
    if late.numel():
        unlikely = weights[late].to(torch.float64)
        cumulated = unlikely.masked_fill(unlikely >= LEAST * unlikely.amax(dim=-1, keepdim=True), 0.0).cumsum(dim=-1)
        total = cumulated[:, -1:]
        target = uniforms(_splitmix64(states[late] + _MIX_1)).unsqueeze(-1) * total
        found = torch.searchsorted(cumulated, target, right=True).squeeze(-1)
        drawn[late] = torch.where(target.squeeze(-1) < total.squeeze(-1), found, drawn[late])
    return drawn


def uniforms(states: torch.Tensor) -> torch.Tensor:
    """A number in [0, 1) with 53 random bits from each of `states` [B] int64 -> [B] float64.

    With the hash of the seed in a state that is two rounds of SplitMix64: neighbouring seeds at neighbouring positions
    do not share random numbers.
    """
    return _logical_shift_right(_splitmix64(states), 11).to(torch.float64) * 2.0**-53


def _waits(states: torch.Tensor) -> torch.Tensor:
    """[B] int64 -> [B] float64, exponential with mean 1, positive."""
    return -(uniforms(states) + 2.0**-54).log()


def _splitmix64(state: torch.Tensor) -> torch.Tensor:
    """[B] int64 -> [B] int64, a bijection with good avalanche; int64 arithmetic wraps."""
    state = state + _GOLDEN_GAMMA
    state = (state ^ _logical_shift_right(state, 30)) * _MIX_1
    state = (state ^ _logical_shift_right(state, 27)) * _MIX_2
    return state ^ _logical_shift_right(state, 31)


def _logical_shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 right and fill with zeros instead of the sign bit."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
