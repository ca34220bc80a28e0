"""One scored micro-batch -> its part of the loss, and the counts that the optimizer step is divided by in the end.

What divides the loss is known before the first forward, except what depends on rejection and weights: the number of
kept tokens (rejected_denominator=drop) and the mean weight (self_normalize). Both are one factor for the whole
optimizer step, so they are counted on the way and multiply the gradient after the last micro-batch. No forward is
run for them, and the gradient does not depend on how samples were packed or sharded.

Used by `trainer/worker.py`. T: packed tokens, N: sequences, S: samples of the rollout step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from algorithms.advantage import ADVANTAGES
from algorithms.aggregate import token_coefficients
from algorithms.config import AdvantageConfig, Aggregation, RejectedDenominator, SelfNormalize
from algorithms.correction import Correction, correct, weight_total
from algorithms.loss import LossStats, policy_loss
from algorithms.masked import segment_expand, segment_sum
from trainer.batch import MicroBatch, MiniBatch, StepSamples
from trainer.config import TrainConfig
from trainer.forward import TokenScores

NUM_COUNTS = 4
"""Kept tokens, sequences with a kept token, sum of weights, number of weights."""


class MicroLoss(NamedTuple):
    """What a micro-batch contributes to the optimizer step."""

    loss: Tensor
    """Scalar with a graph, part of a sum over micro-batches and ranks."""
    correction: Correction
    stats: LossStats
    counts: Tensor
    """[NUM_COUNTS] float64."""


def micro_loss(
    config: TrainConfig, micro: MicroBatch, scores: TokenScores, *, old_logprobs: Tensor, mini: MiniBatch
) -> MicroLoss:
    """Correct, weigh and sum the tokens of one micro-batch of `mini`; mu is compared with `old_logprobs` [T]."""
    correction = micro_correction(config, micro, old_logprobs)
    drops = config.correction.spec().rejected_denominator is RejectedDenominator.drop
    coefficients = token_coefficients(
        config.loss.aggregation,
        mask=correction.keep if drops else micro.response_mask,
        cu_seqlens=micro.cu_seqlens,
        num_tokens=mini.num_response_tokens,
        num_sequences=mini.num_sequences,
        fixed_length_tokens=config.loss.fixed_length_tokens,
    )
    output = policy_loss(
        scores.logprobs,
        entropy=scores.entropy,
        advantages=micro.advantages,
        response_mask=micro.response_mask,
        cu_seqlens=micro.cu_seqlens,
        correction=correction,
        coefficients=coefficients,
        loss_config=config.policy_loss,
    )
    kept_per_sequence = segment_sum(correction.keep.double(), micro.cu_seqlens)
    kept = torch.stack([kept_per_sequence.sum(), (kept_per_sequence > 0).sum().double()])
    weights = weight_total(config.correction, correction, cu_seqlens=micro.cu_seqlens)
    return MicroLoss(loss=output.loss, correction=correction, stats=output.stats, counts=torch.cat([kept, weights]))


def micro_correction(config: TrainConfig, micro: MicroBatch, old_logprobs: Tensor) -> Correction:
    """The correction of one micro-batch."""
    return correct(
        config.correction,
        old_logprobs=old_logprobs,
        rollout_logprobs=micro.rollout_logprobs,
        response_mask=micro.response_mask,
        cu_seqlens=micro.cu_seqlens,
        advantages=micro.advantages,
    )


class StepFactor(NamedTuple):
    """What an optimizer step learnt from its counts."""

    kept_tokens: float
    """Over all ranks."""
    gradient: float
    """Multiplies the gradient, and the loss that is reported."""
    mean_weight: float | None
    """Z, the mean weight of what is kept; None if nothing is."""


def step_factor(config: TrainConfig, counts: Tensor, mini: MiniBatch) -> StepFactor:
    """The factor of an optimizer step from its global counts [NUM_COUNTS]; reads the device."""
    kept_tokens, kept_sequences, weight_sum, num_weights = counts.tolist()
    spec = config.correction.spec()
    factor = 1.0
    if spec.rejected_denominator is RejectedDenominator.drop and kept_tokens:
        match config.loss.aggregation:
            case Aggregation.token_mean:
                factor = mini.num_response_tokens / kept_tokens
            case Aggregation.seq_mean_token_mean | Aggregation.seq_mean_token_sum | Aggregation.fixed_length:
                factor = mini.num_sequences / kept_sequences
            case Aggregation.token_sum:
                factor = 1.0
    mean_weight = weight_sum / num_weights if num_weights else None
    if spec.self_normalize is SelfNormalize.mean_one and mean_weight:
        factor /= mean_weight
    return StepFactor(kept_tokens=kept_tokens, gradient=factor, mean_weight=mean_weight)


def rebase_advantages(config: TrainConfig, minis: Sequence[MiniBatch], samples: StepSamples) -> None:
    """Replace the advantages by those against the baseline of the samples that the correction keeps.

    A sample is kept if one of its tokens is. Needs pi_old of every micro-batch. A collective: all ranks see the
    same verdicts and compute the same advantages.
    """
    kept = torch.zeros_like(samples.rewards, dtype=torch.float64)
    for mini in minis:
        for micro in mini.micro_batches:
            if micro.old_logprobs is None:
                raise RuntimeError("advantage.baseline_scope=kept needs pi_old before the first update")
            keep = micro_correction(config, micro, micro.old_logprobs).keep
            kept.index_add_(0, micro.sample_numbers, segment_sum(keep.double(), micro.cu_seqlens))
    dist.all_reduce(kept)
    advantages = _advantages(config.advantage, samples, kept=kept > 0)
    for mini in minis:
        for micro in mini.micro_batches:
            per_token = segment_expand(advantages[micro.sample_numbers], micro.cu_seqlens, num_tokens=micro.num_tokens)
            micro.advantages = torch.where(micro.response_mask, per_token, 0.0)


def _advantages(config: AdvantageConfig, samples: StepSamples, *, kept: Tensor) -> Tensor:
    return ADVANTAGES[config.estimator.name](
        samples.rewards, samples.group_ids, epsilon=config.epsilon, num_tokens=samples.num_tokens, kept=kept
    )
