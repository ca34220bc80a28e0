"""Newest tokens -> next-token logits: a transformers model with its keys and values in slots
(`rollout/torch/kv_cache.py`).

`ModuleDecoder` runs the model's own code and serves every architecture. `FusedDecoder` computes the same for
architectures that consist of Llama's blocks, with a third of the operations; `build_decoder` chooses. Both decoders
read the parameters of their model, so they see new weights as soon as the weights are copied into the model.

N: sequences, U: prompts, P: padded prompt length, V: vocabulary, H: heads, K: key/value heads, D: size of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad, rms_norm, silu

from rollout.config import MAX_PACKED_BYTES
from rollout.hf.transformers import PreTrainedModel
from rollout.torch.kv_cache import Prefill, Step
from rollout.torch.products import Projection, filled_rows, packs
from rollout.torch.quantized_activations import Rounding

FUSED_TYPES = frozenset({"llama", "qwen2", "qwen3"})
"""Values of model_type whose blocks `FusedDecoder` computes."""

STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose angles depend on the position only."""


class Decoder(Protocol):
    """The forward of a model for `rollout/torch/decoding.py`. Call under `torch.inference_mode()`."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def prefill(self, token_ids: Tensor, lengths: Tensor, forward: Prefill) -> Tensor:
        """Read prompts [U, P], padded on the right, of `lengths` [U]: logits after the last token of each, [U, V]."""
        ...

    def step(self, tokens: Tensor, positions: Tensor, forward: Step) -> Tensor:
        """Read one token [N] per sequence, at `positions` [N]: logits after that token, [N, V]."""
        ...


class _HiddenDecoder(ABC):
    """Prefill and step of every decoder, computed from its hidden states."""

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @abstractmethod
    def _hidden(self, token_ids: Tensor, positions: Tensor, forward: Prefill | Step) -> Tensor:
        """Final hidden states [B, T, hidden] of tokens and positions [B, T]."""

    @abstractmethod
    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits [B, V] of hidden states [B, hidden]."""

    def prefill(self, token_ids: Tensor, lengths: Tensor, forward: Prefill) -> Tensor:
        positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
        hidden = self._hidden(token_ids, positions, forward)
        return self._logits(hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1])

    def step(self, tokens: Tensor, positions: Tensor, forward: Step) -> Tensor:
        return self._logits(self._hidden(tokens[:, None], positions[:, None], forward)[:, 0])


class ModuleDecoder(_HiddenDecoder):
    """The model's own forward, with `slot_attention` for its attention."""

    def __init__(self, model: PreTrainedModel) -> None:
        """`model` must have been loaded with attn_implementation=SLOT_ATTENTION."""
        self._model = model
        self._decoder: Any = model.get_decoder()
        self._head = model.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    def _hidden(self, token_ids: Tensor, positions: Tensor, forward: Prefill | Step) -> Tensor:
        hidden: Tensor = self._decoder(
            input_ids=token_ids, position_ids=positions, use_cache=False, forward_kind=forward
        ).last_hidden_state
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(hidden)
        return logits


@dataclass(kw_only=True, slots=True)
class _Block:
    """One layer: its parameters, or views of them."""

    attention_norm: Tensor
    qkv: Projection
    """hidden -> (H + 2 K) D: the three projections of attention as one."""
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Projection
    mlp_norm: Tensor
    gate_up: Projection
    """hidden -> 2 I: gate, then up."""
    down: Projection


