"""One rollout step on one rank, told in the order in which it happens.

    old_logprobs    log pi_old, in a forward of its own where the correction or the advantages need it beforehand
    ref_logprobs    log pi_ref, where there is a reference policy
    advantages      from rewards (`trainer/policy/advantages.py`), or from the values of the critic
    for each pass over the mini-batches, for each mini-batch (an optimizer step), for each of its micro-batches:
        score       log pi_theta and entropy                        `trainer/scoring/forward.py`
        compare     the log-probs that stand for pi_old             `compared_logprobs`
        correct     anchor, weight, keep                            `algorithms/correction.py`
        loss        surrogate x weight x coefficient (+ KL)         `step_loss`
        backward    the gradient is added up over micro-batches
        measure     sums of what was computed                       `trainer/policy/step_stats.py`
    update          one factor for the whole optimizer step (`step_factor`), clipping, optimizer

`parity replay` calls `compared_logprobs`, `correct`, `step_loss` and `step_factor` on a step that was written down.
T: packed tokens, N: sequences, S: samples of the rollout step, all ranks.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from algorithms.aggregate import token_coefficients
from algorithms.config import Anchor, Divisor, RejectedDenominator, SelfNormalize
from algorithms.correction import Correction, correct, weight_total
from algorithms.loss import LossOutput, policy_loss
from algorithms.masked import segment_sum
from algorithms.reference import reference_kl_loss
from rollout.processes.process_memory import FreedMemory, private_bytes
from rollout.weights.packed_weights import DTYPES
from trainer.batch.token_deltas import SampleNumber
from trainer.batch.train_batch import (
    FewScores,
    MicroBatch,
    RankMiniBatch,
    StepSamples,
    TokenScores,
    pass_order,
    present,
)
from trainer.config.train import TrainConfig
from trainer.limits.device_memory import read_peak, start_peak
from trainer.policy.advantages import set_sample_advantages, set_token_advantages
from trainer.policy.held_weights import held_scores, live_scores, weights_differ
from trainer.policy.recorder import StepRecorder
from trainer.policy.step_stats import StepFactor, StepStats
from trainer.policy.train_report import RankReport

if TYPE_CHECKING:  # `parity replay` needs neither transformers nor Ray
    from trainer.policy.critic import Critic
    from trainer.policy.trainable import Trainable
    from trainer.scoring.forward import ScoringModel

logger = logging.getLogger(__name__)

ScoreTokens = Callable[..., TokenScores]
"""A micro-batch and the keyword temperature -> the scores of its tokens."""
TOKEN_SAMPLES = 4
"""Samples per step that are recorded with the Delta of each token, half of them the worst by K3; each takes at most 8
KB in samples.jsonl."""
MAX_REJECTED_STEPS = 10
"""Optimizer steps in a row without a kept token after which the run stops: nothing would be learnt any more."""
NUM_COUNTS = 4
"""Kept tokens, sequences with a kept token, sum of weights, number of weights."""


class TrainingStep:
    """The policy, the frozen reference and the critic of a rank, trained one rollout step at a time."""

    def __init__(
        self,
        config: TrainConfig,
        policy: Trainable[ScoringModel],
        *,
        reference: ScoreTokens | None,
        critic: Critic | None,
        device: torch.device,
    ) -> None:
        self._config = config
        self._policy = policy
        self._reference = reference
        self._critic = critic
        self._device = device
        self._with_routes = policy.model.with_routes
        self._freed = FreedMemory()
        self.rejected_steps = 0
        """Optimizer steps in a row in which the correction rejected every token; a checkpoint holds the count."""

    def run(
        self, mini_batches: list[RankMiniBatch], samples: StepSamples, step: int, *, dump_dir: Path | None = None
    ) -> RankReport:
        """Train rollout step `step` (1-based): each pass takes one optimizer step per mini-batch. A collective.

        Args:
            mini_batches: those of this rank.
            samples: those of the whole step, all ranks.
            step: number of the rollout step.
            dump_dir: directory to which the rank writes what it trained on, for `parity replay`; None for no dump.
        """
        config = self._config
        started = time.perf_counter()
        start_peak(self._device)
        minis = [
            replace(mini, micro_batches=[micro.to(self._device) for micro in mini.micro_batches])
            for mini in mini_batches
        ]
        samples = samples.to(self._device)
        rate = self._policy.set_learning_rate(step=step, num_steps=config.run.num_steps)

        if config.needs_old_logprobs_pass:
            self.fill_old_logprobs(minis)
        if self._reference is not None:
            self.fill_ref_logprobs(minis, self._reference)
        advantages, critic_metrics = self._set_advantages(minis, samples, step=step)

        recorder = None if dump_dir is None else StepRecorder(samples, rank=dist.get_rank())
        stats = StepStats(self._device, self._config.tracking.metrics)
        learns, usable, taken = config.policy_learns(step), minis, 0
        for number in range(config.batch.passes):
            order = pass_order(usable, number=number, seed=config.run.seed, step=step)
            # A mini-batch from which nothing could be learnt is left out of the passes that follow.
            usable = [
                mini
                for index, mini in enumerate(order)
                if self._optimizer_step(
                    mini, number=number, index=index, samples=samples, stats=stats, learns=learns, recorder=recorder
                )
            ]
            taken += len(usable)

        metrics = stats.metrics() | critic_metrics
        metrics["optim/lr"] = rate if learns else None
        metrics["optim/skipped_steps"] = float(len(minis) * config.batch.passes - taken) if learns else 0.0
        if self._policy.loss_scale is not None:
            metrics["optim/loss_scale"] = self._policy.loss_scale
            metrics["optim/overflow_steps"] = float(stats.overflow_steps)
        metrics["perf/worker_train_s"] = time.perf_counter() - started
        peak = read_peak(self._device)
        metrics["perf/train_peak_gib"] = None if peak is None else peak / 2**30
        self._freed.end_step()
        sample_k3 = stats.sample_k3()
        return RankReport(
            metrics=metrics,
            num_optimizer_steps=taken,
            sample_k3=sample_k3,
            sample_advantages={} if advantages is None else _by_sample(minis, advantages),
            histograms=stats.histograms(),
            token_deltas=stats.token_deltas(sample_k3, count=TOKEN_SAMPLES),
            bad_samples=stats.bad_samples,
            private_bytes=private_bytes(),
            dump=None if recorder is None or dump_dir is None else recorder.write(dump_dir),
        )

    def _set_advantages(
        self, minis: Sequence[RankMiniBatch], samples: StepSamples, *, step: int
    ) -> tuple[Tensor | None, dict[str, float | None]]:
        """Set the advantages of every micro-batch, and train the critic if there is one.

        Returns:
            The advantages of the samples [S], None with a critic, whose advantages differ from token to token; and the
            metrics of the critic.
        """
        if self._critic is None:
            return set_sample_advantages(self._config, minis, samples), {}
        started = time.perf_counter()
        self._critic.fill_old_values(minis)
        unwhitened = set_token_advantages(self._config, minis, samples)
        metrics = self._critic.train(minis, unwhitened=unwhitened, step=step)
        return None, metrics | {"perf/worker_critic_s": time.perf_counter() - started}

    def fill_old_logprobs(self, minis: Sequence[RankMiniBatch]) -> None:
        """Set log pi_old of every token in a forward of its own, with the weights at the start of the step."""
        with torch.no_grad():
            for mini in minis:
                for micro in mini.micro_batches:
                    micro.old_logprobs = self.score(micro).logprobs

    def fill_ref_logprobs(self, minis: Sequence[RankMiniBatch], reference: ScoreTokens) -> None:
        """Set the log-probs of every token under the reference policy, which chooses its own experts."""
        with torch.no_grad():
            for mini in minis:
                for micro in mini.micro_batches:
                    live = replace(micro, routes=None)
                    micro.ref_logprobs = reference(live, temperature=self._config.sampling.temperature).logprobs

    def score(self, micro: MicroBatch, *, measure_floor: bool = False) -> TokenScores:
        """Log-probs and entropy of the tokens of `micro` under the current weights.

        `measure_floor`: also what the rounding of the engine's head explains of the mismatch (`mismatch/k3_floor`).
        """
        rollout = self._config.rollout
        scores: TokenScores = self._policy.model(
            micro,
            temperature=self._config.sampling.temperature,
            entropy_grad=self._config.loss.entropy_coef > 0,
            # With rollout.exact the engine's head rounds as the trainer's does.
            engine_dtype=DTYPES[rollout.dtype.name] if measure_floor and not rollout.exact else None,
        )
        return scores

    def _live_scores(self, micro: MicroBatch, samples: StepSamples) -> FewScores | None:
        """Some tokens of `micro` with the trainer's own choice of experts; None where nothing else is used."""
        if not self._with_routes:
            return None
        return live_scores(self._policy.model, micro, samples.lags[micro.sample_numbers], config=self._config)

    def _held_scores(self, micro: MicroBatch, samples: StepSamples) -> FewScores | None:
        """Some tokens of `micro` under the weights that the engines hold; None where they are those of the trainer."""
        if not weights_differ(self._config):
            return None
        lags = samples.lags[micro.sample_numbers]
        return held_scores(self._policy.model, micro, lags, config=self._config)

    def _optimizer_step(
        self,
        mini: RankMiniBatch,
        *,
        number: int,
        index: int,
        samples: StepSamples,
        stats: StepStats,
        learns: bool,
        recorder: StepRecorder | None,
    ) -> bool:
        """Forward, backward and update of mini-batch `index` of pass `number`; False if nothing could be learnt of it.

        If the policy does not learn in this step (critic warm-up), only the forward runs, for the statistics.
        """
        config, spec = self._config, self._config.correction.spec()
        counts = torch.zeros(NUM_COUNTS, dtype=torch.float64, device=self._device)
        losses: list[Tensor] = []
        self._policy.zero_grad()
        for position, micro in enumerate(mini.micro_batches):
            first = number == index == position == 0  # before any weight moves
            held = self._held_scores(micro, samples) if first else None
            live = self._live_scores(micro, samples) if first else None
            with torch.set_grad_enabled(learns):
                scores = self.score(micro, measure_floor=first)
            if config.needs_old_logprobs and micro.old_logprobs is None:
                micro.old_logprobs = scores.logprobs.detach()  # the only mini-batch, in the first pass
            tokens = micro.tokens(compared_logprobs(micro, scores))
            correction = correct(spec, tokens)
            loss = step_loss(config, micro, scores, correction, mini=mini)
            if learns:
                self._policy.backward(loss.loss)
            counts += correction_counts(config, micro, correction)
            losses.append(loss.loss.detach())
            stats.add_loss(loss.stats)
            stats.add_floor(scores.floor_delta)
            stats.add_held(held, micro, scores)
            stats.add_routes(scores.route_counts if number == index == 0 else None, live, micro, scores)
            if is_measured(micro, number=number, index=index):
                stats.add_mismatch(micro, tokens, correction, samples)
            if recorder is not None:
                recorder.add(mini, position, scores)
        dist.all_reduce(counts)
        factor = step_factor(config, counts, mini)
        if not learns:
            stats.end_step(factor, grad_norm=None)
            return False
        norm = self._policy.scale_and_clip(factor.gradient)
        stats.end_step(factor, grad_norm=norm, overflowed=self._policy.overflowed(norm))
        # A gradient of zeros would still move the weights, by momentum and weight decay. One that is not finite is no
        # such gradient: `update` skips and counts it.
        if factor.kept_tokens == 0 and math.isfinite(norm):
            self._skip_rejected()
            return False
        self.rejected_steps = 0
        if not math.isfinite(norm):
            stats.add_bad_samples(mini.micro_batches, losses)
        return self._policy.update(norm)

    def _skip_rejected(self) -> None:
        """Count an optimizer step without a kept token; all ranks have the same counts and end together."""
        self.rejected_steps += 1
        logger.warning("every token was rejected: optimizer step skipped on every rank")
        if self.rejected_steps >= MAX_REJECTED_STEPS:
            raise RuntimeError(
                f"phase train: the correction rejected every token of {self.rejected_steps} optimizer steps in a row, "
                "so that nothing is learnt; look at mismatch/k3 for the distance of engine and trainer, and widen the "
                "bounds or remove criteria of correction.*"
            )


