"""One forward and backward of the largest micro-batch before the first step: too little memory shows at once, not in
step 37.

Called by `trainer/policy/worker.py` on every rank. The micro-batch finds gradients in place, as every one but the first
of an optimizer step does; they are dropped afterwards, and no weight changes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rollout.types import FinishReason, Sample
from trainer.batch.packing import micro_batch
from trainer.config.train import TrainConfig
from trainer.limits.device_memory import read_peak, start_peak
from trainer.limits.floors import GroupLengths
from trainer.limits.memory_plan import PROCESS_BYTES, memory_plan
from trainer.policy.trainable import Trainable
from trainer.scoring.forward import ScoringModel
from trainer.text.plain import size

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
"""Substrings of the out-of-memory messages of torch's allocators; on a CPU the error has no type of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRunReport:
    """Tokens, seconds and memory of the largest micro-batch."""

    num_tokens: int
    seconds: float
    peak_bytes: int
    """Above what the rank held before: gradients, gathered parameters, activations and logits."""
    planned_bytes: int | None
    """The same tensors in the memory plan; None if the size of the model is not known there."""
    planned_besides_bytes: int
    """What the plan has for the rest of a process, such as libraries at their first use: a peak on a CPU holds it too.
    0 on a GPU, where only tensors are measured."""

    def __str__(self) -> str:
        line = (
            f"largest micro-batch tried: {self.num_tokens:,} tokens forward and backward in {self.seconds:.1f} s, peak "
            f"{size(self.peak_bytes)} above weights and optimizer"
        )
        if self.planned_bytes is None:
            return line
        besides = self.planned_besides_bytes
        return f"{line}, {size(self.planned_bytes)} planned" + (
            f" for it, and up to {size(besides)} for libraries" if besides else ""
        )


def dry_run(
    policy: Trainable[ScoringModel],
    config: TrainConfig,
    groups: Sequence[GroupLengths],
    *,
    device: torch.device,
    model_path: Path,
) -> DryRunReport:
    """Score and differentiate a micro-batch of groups of these lengths; a collective.

    Raises RuntimeError if the memory does not suffice, with the keys that change it.
    """
    started = time.perf_counter()
    num_tokens = sum(group.num_tokens for group in groups)
    before = start_peak(device)
    try:
        micro = micro_batch(group_samples(groups)).to(device)
        scores = policy.model(micro, temperature=config.sampling.temperature, entropy_grad=config.loss.entropy_coef > 0)
        _give_gradients(policy)
        policy.backward(scores.logprobs.sum() + scores.entropy.sum())
        del scores
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(text in str(error) for text in OUT_OF_MEMORY):
            raise
        raise RuntimeError(
            f"phase memory trial: a micro-batch of {num_tokens:,} tokens does not fit "
            f"(batch.max_tokens_per_microbatch={config.batch.max_tokens_per_microbatch}): {error}. Lower that key, or "
            "set policy.activation_checkpoint_every=1 or policy.offload=parameters."
        ) from error
    finally:
        policy.zero_grad()
    peak = (read_peak(device) or before) - before
    planned = memory_plan(config, device_bytes=None, model_path=model_path).rank
    return DryRunReport(
        num_tokens=num_tokens,
        seconds=time.perf_counter() - started,
        peak_bytes=max(0, peak),
        planned_bytes=None if planned is None else planned.working + planned.gradients,
        planned_besides_bytes=PROCESS_BYTES if device.type == "cpu" else 0,
    )


def _give_gradients(policy: Trainable[ScoringModel]) -> None:
    """Gradients of zeros, as large as those of a micro-batch before: every further one of a step is added to them."""
    for parameter in policy.model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def group_samples(groups: Sequence[GroupLengths]) -> list[Sample]:
    """Samples of these lengths; every token after the prompt is scored."""
    return [
        Sample(
            prompt_id=number,
            sample_index=index,
            token_ids=np.full(group.prompt + rest, number % 2),  # neighbours must not share a prompt by chance
            response_mask=np.arange(group.prompt + rest) >= group.prompt,
            rollout_logprobs=np.zeros(group.prompt + rest),
            token_versions=np.zeros(group.prompt + rest, dtype=np.int64),
            finish_reason=FinishReason.length,
        )
        for number, group in enumerate(groups)
        for index, rest in enumerate(group.rests)
    ]
