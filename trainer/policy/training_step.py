"""One rollout step on one rank: its mini-batches, each an optimizer step. Called by `trainer/policy/worker.py`.

pi_old and the reference, where they cost a forward of their own; the critic, if there is one
(`trainer/policy/critic.py`); then for every micro-batch forward -> pi_old -> correction -> loss -> backward, and the
step.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from algorithms.histograms import HistogramArrays
from rollout.processes.process_memory import FreedMemory, private_bytes
from rollout.weights.buckets import DTYPES
from trainer.batch.token_deltas import TokenDeltas
from trainer.batch.train_batch import MicroBatch, MiniBatch, StepSamples, TokenScores
from trainer.config.train import TrainConfig
from trainer.limits.device_memory import read_peak, start_peak
from trainer.policy.critic import Critic
from trainer.policy.forward import ScoringModel
from trainer.policy.logprob_head import TokenGradient
from trainer.policy.micro_loss import NUM_COUNTS, rebase_advantages, step_factor, stored_correction
from trainer.policy.optim import learning_rate
from trainer.policy.optimizer_state import Trainable
from trainer.policy.recorder import DumpReport, StepRecorder
from trainer.policy.step_stats import StepTotals
from trainer.policy.token_gradient import token_gradient

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """The outcome of one rollout step on one rank; metrics are global but for perf/*, which are the rank's own."""

    metrics: dict[str, float | None]
    num_optimizer_steps: int
    """Optimizer steps taken; mini-batches without a usable token or gradient are not counted."""
    sample_k3: dict[tuple[int, int], float]
    """K3 by (prompt_id, sample_index), mean over the response, of the samples that this rank scored."""
    histograms: HistogramArrays
    """Where in probability and position the engines differ; global."""
    token_deltas: dict[tuple[int, int], TokenDeltas] = field(default_factory=dict)
    """The tokens of a few samples, the worst and some others; of this rank, like `sample_k3`."""
    private_bytes: tuple[int, ...] = ()
    """Host memory of each rank after the step that no other process shares."""
    dumps: tuple[DumpReport, ...] = ()
    """The dump of this rank, if the step was to be written down."""

    @property
    def dump_s(self) -> float:
        """Seconds of the slowest rank's dump."""
        return max((dump.write_s for dump in self.dumps), default=0.0)


class TrainingStep:
    """What a rank trains: the policy, the frozen reference and the critic, if there are any."""

    def __init__(
        self,
        config: TrainConfig,
        policy: Trainable[ScoringModel],
        *,
        reference: ScoringModel | None,
        critic: Critic | None,
        device: torch.device,
    ) -> None:
        self._config = config
        self._policy = policy
        self._reference = reference
        self._critic = critic
        self._device = device
        self._freed = FreedMemory()

    def run(
        self, mini_batches: list[MiniBatch], samples: StepSamples, step: int, *, dump_dir: Path | None = None
    ) -> TrainReport:
        """Rollout step `step`: every mini-batch is one optimizer step. All ranks must call it together.

        `samples` are those of the whole step, all ranks. The rank writes what it trained on to `dump_dir`, for
        `parity replay`.
        """
        started = time.perf_counter()
        start_peak(self._device)
        minis = [
            replace(mini, micro_batches=[micro.to(self._device) for micro in mini.micro_batches])
            for mini in mini_batches
        ]
        rate = learning_rate(self._config.optim, step=step, num_steps=self._config.run.num_steps)
        self._policy.set_learning_rate(rate)
        if self._config.needs_old_logprobs_pass:
            self.fill_old_logprobs(minis)
        if self._reference is not None:
            self.fill_ref_logprobs(minis, self._reference)
        samples = samples.to(self._device)
        critic_metrics: dict[str, float | None] = {}
        if self._critic is not None:
            critic_metrics = self._critic.train(minis, samples, step=step, config=self._config)
        elif self._config.needs_prepass:
            rebase_advantages(self._config, minis, samples)
        recorder = None if dump_dir is None else StepRecorder(minis, samples, rank=dist.get_rank())
        totals = StepTotals(self._device)
        learns = self._config.policy_learns(step)
        taken = sum(
            self._optimizer_step(mini, index=index, samples=samples, totals=totals, learns=learns, recorder=recorder)
            for index, mini in enumerate(minis)
        )
        metrics = totals.metrics() | critic_metrics
        metrics["optim/lr"] = rate if learns else None
        metrics["optim/skipped_steps"] = float(len(minis) - taken) if learns else 0.0
        if self._policy.loss_scale is not None:
            metrics["optim/loss_scale"] = self._policy.loss_scale
            metrics["optim/overflow_steps"] = float(totals.overflow_steps)
        metrics["perf/worker_train_s"] = time.perf_counter() - started
        peak = read_peak(self._device)
        metrics["perf/train_peak_gib"] = None if peak is None else peak / 2**30
        self._freed.end_step()
        sample_k3 = totals.sample_k3()
        return TrainReport(
            metrics=metrics,
            num_optimizer_steps=taken,
            sample_k3=sample_k3,
            histograms=totals.histograms(),
            token_deltas=totals.token_deltas(sample_k3, count=self._config.tracking.token_samples_per_step),
            private_bytes=(private_bytes(),),
            dumps=() if recorder is None or dump_dir is None else (recorder.write(dump_dir),),
        )

    def score(
        self, micro: MicroBatch, *, measure_floor: bool = False, gradient_of: TokenGradient | None = None
    ) -> TokenScores:
        """Log-probs and entropy of the tokens of `micro` under the current weights; see `trainer/policy/forward.py`."""
        scores: TokenScores = self._policy.model(
            micro,
            temperature=self._config.sampling.temperature,
            entropy_grad=self._config.loss.entropy_coef > 0,
            floor_dtype=DTYPES[self._config.rollout.dtype.name] if measure_floor else None,
            gradient_of=gradient_of,
        )
        return scores

    def fill_old_logprobs(self, minis: list[MiniBatch]) -> None:
        """pi_old of every token in a forward of its own, with the weights at the start of the step."""
        with torch.no_grad():
            for mini in minis:
                for micro in mini.micro_batches:
                    micro.old_logprobs = self.score(micro).logprobs

    def fill_ref_logprobs(self, minis: list[MiniBatch], reference: ScoringModel) -> None:
        """Log-probs of every token under the reference policy."""
        with torch.no_grad():
            for mini in minis:
                for micro in mini.micro_batches:
                    micro.ref_logprobs = reference(micro, temperature=self._config.sampling.temperature).logprobs

    def _optimizer_step(
        self,
        mini: MiniBatch,
        *,
        index: int,
        samples: StepSamples,
        totals: StepTotals,
        learns: bool,
        recorder: StepRecorder | None,
    ) -> bool:
        """Forward, backward and update of one mini-batch; False if nothing could be learnt from it.

        If the policy does not learn in this step, the forward alone is run: for what it measures.
        """
        counts = torch.zeros(NUM_COUNTS, dtype=torch.float64, device=self._device)
        self._policy.zero_grad()
        for position, micro in enumerate(mini.micro_batches):
            known = stored_correction(self._config, micro)
            gradient_of = token_gradient(self._config, micro, mini=mini, factor=self._policy.loss_factor, known=known)
            with torch.set_grad_enabled(learns):
                scores = self.score(micro, measure_floor=index == 0 and position == 0, gradient_of=gradient_of)
            if recorder is not None:
                recorder.add(micro, scores, index=index, position=position)
            part = totals.add(self._config, micro, scores, mini=mini, index=index, samples=samples, known=known)
            if learns:
                self._policy.backward(part.loss, last=position == len(mini.micro_batches) - 1)
            counts += part.counts
            totals.add_floor(scores.floor_delta)
        dist.all_reduce(counts)
        factor = step_factor(self._config, counts, mini)
        if not learns:
            totals.end_step(factor, grad_norm=None)
            return False
        norm = self._policy.gradient_norm(factor.gradient)
        totals.end_step(factor, grad_norm=norm, overflowed=self._policy.overflowed(norm))
        if factor.kept_tokens == 0 and math.isfinite(norm):
            logger.warning("every token was rejected: optimizer step skipped on every rank")
            return False
        return self._policy.update(norm)