def compared_logprobs(micro: MicroBatch, scores: TokenScores) -> Tensor:
    """The trainer's log-probs that are compared with mu -> [T] float32, nats, no gradient.

    log pi_old, where it is kept beside the tokens: in every pass the same. Otherwise the detached log-probs of the
    training forward. In the first optimizer step of a rollout step they are log pi_old, because the weights have not
    moved. In later steps only corrections that compare the current policy (`compared=current`, as bypass does) have no
    log pi_old: they compare log pi_theta with mu.
    """
    return scores.logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs


def is_measured(micro: MicroBatch, *, number: int, index: int) -> bool:
    """True if the mismatch of a micro-batch of mini-batch `index` of pass `number` is measured: once per token.

    Without a stored pi_old, later optimizer steps would show the mismatch and the drift of the policy together.
    """
    return number == 0 and (micro.old_logprobs is not None or index == 0)


def step_loss(
    config: TrainConfig, micro: MicroBatch, scores: TokenScores, correction: Correction, *, mini: RankMiniBatch
) -> LossOutput:
    """Policy loss, entropy bonus and KL to the reference of one micro-batch: a sum, part of the loss of `mini`.

    With rejected_denominator=drop the sum is over kept tokens, and still divided by the counts of all of them: how many
    are kept is known after the last micro-batch only, and `step_factor` corrects the gradient by it.

    Raises:
        RuntimeError: advantages, or the log-probs of the reference where there is one, are missing.
    """
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
        advantages=present(micro.advantages, "advantages"),
        response_mask=micro.response_mask,
        cu_seqlens=micro.cu_seqlens,
        correction=correction,
        coefficients=coefficients,
        loss_config=config.policy_loss,
    )
    if not config.has_reference or config.has_kl_in_reward:
        return output
    # Over the same tokens with the same weight and anchor as the policy loss: a token that the correction rejects or
    # bounds would otherwise come back through an unbounded pi_theta / mu. Without a ratio the anchor is pi_theta.
    # Unweighted, as other trainers compute it, rejected tokens stay unless they have left the denominator.
    ratio_free, weighted = config.correction.spec().anchor is Anchor.none, config.reference.weighted
    kl = reference_kl_loss(
        scores.logprobs,
        ref_logprobs=present(micro.ref_logprobs, "ref_logprobs"),
        anchor_logprobs=scores.logprobs.detach() if ratio_free else correction.anchor,
        response_mask=correction.keep if weighted else micro.response_mask,
        coefficients=coefficients * correction.weight if weighted else coefficients,
        config=config.reference,
    )
    return output._replace(loss=output.loss + kl)


