"""SGLang's model in the exact arithmetic of the trainer (`rollout/exact`): attention, products, norms, log-probs.

Only SGLang loads this file; `srt_platform.py` registers the attention backend `parity_exact`, which changes the model
when SGLang makes it. SGLang multiplies queries, keys and values at once, and gates with what they gate; here each part
is a product of its own, as in transformers. Norms round where those of transformers round. On a GPU it is the same code
with the kernels of `rollout/exact/gpu.py`: not yet run on a GPU.

B: sequences, N: tokens, C: columns (keys with room), H: heads, K: key/value heads, D: size of a head, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.models import qwen2_moe
from torch import Tensor, nn
from torch.nn.functional import pad

from algorithms.truncation import CUT_LOGIT
from rollout.exact.activations import sigmoid, silu
from rollout.exact.attention import attend, num_columns
from rollout.exact.experts import mixed
from rollout.exact.gpu import use_batch_invariant_kernels
from rollout.exact.layers import log_softmax
from rollout.exact.products import Linear, product
from rollout.sglang.cpu.attention import BatchedAttention

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

KNOWN = (
    LinearBase, RMSNorm, SiluAndMul, RotaryEmbedding, VocabParallelEmbedding, LogitsProcessor, RadixAttention, TopK,
    FusedMoE, UnquantizedFusedMoEMethod, nn.Linear,
)  # fmt: skip
"""Modules that have an exact form, or compute nothing."""
UNQUANTIZED = (UnquantizedLinearMethod, UnquantizedFusedMoEMethod)
HELD_NUMBERS = 1 << 23
"""Bound on the keys that are gathered at a time, 32 MiB in float32; a single sequence may have more."""


class ExactAttention(BatchedAttention):
    """Attention over SGLang's cache with the bits of the trainer, in prefill and in decoding alike."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        make_exact(model_runner.model)
        if torch.device(self.device).type == "cuda":
            use_batch_invariant_kernels()
            _use_plain_operators(model_runner.model)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Nothing is planned for all layers."""

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """One token per sequence: [B, H x D]."""
        self._store(k, v, layer, forward_batch, save_kv_cache=save_kv_cache)
        query = q.reshape(-1, layer.tp_q_head_num, 1, layer.qk_head_dim)
        last = forward_batch.seq_lens.to(torch.int64) - 1
        out = query.new_empty(len(query), 1, layer.tp_q_head_num, layer.qk_head_dim)
        for rows in _of_similar_length(last, numbers=layer.tp_k_head_num * layer.qk_head_dim):
            out[rows] = self._attend(query[rows], layer, forward_batch.req_pool_indices[rows], last[rows, None])
        return out.flatten(1)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """The tokens behind what the cache holds of each sequence, end to end: [N, H x D]."""
        self._store(k, v, layer, forward_batch, save_kv_cache=save_kv_cache)
        ends, counts = forward_batch.seq_lens.tolist(), forward_batch.extend_seq_lens.tolist()
        parts = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim).split(counts)
        found = [
            self._attend(
                part.transpose(0, 1)[None],
                layer,
                forward_batch.req_pool_indices[index, None],
                torch.arange(end - len(part), end, device=q.device)[None],
            )
            for index, (part, end) in enumerate(zip(parts, ends, strict=True))
            if len(part)
        ]
        return torch.cat([part.flatten(0, 1).flatten(1) for part in found])

    def _store(
        self, k: Tensor, v: Tensor, layer: RadixAttention, forward_batch: ForwardBatch, *, save_kv_cache: bool
    ) -> None:
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)

    def _attend(self, query: Tensor, layer: RadixAttention, requests: Tensor, positions: Tensor) -> Tensor:
        """query [B, H, L, D] at `positions` [B, L] -> [B, L, H, D]."""
        columns = torch.arange(num_columns(int(positions.max()) + 1), device=positions.device)
        # Columns behind a sequence repeat its last key: any finite number does.
        slots = self.req_to_token_pool.req_to_token[requests[:, None], columns.clamp(max=positions[:, -1:])]
        held = (
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
        )
        keys, values = (buffer[slots].transpose(1, 2) for buffer in held)
        return attend(query, keys, values, positions, scaling=layer.scaling)


class ExactLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """Products tile by tile, one for each matrix of which SGLang has made one."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows, sizes = x.reshape(-1, x.shape[-1]), getattr(layer, "output_partition_sizes", [len(layer.weight)])
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        parts = [product(rows, weight, part) for weight, part in zip(layer.weight.split(sizes), biases, strict=True)]
        found = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return found.view(*x.shape[:-1], -1)


