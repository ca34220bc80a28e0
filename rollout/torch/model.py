"""Newest tokens -> next-token logits: a transformers model with its keys and values in slots
(`rollout/torch/kv_cache.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollout.hf.transformers import PreTrainedModel
from rollout.torch.kv_cache import Prefill, Step


class Decoder:
    """The model's own forward, with `slot_attention` for its attention. Call under `torch.inference_mode()`.

    New weights are used as soon as they are in the model. N: sequences, U: prompts, P: padded prompt length,
    V: vocabulary.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """`model` must have been loaded with attn_implementation=SLOT_ATTENTION."""
        self._decoder: Any = model.get_decoder()
        self._head: Any = model.get_output_embeddings()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype

    def prefill(self, token_ids: Tensor, lengths: Tensor, forward: Prefill) -> Tensor:
        """Read prompts [U, P], padded on the right, of `lengths` [U]: logits after the last token of each, [U, V]."""
        positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
        hidden = self._hidden(token_ids, positions, forward)
        logits: Tensor = self._head(hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1])
        return logits

    def step(self, tokens: Tensor, positions: Tensor, forward: Step) -> Tensor:
        """Read one token [N] per sequence, at `positions` [N]: logits after that token, [N, V]."""
        logits: Tensor = self._head(self._hidden(tokens[:, None], positions[:, None], forward)[:, 0])
        return logits

    def _hidden(self, token_ids: Tensor, positions: Tensor, forward: Prefill | Step) -> Tensor:
        """Final hidden states [B, T, hidden] of tokens and positions [B, T]."""
        hidden: Tensor = self._decoder(
            input_ids=token_ids, position_ids=positions, use_cache=False, forward_kind=forward
        ).last_hidden_state
        return hidden
