"""Newest tokens -> next-token logits: a transformers model with its keys and values in slots
(`rollout/torch/kv_cache.py`), and with rounded inputs of projections where the engine is quantised.

SGLang's int8 and block fp8 layers scale every token anew ("dynamic"), so there is no calibration and no stale scale
between syncs. Rounding likewise computes the same as those layers, to float rounding. int4 is a format of weights only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout.config import Quantization
from rollout.exact.layers import log_softmax
from rollout.torch.exact_cache import ExactPrefill, ExactStep
from rollout.torch.kv_cache import KVSlots, Prefill, Step
from rollout.weights.adapter import BASE_LAYER

FP8_GROUP = 128
"""Neighbouring features of a token that share one fp8 scale."""
SMALLEST = 1e-10
"""Largest magnitude of the input below which SGLang's kernels do not scale."""


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


def per_token_int8(states: Tensor) -> Tensor:
    """Round to multiples of max|x| / 127 of the token."""
    scale = states.float().abs().amax(dim=-1, keepdim=True).clamp_min_(SMALLEST).div_(127)
    return (states / scale).round_().mul_(scale).to(states.dtype)


def per_group_fp8(states: Tensor) -> Tensor:
    """Round to e4m3 numbers times max|x| / 448 of the group of 128 features; the last group may be shorter."""
    rounded = [_fp8(group) for group in states.float().split(FP8_GROUP, dim=-1)]
    return torch.cat(rounded, dim=-1).to(states.dtype)


INPUT_ROUNDINGS = {Quantization.int8: per_token_int8, Quantization.fp8: per_group_fp8}
"""Format that rounds activations too -> how."""


def round_inputs(model: nn.Module, quantization: Quantization) -> None:
    """Round the inputs of the model's projections, the modules named *_proj, from now on, if the format rounds them.

    An adapter beside a projection gets the inputs as they are, as in SGLang.
    """
    rounding = INPUT_ROUNDINGS.get(quantization)
    if rounding is None:
        return

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounding(inputs[0]), *inputs[1:])

    for name, module in model.named_modules():
        if name.removesuffix(BASE_LAYER).endswith("_proj") and not hasattr(module, "base_layer"):
            module.register_forward_pre_hook(before)


def _fp8(group: Tensor) -> Tensor:
    scale = group.abs().amax(dim=-1, keepdim=True).clamp_min_(SMALLEST).div_(448)
    # A step above 448 would round to NaN, because e4m3 has no infinity.
    return (group / scale).clamp_(-448, 448).to(torch.float8_e4m3fn).float().mul_(scale)
