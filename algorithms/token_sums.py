"""One pass over the tokens of a micro-batch: per-token inputs -> sums, maxima, a sketch, and sums per block.

The tokens go through in pieces that fit a cache, each once, with masks as bit patterns (`algorithms.bits`). Read by
`algorithms.mismatch_stats`; n: tokens of a piece, T: all, B: blocks, V: criteria.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from algorithms.bits import bits_mask, keep_where, mask_bits, valid_bits
from algorithms.chunks import chunk_tokens
from algorithms.kl import k3
from algorithms.sketch import GROUP_BINS, add_log_ratios

BLOCK: Final = 64
"""Tokens of a block: long enough that blocks are cheap, short enough that few tokens share one with a border."""
LOG2_E: Final = math.log2(math.e)

TOKEN_SUMS: Final = (
    "rollout_prob",
    "prob_diff",
    "abs_prob_diff",
    "rollout_prob_squared",
    "prob_diff_squared",
    "prob_product",
    "weight_squared",
    "raw_weight",
    "clipped_weight",
    "advantage",
    "abs_advantage",
    "weighted_advantage",
    "weighted_abs_advantage",
    "entropy",
)
"""Sums over valid response tokens; those of the advantage over all response tokens. prob_product is mu (pi_old - mu);
clipped_weight the weight that the upper bound cut off."""
FLAGS: Final = ("tokens", "valid", "kept", "clipped", "raised")
"""Numbers of response tokens."""
MISMATCH_MAXES: Final = ("delta", "minus_delta", "prob_diff")
"""Over valid tokens, and 0 where some token is not one: off the mask Delta counts as 0."""


class Tokens(NamedTuple):
    """The per-token inputs, or a part of them."""

    old_logprobs: Tensor
    rollout_logprobs: Tensor
    response_mask: Tensor
    keep: Tensor | None
    weight: Tensor | None
    raw_weight: Tensor | None
    clipped: Tensor | None
    raised: Tensor | None
    advantages: Tensor | None
    entropy: Tensor | None
    verdicts: tuple[Tensor, ...]

    def each(self, part: Callable[[Tensor], Tensor]) -> Tokens:
        """The same part of every tensor."""

        def given(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else part(tensor)

        return Tokens(
            old_logprobs=part(self.old_logprobs),
            rollout_logprobs=part(self.rollout_logprobs),
            response_mask=part(self.response_mask),
            keep=given(self.keep),
            weight=given(self.weight),
            raw_weight=given(self.raw_weight),
            clipped=given(self.clipped),
            raised=given(self.raised),
            advantages=given(self.advantages),
            entropy=given(self.entropy),
            verdicts=tuple(part(verdict) for verdict in self.verdicts),
        )

    def cut(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop), filled up to whole blocks with tokens off the mask."""
        padding = -(stop - start) % BLOCK

        def part(tensor: Tensor) -> Tensor:
            return torch.cat([tensor[start:stop], tensor.new_zeros(padding)]) if padding else tensor[start:stop]

        return self.each(part)


class Measured(NamedTuple):
    """n tokens, measured."""

    delta: Tensor
    """[n] as given, log pi_old - log mu, 0 where not valid."""
    delta64: Tensor
    """[n] float64, the same."""
    response: Tensor
    """[n] int32, -1 on response tokens, 0 off the mask."""
    valid: Tensor
    """[n] int32, -1 where both log-probs are log-probabilities."""
    kept: Tensor | None
    """[n] int32, -1 on kept tokens."""
    weight: Tensor | None
    """[n] float64, applied weight, 0 on tokens that are not kept."""
    rows: list[Tensor]
    """[n] float64 each, summed per sequence: Delta, log mu, the weight, and k3 where it is wanted."""
    flags: Tensor
    """[5 + V, n] bool: FLAGS, then the tokens that each criterion rejects."""


