"""The advantages of a rollout step, set on every rank in one call before the first update.

    per sample   A = estimator(rewards of the step)                               `algorithms.advantage`
    per token    GAE of rewards on the last token and of the critic's values      `algorithms.returns`

Some configurations need pi_old for it: the KL to the reference that is taken off the reward, and a baseline of the
samples that the correction keeps. Used by `trainer/policy/step.py` and `trainer/replay/score.py`.
T: packed tokens, N: sequences, S: samples of the rollout step, all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from algorithms.advantage import sample_advantages
from algorithms.config import BaselineScope
from algorithms.correction import correct
from algorithms.masked import segment_expand, segment_sum
from algorithms.reference import reference_kl_penalty
from algorithms.returns import Moments, gae, moments, token_rewards, whiten
from algorithms.stats import merged
from trainer.batch.train_batch import MicroBatch, RankMiniBatch, StepSamples, present
from trainer.config.train import TrainConfig

EPSILON = 1e-6
"""Number added to a standard deviation, in units of reward, as in verl: far below any spread of rewards, so that equal
rewards give advantages of 0 and not of 0 / 0."""
AllReduce = Callable[[Tensor], object]
"""Adds a tensor up over ranks, in place."""


def set_sample_advantages(
    config: TrainConfig, minis: Sequence[RankMiniBatch], samples: StepSamples, *, reduce: AllReduce = dist.all_reduce
) -> Tensor:
    """Set `advantages` of every micro-batch from the rewards of the step; returns those of the samples -> [S] float32.

    A collective where pi_old is needed: all ranks see the same samples and compute the same advantages. Raises
    RuntimeError if pi_old or the log-probs of the reference are missing and the configuration needs them.
    """
    advantages = _set(config, minis, samples, rewards=samples.rewards)
    if not config.needs_prepass:
        return advantages
    # Rows: kept tokens, KL in units of reward. A sample is kept if one of its tokens is.
    totals = torch.zeros(2, advantages.shape[0], dtype=torch.float64, device=advantages.device)
    for micro in _micros(minis):
        totals.index_add_(1, micro.sample_numbers, _kept_and_penalty(config, micro))
    reduce(totals)
    kept = totals[0] > 0 if config.advantage.baseline_scope is BaselineScope.kept else None
    return _set(config, minis, samples, rewards=samples.rewards - totals[1], kept=kept)


def set_token_advantages(
    config: TrainConfig, minis: Sequence[RankMiniBatch], samples: StepSamples, *, reduce: AllReduce = dist.all_reduce
) -> Moments:
    """Set `returns` and whitened `advantages` of every micro-batch from the rewards and its `old_values`; a collective.

    Returns the moments of the advantages before whitening, over the tokens of all ranks that whitening counts: all
    response tokens, or with baseline_scope=kept those of the samples that the correction keeps. Raises RuntimeError if
    `old_values`, or pi_old where the configuration needs it, are missing.
    """
    parts: list[Moments] = []
    for micro in _micros(minis):
        rewards = token_rewards(
            samples.rewards[micro.sample_numbers],
            penalty=kl_in_reward(config, micro),
            response_mask=micro.response_mask,
            cu_seqlens=micro.cu_seqlens,
        )
        micro.advantages, micro.returns = gae(
            rewards,
            present(micro.old_values, "old_values"),
            response_mask=micro.response_mask,
            cu_seqlens=micro.cu_seqlens,
            gamma=config.advantage.gamma,
            gae_lambda=config.advantage.gae_lambda,
        )
        parts.append(moments(micro.advantages, _whitened_tokens(config, micro, micro.advantages)))
    unwhitened = merged(parts)
    reduce(unwhitened.sums)
    for micro in _micros(minis):
        advantages = present(micro.advantages, "advantages")
        micro.advantages = whiten(advantages, micro.response_mask, epsilon=EPSILON, over=unwhitened)
    return unwhitened


def kept_tokens(config: TrainConfig, micro: MicroBatch) -> Tensor:
    """The tokens [T] bool that the correction keeps before the first update."""
    return correct(config.correction.spec(), micro.tokens(present(micro.old_logprobs, "old_logprobs"))).keep


def kl_in_reward(config: TrainConfig, micro: MicroBatch) -> Tensor | None:
    """The KL to the reference that is taken off the reward of each token -> [T] in units of reward; None for none."""
    if not config.has_kl_in_reward:
        return None
    return reference_kl_penalty(
        present(micro.old_logprobs, "old_logprobs"),
        ref_logprobs=present(micro.ref_logprobs, "ref_logprobs"),
        response_mask=micro.response_mask,
        config=config.reference,
    )


def _set(
    config: TrainConfig,
    minis: Sequence[RankMiniBatch],
    samples: StepSamples,
    *,
    rewards: Tensor,
    kept: Tensor | None = None,
) -> Tensor:
    """Set `advantages` of every micro-batch from `rewards` [S] -> those of the samples [S]."""
    advantages = sample_advantages(
        config.advantage.estimator,
        rewards,
        samples.group_ids,
        epsilon=EPSILON,
        num_tokens=samples.num_tokens,
        kept=kept,
    )
    for micro in _micros(minis):
        per_token = segment_expand(advantages[micro.sample_numbers], micro.cu_seqlens, num_tokens=micro.num_tokens)
        micro.advantages = torch.where(micro.response_mask, per_token, 0.0)
    return advantages


def _micros(minis: Sequence[RankMiniBatch]) -> list[MicroBatch]:
    return [micro for mini in minis for micro in mini.micro_batches]


def _kept_and_penalty(config: TrainConfig, micro: MicroBatch) -> Tensor:
    """Kept tokens and the KL that is taken off the reward, of each sequence -> [2, N] float64."""
    penalty = kl_in_reward(config, micro)
    columns = (kept_tokens(config, micro), torch.zeros_like(micro.rollout_logprobs) if penalty is None else penalty)
    return torch.stack([segment_sum(column.double(), micro.cu_seqlens) for column in columns])


def _whitened_tokens(config: TrainConfig, micro: MicroBatch, advantages: Tensor) -> Tensor:
    """The tokens [T] bool whose mean and standard deviation whiten the advantages [T]."""
    finite = micro.response_mask & torch.isfinite(advantages)
    if config.advantage.baseline_scope is BaselineScope.all:
        return finite
    kept = segment_sum(kept_tokens(config, micro).double(), micro.cu_seqlens) > 0
    return finite & segment_expand(kept, micro.cu_seqlens, num_tokens=micro.num_tokens)
