"""The attention backend `parity_batched` of a CPU server: `batched_attention.py` and `running_cache.py` for SGLang.

Only SGLang loads this file; `srt_platform.py` registers the backend. The backend computes the same as SGLang's
`torch_native`, without its loop over sequences. Unsupported cases (cross attention, encoders, a separate cache for
sliding windows) run in `torch_native`, its base class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from rollout.sglang.cpu.batched_attention import Block, attend, plan_blocks
from rollout.sglang.cpu.running_cache import RunningCache

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class BatchedAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """`torch_native` with sequences of similar length computed together; scores and sums in float32."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._blocks: dict[int | None, list[Block]] = {}
        """Sliding window -> blocks of the current forward."""
        self._running = RunningCache(num_layers=self.token_to_kv_pool.layer_num)
        self._is_running = False
        """True if `_running` holds the sequences of the current forward."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Prepare the cache for a forward; SGLang calls this before every forward."""
        super().init_forward_metadata(forward_batch)
        self._blocks.clear()
        self._is_running = False
        if self.use_sliding_window_kv_pool or forward_batch.forward_mode.is_idle():
            return
        if not forward_batch.forward_mode.is_decode():
            self._running.forget(forward_batch.req_pool_indices.tolist())
            return
        first_layer = self.token_to_kv_pool.start_layer
        keys = self.token_to_kv_pool.get_key_buffer(first_layer)
        values = self.token_to_kv_pool.get_value_buffer(first_layer)
        self._is_running = self._running.begin(
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            numbers_per_token=keys[0].numel() + values[0].numel(),
        )

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
        if not self._is_plain(layer, forward_batch):
            output: torch.Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
            return output
        return self._forward(
            (q, k if save_kv_cache else None, v),
            layer,
            forward_batch,
            prefix_lens=forward_batch.extend_prefix_lens,
            extend_lens=forward_batch.extend_seq_lens,
        )

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
        if not self._is_plain(layer, forward_batch):
            output: torch.Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
            return output
        prefix_lens = forward_batch.seq_lens - 1
        return self._forward(
            (q, k if save_kv_cache else None, v), layer, forward_batch, prefix_lens=prefix_lens, extend_lens=None
        )

    def _is_plain(self, layer: RadixAttention, forward_batch: ForwardBatch) -> bool:
        """True for causal self-attention over the single cache."""
        return (
            layer.attn_type == AttentionType.DECODER
            and not layer.is_cross_attention
            and forward_batch.encoder_lens is None
            and not self.use_sliding_window_kv_pool
        )

    def _forward(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        *,
        prefix_lens: torch.Tensor,
        extend_lens: torch.Tensor | None,
    ) -> torch.Tensor:
        """Store keys and values, if given, and attend: [T, query heads x value size]."""
        q, k, v = qkv
        if k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        window = layer.sliding_window_size if layer.sliding_window_size > -1 else None
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if extend_lens is None and self._is_running and window is None:
            pool = (keys, values)
            new_slots = forward_batch.out_cache_loc
            return self._running.attend(layer.layer_id, query, pool, new_slots, scale=layer.scaling).flatten(1)
        if window not in self._blocks:
            self._blocks[window] = plan_blocks(
                self.req_to_token_pool.req_to_token,
                forward_batch.req_pool_indices,
                prefix_lens=prefix_lens,
                extend_lens=extend_lens,
                window=window,
                numbers_per_key=keys[0].numel(),
            )
        return attend(query, keys, values, self._blocks[window], scale=layer.scaling).flatten(1)
