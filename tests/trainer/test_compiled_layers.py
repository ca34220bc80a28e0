"""policy.torch_compile: compiled layers give the numbers of plain ones, and new lengths compile nothing anew."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from policy_cases import lone_worker, make_config, make_samples, save_policy
from test_packing import pack_samples

from trainer.policy.host_copy import local_part

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="on a CPU torch.compile needs a C++ compiler"),
]


@pytest.fixture(autouse=True)
def own_graphs() -> Iterator[None]:
    """No graph of another test before, none left behind."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def trained(path: Path, *, compiled: bool, every: int) -> tuple[list[torch.Tensor], list[int]]:
    """Weights and gradients after three steps of micro-batches of changing lengths; graphs after each step."""
    config = make_config(path, num_workers=1)
    policy = replace(config.policy, torch_compile=compiled, activation_checkpoint_every=every)
    graphs = []
    with lone_worker(replace(config, policy=policy), path) as worker:
        for step, max_tokens in enumerate((1000, 80, 120), start=1):
            batch = pack_samples([make_samples()], num_ranks=1, max_tokens=max_tokens, policy_version=0)
            worker.train(batch.ranks[0], batch.samples, step)
            graphs.append(num_graphs())
        parameters = list(worker._policy.model.parameters())
        found = [local_part(t).detach().clone() for p in parameters for t in (p, p.grad) if t is not None]
    return found, graphs


@pytest.mark.parametrize("every", [0, 1])
def test_compiled_layers_train_as_plain_ones(tmp_path: Path, every: int) -> None:
    path = save_policy(tmp_path)
    plain, none = trained(path, compiled=False, every=every)
    assert none == [0, 0, 0]
    compiled, graphs = trained(path, compiled=True, every=every)
    assert len(compiled) == len(plain)
    for mine, theirs in zip(compiled, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=5e-5)  # AdamW lets a rounding grow
    # Before and after attention, with and without gradients: few graphs for all layers, none for another length.
    assert 0 < graphs[0] <= 4 and graphs[2] == graphs[0]
