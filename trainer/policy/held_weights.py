"""How much of the mismatch the rounding of the weights explains: a few responses, scored with the engines' weights.

An engine holds the weights in `rollout.dtype`, projections on the grid of `rollout.quantization`, while the trainer's
forward may use them as they are. A few responses of a step are scored once more with the weights that the engines hold
and the trainer's own arithmetic. The log-probs of these tokens differ from the trainer's by the rounding of the weights
alone, and from the engines' by the arithmetic alone (kernels, order of sums, type of the activations).
`StepStats.add_held` makes the K3 of both differences.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rollout.config import DType, EngineConfig, Quantization
from rollout.weights.adapter import is_adapter, name_without_adapter
from rollout.weights.quantization import GRIDS, held_weight
from trainer.batch.packing import chosen_sequences, token_places
from trainer.batch.train_batch import FewScores, MicroBatch
from trainer.config.train import TrainConfig
from trainer.policy.host_copy import full_tensor, local_part, own_rows
from trainer.policy.lora import adapter_scaled, updates

if TYPE_CHECKING:  # `parity replay` needs no transformers
    from trainer.scoring.forward import ScoringModel

SCORED_TOKENS = 256
"""Tokens of the responses and their prompts that a rank scores once more in a step; one response at least."""


def weights_differ(config: TrainConfig) -> bool:
    """True if engines hold other numbers than the trainer's forward uses, and the trainer can compute with theirs.

    A forward in 16 bits rounds its weights to that type itself: to the same numbers as an engine of that type. With an
    engine of another type the trainer has no forward with the engine's weights, and nothing is measured.
    """
    if config.rollout.quantization is not Quantization.none:
        return True
    return config.policy.dtype is DType.float32 and config.rollout.dtype is not DType.float32


def held_scores(model: ScoringModel, micro: MicroBatch, lags: Tensor, *, config: TrainConfig) -> FewScores:
    """Score a few responses of `micro` with the weights that the engines hold. A collective; without gradient.

    Args:
        model: the sharded policy; its parameters are the same bits before and after.
        micro: where the responses are taken from; a rank without a fresh response scores none.
        lags: [N] int64, optimizer steps since the weights that sampled each sequence. Only fresh responses, of lag 0,
            are scored: others differ for another reason.
        config: of the run.
    """
    with _held_weights(model, config):
        return _scores_of_few(model, micro, lags, config=config)


def live_scores(model: ScoringModel, micro: MicroBatch, lags: Tensor, *, config: TrainConfig) -> FewScores:
    """Score a few responses of `micro` with the experts that the trainer chooses itself. A collective, like
    `held_scores`, with the same arguments."""
    return _scores_of_few(model, replace(micro, routes=None), lags, config=config)


def _scores_of_few(model: ScoringModel, micro: MicroBatch, lags: Tensor, *, config: TrainConfig) -> FewScores:
    chosen = _few_fresh(micro, lags)
    few = chosen_sequences(micro, chosen)
    with torch.no_grad():
        logprobs = model(few, temperature=config.sampling.temperature).logprobs
    return FewScores(token_places(micro, chosen)[few.response_index], logprobs[few.response_index])


def _few_fresh(micro: MicroBatch, lags: Tensor) -> list[int]:
    """The first sequences of lag 0 that hold at most SCORED_TOKENS together, one at least if there is any."""
    if micro.token_lags is not None or not micro.sample_keys:
        return []
    fresh = [number for number, lag in enumerate(lags.tolist()) if lag == 0]
    ends = micro.cu_seqlens.diff()[fresh].cumsum(0).tolist()  # counted over the fresh ones alone
    return [number for number, end in zip(fresh, ends, strict=True) if end <= SCORED_TOKENS] or fresh[:1]


@contextmanager
def _held_weights(model: ScoringModel, config: TrainConfig) -> Iterator[None]:
    """While the context lasts, the parameters of `model` are what an engine computes with; then the old bits again.

    Takes the memory of one more copy of this rank's weights, as the gradients do later in the step.
    """
    before: list[tuple[Tensor, Tensor]] = []
    _forget_gathered(model)  # after a forward without a backward the root's parameters are the gathered copies
    # Engines that get no adapter hold the sum of a weight and its adapter.
    added = {} if config.sends_adapter else updates(model.causal_lm)
    try:
        for full_name, parameter in model.causal_lm.named_parameters():
            if is_adapter(full_name) and not config.sends_adapter:
                continue
            name, weight = name_without_adapter(full_name), parameter.detach()
            own = local_part(weight)
            summed = added[name].to(weight) if name in added and isinstance(weight, DTensor) else weight
            held = _held_rows(name, summed, config.rollout)
            before.append((own, own.clone()))
            own.copy_(held)
        _forget_gathered(model)
        with nullcontext() if config.sends_adapter else adapter_scaled(model, 0.0):
            yield
    finally:
        for own, kept in before:
            own.copy_(kept)
        _forget_gathered(model)


def _held_rows(name: str, parameter: Tensor, config: EngineConfig) -> Tensor:
    """This rank's rows of a parameter as the engines hold it, float32."""
    grid = GRIDS.get(config.quantization)
    if not isinstance(parameter, DTensor) or grid is None or grid.rows == 1:  # no scale covers rows of two ranks
        return held_weight(name, local_part(parameter), config)
    whole = full_tensor(parameter)
    first, last = own_rows(parameter)
    return held_weight(name, whole, config)[first:last].to(local_part(parameter).device)


def _forget_gathered(model: ScoringModel) -> None:
    """Have FSDP gather the parameters anew: the root keeps those of the last forward."""
    if isinstance(model, FSDPModule):
        model.reshard()