def correction_counts(config: TrainConfig, micro: MicroBatch, correction: Correction) -> Tensor:
    """Return the counts of a micro-batch -> [NUM_COUNTS] float64. Their sum over micro-batches determines the factor of
    the optimizer step."""
    kept_per_sequence = segment_sum(correction.keep.double(), micro.cu_seqlens)
    kept = torch.stack([kept_per_sequence.sum(), (kept_per_sequence > 0).sum().double()])
    return torch.cat([kept, weight_total(config.correction.spec(), correction, cu_seqlens=micro.cu_seqlens)])


def step_factor(config: TrainConfig, counts: Tensor, mini: RankMiniBatch) -> StepFactor:
    """The factor of an optimizer step from its global counts [NUM_COUNTS]; reads the device.

    The denominators of `step_loss` are known before the first forward, except for two: the number of kept tokens
    (rejected_denominator=drop) and the mean weight (self_normalize). Both are one number for the whole optimizer step,
    so they multiply the gradient after the last micro-batch; it does not depend on how samples were packed or sharded.
    """
    kept_tokens, kept_sequences, weight_sum, num_weights = counts.tolist()
    spec = config.correction.spec()
    factor = 1.0
    if spec.rejected_denominator is RejectedDenominator.drop and kept_tokens:
        match config.loss.aggregation.divisor:
            case Divisor.tokens:
                factor = mini.num_response_tokens / kept_tokens
            case Divisor.sequences:
                factor = mini.num_sequences / kept_sequences
            case Divisor.none:
                factor = 1.0
    mean_weight = weight_sum / num_weights if num_weights else None
    if spec.self_normalize is SelfNormalize.mean_one and mean_weight:
        factor /= mean_weight
    return StepFactor(
        kept_tokens=kept_tokens, num_tokens=mini.num_response_tokens, gradient=factor, mean_weight=mean_weight
    )


def _by_sample(minis: Sequence[RankMiniBatch], advantages: Tensor) -> dict[SampleNumber, float]:
    """The advantages [S] of the samples in `minis`, those of this rank; reads the device."""
    values = advantages.tolist()
    return {number: values[number] for mini in minis for micro in mini.micro_batches for number in micro.numbers()}
