"""A run directory as a run leaves it, with made-up numbers of realistic shape, for the tests of the report."""

from __future__ import annotations

import io
import math
import random
from pathlib import Path
from typing import Any

import torch

from algorithms.config import TISConfig
from algorithms.histograms import HistogramArrays, mismatch_histograms
from algorithms.tokens import Tokens
from rollout.config import DynamicCollectConfig, SamplingConfig
from rollout.task_config import ArithmeticDataConfig
from rollout.types import FinishReason
from trainer.config.outputs import TrackingConfig, WandbMode
from trainer.config.train import TrainConfig
from trainer.config.training import ArithmeticModelConfig, RunConfig
from trainer.report.data import RunData
from trainer.tracking.console import Console
from trainer.tracking.samples import SampleRow, SampleTokens
from trainer.tracking.tracker import Tracker

ATTACK = "</pre></script><script>window.attacked = 1</script><img src=x onerror='window.attacked=2'>{{ 7*7 }}<!--"
"""What a model, a dataset or a name may try to get onto the page."""


def make_run(rows: list[dict[str, Any]], **other: Any) -> RunData:
    """A run of these rows; everything else is empty unless it is given."""
    empty: dict[str, Any] = {
        "samples": [],
        "histograms": [],
        "evaluations": {},
        "events": [],
        "config": {},
        "earlier": [],
        "environment": {},
        "status": {},
        "accounting": {},
        "diagnosis": {},
        "profiles": {},
        "remarks": [],
    }
    return RunData(name="made", rows=rows, **(empty | other))


def hostile_sample(text: str) -> SampleRow:
    """A sample whose every text is `text`, its tokens too."""
    tokens = SampleTokens(
        first=3, num_tokens=99, texts=[text, text], rollout_logprobs=[-1.0, None], deltas=[-2.0, None]
    )
    return SampleRow(
        prompt_id=99, sample_index=0, prompt=text, response=text * 9, answer=text, reward=0.0, correct=False,
        advantage=0.0, num_response_tokens=1, finish_reason=FinishReason.stop, policy_version=1,
        rollout_logprob_mean=-1.0, k3=1.0, tokens=tokens,
    )  # fmt: skip


