"""Draws tokens from probabilities with one seed per sample: (probabilities, seeds, positions) -> token ids. Torch only.

`rollout/sglang/cpu/srt_platform.py` uses it inside SGLang's scheduler. A draw depends only on the sample's own seed,
the position and the probabilities: not on the other samples of the batch, not on their order of arrival.
"""

from __future__ import annotations

import torch

_GOLDEN_GAMMA = -7046029254386353131
"""0x9E3779B97F4A7C15 as a signed 64-bit integer: the increment of SplitMix64 (doi.org/10.1145/2714064.2660195)."""
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


def uniforms(seeds: torch.Tensor, *, positions: torch.Tensor) -> torch.Tensor:
    """A number in [0, 1) with 53 random bits from each seed [B] int64 and position [B] -> [B] float64.

    Two rounds of SplitMix64: the first scatters the seed, so that neighbouring seeds at neighbouring positions do not
    share random numbers.
    """
    state = _splitmix64(seeds.to(torch.int64))
    state = _splitmix64(state + positions.to(torch.int64) * _GOLDEN_GAMMA)
    return _logical_shift_right(state, 11).to(torch.float64) * 2.0**-53


def draw(probs: torch.Tensor, *, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF draw: the first token whose cumulated weight exceeds `uniform` [B] times the total -> [B] int64.

    `probs` [B, V] are non-negative weights; rows need not sum to 1. A token of weight 0 is never drawn.
    """
    cumulated = probs.to(torch.float64).cumsum(dim=-1)
    total = cumulated[:, -1:]
    # Rounding may lift uniform * total up to total itself; the clamp below total ensures that a token is always found.
    target = torch.minimum(uniform.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, target, right=True).squeeze(-1)


def _splitmix64(state: torch.Tensor) -> torch.Tensor:
    """[B] int64 -> [B] int64, a bijection with good avalanche; int64 arithmetic wraps."""
    state = state + _GOLDEN_GAMMA
    state = (state ^ _logical_shift_right(state, 30)) * _MIX_1
    state = (state ^ _logical_shift_right(state, 27)) * _MIX_2
    return state ^ _logical_shift_right(state, 31)


def _logical_shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 right and fill with zeros instead of the sign bit."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