class FusedDecoder(_HiddenDecoder):
    """Blocks like Llama's as plain functions: norms, one product for q, k and v, one product for gate and up.

    Projections that are computed together share one buffer, and the model's parameters become views of the buffer. On a
    CPU the buffers are also packed: build a new decoder when the parameters have changed. Agrees with `ModuleDecoder`
    to rounding.
    """

    def __init__(self, model: PreTrainedModel, rounding: Rounding | None = None) -> None:
        """`rounding` is applied to the input of every projection."""
        self._input = rounding or _same
        decoder: Any = model.get_decoder()
        config = model.config
        self._model = model
        self._embedding = decoder.embed_tokens.weight
        self._head = model.get_output_embeddings()
        self._norm = decoder.norm.weight
        self._epsilon = float(config.rms_norm_eps)
        self._num_heads = int(config.num_attention_heads)
        self._num_kv = int(config.num_key_value_heads)
        self._head_dim = int(decoder.layers[0].self_attn.head_dim)
        size = sum(parameter.nbytes for parameter in decoder.layers.parameters())
        self._blocks = [_block(layer, may_pack=size <= MAX_PACKED_BYTES) for layer in decoder.layers]
        self._is_filled = self.device.type == "cpu" and packs(self.dtype)
        self._rotary = decoder.rotary_emb
        self._angles: tuple[Tensor, Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def _hidden(self, token_ids: Tensor, positions: Tensor, forward: Prefill | Step) -> Tensor:
        """Final hidden states [B, T, hidden] of tokens and positions [B, T], before the last norm.

        Between the layers the states are rows, one per token, filled up once for all products where oneDNN multiplies
        (`rollout/torch/products.py`).
        """
        cos, sin = self._rotation(positions, longest=forward.longest)
        num_tokens = token_ids.numel()
        missing = filled_rows(num_tokens) - num_tokens if self._is_filled else 0
        tokens = token_ids.reshape(-1)
        states = embedding(pad(tokens, (0, missing)) if missing else tokens, self._embedding)
        for index, block in enumerate(self._blocks):
            normed = rms_norm(states, block.attention_norm.shape, block.attention_norm, self._epsilon)
            qkv = block.qkv(self._input(normed))
            heads = qkv[:num_tokens].view(*token_ids.shape, -1, self._head_dim)
            out = self._attention(index, block, heads, cos, sin, forward)
            states = states + block.out(self._input(pad(out, (0, 0, 0, missing)) if missing else out))
            normed = rms_norm(states, block.mlp_norm.shape, block.mlp_norm, self._epsilon)
            gate, up = block.gate_up(self._input(normed)).chunk(2, dim=-1)
            states = states + block.down(self._input(silu(gate).mul_(up)))
        return states[:num_tokens].view(*token_ids.shape, -1)

    def _attention(
        self, index: int, block: _Block, heads: Tensor, cos: Tensor, sin: Tensor, forward: Prefill | Step
    ) -> Tensor:
        """Projections [B, T, H + 2 K, D] of the tokens -> outputs of attention [B * T, H * D]."""
        rotated, value = heads.split([self._num_heads + self._num_kv, self._num_kv], dim=2)
        if block.query_norm is not None and block.key_norm is not None:
            query, key = rotated.split([self._num_heads, self._num_kv], dim=2)
            query = rms_norm(query, block.query_norm.shape, block.query_norm, self._epsilon)
            key = rms_norm(key, block.key_norm.shape, block.key_norm, self._epsilon)
            rotated = torch.cat([query, key], dim=2)
        swapped = rotated.roll(self._head_dim // 2, dims=-1)
        rotated = (rotated * cos).addcmul_(swapped, sin)
        query, key = rotated.split([self._num_heads, self._num_kv], dim=2)
        out = forward.attend(index, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), None)
        return out.transpose(1, 2).reshape(-1, self._num_heads * self._head_dim)

    def _rotation(self, positions: Tensor, *, longest: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles [B, T, 1, D], the first half of the sines negated."""
        if self._angles is None or len(self._angles[0]) < longest:
            positions_known = torch.arange(2 * longest, device=self.device)[None]
            cos, sin = self._rotary(self._embedding, positions_known)
            half = self._head_dim // 2
            self._angles = cos[0, :, None], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)[:, None]
        cos, sin = self._angles
        return cos[positions], sin[positions]

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(rms_norm(hidden, self._norm.shape, self._norm, self._epsilon))
        return logits


def build_decoder(model: PreTrainedModel, rounding: Rounding | None = None) -> Decoder:
    """The fastest decoder that computes exactly the same as the model's own code.

    `rounding` applies to the inputs of projections; for the model's own code the caller sets it with `round_inputs`.
    """
    hf_config = model.config
    rope = getattr(hf_config, "rope_parameters", None) or {}
    fits = (
        hf_config.model_type in FUSED_TYPES
        and getattr(hf_config, "hidden_act", "") == "silu"
        and rope.get("rope_type", "default") in STATIC_ROPE
        and set(getattr(hf_config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    )
    return FusedDecoder(model, rounding) if fits else ModuleDecoder(model)


def _same(states: Tensor) -> Tensor:
    return states


def _block(layer: Any, *, may_pack: bool) -> _Block:
    attention, mlp = layer.self_attn, layer.mlp

    def projection(*modules: Any) -> Projection:
        bias = None if modules[0].bias is None else _joined([each.bias for each in modules])
        return Projection(_joined([each.weight for each in modules]), bias, may_pack=may_pack)

    return _Block(
        attention_norm=layer.input_layernorm.weight,
        qkv=projection(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        key_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        out=projection(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=projection(mlp.gate_proj, mlp.up_proj),
        down=projection(mlp.down_proj),
    )


def _joined(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One buffer with all rows; each parameter becomes a view of its own rows, so that no weight is stored twice."""
    first, ends = parameters[0].detach(), [0]
    for parameter in parameters:
        ends.append(ends[-1] + parameter.numel())
    places = [first.data_ptr() + end * first.element_size() for end in ends[:-1]]
    rows = [len(parameter) for parameter in parameters]
    if [parameter.data_ptr() for parameter in parameters] == places and first.untyped_storage().nbytes() >= (
        first.storage_offset() + ends[-1]
    ) * first.element_size():
        return first.as_strided((sum(rows), *first.shape[1:]), first.stride())
    with torch.no_grad():
        joined = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, joined.split(rows), strict=True):
            parameter.data = part
    return joined
