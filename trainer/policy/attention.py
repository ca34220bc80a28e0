"""Causal attention over packed sequences for any Hugging Face decoder, chosen by name instead of by mask.

Transformers recognises packed sequences only in some configurations; with a cache in eval mode it lets packed
sequences attend to each other without a word. Here the boundaries are explicit: `cu_seqlens` travels with the
call, each sequence is attended to by itself, and no [T, T] mask is ever built.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rollout.hf.model_limits import check_attention
from rollout.hf.transformers import AttentionInterface

PACKED_ATTENTION = "parity_packed"
"""Value of `attn_implementation` that selects this function."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention interface of transformers: query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D].

    On a GPU, sequences are padded on the right to the longest one and attended to causally in one batch: a real token
    never sees padding behind it, so no mask is needed. On a CPU nothing is padded. Needs `cu_seqlens` [N+1] and
    `max_seqlen` as keyword arguments of the model's forward.
    """
    cu_seqlens, max_seqlen = kwargs["cu_seqlens"], kwargs["max_seqlen"]
    if not isinstance(cu_seqlens, Tensor) or not isinstance(max_seqlen, int):
        raise TypeError("packed attention needs cu_seqlens (Tensor) and max_seqlen (int)")
    if attention_mask is not None:
        raise ValueError("packed attention takes cu_seqlens, not an attention mask")
    check_attention(kwargs, longest=max_seqlen, name="packed")
    if query.device.type == "cpu":
        lengths = cu_seqlens.diff().tolist()
        return attend_by_run(query, key, value, lengths, scaling=scaling, dropout=dropout), None
    grid = token_grid(cu_seqlens.to(query.device), query.shape[2])
    shape = (cu_seqlens.numel() - 1, max_seqlen)
    return attend_padded(query, key, value, grid, shape=shape, scaling=scaling, dropout=dropout), None


def attend_padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grid: tuple[Tensor, Tensor],
    *,
    shape: tuple[int, int],
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """[1, H, T, D] -> [1, T, H, D]: one call on `shape`, sequences x longest; `grid` is the `token_grid`."""

    def pad(packed: Tensor) -> Tensor:
        padded = packed.new_zeros(*shape, packed.shape[1], packed.shape[3])
        return padded.index_put(grid, packed[0].transpose(0, 1)).transpose(1, 2)

    out = scaled_dot_product_attention(
        pad(query),
        pad(key),
        pad(value),
        dropout_p=dropout,
        is_causal=True,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2)[grid].unsqueeze(0)


def attend_by_run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """[1, H, T, D] -> [1, T, H, D]: neighbours of the same length in one call, without a copy.

    In float32 if the dtype is narrower: on a CPU torch's backward of attention takes three times as long in bfloat16.
    """
    runs = [(length, len(list(same))) for length, same in groupby(lengths)]
    sizes = [length * number for length, number in runs]
    wide = torch.promote_types(query.dtype, torch.float32)
    split = (states.to(wide).squeeze(0).split(sizes, dim=1) for states in (query, key, value))
    outs = []
    for (length, number), *parts in zip(runs, *split, strict=True):
        # [H, number * length, D] -> [number, H, length, D]
        q, k, v = (part.unflatten(1, (number, length)).transpose(0, 1) for part in parts)
        out = scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).to(query.dtype).unsqueeze(0)


def token_grid(cu_seqlens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Sequence number and offset within the sequence of every packed token: two [T] int64."""
    positions = torch.arange(num_tokens, device=cu_seqlens.device)
    rows = torch.bucketize(positions, cu_seqlens[1:], right=True)
    return rows, positions - cu_seqlens[rows]


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
