"""Newest tokens -> next-token logits: a transformers model with its keys and values in slots
(`rollout/torch/kv_cache.py`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout.config import Routing
from rollout.embedded.drawing import float32_log_softmax
from rollout.exact.layers import log_softmax
from rollout.model.router_tap import routers
from rollout.routes import Numbers, Weights, narrowed
from rollout.torch.exact_cache import ExactPrefill, ExactStep
from rollout.torch.kv_cache import KVSlots, Prefill, Step
from rollout.weights.experts import mixture_of


class ReadRoutes(NamedTuple):
    """Routes of B rows of T tokens, on the host."""

    experts: Numbers
    """[B, T, L, K]."""
    weights: Weights | None
    """[B, T, L, K]; None if they are not wanted."""


class Read(NamedTuple):
    """What comes of reading B rows of T tokens."""

    logits: Tensor
    """[B, V] after the last token of each."""
    routes: ReadRoutes | None
    """None if they are not wanted, or if the model is dense."""


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
        self._gates: list[torch.nn.Module] = routers(model) if mixture_of(model.config.to_dict()) else []

    def reading(self, slots: KVSlots, *, first_slot: int, prompt_of_slot: Tensor, longest: int) -> Prefill:
        """How prompts are read into `slots`."""
        return Prefill(slots, first_slot=first_slot, prompt_of_slot=prompt_of_slot, longest=longest)

    def stepping(self, slots: KVSlots, *, positions: Tensor, longest: int) -> Step:
        """How one token is read into each of the first slots."""
        return Step(slots, positions=positions, longest=longest, dtype=self.dtype)

    log_softmax = staticmethod(float32_log_softmax)

    def prefill(self, token_ids: Tensor, lengths: Tensor, forward: Prefill, *, detail: Routing = Routing.live) -> Read:
        """Read prompts [U, P], padded on the right, of `lengths` [U]."""
        positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
        hidden, routes = self._hidden(token_ids, positions, forward, detail=detail)
        return Read(self._head(hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]), routes)

    def step(self, tokens: Tensor, positions: Tensor, forward: Step, *, detail: Routing = Routing.live) -> Read:
        """Read one token [N] per sequence, at `positions` [N]."""
        hidden, routes = self._hidden(tokens[:, None], positions[:, None], forward, detail=detail)
        return Read(self._head(hidden[:, 0]), routes)

    def _hidden(
        self, token_ids: Tensor, positions: Tensor, forward: Prefill | Step, *, detail: Routing
    ) -> tuple[Tensor, ReadRoutes | None]:
        """Final hidden states [B, T, hidden] and routes of tokens and positions [B, T]."""
        recorded: list[tuple[Tensor, Tensor]] = []

        def record(_gate: object, _inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
            recorded.append((output[2], output[1]))

        hooks = [gate.register_forward_hook(record) for gate in self._gates if detail is not Routing.live]
        try:
            hidden: Tensor = self._decoder(
                input_ids=token_ids, position_ids=positions, use_cache=False, forward_kind=forward
            ).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        if not recorded:
            return hidden, None
        experts, weights = (
            torch.stack(layers, dim=1).unflatten(0, token_ids.shape) for layers in zip(*recorded, strict=True)
        )
        given = weights.half().cpu().numpy() if detail is Routing.weights else None
        return hidden, ReadRoutes(narrowed(experts.cpu().numpy()), given)


class ExactDecoder(Decoder):
    """The forward of a model that computes in exact arithmetic (`rollout/exact`)."""

    def reading(self, slots: KVSlots, *, first_slot: int, prompt_of_slot: Tensor, longest: int) -> Prefill:
        return ExactPrefill(slots, first_slot=first_slot, prompt_of_slot=prompt_of_slot, longest=longest)

    def stepping(self, slots: KVSlots, *, positions: Tensor, longest: int) -> Step:
        return ExactStep(slots, positions=positions, longest=longest, dtype=self.dtype)

    @staticmethod
    def log_softmax(logits: Tensor) -> Tensor:
        return log_softmax(logits)
