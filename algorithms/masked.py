"""Masked and segmented reductions: packed per-token tensors -> scalars or one value per sequence.

Every other module of this package uses these functions. Only this module divides by a mask or a token count; each
function states its result for an empty mask. No function reads a value on the host.

T: packed tokens, N: sequences. `cu_seqlens` [N+1] int32 holds the first token of each sequence; a sequence may be
empty, and tokens from `cu_seqlens[-1]` on are padding that belongs to no sequence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def require_packed(response_mask: Tensor, **per_token: Tensor) -> None:
    """Check that every tensor fits `response_mask` [T] bool, and is float32 (float64 is accepted).

    Raises ValueError for a wrong shape or dtype, naming the tensor; reads no values.
    """
    if response_mask.dtype != torch.bool or response_mask.dim() != 1:
        raise ValueError(
            f"response_mask must be a [T] bool tensor, got {list(response_mask.shape)} {response_mask.dtype}. "
            "Masks are never floats."
        )
    for name, tensor in per_token.items():
        if tensor.shape != response_mask.shape:
            raise ValueError(
                f"{name} must have the shape of response_mask {list(response_mask.shape)}, got {list(tensor.shape)}. "
                "Every per-token tensor is packed, [T]."
            )
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} must be float32, got {tensor.dtype}. Cast where it is computed: a half-precision log-prob "
                "is itself a mismatch."
            )


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of values [T] where mask [T] is True -> scalar; 0 for an empty mask. Values off the mask may be NaN."""
    return torch.where(mask, values, 0.0).sum()


def divide_by_count(values: Tensor, count: float | Tensor) -> Tensor:
    """values / count, with counts below 1 taken as 1: an empty sum stays 0 instead of becoming NaN."""
    return values / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))


def require_segments(response_mask: Tensor, cu_seqlens: Tensor) -> None:
    """Check that `cu_seqlens` [N+1] divides the tokens of `response_mask` [T], with no response token in the padding.

    Raises ValueError with the rule and the value. Values on a GPU are not read, because that would wait for it.
    """
    num_tokens = response_mask.shape[0]
    if cu_seqlens.dim() != 1 or not cu_seqlens.numel() or cu_seqlens.is_floating_point():
        raise ValueError(
            f"cu_seqlens must be an [N+1] tensor of integers, got {list(cu_seqlens.shape)} {cu_seqlens.dtype}"
        )
    if cu_seqlens.device.type != "cpu":
        return
    starts = cu_seqlens.tolist()
    if starts[0] != 0 or starts != sorted(starts) or starts[-1] > num_tokens:
        shown = starts if len(starts) <= 8 else [*starts[:4], "...", *starts[-4:]]
        raise ValueError(f"cu_seqlens must begin with 0, never fall and end at most at T={num_tokens}, got {shown}")
    if behind := int(response_mask[starts[-1] :].sum()):
        raise ValueError(
            f"tokens behind cu_seqlens[-1]={starts[-1]} are padding, but response_mask marks {behind} of them as "
            "response tokens"
        )


def segment_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum of values [T] over each sequence -> [N], same dtype; 0 for an empty sequence.

    Accumulates in float64, each sequence by itself: neither its place in the pack nor the values of other sequences,
    NaN included, change its sum.
    """
    sums = torch.segment_reduce(values.double(), "sum", offsets=cu_seqlens, initial=0, unsafe=True)
    return sums.to(values.dtype)


def segment_mean(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mean of values [T] over the mask-True tokens of each sequence -> [N]; 0 for a sequence without such a token."""
    totals = segment_sum(torch.where(mask, values, 0.0), cu_seqlens)
    return divide_by_count(totals, segment_sum(mask.view(torch.uint8).to(values.dtype), cu_seqlens))


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Maximum of values [T] where mask [T] is True -> scalar float64; -inf for an empty mask."""
    masked = torch.where(mask, values.double(), -math.inf)
    # One more element, because a maximum over T = 0 tokens is an error.
    return torch.cat([masked, masked.new_full((1,), -math.inf)]).amax()


def segment_min(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Minimum of values [T] over each sequence -> [N], same dtype; +inf for an empty sequence."""
    return torch.segment_reduce(values, "min", offsets=cu_seqlens, initial=math.inf, unsafe=True)


def segment_max(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Maximum of values [T] over each sequence -> [N], same dtype; -inf for an empty sequence."""
    return -segment_min(-values, cu_seqlens)


def segment_expand(values: Tensor, cu_seqlens: Tensor, *, num_tokens: int) -> Tensor:
    """One value per sequence [N] -> the value of each token's sequence [T], T = num_tokens; 0 on padding.

    `num_tokens` is an argument because `cu_seqlens[-1]` lies on the device, and reading this value would wait for the
    device.
    """
    padded = torch.cat([values, values.new_zeros(1)])
    lengths = torch.cat([cu_seqlens, cu_seqlens.new_full((1,), num_tokens)]).diff()
    return padded.repeat_interleave(lengths, output_size=num_tokens)
