"""A recorded step -> what training would have made of it under a correction, without a model.

The code is that of training: `trainer/policy/micro_loss.py` scores each micro-batch, `trainer/policy/step_stats.py`
adds up, rank by rank in the order of the run. So the row of the run's own correction is what its metrics.jsonl says, to
the last bit: with one or two ranks on a CPU; more ranks are added in another order than gloo's, and a GPU rounds
differently.

A correction is judged on the tokens and log-probs of the run. From the second optimizer step on, pi_theta is where the
run's own correction had moved it, and not where another one would have.

T: packed tokens, R: response tokens of the step, all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from algorithms.config import BaselineScope
from trainer.batch.train_batch import MicroBatch, MiniBatch, StepSamples, TokenScores
from trainer.config.train import TrainConfig
from trainer.policy.micro_loss import (
    NUM_COUNTS,
    StepFactor,
    micro_correction,
    micro_loss,
    rebase_advantages,
    step_factor,
    stored_correction,
)
from trainer.policy.step_stats import StepTotals
from trainer.replay.modes import RUN, Mode
from trainer.replay.recorded import RecordedStep

NOT_REPLAYED = ("mismatch/k3_floor", "optim/grad_norm")
"""What `StepTotals` measures with the model."""
MAX_WEIGHT = "replay/max_weight"
"""Largest weight of a kept token, before self-normalisation."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModeScore:
    """A step under one correction."""

    name: str
    metrics: dict[str, float | None]
    """What the run would have logged, and `MAX_WEIGHT`."""
    coefficients: Tensor
    """[R] float32, gradient of the loss by log pi_theta of each response token: rank by rank, as they were packed."""
    factors: tuple[StepFactor, ...]
    """Of each optimizer step; the coefficients hold them."""


def score_mode(mode: Mode, step: RecordedStep) -> ModeScore:
    """What training makes of `step` under `mode`, which must not be refused."""
    config, ranks = fitted(mode), prepared(mode, step)
    totals = [StepTotals(torch.device("cpu")) for _ in ranks]
    coefficients: list[list[Tensor]] = [[] for _ in ranks]
    factors, max_weight = [], 0.0
    for index in range(step.num_optimizer_steps):
        counts = torch.zeros(NUM_COUNTS, dtype=torch.float64)
        found: list[list[Tensor]] = [[] for _ in ranks]
        for rank, minis in enumerate(ranks):
            place = Place(mini=minis[index], number=index, samples=step.samples)
            for micro, scores in zip(minis[index].micro_batches, step.ranks[rank][index].scores, strict=True):
                part = score_micro(config, micro, scores, place=place, totals=totals[rank])
                counts += part.counts
                found[rank].append(part.gradient[micro.response_index])
                max_weight = max(max_weight, part.max_weight)
        factor = step_factor(config, counts, ranks[0][index])
        for rank in range(len(ranks)):
            totals[rank].end_step(factor, grad_norm=None)
            coefficients[rank] += [part * factor.gradient for part in found[rank]]
        factors.append(factor)
    for other in totals[1:]:
        totals[0].take(other)
    metrics = {key: value for key, value in totals[0].metrics_here().items() if key not in NOT_REPLAYED}
    return ModeScore(
        name=mode.name,
        metrics=metrics | {MAX_WEIGHT: max_weight},
        coefficients=torch.cat([part for rank in coefficients for part in rank]),
        factors=tuple(factors),
    )


def scored_modes(modes: Sequence[Mode], step: RecordedStep) -> list[ModeScore]:
    """The score of every mode that is not refused; equal corrections are computed once."""
    scores: list[ModeScore] = []
    done: list[tuple[Mode, ModeScore]] = []
    for mode in modes:
        if mode.config is None:
            continue
        # What the run's own advantages depend on is not in the identity of its correction.
        same = next((score for other, score in done if other.name != RUN and other.identity == mode.identity), None)
        score = score_mode(mode, step) if same is None else replace(same, name=mode.name)
        done.append((mode, score))
        scores.append(score)
    return scores


class Place(NamedTuple):
    """Where a micro-batch stands in its rollout step."""

    mini: MiniBatch
    number: int
    """Of its optimizer step, from 0."""
    samples: StepSamples


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroScore:
    """One micro-batch under a correction."""

    counts: Tensor
    """[NUM_COUNTS] float64."""
    gradient: Tensor
    """[T] float32, of the loss by log pi_theta, before the factor of the optimizer step; 0 off the mask."""
    max_weight: float
    """Of its kept tokens; 0 without one."""


def score_micro(
    config: TrainConfig, micro: MicroBatch, scores: TokenScores, *, place: Place, totals: StepTotals | None
) -> MicroScore:
    """The calls of `trainer/policy/training_step.py`, and the gradient where the backward of the model would begin.

    What is measured is added to `totals`; nothing is without them.
    """
    logprobs = scores.logprobs.clone().requires_grad_()
    at_loss = scores._replace(logprobs=logprobs)
    known = stored_correction(config, micro)
    old_logprobs = scores.logprobs if micro.old_logprobs is None else micro.old_logprobs
    correction = micro_correction(config, micro, old_logprobs) if known is None else known
    if totals is None:
        part = micro_loss(config, micro, at_loss, old_logprobs=old_logprobs, mini=place.mini, known=correction)
    else:
        part = totals.add(
            config, micro, at_loss, mini=place.mini, index=place.number, samples=place.samples, known=known
        )
    [gradient] = torch.autograd.grad(part.loss, [logprobs])
    kept = correction.weight[correction.keep]
    return MicroScore(counts=part.counts, gradient=gradient, max_weight=kept.max().item() if kept.numel() else 0.0)


def fitted(mode: Mode) -> TrainConfig:
    """The config of a mode that is not refused."""
    if mode.config is None:
        raise ValueError(f"mode {mode.name} cannot be scored: {mode.refusal}")
    return mode.config


def prepared(mode: Mode, step: RecordedStep) -> list[list[MiniBatch]]:
    """The mini-batches of every rank as `mode` would have them: pi_old only where it costs a forward, and the
    advantages of the run, unless they depend on what the correction keeps."""
    config = fitted(mode)
    keeps_old = config.needs_old_logprobs_pass and step.has_old_logprobs
    ranks = [[_copied(recorded.mini, keeps_old=keeps_old) for recorded in rank] for rank in step.ranks]
    if mode.name != RUN and config.advantage.baseline_scope is BaselineScope.kept:
        minis = [mini for rank in ranks for mini in rank]
        # All ranks are here, so nothing is left to add up.
        rebase_advantages(config, minis, step.samples, reduce=lambda totals: totals)
    return ranks


def _copied(mini: MiniBatch, *, keeps_old: bool) -> MiniBatch:
    micros = [replace(micro, old_logprobs=micro.old_logprobs if keeps_old else None) for micro in mini.micro_batches]
    return replace(mini, micro_batches=micros)
