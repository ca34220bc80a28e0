"""The attention backend `parity_batched` of a CPU server: sequences of one new token in a few large operators.

Only SGLang loads this file; `srt_platform.py` registers the backend. SGLang's `torch_native`, the base class, runs
about ten operators per sequence and layer in every step; here sequences of similar length share the operators.
Everything else (several new tokens, sliding windows, cross attention, encoders) runs in `torch_native`.

A slot is the place of one token in SGLang's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

BLOCK_NUMBERS = 1 << 20
"""Bound on the float32 keys of a block, 4 MiB: then two threads have enough to share in every operator, and short
sequences are not padded to the length of a long one."""


class Block(NamedTuple):
    """b sequences, padded to L keys each, that are computed together."""

    rows: torch.Tensor
    """[b] int64, index of each sequence in the batch."""
    slots: torch.Tensor
    """[b * L] integer, slot of each key; padding repeats the last key of its sequence, so that a number that is not
    finite stays within its sequence."""
    mask: torch.Tensor
    """[b, 1, 1, L] float32, 0 or -inf for padding, added to the scores."""


class BatchedAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """`torch_native` with decode steps in blocks; their scores and sums are in float32."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._blocks: list[Block] = []
        """Blocks of the current step, the same for all layers; none if a sequence gets several tokens."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan a step of one token per sequence: a decode step, or the last token of prompts that the cache holds, as
        all but the first of a group. SGLang calls this before every forward."""
        super().init_forward_metadata(forward_batch)
        mode, self._blocks = forward_batch.forward_mode, []
        is_single = mode.is_decode() or (mode.is_extend() and bool((forward_batch.extend_seq_lens == 1).all()))
        if is_single and not self.use_sliding_window_kv_pool:
            keys = self.token_to_kv_pool.get_key_buffer(self.token_to_kv_pool.start_layer)
            table = self.req_to_token_pool.req_to_token
            requests, lens = forward_batch.req_pool_indices, forward_batch.seq_lens
            self._blocks = plan_blocks(table, requests, lens=lens, numbers_per_key=keys[0].numel())

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Store the keys and values of the new tokens and attend: [B, query heads x value size]."""
        if not self._is_plain(layer, forward_batch):
            output: torch.Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
            return output
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        return attend(query, keys, values, self._blocks, scale=layer.scaling).flatten(1)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The same if every sequence gets one token; `torch_native` if one gets more."""
        if self._blocks and self._is_plain(layer, forward_batch):
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        output: torch.Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return output

    def _is_plain(self, layer: RadixAttention, forward_batch: ForwardBatch) -> bool:
        return (
            layer.attn_type == AttentionType.DECODER
            and not layer.is_cross_attention
            and forward_batch.encoder_lens is None
            and not self.use_sliding_window_kv_pool
            and layer.sliding_window_size in (None, -1)
        )


def plan_blocks(
    req_to_token: torch.Tensor, requests: torch.Tensor, *, lens: torch.Tensor, numbers_per_key: int
) -> list[Block]:
    """Cut the sequences of a decode step into blocks of similar length.

    Args:
        req_to_token: [requests, positions] integer: slot of each token of each request.
        requests: [B] row of `req_to_token` of each sequence.
        lens: [B] tokens of each sequence, including the new token.
        numbers_per_key: key heads x head size, for the size of the blocks.
    """
    ascending, order = lens.to(torch.int64).sort(stable=True)
    bounds, lengths = [0], ascending.tolist()
    for index, length in enumerate(lengths):
        if index > bounds[-1] and (index + 1 - bounds[-1]) * length * numbers_per_key > BLOCK_NUMBERS:
            bounds.append(index)
    blocks = []
    for begin, end in zip(bounds, [*bounds[1:], len(lengths)], strict=True):
        rows, last = order[begin:end], ascending[begin:end, None] - 1
        positions = torch.arange(lengths[end - 1])
        slots = req_to_token[requests[rows, None], positions.clamp(max=last)].flatten()
        mask = torch.zeros(len(rows), len(positions)).masked_fill_(positions > last, -torch.inf)
        blocks.append(Block(rows=rows, slots=slots, mask=mask[:, None, None]))
    return blocks


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, blocks: Sequence[Block], *, scale: float
) -> torch.Tensor:
    """Outputs of one query per sequence; scores, softmax and sums in float32.

    Args:
        query: [B, query heads, head size].
        keys: [slots, key heads, head size]; query heads are a multiple of key heads, neighbouring query heads share a
            key head.
        values: [slots, key heads, value size].
        scale: Factor of the scores.

    Returns:
        [B, query heads, value size] in the type of `query`.
    """
    num_kv_heads, value_size = values.shape[1:]
    output = query.new_empty(*query.shape[:2], value_size)
    for rows, slots, mask in blocks:
        b, length = len(rows), mask.shape[-1]
        # Query heads that share a key head are laid out as further queries, so that no key is repeated.
        q = query[rows].float().view(b, num_kv_heads, -1, query.shape[2])
        k, v = (
            numbers.flatten(1).index_select(0, slots).float().view(b, length, num_kv_heads, -1).transpose(1, 2)
            for numbers in (keys, values)
        )
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        output[rows] = out.reshape(b, -1, value_size).to(output.dtype)
    return output
