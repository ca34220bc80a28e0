"""The denominator of the loss: aggregation rule and global counts -> one coefficient per token.

The loss is sum(per-token loss x coefficient) over all micro-batches and ranks of an optimizer step. The counts are
global and fixed before the first forward, so the gradient depends neither on packing nor on sharding.

T: packed tokens, N: sequences of this micro-batch.
"""

from __future__ import annotations

from torch import Tensor

from algorithms.config.loss import Aggregation, CustomAggregation
from algorithms.masked import divide_by_count, segment_expand, segment_sum


def token_coefficients(
    aggregation: Aggregation | CustomAggregation,
    *,
    mask: Tensor,
    cu_seqlens: Tensor,
    num_tokens: float | Tensor,
    num_sequences: float | Tensor,
    fixed_length_tokens: int | None,
) -> Tensor:
    """The factor of each token's loss -> [T] float32, 0 off the mask.

    Args:
        aggregation: The rule.
        mask: [T] bool, the tokens of the denominator: response_mask, or response_mask & keep when rejected tokens leave
            the denominator.
        cu_seqlens: [N+1] int32, first token of each sequence; a sequence is never split over micro-batches.
        num_tokens: mask-True tokens of the optimizer step, over all ranks.
        num_sequences: Sequences of the optimizer step with a mask-True token, over all ranks.
        fixed_length_tokens: Divisor of aggregation=fixed_length, tokens.

    A count of 0 divides by 1: an empty sum gives the loss 0, not NaN. Raises ValueError for aggregation=fixed_length
    without fixed_length_tokens.
    """
    ones = mask.float()
    if isinstance(aggregation, CustomAggregation):
        counts = {"num_tokens": float(num_tokens), "num_sequences": float(num_sequences)}
        return aggregation.fitting(aggregation.answer(mask, cu_seqlens, **counts), ones, finite=True)
    match aggregation:
        case Aggregation.token_mean:
            return divide_by_count(ones, num_tokens)
        case Aggregation.seq_mean_token_mean:
            lengths = segment_expand(segment_sum(ones, cu_seqlens), cu_seqlens, num_tokens=mask.shape[0])
            return divide_by_count(divide_by_count(ones, lengths), num_sequences)
        case Aggregation.seq_mean_token_sum:
            return divide_by_count(ones, num_sequences)
        case Aggregation.fixed_length:
            if fixed_length_tokens is None:
                raise ValueError(
                    "loss.fixed_length_tokens must be > 0 with aggregation=fixed_length, got None. "
                    "Usually the value of sampling.max_new_tokens."
                )
            return divide_by_count(divide_by_count(ones, fixed_length_tokens), num_sequences)
        case Aggregation.token_sum:
            return ones
