"""The critic's loss of one micro-batch (PPO): values + returns -> scalar to call backward on, statistics.

Like the policy loss, the critic's loss is a sum: `algorithms.aggregate` puts the denominator of the whole optimizer
step into the coefficients, and losses of micro-batches and ranks are added up. T: packed tokens, K: sums, M: maxima.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from algorithms.masked import masked_max, require_packed
from algorithms.returns import ROUNDING
from algorithms.stats import Stats, max_or_none, mean_or_none

VALUE_SUMS: Final = (
    "loss", "tokens", "invalid", "clipped", "value", "returns", "returns_squared", "residual", "residual_squared",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ValueStats(Stats):
    """Statistics of the critic's predictions and of the value clip."""

    def metrics(self, *, optimizer_steps: int = 1) -> dict[str, float | None]:
        """`critic/*`: means over valid response tokens. Reads the device; None where there is no such token.

        critic/loss: the aggregated loss, a sum divided by the `optimizer_steps` that were merged. clip_frac: tokens
        without gradient, because V has left the clip range and lies closer to R than the range does.
        explained_variance: 1 - Var(R - V_old) / Var(R), how much of the returns the critic knew before the update; 1
        is perfect, 0 or less is no better than a constant, None if all returns are equal. value_mean, returns_mean: in
        units of reward. error_max: the largest |V - R|. invalid_tokens: response tokens left out for a non-finite
        input.
        """
        sums = dict(zip(VALUE_SUMS, self.sums.tolist(), strict=True))
        tokens = sums["tokens"]
        return {
            "critic/loss": sums["loss"] / optimizer_steps,
            "critic/clip_frac": mean_or_none(sums["clipped"], tokens),
            "critic/explained_variance": _explained(sums),
            "critic/value_mean": mean_or_none(sums["value"], tokens),
            "critic/returns_mean": mean_or_none(sums["returns"], tokens),
            "critic/error_max": max_or_none(self.maxes.tolist()[0], tokens),
            "critic/invalid_tokens": sums["invalid"],
        }


class ValueLossOutput(NamedTuple):
    """The contribution of a micro-batch to the critic's optimizer step."""

    loss: Tensor
    """Scalar float32, part of a sum over micro-batches and ranks, always with a graph: every rank runs backward."""
    stats: ValueStats
    """Sums and maxima on the device; merge them over micro-batches, reduce them over ranks."""


def value_loss(
    values: Tensor,
    *,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    coefficients: Tensor,
    clip: float | None,
) -> ValueLossOutput:
    """sum of coefficient x 0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) over the response tokens.

    Args:
        values: [T] float32 with gradient, V of the critic being trained, in units of reward.
        old_values: [T] float32, V before the update, from which the returns were computed.
        returns: [T] float32 from `algorithms.returns.gae`.
        response_mask: [T] bool.
        coefficients: [T] float32 from `algorithms.aggregate.token_coefficients`.
        clip: c, in units of reward; None for the plain squared error.

    A response token with a non-finite value, old value or return is left out and counted (`critic/invalid_tokens`).
    Raises ValueError for a wrong shape or dtype.

    Source: the code that came with PPO (https://arxiv.org/abs/1707.06347), which the paper does not describe; see
    https://arxiv.org/abs/2005.12729, section 3.
    """
    require_packed(response_mask, values=values, old_values=old_values, returns=returns, coefficients=coefficients)
    finite = torch.isfinite(values) & torch.isfinite(old_values) & torch.isfinite(returns)
    active = response_mask & finite
    # Masked before the square: 0 x inf would be NaN, in the loss and in the gradient.
    predicted = torch.where(active, values, 0.0)
    before = torch.where(active, old_values, 0.0).detach()
    target = torch.where(active, returns, 0.0).detach()
    error = (predicted - target).square()
    clipped = torch.zeros_like(active)
    if clip is not None:
        moved = (before + (predicted - before).clamp(-clip, clip) - target).square()
        clipped = moved > error
        error = torch.where(clipped, moved, error)
    scale = torch.where(active, coefficients, 0.0).detach()
    loss = (scale.double() * error).sum() / 2
    with torch.no_grad():
        columns = {
            "tokens": active,
            "invalid": response_mask & ~active,
            "clipped": clipped,
            "value": predicted,
            "returns": target,
            "returns_squared": target.double().square(),
            "residual": target - before,
            "residual_squared": (target - before).double().square(),
        }
        sums = torch.stack([columns[name].double() for name in VALUE_SUMS[1:]]).sum(dim=1)
        stats = ValueStats(
            sums=torch.cat([loss.detach().reshape(1), sums]),
            maxes=masked_max((predicted - target).abs(), active).reshape(1),
        )
    return ValueLossOutput(loss=loss.to(values.dtype), stats=stats)


def _explained(sums: dict[str, float]) -> float | None:
    """1 - Var(R - V_old) / Var(R); None where the returns do not vary."""
    spread = _variance(sums["returns"], sums["returns_squared"], sums["tokens"])
    unexplained = _variance(sums["residual"], sums["residual_squared"], sums["tokens"])
    return 1 - unexplained / spread if spread else None


def _variance(total: float, squares: float, count: float) -> float:
    """Biased variance from sums; 0 where the difference is a rounding error, and where count is 0."""
    mean_square = squares / max(count, 1)
    variance = mean_square - (total / max(count, 1)) ** 2
    return variance if variance > ROUNDING * mean_square else 0.0
