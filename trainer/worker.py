"""The FSDP worker: one data-parallel rank of the policy, hosted in a Ray actor by `trainer/policy_group.py`.

Verbs: setup, train, logprobs, weight_buckets, stop. All ranks must be called together: each verb but `stop`
contains collectives. Inside `train`: forward -> pi_old -> correction -> loss -> backward -> optimizer step.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from algorithms.aggregate import token_coefficients
from algorithms.config import RejectedDenominator
from algorithms.correction import Correction, MISConfig, correct
from algorithms.diagnostics import LossStats, MismatchStats, mismatch_stats
from algorithms.kl import k3
from algorithms.loss import policy_loss
from algorithms.masked import segment_mean
from rollout.types import WeightBucket
from rollout.weights import DTYPES, pack_buckets
from trainer.batch import MicroBatch, MiniBatch
from trainer.config import TrainConfig
from trainer.forward import ScoringModel, TokenScores
from trainer.model import full_tensors, gradient_sync, load_causal_lm, shard
from trainer.optim import build_optimizer, clip_gradients, learning_rate

logger = logging.getLogger(__name__)

MAX_CONSECUTIVE_BAD_STEPS = 3
"""Optimizer steps with a non-finite gradient norm in a row after which the run stops."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySetup:
    """What a rank needs to join the group."""

    config: TrainConfig
    model_path: Path
    rank: int
    init_method: str
    """Rendezvous of the process group, "file://<path>" or "tcp://<address>:<port>"."""
    device: str
    """"cpu" or "cuda"."""
    num_threads: int
    """Torch threads on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyInfo:
    """What a rank says about itself once it is ready."""

    rank: int
    pid: int
    num_parameters: int
    """Of the whole model."""
    rss_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """The outcome of one rollout step on one rank; metrics are global but for perf/*, which are the rank's own."""

    metrics: dict[str, float | None]
    num_optimizer_steps: int
    """Optimizer steps taken; mini-batches without a usable token or gradient are not counted."""
    sample_k3: dict[tuple[int, int], float]
    """K3 by (prompt_id, sample_index), mean over the response, of the samples that this rank scored."""


class PolicyWorker:
    """One FSDP2 rank: master weights, optimizer and the training step."""

    def __init__(self, setup: PolicySetup) -> None:
        self._setup = setup
        self._config = setup.config
        self._bad_steps = 0

    # ---------------------------------------------------------------- verbs

    def setup(self) -> PolicyInfo:
        """Join the process group, load the model, shard it, build the optimizer."""
        setup, config = self._setup, self._config
        torch.manual_seed(config.run.seed)
        if setup.device == "cpu":
            torch.set_num_threads(setup.num_threads)
        self._device = torch.device(setup.device)
        dist.init_process_group(
            "nccl" if setup.device == "cuda" else "gloo",
            init_method=setup.init_method,
            rank=setup.rank,
            world_size=config.policy.num_workers,
            timeout=timedelta(seconds=config.policy.step_timeout_s),
        )
        causal_lm = load_causal_lm(setup.model_path)
        num_parameters = sum(parameter.numel() for parameter in causal_lm.parameters())
        self._model = ScoringModel(causal_lm, chunk_tokens=config.policy.logprob_chunk_tokens).to(self._device)
        self._model.eval()  # no dropout: the engine has none, and pi_old must be the policy that samples
        shard(self._model, init_device_mesh(setup.device, (config.policy.num_workers,)), config.policy.dtype)
        self._optimizer = build_optimizer(self._model, config.optim)
        return PolicyInfo(
            rank=setup.rank,
            pid=os.getpid(),
            num_parameters=num_parameters,
            rss_bytes=psutil.Process().memory_info().rss,
        )

    def train(self, mini_batches: list[MiniBatch], step: int) -> TrainReport:
        """One rollout step: every mini-batch is one optimizer step. Returns global metrics."""
        started = time.perf_counter()
        minis = [
            replace(mini, micro_batches=[micro.to(self._device) for micro in mini.micro_batches])
            for mini in mini_batches
        ]
        rate = learning_rate(self._config.optim, step=step, num_steps=self._config.run.num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        if self._config.needs_old_logprobs_pass:
            self._fill_old_logprobs(minis)
        totals = _StepTotals(self._device)
        taken = sum(self._optimizer_step(mini, index=index, totals=totals) for index, mini in enumerate(minis))
        metrics = totals.metrics()
        metrics["optim/lr"] = rate
        metrics["optim/skipped_steps"] = float(len(minis) - taken)
        metrics["perf/worker_train_s"] = time.perf_counter() - started
        metrics["perf/policy_rss_gib"] = psutil.Process().memory_info().rss / 2**30
        return TrainReport(metrics=metrics, num_optimizer_steps=taken, sample_k3=totals.sample_k3())

    def logprobs(self, micro_batches: list[MicroBatch]) -> list[Tensor]:
        """Log-probs [T] float32 (CPU) of each micro-batch under the current weights, without gradient."""
        with torch.no_grad():
            return [self._score(micro.to(self._device)).logprobs.cpu() for micro in micro_batches]

    def weight_buckets(self, policy_version: int) -> list[WeightBucket]:
        """All weights in the engine's dtype, flattened; rank 0 returns them, the others an empty list."""
        tensors = full_tensors(self._model)  # sharded master weights, whatever ran before
        if self._setup.rank != 0:
            for _ in tensors:
                continue  # gathering is a collective: every rank walks the same parameters
            return []
        return pack_buckets(
            ((name, tensor.cpu()) for name, tensor in tensors),
            policy_version=policy_version,
            bucket_bytes=self._config.policy.sync_bucket_mib * 2**20,
            dtype=DTYPES[self._config.rollout.dtype.name],
        )

    def stop(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    # ---------------------------------------------------------------- the training step

    def _score(self, micro: MicroBatch, *, measure_floor: bool = False) -> TokenScores:
        scores: TokenScores = self._model(
            micro,
            temperature=self._config.sampling.temperature,
            entropy_grad=self._config.loss.entropy_coef > 0,
            floor_dtype=DTYPES[self._config.rollout.dtype.name] if measure_floor else None,
        )
        return scores

    def _fill_old_logprobs(self, minis: list[MiniBatch]) -> None:
        """pi_old of every token in a forward of its own, with the weights at the start of the step."""
        with torch.no_grad():
            for mini in minis:
                for micro in mini.micro_batches:
                    micro.old_logprobs = self._score(micro).logprobs

    def _correct(self, micro: MicroBatch, old_logprobs: Tensor) -> Correction:
        return correct(
            self._config.correction,
            old_logprobs=old_logprobs,
            rollout_logprobs=micro.rollout_logprobs,
            response_mask=micro.response_mask,
            cu_seqlens=micro.cu_seqlens,
        )

    def _denominators(self, mini: MiniBatch) -> tuple[float, float]:
        """Global (tokens, sequences) that the loss is divided by; all of them, or under `drop` the kept ones."""
        if not _drops(self._config):
            return float(mini.num_response_tokens), float(mini.num_sequences)
        counts = torch.zeros(2, dtype=torch.float64, device=self._device)
        for micro in mini.micro_batches:
            if micro.old_logprobs is None:
                raise RuntimeError("rejected_denominator=drop needs pi_old before the first update")
            kept = micro.response_mask & self._correct(micro, micro.old_logprobs).keep
            tokens_before = torch.cat([kept.new_zeros(1).long(), kept.long().cumsum(0)])
            per_sequence = tokens_before[micro.cu_seqlens.long()].diff()
            counts += torch.stack([per_sequence.sum(), (per_sequence > 0).sum()]).double()
        dist.all_reduce(counts)
        tokens, sequences = counts.tolist()
        return max(tokens, 1.0), max(sequences, 1.0)

    def _optimizer_step(self, mini: MiniBatch, *, index: int, totals: _StepTotals) -> bool:
        """Forward, backward and update of one mini-batch; False if nothing could be learnt from it."""
        denominators = self._denominators(mini)
        kept = torch.zeros((), dtype=torch.float64, device=self._device)
        self._optimizer.zero_grad(set_to_none=True)
        for position, micro in enumerate(mini.micro_batches):
            gradient_sync(self._model, position == len(mini.micro_batches) - 1)
            measure_floor = index == 0 and position == 0
            kept += self._backward(
                micro, denominators=denominators, index=index, measure_floor=measure_floor, totals=totals
            )
        dist.all_reduce(kept)
        norm = clip_gradients(self._model, self._config.optim.max_grad_norm)
        totals.grad_norms.append(norm)
        if not torch.isfinite(torch.tensor(norm)):
            self._bad_steps += 1
            logger.warning("gradient norm is %s: optimizer step skipped on every rank", norm)
            if self._bad_steps >= MAX_CONSECUTIVE_BAD_STEPS:
                raise RuntimeError(
                    f"phase train: {self._bad_steps} optimizer steps in a row had a non-finite gradient norm; "
                    "lower optim.lr or set policy.dtype=float32"
                )
            return False
        self._bad_steps = 0
        if kept.item() == 0:
            logger.warning("every token was rejected: optimizer step skipped on every rank")
            return False
        self._optimizer.step()
        return True

    def _backward(
        self,
        micro: MicroBatch,
        *,
        denominators: tuple[float, float],
        index: int,
        measure_floor: bool,
        totals: _StepTotals,
    ) -> Tensor:
        """Accumulate the gradient and the statistics of one micro-batch; returns its kept tokens, float64."""
        config = self._config
        scores = self._score(micro, measure_floor=measure_floor)
        old_logprobs = scores.logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs
        correction = self._correct(micro, old_logprobs)
        mask = micro.response_mask & correction.keep if _drops(config) else micro.response_mask
        coefficients = token_coefficients(
            config.loss.aggregation,
            mask=mask,
            cu_seqlens=micro.cu_seqlens,
            num_tokens=denominators[0],
            num_sequences=denominators[1],
            fixed_length_tokens=config.loss.fixed_length_tokens,
        )
        output = policy_loss(
            scores.logprobs,
            entropy=scores.entropy,
            advantages=micro.advantages,
            response_mask=micro.response_mask,
            correction=correction,
            coefficients=coefficients,
            correction_config=config.correction,
            loss_config=config.loss,
        )
        # FSDP averages gradients over ranks; the denominators are global, so the sum is wanted.
        (output.loss * config.policy.num_workers).backward()
        totals.loss = output.stats if totals.loss is None else totals.loss.merge(output.stats)
        # Without a forward of its own, pi_old is the training forward before the first update; later
        # mini-batches show drift and mismatch together and are left out.
        if micro.old_logprobs is not None or index == 0:
            stats = mismatch_stats(
                old_logprobs=old_logprobs,
                rollout_logprobs=micro.rollout_logprobs,
                response_mask=micro.response_mask,
                cu_seqlens=micro.cu_seqlens,
                correction=correction,
            )
            totals.mismatch = stats if totals.mismatch is None else totals.mismatch.merge(stats)
            totals.add_samples(micro, old_logprobs)
        if scores.floor_delta is not None:
            totals.add_floor(scores.floor_delta)
        return (micro.response_mask & correction.keep).sum().double()


def _drops(config: TrainConfig) -> bool:
    """Whether rejected tokens leave the denominator."""
    correction = config.correction
    return isinstance(correction, MISConfig) and correction.rejected_denominator is RejectedDenominator.drop


class _StepTotals:
    """Statistics of a rollout step, summed over micro-batches here and over ranks in `metrics`."""

    def __init__(self, device: torch.device) -> None:
        self.loss: LossStats | None = None
        self.mismatch: MismatchStats | None = None
        self.grad_norms: list[float] = []
        self._floor = torch.zeros(2, dtype=torch.float64, device=device)
        self._samples: list[tuple[list[tuple[int, int]], Tensor]] = []

    def add_samples(self, micro: MicroBatch, old_logprobs: Tensor) -> None:
        """Keep the mean K3 of each sequence of `micro`; nothing is read from the device yet."""
        per_token = k3(torch.where(micro.response_mask, old_logprobs - micro.rollout_logprobs, 0.0))
        means = segment_mean(per_token, micro.response_mask, micro.cu_seqlens)
        self._samples.append((micro.sample_keys, means[: len(micro.sample_keys)]))

    def sample_k3(self) -> dict[tuple[int, int], float]:
        """K3 of every sample of this rank; reads the device."""
        return {key: value for keys, means in self._samples for key, value in zip(keys, means.tolist(), strict=True)}

    def add_floor(self, delta: Tensor) -> None:
        """Add the head's rounding errors [F] of one micro-batch."""
        self._floor += torch.stack([k3(delta).sum(), torch.tensor(float(delta.numel()), device=delta.device)])

    def metrics(self) -> dict[str, float | None]:
        """Reduce over ranks (a collective) and turn sums into metrics."""
        if self.loss is None or self.mismatch is None:
            raise RuntimeError("no micro-batch was trained on")
        for stats in (self.loss, self.mismatch):
            dist.all_reduce(stats.sums, op=dist.ReduceOp.SUM)
            dist.all_reduce(stats.maxes, op=dist.ReduceOp.MAX)
        dist.all_reduce(self._floor, op=dist.ReduceOp.SUM)
        floor_sum, floor_count = self._floor.tolist()
        return {
            **self.mismatch.metrics(),
            "mismatch/k3_floor": floor_sum / floor_count if floor_count else None,
            **self.loss.metrics(optimizer_steps=len(self.grad_norms)),
            "optim/grad_norm": sum(self.grad_norms) / len(self.grad_norms),
        }
