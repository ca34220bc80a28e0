"""The token differences and what each cause would make of them -> how much of K3 each cause has, and how sure that is.

R: response tokens, C: causes, N: blocks of tokens, B: resamples. Log-probs in nats, K3 in nats per token.

*What is there.* Each cause is computed by itself, so it is known what it would change of every log-prob. The deviation
of a side from the definition is regressed on these changes, all at once: multiple 1 is a cause as computed, 0 is none.

*How much.* The share of a cause is that of Shapley (A Value for n-Person Games, 1953) in the K3 of the computed
log-probs: the mean of what it adds to K3 as the first cause, and as the last. It is scaled to what is explained.

*What is explained.* Along the straight line from no difference to d, a change z of d has the part z K3(d) / d of K3(d)
(Aumann and Shapley, Values of Non-Atomic Games, 1974): for small d the covariance z d / 2. What the fitted changes have
is reproduced. An engine that rounds in another order has other noise than a replay, and the same amount of it. So noise
is a component of variance: its amount is known, its values are not. Causes that round take of what is not reproduced as
much as their replay is larger than what is reproduced of it, and no more. The rest is not explained.

*Intervals* are 95 % percentile intervals of a bootstrap over blocks of neighbouring tokens (Kuensch, Annals of
Statistics 17, 1989). Everything is computed again from each resample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.kl import k3
from trainer.diagnose.case import COMMON, LEAST_COMMON, Candidate, evenly

BLOCK_TOKENS = 16
RESAMPLES = 500
LEVELS = (0.025, 0.975)
MOST_LARGER = 2.0
"""What is explained, over what the causes have in a replay, at most: what is beyond it is not explained."""
WIDE = 0.3
"""Width of an interval of shares from which two causes are not told apart."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Effect:
    """What a cause by itself changes of the log-probs of its side."""

    side: str
    cause: Candidate
    change: Tensor
    """[R] float64, nats, with the cause less without it."""
    size: Tensor
    """[R] float64, nats: what the cause adds to the K3 of the computed log-probs."""
    is_known: bool = False
    """True if the change is measured, not computed: its multiple is 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A part of K3."""

    k3: float
    """Nats per token; negative if the cause hides a part of another one."""
    share: float
    """k3 / K3; NaN where K3 is 0."""
    low: float = math.nan
    high: float = math.nan
    """Ends of the 95 % interval of the share; NaN if it is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Of all causes, in the order of the effects."""

    parts: tuple[Share, ...]
    unexplained: Share
    mixed: tuple[tuple[int, int, float], ...]
    """(number of a cause, that of another, tokens that would do), for two of which only the sum is known."""


def shares(
    deviations: dict[str, Tensor], effects: Sequence[Effect], difference: Tensor, mask: Tensor, lengths: Sequence[int]
) -> Shares:
    """Regress, and divide K3.

    Args:
        deviations: side -> [R] float64, its log-probs less those of the definition, without the known effects.
        effects: of both sides.
        difference: [R] float64, trainer's log-probs less the engine's.
        mask: [R] bool, tokens that count.
        lengths: response tokens of each response, for the blocks.
    """
    tokens = float(mask.sum())
    sums = _Sums(deviations, effects, difference, mask, lengths)
    draw = torch.Generator().manual_seed(0)
    picked = torch.randint(sums.num_blocks, (RESAMPLES, sums.num_blocks), generator=draw)
    counts = torch.zeros(RESAMPLES, sums.num_blocks, dtype=torch.float64)
    counts.scatter_add_(1, picked, torch.ones_like(picked, dtype=torch.float64))
    found, [parts] = sums.parts(counts), sums.parts(torch.ones(1, sums.num_blocks, dtype=torch.float64))
    whole = found.sum(-1, keepdim=True).clamp_min(1e-300)  # what is not explained is the last part
    low, high = (found / whole).quantile(torch.tensor(LEVELS, dtype=torch.float64), dim=0)
    each = [
        Share(k3=float(part) / tokens, share=float(part / parts.sum()), low=float(least), high=float(most))
        for part, least, most in zip(parts, low, high, strict=True)
    ]
    return Shares(parts=tuple(each[:-1]), unexplained=each[-1], mixed=tuple(_mixed(found / whole, tokens)))


def _mixed(found: Tensor, tokens: float) -> list[tuple[int, int, float]]:
    """Pairs of causes whose shares [B, C + 1] are wide, and whose sum is not."""

    def width(values: Tensor) -> float:
        low, high = values.quantile(torch.tensor(LEVELS, dtype=torch.float64))
        return float(high - low)

    widths = [width(each) for each in found.T]
    pairs = []
    for one in range(len(widths) - 1):
        for other in range(one):
            narrower = min(widths[one], widths[other])
            if narrower > WIDE and width(found[:, one] + found[:, other]) < narrower / 2:
                pairs.append((other, one, tokens * (narrower / WIDE) ** 2))
    return pairs