def step_metrics(step: int, num_steps: int, noise: random.Random) -> dict[str, float | None]:
    """Metrics of one step: accuracy rises from 0.4 to 0.95, K3 grows slowly, every ninth floor is missing."""
    progress = step / num_steps
    accuracy = 0.4 + 0.55 * (1 - math.exp(-3 * progress)) + noise.gauss(0, 0.02)
    k3 = 2.6e-6 * math.exp(0.9 * progress + noise.gauss(0, 0.18))
    seconds = {"rollout": 1.2, "reward": 0.03, "pack": 0.01, "train": 0.7, "sync": 0.09, "log": 0.004,
               "checkpoint": 0.05}  # fmt: skip
    seconds = {name: value * math.exp(noise.gauss(0, 0.08)) for name, value in seconds.items()}
    seconds["unattributed"] = 0.01
    evaluated = step == num_steps or step % 10 == 0
    if evaluated:
        seconds["eval"] = 0.8
    total = sum(seconds.values())
    return {
        "reward/mean": accuracy - 0.02,
        "reward/accuracy": accuracy,
        "mismatch/k1": k3 * 0.2,
        "mismatch/k3": k3,
        "mismatch/k3_floor": None if step % 9 == 0 else 2.4e-6,
        "mismatch/k3_max": k3 * 90,
        "mismatch/abs_logdiff_mean": math.sqrt(2 * k3) * 0.8,
        "mismatch/prob_diff_max": 0.01 * math.exp(noise.gauss(0, 0.3)),
        "mismatch/ess/raw_token": 0.9997 - 4 * k3,
        "mismatch/ess/applied_token": 0.9999,
        "mismatch/is/clip_frac_hi": max(0.0, noise.gauss(1e-4, 1e-4)),
        "mismatch/kept_frac": 1.0,
        "mismatch/rs/token_frac": 0.002 * (1 + progress),
        "mismatch/rs/seq_frac": 0.01 * (1 + progress),
        "mismatch/rs/kept_len": 4.4,
        "mismatch/rs/rejected_len": None if step % 4 == 0 else 6.1 + noise.gauss(0, 0.3),
        "mismatch/rs/kept_reward": accuracy,
        "mismatch/rs/rejected_reward": None if step % 4 == 0 else accuracy - 0.1,
        "mismatch/rs/kept_k3": k3,
        "mismatch/rs/rejected_k3": None if step % 4 == 0 else k3 * 40,
        "mismatch/ppl/train": 1.3 * math.exp(-0.2 * progress + noise.gauss(0, 0.02)),
        "mismatch/ppl/rollout": 1.3 * math.exp(-0.2 * progress),
        "policy/entropy": 0.62 * math.exp(-1.4 * progress + noise.gauss(0, 0.02)) + 0.02,
        "optim/grad_norm": 0.12 * math.exp(noise.gauss(0, 0.3)),
        "optim/lr": 3e-4,
        "loss/policy": noise.gauss(-0.002, 0.004),
        "loss/clip_frac_high": abs(noise.gauss(0.002, 0.001)),
        "loss/clip_frac_low": abs(noise.gauss(0.001, 0.001)),
        "critic/explained_variance": 0.3 * progress + noise.gauss(0, 0.02),
        "critic/value_mean": accuracy - 0.05,
        "critic/returns_mean": accuracy,
        "critic/loss": 0.1 - 0.05 * progress,
        "rollout/policy_version": step - 1,
        "rollout/num_samples": 128,
        "rollout/response_tokens_mean": 4.4 + noise.gauss(0, 0.1),
        "rollout/truncated_frac": 0.03 * math.exp(-5 * progress),
        "rollout/groups_generated": 24,
        "rollout/groups_kept": 16,
        "rollout/groups_dropped/all_correct": round(8 * progress),
        "rollout/groups_dropped/all_wrong": 8 - round(8 * progress),
        "rollout/groups_dropped/never": 0,
        "rollout/zero_variance_frac": 1 / 3,
        "rollout/tokens_per_s": 128 * 4.4 / seconds["rollout"],
        "rollout/rounds": 1,
        "sync/gb_per_s": 0.9 + noise.gauss(0, 0.05),
        "sync/bytes": 2_650_000,
        "sync/seconds": 0.003,
        **{f"time/{name}_s": value for name, value in seconds.items()},
        "time/step_s": total,
        "perf/unattributed_frac": seconds["unattributed"] / total,
        "perf/rollout_floor_frac": 0.1 / seconds["rollout"],
        "perf/train_floor_frac": 0.2 / seconds["train"],
        "perf/sync_floor_frac": 0.001 / seconds["sync"],
        "perf/step_floor_frac": 0.301 / total,
        "perf/mfu": 0.19 / seconds["train"],
        "perf/train_tokens_per_s": 128 * 9.0 / seconds["train"],
        "perf/train_peak_gib": 0.9,
        "perf/memory_gib/driver": 0.31,
        "perf/memory_gib/policy_0": 0.5 + 0.0001 * step,
        "perf/memory_gib/engine_0": 0.4,
        **(evaluation_metrics(step, accuracy) if evaluated else {}),
    }


def evaluation_metrics(step: int, accuracy: float) -> dict[str, float | None]:
    """Metrics of an evaluation after `step`."""
    return {
        "eval/accuracy": accuracy,
        "eval/accuracy_sampled": accuracy - 0.06,
        "eval/reward_mean": accuracy,
        "eval/policy_version": step,
    }


