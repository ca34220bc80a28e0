"""The schedule in rollout steps, decay on matrices only, and clipping by the global norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.components import OptimConfig, Schedule
from trainer.optim import build_optimizer, clip_gradients, learning_rate


def test_warm_up_counts_rollout_steps() -> None:
    config = OptimConfig(lr=1e-3, warmup_rollout_steps=4)
    rates = [learning_rate(config, step=step, num_steps=10) for step in range(1, 7)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_linear_and_cosine_fall_to_nothing_after_the_last_step() -> None:
    linear = OptimConfig(lr=1.0, schedule=Schedule.linear)
    assert [learning_rate(linear, step=s, num_steps=4) for s in (1, 2, 4)] == pytest.approx([1.0, 0.75, 0.25])
    cosine = OptimConfig(lr=1.0, schedule=Schedule.cosine)
    assert learning_rate(cosine, step=3, num_steps=4) == pytest.approx(0.5)


def test_vectors_are_not_decayed() -> None:
    model = nn.Linear(3, 2)
    groups = build_optimizer(model, OptimConfig(weight_decay=0.1)).param_groups
    assert [(group["weight_decay"], [p.ndim for p in group["params"]]) for group in groups] == [
        (0.1, [2]),
        (0.0, [1]),
    ]


def test_clipping_reports_the_norm_before_it() -> None:
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0]])
    assert clip_gradients(model, 1.0) == pytest.approx(3.0)
    assert model.weight.grad.item() == pytest.approx(1.0, abs=1e-4)
