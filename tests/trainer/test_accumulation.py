"""A rank keeps its shard of the gradient between micro-batches, not the gradient of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_ranks import one_rank_of
from policy_cases import make_samples, save_policy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rollout.config import DType
from trainer.batch.packing import micro_batch
from trainer.config.training import Offload, OptimConfig
from trainer.policy.model import load_causal_lm, shard
from trainer.policy.trainable import Trainable
from trainer.scoring.forward import ScoringModel

RANKS = 8


def unsharded_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Gradients of whole parameters that FSDP2 keeps for the next micro-batch."""
    units = [unit._get_fsdp_state() for unit in model.modules() if hasattr(unit, "_get_fsdp_state")]
    parameters = [parameter for unit in units for parameter in unit._fsdp_param_group.fsdp_params]
    assert len(parameters) == len(list(model.parameters()))
    kept = [parameter.unsharded_accumulated_grad for parameter in parameters]
    return [gradient for gradient in kept if gradient is not None]


@pytest.mark.parametrize("offload", [Offload.none, Offload.parameters])
def test_a_rank_keeps_its_shard_of_the_gradient_only(tmp_path: Path, offload: Offload) -> None:
    with one_rank_of(RANKS):
        causal_lm = load_causal_lm(save_policy(tmp_path / "model"))
        model, on_host = ScoringModel(causal_lm, chunk_tokens=64), offload is Offload.parameters
        shard(model, causal_lm.get_decoder(), init_device_mesh("cpu", (RANKS,)), DType.bfloat16, on_host=on_host)
        policy = Trainable(model, OptimConfig(), name="policy", dtype=DType.bfloat16, offload=offload)
        for _ in range(3):
            policy.backward(policy.model(micro_batch(make_samples()), temperature=1.0).logprobs.sum())
            assert not unsharded_gradients(model)
            gradients = [parameter.grad for parameter in model.parameters()]
            assert all(isinstance(gradient, DTensor) and gradient.dtype == torch.float32 for gradient in gradients)
            held = sum(gradient.to_local().numel() for gradient in gradients)
            assert held == sum(parameter.to_local().numel() for parameter in model.parameters())
            assert held <= 1.1 * sum(parameter.numel() for parameter in model.parameters()) / RANKS