def step_samples(step: int, num_steps: int, noise: random.Random) -> list[SampleRow]:
    rows = []
    for prompt_id in range(8):
        left, right = noise.randrange(10, 99), noise.randrange(10, 99)
        correct = noise.random() < 0.4 + 0.55 * step / num_steps
        rows.append(
            SampleRow(
                prompt_id=prompt_id, sample_index=0, prompt=f"{left}+{right}=",
                response=str(left + right if correct else left + right - 10), answer=str(left + right),
                reward=float(correct), correct=correct, advantage=noise.gauss(0, 1), num_response_tokens=4,
                finish_reason=FinishReason.length if prompt_id == 3 else FinishReason.stop, policy_version=step - 1,
                rollout_logprob_mean=-abs(noise.gauss(0.1, 0.1)), k3=3e-6 * math.exp(noise.gauss(0, 1)),
                tokens=step_tokens(str(left + right), noise) if prompt_id < 4 else None, by_k3=prompt_id < 4,
            )
        )  # fmt: skip
    return rows


def step_responses(step: int, *, text: str = "") -> list[dict[str, Any]]:
    """Rows of an evaluation: of four prompts one is learnt after step 0 and one forgotten."""
    right = [step > 0, step == 0, True, False]
    return [
        {
            "set": "heldout", "prompt_id": number, "prompt": text or f"{number}+1=", "answer": str(number + 1),
            "greedy": {"response": text or str(number + correct), "correct": correct, "reward": float(correct),
                       "reward_parts": {"chars": 1.5}, "finish_reason": "stop"},
            "sampled": [],
        }
        for number, correct in enumerate(right)
    ]  # fmt: skip


def step_tokens(text: str, noise: random.Random) -> SampleTokens:
    """A token per character, each with a Delta of a few thousandths, and one that a tool wrote."""
    logprobs = [-abs(noise.gauss(0.1, 0.1)) for _ in text]
    return SampleTokens(
        first=0,
        num_tokens=len(text) + 1,
        texts=[*text, "<tool>"],
        rollout_logprobs=[*logprobs, None],
        deltas=[*(noise.gauss(0, 3e-3) for _ in text), None],
    )


def step_histograms(noise: random.Random) -> HistogramArrays:
    """Of 64 responses of 4 tokens."""
    rollout = -torch.tensor([abs(noise.gauss(0, 0.8)) for _ in range(256)])
    delta = torch.tensor([noise.gauss(0, 2e-3) for _ in range(256)])
    return mismatch_histograms(
        Tokens(
            trainer_logprobs=(rollout + delta).clamp(max=0),
            rollout_logprobs=rollout,
            response_mask=torch.ones(256, dtype=torch.bool),
            cu_seqlens=torch.arange(0, 257, 4, dtype=torch.int32),
        )
    ).arrays()


def write_run(
    run_dir: Path, *, num_steps: int = 40, extra_samples: tuple[SampleRow, ...] = (), seed: int = 7, cap: float = 2.0
) -> Path:
    """Let a real Tracker write `num_steps` made-up steps; `extra_samples` go with the last one."""
    noise = random.Random(seed)
    config = TrainConfig(
        run=RunConfig(recipe="arithmetic_dapo", num_steps=num_steps, dir=str(run_dir), seed=seed),
        correction=TISConfig(cap=cap),
        model=ArithmeticModelConfig(), data=ArithmeticDataConfig(), collect=DynamicCollectConfig(),
        sampling=SamplingConfig(max_new_tokens=16), tracking=TrackingConfig(wandb=WandbMode.disabled),
    )  # fmt: skip
    with Tracker(config, run_dir=run_dir, console=Console(num_steps, stream=io.StringIO())) as tracker:
        tracker.log_assumptions(["MFU: 6 x (198,000 body parameters x tokens) over train seconds x 96 GFLOP/s"])
        tracker.log_responses(0, step_responses(0))
        tracker.log_evaluation(0, evaluation_metrics(0, 0.4))
        for step in range(1, num_steps + 1):
            samples = step_samples(step, num_steps, noise)
            if step == num_steps:
                samples = [*extra_samples, *samples]
            tracker.log(step, step_metrics(step, num_steps, noise), samples)
            tracker.log_histograms(step, step_histograms(noise))
        tracker.log_responses(num_steps, step_responses(num_steps))
    return run_dir
