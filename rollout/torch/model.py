"""Newest tokens -> next-token logits: a transformers model with its keys and values in slots
(`rollout/torch/kv_cache.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout.exact.layers import log_softmax
from rollout.torch.exact_cache import ExactPrefill, ExactStep
from rollout.torch.kv_cache import KVSlots, Prefill, Step


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

    def reading(self, slots: KVSlots, *, first_slot: int, prompt_of_slot: Tensor, longest: int) -> Prefill:
        """How prompts are read into `slots`."""
        return Prefill(slots, first_slot=first_slot, prompt_of_slot=prompt_of_slot, longest=longest)

    def stepping(self, slots: KVSlots, *, positions: Tensor, longest: int) -> Step:
        """How one token is read into each of the first slots."""
        return Step(slots, positions=positions, longest=longest, dtype=self.dtype)

    @staticmethod
    def log_softmax(logits: Tensor) -> Tensor:
        """[B, V] float32 -> [B, V]."""
        return torch.log_softmax(logits, dim=-1)

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


class ExactDecoder(Decoder):
    """The forward of a model that computes in exact arithmetic (`rollout/exact`)."""

    def reading(self, slots: KVSlots, *, first_slot: int, prompt_of_slot: Tensor, longest: int) -> Prefill:
        return ExactPrefill(slots, first_slot=first_slot, prompt_of_slot=prompt_of_slot, longest=longest)

    def stepping(self, slots: KVSlots, *, positions: Tensor, longest: int) -> Step:
        return ExactStep(slots, positions=positions, longest=longest, dtype=self.dtype)

    @staticmethod
    def log_softmax(logits: Tensor) -> Tensor:
        return log_softmax(logits)
