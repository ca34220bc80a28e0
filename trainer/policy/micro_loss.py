"""One scored micro-batch -> its part of the loss, and the counts that the optimizer step is divided by in the end.

What divides the loss is known before the first forward, except what depends on rejection and weights: the number of
kept tokens (rejected_denominator=drop) and the mean weight (self_normalize). Both are one factor for the whole
optimizer step, so they are counted on the way and multiply the gradient after the last micro-batch. No forward is
run for them, and the gradient does not depend on how samples were packed or sharded.

Used by `trainer/policy/training_step.py`. T: packed tokens, N: sequences, S: samples of the rollout step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from algorithms.advantage import ADVANTAGES
from algorithms.aggregate import token_coefficients
from algorithms.config import AdvantageConfig, Aggregation, Anchor, BaselineScope, RejectedDenominator, SelfNormalize
from algorithms.correction import Correction, correct, weight_total
from algorithms.loss import LossOutput, LossStats, policy_loss
from algorithms.masked import segment_expand, segment_sum
from algorithms.mismatch import MismatchStats, StepContext, mismatch_stats
from algorithms.reference import reference_kl_loss, reference_kl_penalty
from algorithms.tokens import Tokens
from trainer.batch.train_batch import MicroBatch, MiniBatch, StepSamples, TokenScores
from trainer.config.train import TrainConfig

NUM_COUNTS = 4
"""Kept tokens, sequences with a kept token, sum of weights, number of weights."""


class MicroLoss(NamedTuple):
    """What a micro-batch contributes to the optimizer step."""

    loss: Tensor
    """Scalar with a graph, part of a sum over micro-batches and ranks."""
    stats: LossStats
    counts: Tensor
    """[NUM_COUNTS] float64."""
    mismatch: MismatchStats | None
    """None if nobody asked for it."""


def micro_loss(
    config: TrainConfig,
    micro: MicroBatch,
    scores: TokenScores,
    *,
    tokens: Tokens,
    mini: MiniBatch,
    known: Correction | None = None,
    context: StepContext | None = None,
) -> MicroLoss:
    """Correct, weigh and sum the tokens of one micro-batch of `mini`; mu is compared with `tokens.trainer_logprobs`.

    `known` is the correction where it was computed before the forward (`stored_correction`). The mismatch is measured
    if a `context` for it is given.
    """
    correction = correct(config.correction.spec(), tokens) if known is None else known
    mismatch = None if context is None else mismatch_stats(tokens, correction, context)
    coefficients = loss_coefficients(config, micro, mini=mini, keep=correction.keep)
    loss, stats = weighted_loss(config, micro, scores, correction, coefficients=coefficients)
    kept_per_sequence = segment_sum(correction.keep.double(), micro.cu_seqlens)
    kept = torch.stack([kept_per_sequence.sum(), (kept_per_sequence > 0).sum().double()])
    weights = weight_total(config.correction.spec(), correction, cu_seqlens=micro.cu_seqlens)
    counts = torch.cat([kept, weights])
    return MicroLoss(loss=loss, stats=stats, counts=counts, mismatch=mismatch)


def mismatch_context(micro: MicroBatch, samples: StepSamples) -> StepContext:
    """Facts besides log-probs that the mismatch statistics of a micro-batch need."""
    return StepContext(
        rewards=samples.rewards[micro.sample_numbers],
        lags=samples.lags[micro.sample_numbers],
        token_lags=micro.token_lags,
    )


def loss_coefficients(config: TrainConfig, micro: MicroBatch, *, mini: MiniBatch, keep: Tensor | None) -> Tensor:
    """The factor of each token's loss -> [T]; `keep` [T] is read where rejected tokens leave the denominator."""
    mask = micro.response_mask
    if config.correction.spec().rejected_denominator is RejectedDenominator.drop:
        if keep is None:
            raise RuntimeError("a denominator without the rejected tokens needs the correction first")
        mask = keep
    return token_coefficients(
        config.loss.aggregation,
        mask=mask,
        cu_seqlens=micro.cu_seqlens,
        num_tokens=mini.num_response_tokens,
        num_sequences=mini.num_sequences,
        fixed_length_tokens=config.loss.fixed_length_tokens,
    )


def weighted_loss(
    config: TrainConfig, micro: MicroBatch, scores: TokenScores, correction: Correction, *, coefficients: Tensor
) -> LossOutput:
    """Policy loss, entropy bonus and KL to the reference, added up over the tokens of `micro`."""
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
    if not config.has_reference or config.has_kl_in_reward:
        return output
    return output._replace(loss=output.loss + _kl_to_reference(config, micro, scores, correction, coefficients))


