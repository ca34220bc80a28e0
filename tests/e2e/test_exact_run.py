"""Runs with rollout.exact=true: K3 is 0 in every step, and the modes end with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import column, metrics_of
from safetensors import safe_open
from torch import Tensor

from trainer.cli.commands import run

pytestmark = pytest.mark.slow

EXACT = (
    "model.num_steps=400", "tracking.wandb=disabled", "eval.max_prompts=32", "rollout=torch", "rollout.exact=true",
    "policy.num_workers=2", "run.num_steps=2", "eval.every=0", "batch.prompts_per_step=8",
    "batch.mini_batch_prompts=null", "batch.max_tokens_per_microbatch=512",
)  # fmt: skip
"""Two ranks, several micro-batches each, one optimizer step per rollout; a base model that is right now and then."""
CORRECTIONS = ("recompute", "vanilla_is", "bypass")
"""One that compares with pi_old, one with the policy in the loss, one with mu: benchmarks/exact.py runs all six."""
FLOAT32 = ("policy.dtype=float32", "rollout.dtype=float32")
BFLOAT16 = ("policy.dtype=bfloat16", "rollout.dtype=bfloat16")


def trained(run_dir: Path, *words: str) -> dict[str, Tensor]:
    """Weights after the run, every step of which agreed in every bit."""
    assert run(["train", "arithmetic_grpo", *EXACT, f"run.dir={run_dir}", *words]) == 0
    rows = metrics_of(run_dir)
    assert column(rows, "mismatch/k3") == column(rows, "mismatch/abs_logdiff_max") == [0.0] * len(rows)
    assert column(rows, "mismatch/kept_frac") == [1.0] * len(rows)
    assert any(norm > 0 for norm in column(rows, "optim/grad_norm"))
    assert run(["export", str(run_dir), str(run_dir / "model")]) == 0
    with safe_open(run_dir / "model" / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


def test_the_modes_become_one(tmp_path: Path, local_ray: None) -> None:
    first, *others = [trained(tmp_path / mode, f"correction={mode}", *FLOAT32) for mode in CORRECTIONS]
    assert len(first) > 20
    for end in others:
        assert end.keys() == first.keys() and all(bool((end[name] == first[name]).all()) for name in first)


@pytest.mark.sglang
def test_a_server_has_the_bits_of_the_trainer(tmp_path: Path, local_ray: None) -> None:
    trained(tmp_path / "run", *BFLOAT16, "rollout=sglang", "sampling.top_k=20", "sampling.top_p=0.95")


@pytest.mark.parametrize("engine", ["torch", pytest.param("sglang", marks=pytest.mark.sglang)])
def test_a_mixture_chooses_the_same_experts_in_engine_and_trainer(tmp_path: Path, local_ray: None, engine: str) -> None:
    """The routes of the engine are replayed, and change nothing."""
    trained(tmp_path / "run", *BFLOAT16, f"rollout={engine}", "model.num_experts=16")
    rows = metrics_of(tmp_path / "run")
    assert column(rows, "mismatch/routes_changed") == column(rows, "mismatch/tokens_rerouted") == [0.0] * len(rows)


def test_engines_adapters_and_checkpointed_layers_keep_the_bits(tmp_path: Path, local_ray: None) -> None:
    """With truncated sampling: the base model is sure of most tokens, so few are kept."""
    several = ("rollout.num_engines=2", "policy.activation_checkpoint_every=1", "sampling.temperature=0.7")
    truncation = ("sampling.top_p=0.95", "sampling.min_p=0.01")
    trained(tmp_path / "run", *BFLOAT16, *several, *truncation, "policy.lora.rank=8", "optim.lr=1e-3")
    assert all(1 < size < 20 for size in column(metrics_of(tmp_path / "run"), "rollout/support_size_mean"))
