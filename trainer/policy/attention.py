"""Causal attention over packed sequences for any Hugging Face decoder, chosen by name instead of by mask.

Transformers recognises packed sequences only in some configurations; with a cache in eval mode it lets packed
sequences attend to each other without a word. Here the boundaries are explicit: `cu_seqlens` travels with the
call, each sequence is attended to by itself, no [T, T] mask is ever built, and nothing is padded.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rollout.torch.model_limits import check_attention

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

    Needs `cu_seqlens` [N+1] int32 and `max_seqlen` as keyword arguments of the model's forward. Raises ValueError for a
    mask, dropout, or an option of the layer that this attention does not compute.
    """
    cu_seqlens, max_seqlen = kwargs["cu_seqlens"], kwargs["max_seqlen"]
    if not isinstance(cu_seqlens, Tensor) or not isinstance(max_seqlen, int):
        raise TypeError("packed attention needs cu_seqlens (Tensor) and max_seqlen (int)")
    if attention_mask is not None:
        raise ValueError("packed attention takes cu_seqlens, not an attention mask")
    if dropout:
        raise ValueError(f"packed attention has no dropout, got {dropout}: put the model into eval mode")
    check_attention(kwargs, longest=max_seqlen, name="packed")
    if flash_runs(query, key, value):
        return attend_at_once(query, key, value, cu_seqlens, longest=max_seqlen, scaling=scaling), None
    return attend_by_run(query, key, value, cu_seqlens.diff().tolist(), scaling=scaling), None


def flash_runs(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True if torch's flash attention takes these tensors: float16 or bfloat16 on a GPU, Ampere or newer."""
    if not query.is_cuda:
        return False
    params = SDPAParams(query, key, value, None, 0.0, True, query.shape[1] != key.shape[1])
    return query.shape[3] % 8 == 0 and can_use_flash_attention(params)


def attend_at_once(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *, longest: int, scaling: float | None = None
) -> Tensor:
    """[1, H, T, D] -> [1, T, H, D]: all sequences in one call of flash attention. Not yet run on a GPU."""
    q, k, v = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    out = varlen_attn(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        scale=scaling,
        window_size=(-1, 0),  # causal
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)  # nothing else was asked for
    return out.unsqueeze(0)


def attend_by_run(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], *, scaling: float | None = None
) -> Tensor:
    """[1, H, T, D] -> [1, T, H, D]: neighbours of the same length in one call, without a copy, on any device.

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
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).to(query.dtype).unsqueeze(0)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