def _kl_to_reference(
    config: TrainConfig, micro: MicroBatch, scores: TokenScores, correction: Correction, coefficients: Tensor
) -> Tensor:
    """The KL term of the loss, a sum like the policy loss, over the same tokens with the same weight and anchor.

    A token that the correction rejects or bounds would otherwise come back through an unbounded pi_theta / mu.
    """
    if micro.ref_logprobs is None:
        raise RuntimeError("reference.coef > 0 needs the log-probs of the reference")
    # Without a ratio the weight is that of pi_theta itself.
    ratio_free = config.correction.spec().anchor is Anchor.none
    return reference_kl_loss(
        scores.logprobs,
        ref_logprobs=micro.ref_logprobs,
        anchor_logprobs=scores.logprobs.detach() if ratio_free else correction.anchor,
        response_mask=correction.keep,
        coefficients=coefficients * correction.weight,
        config=config.reference,
    )


def micro_correction(config: TrainConfig, micro: MicroBatch, trainer_logprobs: Tensor) -> Correction:
    """The correction of one micro-batch; mu is compared with `trainer_logprobs` [T], see `Tokens.trainer_logprobs`."""
    return correct(config.correction.spec(), micro.tokens(trainer_logprobs))


def stored_correction(config: TrainConfig, micro: MicroBatch) -> Correction | None:
    """The correction as far as it is known before the forward: with a stored pi_old."""
    return None if micro.old_logprobs is None else micro_correction(config, micro, micro.old_logprobs)


class StepFactor(NamedTuple):
    """What an optimizer step learnt from its counts."""

    kept_tokens: float
    """Over all ranks."""
    num_tokens: int
    """Response tokens, over all ranks."""
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
    return StepFactor(
        kept_tokens=kept_tokens, num_tokens=mini.num_response_tokens, gradient=factor, mean_weight=mean_weight
    )


def rebase_advantages(
    config: TrainConfig,
    minis: Sequence[MiniBatch],
    samples: StepSamples,
    *,
    reduce: Callable[[Tensor], object] = dist.all_reduce,
) -> None:
    """Replace the advantages by those that need pi_old: rewards minus the KL to the reference, and the baseline of the
    samples that the correction keeps, as far as the config asks for them.

    A sample is kept if one of its tokens is. Needs pi_old of every micro-batch. A collective: all ranks see the
    same samples and compute the same advantages. `reduce` adds a tensor up over ranks, in place.
    """
    # Rows: kept tokens, KL in units of reward.
    totals = torch.zeros(2, samples.rewards.shape[0], dtype=torch.float64, device=samples.rewards.device)
    for mini in minis:
        for micro in mini.micro_batches:
            totals.index_add_(1, micro.sample_numbers, _kept_and_penalty(config, micro))
    reduce(totals)
    kept = totals[0] > 0 if config.advantage.baseline_scope is BaselineScope.kept else None
    advantages = _advantages(config.advantage, replace(samples, rewards=samples.rewards - totals[1]), kept=kept)
    for mini in minis:
        for micro in mini.micro_batches:
            per_token = segment_expand(advantages[micro.sample_numbers], micro.cu_seqlens, num_tokens=micro.num_tokens)
            micro.advantages = torch.where(micro.response_mask, per_token, 0.0)


def kept_tokens(config: TrainConfig, micro: MicroBatch) -> Tensor:
    """The tokens [T] bool that the correction keeps, before the first update."""
    return micro_correction(config, micro, _needed_old_logprobs(micro)).keep


def kl_in_reward(config: TrainConfig, micro: MicroBatch) -> Tensor | None:
    """The KL to the reference that is taken off the reward of each token -> [T] in units of reward; None for none."""
    if not config.has_kl_in_reward:
        return None
    if micro.ref_logprobs is None:
        raise RuntimeError("reference.coef > 0 needs the log-probs of the reference")
    return reference_kl_penalty(
        _needed_old_logprobs(micro),
        ref_logprobs=micro.ref_logprobs,
        response_mask=micro.response_mask,
        config=config.reference,
    )


def _needed_old_logprobs(micro: MicroBatch) -> Tensor:
    if micro.old_logprobs is None:
        raise RuntimeError("advantages that depend on pi_old need it before the first update")
    return micro.old_logprobs


def _kept_and_penalty(config: TrainConfig, micro: MicroBatch) -> Tensor:
    """Kept tokens and the KL that is taken off the reward, of each sequence -> [2, N] float64."""
    penalty = kl_in_reward(config, micro)
    columns = (kept_tokens(config, micro), torch.zeros_like(micro.rollout_logprobs) if penalty is None else penalty)
    return torch.stack([segment_sum(column.double(), micro.cu_seqlens) for column in columns])


def _advantages(config: AdvantageConfig, samples: StepSamples, *, kept: Tensor | None) -> Tensor:
    return ADVANTAGES[config.estimator.name](
        samples.rewards, samples.group_ids, epsilon=config.epsilon, num_tokens=samples.num_tokens, kept=kept
    )
