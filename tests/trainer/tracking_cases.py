"""Shared by the tests of what a run logs: a config, a tracker, rows, and a W&B without the login of the machine."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer.tracking.wandb_sink as wandb_sink
from algorithms.histograms import HistogramArrays, mismatch_histograms
from algorithms.tokens import Tokens
from rollout.config import SamplingConfig
from rollout.task_config import ArithmeticDataConfig
from rollout.types import FinishReason
from trainer.config.outputs import TrackingConfig, WandbMode
from trainer.config.train import TrainConfig
from trainer.config.training import ArithmeticModelConfig, RunConfig
from trainer.tracking.console import Console
from trainer.tracking.samples import SampleRow
from trainer.tracking.tracker import Tracker


@pytest.fixture(autouse=True)
def no_wandb_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing in these tests may depend on, or use, a login of the machine."""
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setattr(wandb_sink, "_START_TIMEOUT_S", 3.0)


def make_config(mode: WandbMode = WandbMode.disabled, **changes: object) -> TrainConfig:
    base = TrainConfig(
        run=RunConfig(recipe="arithmetic_grpo", num_steps=4),
        model=ArithmeticModelConfig(),
        data=ArithmeticDataConfig(),
        sampling=SamplingConfig(max_new_tokens=16),
        tracking=TrackingConfig(wandb=mode, samples_per_step=3),
    )
    return replace(base, **changes)


def make_tracker(config: TrainConfig, run_dir: Path) -> tuple[Tracker, io.StringIO]:
    stream = io.StringIO()
    return Tracker(config, run_dir=run_dir, console=Console(config.run.num_steps, stream=stream)), stream


def row(prompt_id: int, sample_index: int, k3: float | None = None, response: str = "42") -> SampleRow:
    return SampleRow(
        prompt_id=prompt_id, sample_index=sample_index, prompt="40+2=", response=response, answer="42", reward=1.0,
        correct=True, advantage=0.5, num_response_tokens=3, finish_reason=FinishReason.stop, policy_version=7,
        rollout_logprob_mean=-0.25, k3=k3,
    )  # fmt: skip


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def some_histograms() -> HistogramArrays:
    old, rollout = torch.log(torch.tensor([0.5, 0.9, 0.3])), torch.log(torch.tensor([0.4, 0.9, 0.3]))
    return mismatch_histograms(
        Tokens(
            trainer_logprobs=old,
            rollout_logprobs=rollout,
            response_mask=torch.ones(3, dtype=torch.bool),
            cu_seqlens=torch.tensor([0, 3], dtype=torch.int32),
        )
    ).arrays()
