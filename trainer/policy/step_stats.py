"""Statistics of a rollout step: micro-batches are added on the device, ranks are reduced and read once at the end.

Statistics are given what `trainer/policy/step.py` computed, and compute nothing that is differentiated.
`trainer/replay/score.py` adds up a step that was written down: the same sums in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from algorithms.config import CustomMetric
from algorithms.correction import Correction
from algorithms.histograms import HistogramArrays, MismatchHistograms, mismatch_histograms
from algorithms.kl import k3
from algorithms.loss import LossStats
from algorithms.mismatch import MismatchStats, StepContext, mismatch_stats
from algorithms.reference import ReferenceKLStats, reference_kl_stats
from algorithms.stats import mean_or_none, merged
from algorithms.tokens import Tokens
from trainer.batch.token_deltas import SampleNumber, TokenDeltas, worst_and_others
from trainer.batch.train_batch import FewScores, MicroBatch, StepSamples, TokenScores


class StepFactor(NamedTuple):
    """The factor of an optimizer step, and the counts behind it."""

    kept_tokens: float
    """Over all ranks."""
    num_tokens: int
    """Response tokens, over all ranks."""
    gradient: float
    """Multiplies the gradient, and the loss that is reported."""
    mean_weight: float | None
    """Z, the mean weight of kept tokens (or responses); None if nothing is kept."""


class StepStats:
    """Statistics of a rollout step, summed over micro-batches here and over ranks in `metrics`."""

    def __init__(self, device: torch.device, metrics: Sequence[CustomMetric] = ()) -> None:
        self._own_metrics = metrics
        self._losses: list[LossStats] = []
        """Of each optimizer step."""
        self._running: list[LossStats] = []
        """Of each micro-batch of the running optimizer step."""
        self._factors: list[StepFactor] = []
        self._grad_norms: list[float] = []
        self.overflow_steps = 0
        """Optimizer steps whose gradient left the range of float16; their norm says nothing and is left out."""
        self.bad_samples: list[tuple[int, int]] = []
        """(prompt_id, sample_index) of samples of this rank in micro-batches whose loss is not finite."""
        self._mismatch: list[MismatchStats] = []
        self._histograms: list[MismatchHistograms] = []
        self._reference: list[ReferenceKLStats] = []
        self._floor = torch.zeros(2, dtype=torch.float64, device=device)
        self._held = torch.zeros(3, dtype=torch.float64, device=device)
        """K3 of the rounding of the weights, K3 of the arithmetic, number of tokens."""
        self._routes = torch.zeros(4, dtype=torch.float64, device=device)
        """Sums of `Replay.counts` of trainer/scoring/routing_replay.py."""
        self._live = torch.zeros(3, dtype=torch.float64, device=device)
        """K3 with the trainer's own choice of experts, with that of the engine, number of tokens."""
        self._scored: list[tuple[MicroBatch, Tokens]] = []
        """The measured micro-batches with the log-probs that they were measured from."""

    def add_loss(self, stats: LossStats) -> None:
        """Add the loss of a micro-batch of the running optimizer step."""
        self._running.append(stats)

    def add_bad_samples(self, micros: Sequence[MicroBatch], losses: Sequence[Tensor]) -> None:
        """Name the samples behind a gradient that is not finite; reads the device."""
        for micro, loss in zip(micros, losses, strict=True):
            if not math.isfinite(loss.item()):
                self.bad_samples += micro.sample_keys

    def end_step(self, factor: StepFactor, *, grad_norm: float | None, overflowed: bool = False) -> None:
        """Close an optimizer step: its policy loss is multiplied by the same factor as its gradient.

        `grad_norm` is None where the policy does not learn.
        """
        self._losses.append(merged(self._running).scaled(policy=self._floor.new_tensor(factor.gradient)))
        self._running = []
        self._factors.append(factor)
        if overflowed:
            self.overflow_steps += 1
        elif grad_norm is not None:
            self._grad_norms.append(grad_norm)

    def add_mismatch(self, micro: MicroBatch, tokens: Tokens, correction: Correction, samples: StepSamples) -> None:
        """Add the mismatch of a micro-batch, and the distance from the reference. Nothing is read from the device."""
        context = StepContext(
            rewards=samples.rewards[micro.sample_numbers],
            lags=samples.lags[micro.sample_numbers],
            token_lags=micro.token_lags,
        )
        self._mismatch.append(mismatch_stats(tokens, correction, context, self._own_metrics))
        self._histograms.append(mismatch_histograms(tokens))
        self._scored.append((micro, tokens))
        if micro.ref_logprobs is not None and tokens.trainer_logprobs is not None:
            self._reference.append(
                reference_kl_stats(
                    tokens.trainer_logprobs, ref_logprobs=micro.ref_logprobs, response_mask=micro.response_mask
                )
            )

    def sample_k3(self) -> dict[SampleNumber, float]:
        """K3 of every sample of this rank, its mean over the response; reads the device."""
        # An empty micro-batch has no number, and one masked token with a mean.
        return {
            number: mean
            for micro, tokens in self._scored
            for number, mean in zip(micro.numbers(), tokens.mean(k3(tokens.delta)).tolist(), strict=False)
        }

    def token_deltas(self, sample_k3: dict[SampleNumber, float], *, count: int) -> dict[SampleNumber, TokenDeltas]:
        """The tokens of at most `count` samples of this rank, the worst and some others; reads the device."""
        return worst_and_others(self._scored, sample_k3, count=count)

    def histograms(self) -> HistogramArrays:
        """Reduce the histograms over ranks (a collective) and read them."""
        histograms = merged(self._histograms)
        dist.all_reduce(histograms.sums, op=dist.ReduceOp.SUM)
        return histograms.arrays()

    def add_floor(self, delta: Tensor | None) -> None:
        """Add the head's rounding errors [F] of one micro-batch; None where they were not measured."""
        if delta is not None:
            self._floor += torch.stack([k3(delta).sum(), torch.tensor(float(delta.numel()), device=delta.device)])

    def add_held(self, held: FewScores | None, micro: MicroBatch, scores: TokenScores) -> None:
        """Add the two parts of the mismatch of some tokens of `micro`; None where they were not measured.

        `scores` are those of the trainer's own weights, of which `held` are a rounding.
        """
        if held is None:
            return
        rollout = micro.rollout_logprobs[held.places].double()
        rounding = scores.logprobs.detach()[held.places].double() - held.logprobs.double()
        arithmetic = held.logprobs.double() - rollout
        valid = rollout.isfinite() & arithmetic.isfinite() & rounding.isfinite()
        parts = [k3(rounding[valid]).sum(), k3(arithmetic[valid]).sum(), valid.sum().double()]
        self._held += torch.stack(parts)

    def add_routes(self, counts: Tensor | None, live: FewScores | None, micro: MicroBatch, scores: TokenScores) -> None:
        """Add what the replay of routes changes in `micro`: `counts` of routes, and some tokens scored without it."""
        if counts is not None:
            self._routes += counts
        if live is None:
            return
        rollout = micro.rollout_logprobs[live.places].double()
        deltas = [each.double() - rollout for each in (live.logprobs, scores.logprobs.detach()[live.places])]
        valid = deltas[0].isfinite() & deltas[1].isfinite()
        self._live += torch.stack([*(k3(delta[valid]).sum() for delta in deltas), valid.sum().double()])

    def metrics(self) -> dict[str, float | None]:
        """Reduce over ranks (a collective) and make metrics; quantiles and tails on rank 0, elsewhere None."""
        loss, mismatch = merged(self._losses), merged(self._mismatch)
        reference = [merged(self._reference)] if self._reference else []
        own = (self._floor, self._held, self._routes, self._live)
        for sums in (loss.sums, mismatch.sums, *own, *(each.sums for each in reference)):
            dist.all_reduce(sums, op=dist.ReduceOp.SUM)
        for maxes in (loss.maxes, mismatch.maxes):
            dist.all_reduce(maxes, op=dist.ReduceOp.MAX)
        mismatch = replace(
            mismatch,
            token_deltas=_on_rank_0(mismatch.token_deltas),
            sequence_deltas=_on_rank_0(mismatch.sequence_deltas),
        )
        self._losses, self._mismatch, self._reference = [loss], [mismatch], reference
        return self.metrics_here()

    def take(self, other: StepStats) -> None:
        """Add what another rank counted in the same step: what `metrics` does where every rank is a process."""
        self._losses = [merged(self._losses), merged(other._losses)]
        self._mismatch = [merged(self._mismatch), merged(other._mismatch)]
        self._reference = [merged(each) for each in (self._reference, other._reference) if each]
        self._floor += other._floor
        self._held += other._held
        self._routes += other._routes
        self._live += other._live

    def metrics_here(self) -> dict[str, float | None]:
        """Return the counts of this process as metrics, without asking other ranks. Reads the device."""
        floor_sum, floor_count = self._floor.tolist()
        rounding, arithmetic, held_count = self._held.tolist()
        routes_changed, num_routes, rerouted, num_routed = self._routes.tolist()
        live, replayed, num_live = self._live.tolist()
        num_steps = len(self._factors)
        mean_weights = [factor.mean_weight for factor in self._factors if factor.mean_weight is not None]
        num_tokens = sum(factor.num_tokens for factor in self._factors)
        return {
            **merged(self._mismatch).metrics(),
            # Over all optimizer steps: in bypass the statistics above see the first one only.
            "mismatch/kept_frac": sum(factor.kept_tokens for factor in self._factors) / num_tokens,
            **(merged(self._reference).metrics() if self._reference else {}),
            "mismatch/k3_floor": floor_sum / floor_count if floor_count else None,
            "mismatch/k3_weights": rounding / held_count if held_count else None,
            "mismatch/k3_arithmetic": arithmetic / held_count if held_count else None,
            "mismatch/k3_live": live / num_live if num_live else None,
            "mismatch/k3_replayed": replayed / num_live if num_live else None,
            "mismatch/routes_changed": routes_changed / num_routes if num_routes else None,
            "mismatch/tokens_rerouted": rerouted / num_routed if num_routed else None,
            "mismatch/is/norm_Z": sum(mean_weights) / len(mean_weights) if mean_weights else None,
            "mismatch/gradient_factor": sum(factor.gradient for factor in self._factors) / num_steps,
            **merged(self._losses).metrics(optimizer_steps=num_steps),
            "optim/grad_norm": mean_or_none(sum(self._grad_norms), len(self._grad_norms)),
        }


def _on_rank_0(deltas: Tensor) -> Tensor:
    """The log-ratios [n] of this rank -> on rank 0 those of all ranks, without NaN, elsewhere none (a collective).

    n may differ between ranks. One rank sorts them: its metrics are those of the step.
    """
    deltas = deltas[~deltas.isnan()]
    size = torch.tensor(deltas.numel(), device=deltas.device)
    dist.all_reduce(size, op=dist.ReduceOp.MAX)
    padded = pad(deltas, (0, int(size) - deltas.numel()), value=math.nan)
    gathered = padded.new_empty(dist.get_world_size() if dist.get_rank() == 0 else 0, int(size))
    dist.gather(padded, list(gathered) or None, dst=0)
    return gathered.flatten()
