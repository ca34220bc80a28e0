"""Packed attention in exact arithmetic: the forward is that of the engine (`rollout/exact/attention.py`).

Sequences of similar size are padded to one shape and computed together; neither padding nor company changes a bit. The
backward pass is that of `trainer.scoring.attention.py`, at the same queries, keys and values.

I: tokens that the decoder computes, H: heads, K: key/value heads, D: size of a head, M: sequences of one shape, L:
their tokens, C: their columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from rollout.exact.attention import KEY_BLOCK, attend, num_columns
from rollout.model.limits import check_attention
from trainer.batch.train_batch import Branch
from trainer.scoring.attention import Segments, attend_by_run

EXACT_ATTENTION = "parity_exact"
"""Value of `attn_implementation` that selects this function."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sequences that are computed together: indices among the I tokens; what is padded points at the first token."""

    queries: Tensor
    """[M, L] int64."""
    is_query: Tensor
    """[M, L] bool, False for padding."""
    keys: Tensor
    """[M, C] int64: of the prompt, then of the sequence itself."""
    positions: Tensor
    """[M, L] int64, in the sequence."""


def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention interface of transformers: query [1, H, I, D], key and value [1, K, I, D] -> [1, I, H, D].

    Needs `segments` (Segments) as a keyword argument of the model's forward. Raises ValueError like packed attention.
    """
    segments = kwargs["segments"]
    if not isinstance(segments, Segments):
        raise TypeError("exact attention needs segments (Segments)")
    if attention_mask is not None or dropout:
        raise ValueError("exact attention takes segments, no attention mask and no dropout")
    check_attention(kwargs, longest=segments.longest, name="exact")
    out: Tensor = _ExactAttention.apply(query, key, value, segments, scaling)
    return out, None


def shapes(segments: Segments) -> list[Shape]:
    """The sequences of `segments` by their size: at most half of the queries and of the columns of each are padding."""
    branches = [*(Branch(0, 0, length) for length in segments.roots), *segments.branches]
    starts = accumulate((branch.length for branch in branches), initial=0)
    by_size: dict[tuple[int, int], list[tuple[int, Branch]]] = defaultdict(list)
    for start, branch in zip(starts, branches, strict=False):
        blocks = num_columns(branch.prompt_length + branch.length) // KEY_BLOCK
        by_size[branch.length.bit_length(), blocks.bit_length()].append((start, branch))
    return [_shape(members) for members in by_size.values()]


def _shape(members: Sequence[tuple[int, Branch]]) -> Shape:
    length = max(branch.length for _, branch in members)
    columns = num_columns(max(branch.prompt_length + branch.length for _, branch in members))
    queries = torch.zeros((len(members), length), dtype=torch.int64)
    keys = torch.zeros((len(members), columns), dtype=torch.int64)
    positions, is_query = torch.zeros_like(queries), torch.zeros_like(queries, dtype=torch.bool)
    for row, (start, branch) in enumerate(members):
        prompt, end = branch.prompt_length, branch.prompt_length + branch.length
        own = torch.arange(start, start + branch.length)
        queries[row, : branch.length], is_query[row, : branch.length] = own, True
        positions[row, : branch.length] = torch.arange(prompt, end)
        keys[row, :prompt] = torch.arange(branch.prompt_start, branch.prompt_start + prompt)
        keys[row, prompt:end] = own
    return Shape(queries=queries, is_query=is_query, keys=keys, positions=positions)


class _ExactAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.segments, ctx.scaling = segments, scaling
        out = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
        for shape in segments.once(shapes):
            q = query[0][:, shape.queries].transpose(0, 1)  # [M, H, L, D]
            k, v = (states[0][:, shape.keys].transpose(0, 1) for states in (key, value))
            found = attend(q, k, v, shape.positions.to(query.device), scaling=scaling)
            out[shape.queries[shape.is_query]] = found[shape.is_query]
        return out[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            out = attend_by_run(query, key, value, ctx.segments, scaling=ctx.scaling)
        by_query, by_key, by_value = torch.autograd.grad(out, (query, key, value), grad)
        return by_query, by_key, by_value, None, None


AttentionInterface.register(EXACT_ATTENTION, exact_attention)
