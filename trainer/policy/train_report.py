"""The outcome of a rollout step: of one rank, as `trainer/policy/step.py` returns it, and of all ranks together."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from algorithms.histograms import HistogramArrays
from trainer.batch.token_deltas import SampleNumber, TokenDeltas, merge_ranks
from trainer.policy.recorder import DumpReport


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """The outcome of one rollout step on one rank."""

    metrics: dict[str, float | None]
    """Global, the same on every rank; only perf/* are the rank's own. Quantiles and tails: on rank 0, else None."""
    num_optimizer_steps: int
    """Optimizer steps taken in all passes; those without a usable token or gradient are not counted."""
    sample_k3: dict[SampleNumber, float]
    """K3, mean over the response, of the samples that this rank scored."""
    histograms: HistogramArrays
    """The mismatch by probability and position of the token; global."""
    sample_advantages: dict[SampleNumber, float] = field(default_factory=dict)
    """The advantage of the same samples; empty where advantages differ from token to token (gae)."""
    token_deltas: dict[SampleNumber, TokenDeltas] = field(default_factory=dict)
    """Delta of each token of a few of these samples, the worst and some others."""
    bad_samples: list[tuple[int, int]] = field(default_factory=list)
    """(prompt_id, sample_index) of samples of this rank in micro-batches whose loss was not finite."""
    private_bytes: int = 0
    """Host memory of the rank after the step that no other process shares."""
    dump: DumpReport | None = None
    """The rank's part of the dump, if the step was to be written down."""


@dataclass(frozen=True, slots=True)
class TrainReport:
    """The outcome of one rollout step on all ranks."""

    ranks: list[RankReport]

    @property
    def metrics(self) -> dict[str, float | None]:
        """Those of rank 0: global, except for its own perf/*. advantage/* are over the samples of the step."""
        advantages = self.sample_advantages.values()
        if not advantages:
            return self.ranks[0].metrics
        spread = {"mean": statistics.fmean(advantages), "min": min(advantages), "max": max(advantages)}
        return self.ranks[0].metrics | {f"advantage/{name}": value for name, value in spread.items()}

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps taken, the same on every rank."""
        return self.ranks[0].num_optimizer_steps

    @property
    def histograms(self) -> HistogramArrays:
        """The mismatch by probability and position of the token."""
        return self.ranks[0].histograms

    @property
    def sample_k3(self) -> dict[SampleNumber, float]:
        """K3 of every sample of the step."""
        return {key: value for rank in self.ranks for key, value in rank.sample_k3.items()}

    @property
    def sample_advantages(self) -> dict[SampleNumber, float]:
        """Advantage of every sample of the step; empty where advantages differ from token to token (gae)."""
        return {key: value for rank in self.ranks for key, value in rank.sample_advantages.items()}

    @property
    def token_deltas(self) -> dict[SampleNumber, TokenDeltas]:
        """Delta of each token of a few samples of the step, worst first."""
        return merge_ranks((rank.token_deltas for rank in self.ranks), self.sample_k3)

    @property
    def bad_samples(self) -> list[tuple[int, int]]:
        """(prompt_id, sample_index) of all samples in micro-batches whose loss was not finite."""
        return [key for rank in self.ranks for key in rank.bad_samples]

    @property
    def dumps(self) -> list[DumpReport]:
        """The parts of the dump; empty if the step was not to be written down."""
        return [rank.dump for rank in self.ranks if rank.dump is not None]

    @property
    def dump_s(self) -> float:
        """Seconds of the slowest rank's dump."""
        return max((dump.write_s for dump in self.dumps), default=0.0)