class _Sums:
    """Sums over the blocks, of which every resample is a weighted sum."""

    def __init__(
        self,
        deviations: dict[str, Tensor],
        effects: Sequence[Effect],
        difference: Tensor,
        mask: Tensor,
        lengths: Sequence[int],
    ) -> None:
        blocks, self.num_blocks = _blocks(lengths, mask)
        count = len(effects)
        self._known = torch.tensor([each.is_known for each in effects], dtype=torch.bool)
        self._rounds = torch.tensor([each.cause.rounds for each in effects], dtype=torch.bool)
        # Only the amount of another order is known: no replay has its values.
        self._unseen = torch.tensor([not bool(each.change.any()) for each in effects], dtype=torch.bool)
        changes, sizes = (
            torch.stack(each) if each else torch.zeros(0, len(mask), dtype=torch.float64)
            for each in ([each.change for each in effects], [each.size for each in effects])
        )
        products = torch.zeros(count, count, len(mask), dtype=torch.float64)
        along = torch.zeros(count, len(mask), dtype=torch.float64)
        for side, deviation in deviations.items():
            rows = torch.tensor([each.side == side and not each.is_known for each in effects], dtype=torch.bool)
            x = changes * rows[:, None]
            # Where a change is far below what no cause explains, the token says nothing of its multiple.
            left = (deviation - x.sum(0)).nan_to_num(0.0)
            weights = evenly(torch.cat([x, left[None]]), mask & ~deviation.isnan())
            products += x[:, None] * x[None] * weights
            along += x * deviation.nan_to_num(0.0) * weights
        signs = torch.tensor([1.0 if each.side == "trainer" else -1.0 for each in effects], dtype=torch.float64)
        slope = torch.where(difference.abs() > 0, k3(difference) / difference, 0.0)
        stacked = [products.flatten(0, 1), along, signs[:, None] * changes * slope, sizes, k3(difference)[None]]
        self._parted = [len(each) for each in stacked]
        values = torch.where(mask, torch.cat(stacked), 0.0)
        self._sums = torch.zeros(len(values), self.num_blocks, dtype=torch.float64).index_add_(1, blocks, values)

    def _of(self, counts: Tensor) -> tuple[Tensor, ...]:
        return (counts @ self._sums.T).split(self._parted, dim=-1)

    def multiples(self, counts: Tensor) -> Tensor:
        """[B, C] of every effect, for resamples that have each block `counts` [B, N] times."""
        products, along, *_ = self._of(counts)
        count = along.shape[-1]
        products = products.unflatten(-1, (count, count))
        scale = products.diagonal(dim1=-2, dim2=-1).clamp_min(1e-300).rsqrt()
        even = products * scale[:, :, None] * scale[:, None] + 1e-6 * torch.eye(count, dtype=torch.float64)
        return torch.where(self._known, 1.0, torch.linalg.solve(even, along * scale) * scale)

    def parts(self, counts: Tensor) -> Tensor:
        """[B, C + 1]: sums of K3 over the tokens, that of what is not explained last."""
        _, _, slopes, sizes, whole = self._of(counts)
        multiples = self.multiples(counts)
        rounding = ((multiples - LEAST_COMMON) / (COMMON - LEAST_COMMON)).clamp(0, 1)
        rounding = torch.where(self._unseen, 1.0, rounding)
        is_there = torch.where(self._rounds, rounding, multiples.clamp_min(0))
        own = torch.where(self._known, 0.0, sizes * is_there)
        reproduced = multiples * slopes
        left = whole - reproduced.sum(-1, keepdim=True)
        room = torch.where(self._rounds, own - reproduced, 0.0).sum(-1, keepdim=True).clamp_min(0)
        left -= left.clamp_min(0).minimum(room)
        explained = whole - left - torch.where(self._known, slopes, 0.0).sum(-1, keepdim=True)
        replayed = own.sum(-1, keepdim=True)
        shared = explained.clamp_min(0).minimum(MOST_LARGER * replayed.clamp_min(0))
        divided = shared * own / replayed.clamp_min(1e-300)
        left = left + explained - shared
        return torch.cat([torch.where(self._known, slopes, divided), left], dim=-1)


def _blocks(lengths: Sequence[int], mask: Tensor) -> tuple[Tensor, int]:
    """([R] number of the block of each token, how many): a block has neighbouring tokens of one response."""
    firsts = torch.cat([torch.arange(length) % BLOCK_TOKENS == 0 for length in lengths])
    numbers = firsts.cumsum(0) - 1
    used, places = numbers[mask].unique(return_inverse=True)
    found = torch.zeros_like(numbers)
    found[mask] = places
    return found, max(1, len(used))
