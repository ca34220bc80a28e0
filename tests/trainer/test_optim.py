"""The schedule in rollout steps, decay on matrices only, and clipping by the global norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.config.training import LRSchedule, OptimConfig
from trainer.policy.optimizer import build_optimizer, clip_gradients, learning_rate


def test_warm_up_counts_rollout_steps() -> None:
    config = OptimConfig(lr=1e-3, warmup_rollout_steps=4)
    rates = [learning_rate(config, step=step, num_steps=10) for step in range(1, 7)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_linear_and_cosine_fall_to_nothing_after_the_last_step() -> None:
    linear = OptimConfig(lr=1.0, schedule=LRSchedule.linear)
    assert [learning_rate(linear, step=s, num_steps=4) for s in (1, 2, 4)] == pytest.approx([1.0, 0.75, 0.25])
    cosine = OptimConfig(lr=1.0, schedule=LRSchedule.cosine)
    assert learning_rate(cosine, step=3, num_steps=4) == pytest.approx(0.5)


def test_vectors_are_not_decayed() -> None:
    model = nn.Linear(3, 2)
    groups = build_optimizer(model, OptimConfig(weight_decay=0.1)).param_groups
    assert [(group["weight_decay"], [p.ndim for p in group["params"]]) for group in groups] == [
        (0.1, [2]),
        (0.0, [1]),
    ]


def test_the_update_at_once_on_a_cpu_is_that_of_adamw() -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(7, 5), nn.Linear(7, 5)
    plain.load_state_dict(model.state_dict())
    config = OptimConfig(lr=1e-2, weight_decay=0.1)
    optimizer = build_optimizer(model, config)
    assert optimizer.defaults["fused"] is True
    groups = [{"params": [plain.weight], "weight_decay": 0.1}, {"params": [plain.bias], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, config.beta2), eps=1e-8, foreach=False, fused=False)
    for _ in range(3):
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            own.grad = torch.randn_like(own)
            other.grad = own.grad.clone()
        optimizer.step()
        reference.step()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)


def test_clipping_reports_the_norm_before_it() -> None:
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0]])
    assert clip_gradients(model, 1.0) == pytest.approx(3.0)
    assert model.weight.grad.item() == pytest.approx(1.0, abs=1e-4)
