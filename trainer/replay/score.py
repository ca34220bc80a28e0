"""A recorded step -> the metrics of training under a correction, without a model.

The code is the code of training: the functions of `trainer/policy/step.py` on each micro-batch, and
`trainer/policy/step_stats.py`, rank by rank in the order of the run. So the row of the run's own correction equals its
row in metrics.jsonl to the last bit with one or two ranks on a CPU. With more ranks the order of the sums differs from
gloo's, and a GPU rounds differently.

A correction is judged on the tokens and log-probs of the run. From the second optimizer step on, pi_theta is the policy
that the run's own correction produced, not the policy of another correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from algorithms.config import BaselineScope
from algorithms.correction import correct
from trainer.batch.train_batch import RankMiniBatch
from trainer.policy.advantages import set_sample_advantages
from trainer.policy.step import NUM_COUNTS, compared_logprobs, correction_counts, is_measured, step_factor, step_loss
from trainer.policy.step_stats import StepStats
from trainer.replay.modes import RUN, Mode
from trainer.replay.recorded import RecordedStep

NOT_REPLAYED = (
    "mismatch/k3_floor", "mismatch/k3_weights", "mismatch/k3_arithmetic", "mismatch/k3_live", "mismatch/k3_replayed",
    "mismatch/routes_changed", "mismatch/tokens_rerouted", "optim/grad_norm",
)  # fmt: skip
"""Metrics of `StepStats` that need the model."""
MAX_WEIGHT = "replay/max_weight"
"""Largest weight of a kept token, before self-normalisation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeScore:
    """Metrics of a step under one correction."""

    name: str
    metrics: dict[str, float | None]
    """The metrics that the run would have logged, and `MAX_WEIGHT`."""


def score_mode(mode: Mode, step: RecordedStep) -> ModeScore:
    """Score `step` under `mode`."""
    config, ranks = mode.config, prepared(mode, step)
    stats = [StepStats(torch.device("cpu"), config.tracking.metrics) for _ in ranks]
    max_weight = 0.0
    for index, recorded in enumerate(step.ranks[0]):
        counts = torch.zeros(NUM_COUNTS, dtype=torch.float64)
        for rank, minis in enumerate(ranks):
            mini = minis[index]
            for micro, scores in zip(mini.micro_batches, step.ranks[rank][index].scores, strict=True):
                tokens = micro.tokens(compared_logprobs(micro, scores))
                correction = correct(config.correction.spec(), tokens)
                counts += correction_counts(config, micro, correction)
                stats[rank].add_loss(step_loss(config, micro, scores, correction, mini=mini).stats)
                if is_measured(micro, number=int(recorded.again is not None), index=index):
                    stats[rank].add_mismatch(micro, tokens, correction, step.samples)
                max_weight = max(max_weight, torch.where(correction.keep, correction.weight, 0.0).max().item())
        factor = step_factor(config, counts, ranks[0][index])
        for of_rank in stats:
            of_rank.end_step(factor, grad_norm=None)
    for other in stats[1:]:
        stats[0].take(other)
    metrics = {key: value for key, value in stats[0].metrics_here().items() if key not in NOT_REPLAYED}
    return ModeScore(name=mode.name, metrics=metrics | {MAX_WEIGHT: max_weight})


def scored_modes(modes: Sequence[Mode], step: RecordedStep) -> list[ModeScore]:
    """The score of every mode; equal corrections are computed once."""
    scores: list[ModeScore] = []
    for mode in modes:
        # The identity of the run's own correction does not include the inputs of its advantages.
        equal = (
            score
            for other, score in zip(modes, scores, strict=False)
            if other.name != RUN and other.identity == mode.identity
        )
        same = next(equal, None)
        scores.append(score_mode(mode, step) if same is None else replace(same, name=mode.name))
    return scores


def prepared(mode: Mode, step: RecordedStep) -> list[list[RankMiniBatch]]:
    """The mini-batch of every optimizer step, by rank, as `mode` would have them: pi_old only if the mode keeps it, and
    the run's advantages, unless they depend on the tokens that the correction keeps.
    """
    config = mode.config
    keeps_old = config.needs_old_logprobs and step.has_old_logprobs
    first = [[_copied(each.mini, keeps_old=keeps_old) for each in rank if each.again is None] for rank in step.ranks]
    if mode.name != RUN and config.advantage.baseline_scope is BaselineScope.kept:
        minis = [mini for rank in first for mini in rank]
        # All ranks are in this process, so no sum over ranks is missing.
        set_sample_advantages(config, minis, step.samples, reduce=lambda totals: totals)
    return [
        [minis[index if each.again is None else each.again] for index, each in enumerate(rank)]
        for minis, rank in zip(first, step.ranks, strict=True)
    ]


def _copied(mini: RankMiniBatch, *, keeps_old: bool) -> RankMiniBatch:
    micros = [replace(micro, old_logprobs=micro.old_logprobs if keeps_old else None) for micro in mini.micro_batches]
    return replace(mini, micro_batches=micros)