def pass_over(tokens: Tokens, table: Tensor, *, with_k3: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Every token once -> TOKEN_SUMS, MISMATCH_MAXES, and sums per block [rows + flags, B]; fills `table`."""
    num_tokens = tokens.response_mask.shape[0]
    device = tokens.response_mask.device
    size = chunk_tokens(device)  # whole blocks
    num_rows = 3 + with_k3 + len(FLAGS) + len(tokens.verdicts)
    blocks = torch.zeros(num_rows, -(-num_tokens // BLOCK), dtype=torch.float64, device=device)
    totals = torch.zeros(len(TOKEN_SUMS), dtype=torch.float64, device=device)
    maxes = torch.full((len(MISMATCH_MAXES),), -math.inf, dtype=torch.float64, device=device)
    for start in range(0, num_tokens, size):
        stop = min(start + size, num_tokens)
        part = tokens.cut(start, stop)
        measured = measure(part, with_k3=with_k3)
        blocks[:, start // BLOCK : -(-stop // BLOCK)] = _block_sums(measured)
        rejected = None if measured.kept is None else measured.kept + 1
        add_log_ratios(table, measured.delta64, kind=rejected)
        part_totals, part_maxes = _token_sums(part, measured)
        totals += part_totals
        maxes = torch.maximum(maxes, part_maxes)
    # Tokens that are not valid were counted with Delta = 0, among the rejected ones if there is such a class.
    zeros = blocks.shape[1] * BLOCK - blocks[3 + with_k3 + 1].sum()
    table[0, 0 if tokens.keep is None else GROUP_BINS] -= zeros
    return totals, maxes, blocks


def measure(part: Tokens, *, with_k3: bool) -> Measured:
    """Some tokens of the pack, their number a multiple of BLOCK."""
    delta = part.old_logprobs - part.rollout_logprobs
    response = mask_bits(part.response_mask)
    valid = valid_bits(delta, part.rollout_logprobs) & response
    delta = keep_where(valid, delta)
    delta64 = delta.double()
    is_valid = bits_mask(valid)
    kept = weight = None
    never = torch.zeros_like(is_valid)
    counted = [never, never, never]
    if part.keep is not None and part.weight is not None:
        keep = part.keep & is_valid
        kept = mask_bits(keep)
        weight = keep_where(kept, part.weight).double()
        counted = [keep, *(never if cut is None else cut & keep for cut in (part.clipped, part.raised))]
    rows = [
        delta64,
        keep_where(valid, part.rollout_logprobs).double(),
        torch.zeros_like(delta64) if weight is None else weight,
    ]
    if with_k3:
        rows.append(k3(delta64))
    flags = torch.stack([part.response_mask, is_valid, *counted])
    return Measured(
        delta=delta,
        delta64=delta64,
        response=response,
        valid=valid,
        kept=kept,
        weight=weight,
        rows=rows,
        flags=flags if not part.verdicts else torch.cat([flags, _rejected(part)]),
    )


def _rejected(part: Tokens) -> Tensor:
    """Response tokens that each criterion rejects -> [V, n] bool."""
    return torch.stack(part.verdicts).bitwise_not_().bitwise_and_(part.response_mask)


def _block_sums(measured: Measured) -> Tensor:
    """Sums over blocks -> [rows + flags, n / BLOCK] float64."""
    rows = torch.stack([row.view(-1, BLOCK).sum(1) for row in measured.rows])
    # Eight flags at a time as the bytes of an integer: the product collects their sum, at most 64, in the top byte.
    bytes_ = measured.flags.view(torch.int64).view(measured.flags.shape[0], -1, BLOCK // 8).sum(2)
    return torch.cat([rows, ((bytes_ * 0x0101010101010101) >> 56).double()])


def _token_sums(part: Tokens, measured: Measured) -> tuple[Tensor, Tensor]:
    """TOKEN_SUMS and MISMATCH_MAXES of a part, float64."""
    mu = keep_where(measured.valid, torch.exp2(part.rollout_logprobs * LOG2_E))
    difference = keep_where(measured.valid, torch.exp2(part.old_logprobs * LOG2_E)) - mu
    # -log mu is at most 128 octaves: what overflows is not valid. The difference of equal log-probs is exactly 0.
    mu, difference = mu.double(), difference.double()
    distance = difference.abs()
    zero = distance.new_zeros(())
    sums = [mu.sum(), difference.sum(), distance.sum()]
    sums += [torch.dot(mu, mu), torch.dot(difference, difference), torch.dot(mu, difference)]
    sums += [zero] * 3 if measured.weight is None else _weight_sums(part, measured, measured.weight)
    if part.advantages is None or measured.weight is None:
        sums += [zero] * 4
    else:
        advantage = keep_where(measured.response, part.advantages).double()
        size = advantage.abs()
        sums += [advantage.sum(), size.sum()]
        sums += [torch.dot(measured.weight, advantage), torch.dot(measured.weight, size)]
    sums.append(zero if part.entropy is None else keep_where(measured.valid, part.entropy).double().sum())
    low, high = torch.aminmax(measured.delta)
    return torch.stack(sums), torch.stack([high.double(), -low.double(), distance.amax()])


def _weight_sums(part: Tokens, measured: Measured, weight: Tensor) -> list[Tensor]:
    """Squared applied weights, weights before their bounds, and what the upper bound cut off."""
    if part.raw_weight is None:
        return [torch.dot(weight, weight), -measured.valid.sum(dtype=torch.float64), weight.new_zeros(())]
    raw = keep_where(measured.valid, part.raw_weight).double()
    clipped = measured.flags[FLAGS.index("clipped")].view(torch.uint8).double()
    return [torch.dot(weight, weight), raw.sum(), torch.dot(raw - weight, clipped)]