def make_exact(model: nn.Module) -> None:
    """Have SGLang's `model` compute in exact arithmetic from now on.

    Call it before the first forward. Raises ValueError with everything that has no exact form.
    """
    if problems := list(_problems(model)):
        raise ValueError(f"rollout.exact=true has no exact form of {', '.join(dict.fromkeys(problems))} in SGLang")
    for module in model.modules():
        # SGLang calls what an operator has in `_forward_method`, whatever the platform.
        if isinstance(module, RMSNorm):
            module._forward_method = partial(_rms_norm, module)
        elif isinstance(module, SiluAndMul):
            module._forward_method = _silu_and_mul
        elif isinstance(module, RotaryEmbedding | TopK):
            module._forward_method = module.forward_native
        elif isinstance(module, UnquantizedFusedMoEMethod):
            module._forward_method = _experts
        elif isinstance(module, LinearBase):
            module.quant_method = ExactLinearMethod()
        elif isinstance(module, nn.Linear):
            module.__class__ = Linear
        elif isinstance(module, LogitsProcessor):
            module._compute_lm_head = _logits
    qwen2_moe.fused_gate_sigmoid_mul_add = _add_shared_expert


def exact_logprobs(scaled: Tensor, tokens: Tensor) -> Tensor:
    """[B] log-probs of tokens [B] under logits [B, V] that are divided by the temperature, with the trainer's bits."""
    return log_softmax(scaled).gather(-1, tokens.long()[:, None])[:, 0]


def exact_support_logprobs(scaled: Tensor, tokens: Tensor, support_ids: Tensor, sizes: Tensor) -> Tensor:
    """The same among the first `sizes` [B] of the ids [B, M] of each row."""
    is_kept = torch.arange(support_ids.shape[1], device=scaled.device) < sizes[:, None]
    kept = torch.zeros_like(scaled, dtype=torch.bool)
    # An id behind the support is replaced with the first one of it, which is kept anyway.
    kept.scatter_(1, torch.where(is_kept, support_ids, support_ids[:, :1]).long(), True)
    return exact_logprobs(scaled.masked_fill(~kept, CUT_LOGIT), tokens)


def _of_similar_length(last: Tensor, *, numbers: int) -> Iterator[Tensor]:
    """Yield indices of sequences, longest first, whose keys and values are gathered at a time.

    `last` [B] are the positions of their last tokens, `numbers` those of a key. A row does not depend on its company.
    """
    order = last.argsort(descending=True)
    begin = 0
    while begin < len(order):
        columns = num_columns(int(last[order[begin]]) + 1)
        end = begin + max(1, HELD_NUMBERS // (columns * numbers))
        yield order[begin:end]
        begin = end


def _problems(model: nn.Module) -> Iterator[str]:
    """Yield the class of every module that has no exact implementation."""
    for module in model.modules():
        if isinstance(module, LinearBase | FusedMoE) and type(module.quant_method) not in UNQUANTIZED:
            yield f"{type(module).__name__} with {type(module.quant_method).__name__}"
        owns = next(iter(module.parameters(recurse=False)), None) is not None
        if (owns or isinstance(module, BaseFusedOp)) and not isinstance(module, KNOWN):
            yield type(module).__name__


def _use_plain_operators(model: nn.Module) -> None:
    """On a GPU: norms of queries and keys one by one, and rotary embeddings made as transformers makes them."""
    from sglang.srt.models import utils

    utils.can_use_fused_inplace_qknorm = lambda *_: False
    found: list[Any] = [module for module in model.modules() if type(module) is RotaryEmbedding]
    for module in found:
        with torch.device("cpu"):  # SGLang takes the powers on the GPU, with other last bits
            frequencies = module._compute_inv_freq(module.base)
        cache = module.cos_sin_cache
        angles = torch.outer(torch.arange(len(cache), device=cache.device).float(), frequencies.to(cache.device))
        module.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], dim=-1).to(cache.dtype)


def _rms_norm(
    norm: Any, x: Tensor, residual: Tensor | None = None, post_residual_addition: Tensor | None = None, *_: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm of the sum, which is rounded before it is squared, as a sum of its own would be."""
    if residual is not None:
        x = residual + x
    if post_residual_addition is not None:
        x = x + post_residual_addition
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    out = norm.weight * scaled.to(x.dtype)
    return out if residual is None else (out, x)


def _silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return silu(gate.contiguous()) * up


def _experts(layer: Any, dispatch_output: Any) -> Any:
    weights, chosen, _ = dispatch_output.topk_output
    found = mixed(dispatch_output.hidden_states, chosen.long(), weights, layer.w13_weight, layer.w2_weight)
    return StandardCombineInput(hidden_states=found)


def _add_shared_expert(hidden_states: Tensor, gate: Tensor, shared: Tensor, out: Tensor) -> None:
    """Add what the expert that all tokens share says, [N, H], to `out`; `gate` [H] weighs it."""
    out += sigmoid(product(hidden_states, gate[None])) * shared


def _logits(
    hidden_states: Tensor, lm_head: Any, embedding_bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """[N, V and padding]: SGLang fills the vocabulary up, and the width of a product may change its bits."""
    weight = lm_head.weight
    found = product(hidden_states.to(weight.dtype), weight[: lm_head.org_vocab_size])
    return pad(found, (0, len(weight) - found.shape[1]))
