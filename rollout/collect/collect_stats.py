"""Statistics of collecting one step, and their metrics. `rollout/collect/collector.py` fills them in."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from rollout.collect.filters import DropReason, InvalidReason
from rollout.engine import continuation
from rollout.rewards import ScoreStats
from rollout.types import FinishReason, GenerateRequest, Sample, SampleGroup


@dataclass(kw_only=True, slots=True)
class Served:
    """One round of generation: the requests to the engines and the lengths of the responses."""

    requests: list[GenerateRequest] = field(default_factory=list)
    """Requests as an engine receives them that knows no resumed requests."""
    lengths: list[int] = field(default_factory=list)
    """Number of tokens sampled for each request."""

    def add(self, request: GenerateRequest, num_tokens: int) -> None:
        self.requests.append(continuation(request))
        self.lengths.append(num_tokens)


@dataclass(kw_only=True, slots=True)
class CollectCounts:
    """Counts and times of collecting one step that a checkpoint keeps, as JSON values.

    A step that is sampled ahead has them when the step before it is saved.
    """

    rounds: int = 0
    groups_generated: int = 0
    """Groups whose prompts were submitted for the first time."""
    groups_dropped: Counter[str] = field(default_factory=Counter)
    """Dropped groups by reason, the name of a rollout.collect.filters.DropReason."""
    samples_generated: int = 0
    """Responses that ended without being aborted."""
    samples_dropped: Counter[str] = field(default_factory=Counter)
    """Invalid samples by the name of their rollout.collect.filters.InvalidReason."""
    samples_aborted: int = 0
    """Responses that were aborted because the step had all its groups."""
    samples_resumed: int = 0
    """Responses that were resumed from tokens of an earlier step."""
    resumed_tokens: int = 0
    """Tokens with which the resumed responses began."""
    samples_decided: int = 0
    """Valid samples of all decided groups, kept or dropped."""
    samples_correct: int = 0
    """Samples among `samples_decided` that passed the task's check."""
    groups_compared: int = 0
    """Decided groups, kept or dropped, with two valid samples or more."""
    groups_equal: int = 0
    """Groups among `groups_compared` whose rewards are all equal."""
    generated_tokens: int = 0
    """Response tokens that the engines returned for the first time."""
    prompt_tokens: int = 0
    """Prompt tokens of all responses that came back."""
    shared_prompt_tokens: int = 0
    """Tokens among `prompt_tokens` that the engines did not compute, because another response has the same prompt."""
    wasted_tokens: int = 0
    """Response tokens, of this step and earlier ones, that were discarded."""
    all_lengths: list[int] = field(default_factory=list)
    """Response tokens so far of each sample of this step, kept, dropped or left over; only if order is completion."""
    episodes: Counter[str] = field(default_factory=Counter)
    """Counts of the episodes that ended meanwhile, by the names of their metrics; empty for responses of one turn."""
    waited_s: float = 0.0
    """Seconds in which the driver waited for the engines."""
    sampling_s: float = 0.0
    """Seconds in which the engines sampled, mean over engines."""
    reward_s: float = 0.0
    """Seconds in which the driver waited for rewards."""

    def count(self, group: SampleGroup) -> None:
        """Count the valid samples of a decided group."""
        self.samples_decided += len(group.samples)
        self.samples_correct += sum(sample.correct is True for sample in group.samples)
        if len(group.samples) > 1:
            self.groups_compared += 1
            self.groups_equal += min(group.rewards) == max(group.rewards)

    def counts(self) -> dict[str, Any]:
        """A copy of the counts by name, as JSON values."""
        found = {each.name: copy(getattr(self, each.name)) for each in fields(CollectCounts)}
        # `dataclasses.asdict` would count the pairs of a Counter.
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in found.items()}


@dataclass(kw_only=True, slots=True)
class CollectStats(CollectCounts):
    """Counts and times of collecting one step, from the end of the previous collection.

    "Kept" samples are returned for training. All other samples are cost, or left over for the next step.
    """

    policy_version: int = 0
    """Policy version of the weights at the start of the step's training."""
    groups_left_over: int = 0
    """Groups that are unfinished or waiting, for the next steps."""
    served: list[Served] = field(default_factory=list)
    """All rounds of the step, dropped samples included; those since the resume, if the step began before it."""
    kept: list[SampleGroup] = field(default_factory=list)
    past_end: int | None = None
    """Token with which the chat template ends an answer, if no response ends there."""
    seen_versions: set[int] = field(default_factory=set)
    scoring: ScoreStats = field(default_factory=ScoreStats)
    """Statistics of the scorer; responses without a score are not trained on."""

    @classmethod
    def of(cls, counts: Mapping[str, Any]) -> CollectStats:
        """Statistics that go on from `counts`, as a checkpoint gives them back; from 0 where it has none."""
        stats = cls()
        for key, value in counts.items():
            setattr(stats, key, Counter(value) if isinstance(value, dict) else value)
        return stats

    @property
    def hidden_s(self) -> float:
        """Seconds in which the engines sampled while the driver did other work."""
        return max(0.0, self.sampling_s - self.waited_s - self.reward_s)

    @property
    def generated_accuracy(self) -> float:
        """Share of correct samples in all decided groups, kept or not."""
        return self.samples_correct / max(1, self.samples_decided)

    def metrics(self) -> dict[str, float | None]:
        """Metrics rollout/*, reward/* and perf/* of the step.

        Means, std (population), minimum, maximum and fractions are over kept samples, zero_variance_frac over groups
        before any is dropped.
        """
        samples = [sample for group in self.kept for sample in group.samples]
        lengths = np.array([sample.num_response_tokens for sample in samples])
        rewards = np.array([reward for group in self.kept for reward in group.rewards])
        truncated = [sample.finish_reason is FinishReason.length for sample in samples]
        distinct = {
            (position, sample.token_ids.tobytes())
            for position, group in enumerate(self.kept)
            for sample in group.samples
        }
        counts = {
            "policy_version": self.policy_version,
            "num_samples": len(samples),
            "rounds": self.rounds,
            "groups_generated": self.groups_generated,
            "groups_kept": len(self.kept),
            **{f"groups_dropped/{reason}": self.groups_dropped[reason] for reason in DropReason.__members__},
            "groups_left_over": self.groups_left_over,
            "samples_generated": self.samples_generated,
            "samples_decided": self.samples_decided,
            **{f"samples_dropped/{name}": self.samples_dropped[name] for name in InvalidReason.__members__},
            "samples_aborted": self.samples_aborted,
            "samples_resumed": self.samples_resumed,
            "resumed_tokens": self.resumed_tokens,
            "response_tokens": lengths.sum(),
            "response_tokens_mean": lengths.mean(),
            "response_tokens_min": lengths.min(),
            "response_tokens_max": lengths.max(),
            "truncated_frac": np.mean(truncated),
            "generated_tokens": self.generated_tokens,
            "wasted_tokens": self.wasted_tokens,
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_shared": self.shared_prompt_tokens,
            "tokens_per_s": self.generated_tokens / max(self.sampling_s, 1e-9),
            "duplicate_frac": 1 - len(distinct) / len(samples),
            **_lags(samples, policy_version=self.policy_version),
        }
        supports = [sample.supports for sample in samples if sample.supports is not None]
        if supports:
            counts["support_size_mean"] = sum(len(each.token_ids) for each in supports) / lengths.sum()
        if self.all_lengths:
            counts["length_bias"] = lengths.mean() / max(1e-9, float(np.mean(self.all_lengths)))
        return {f"rollout/{name}": float(value) for name, value in counts.items()} | {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "reward/min": float(rewards.min()),
            "reward/max": float(rewards.max()),
            "reward/accuracy": float(np.mean([bool(sample.correct) for sample in samples])),
            "reward/generated_accuracy": self.generated_accuracy,
            **{f"reward/{key}": mean for key, mean in mean_parts(samples).items()},
            **self.scoring.metrics(),
            **(self._of_episodes() if self.episodes else {}),
            "rollout/past_end_frac": self._past_end_frac(samples),
            "rollout/zero_variance_frac": self.groups_equal / self.groups_compared if self.groups_compared else None,
            "perf/rollout_hidden_s": self.hidden_s,
            "perf/overlap_frac": self.hidden_s / max(self.sampling_s, 1e-9),
        }

    def _of_episodes(self) -> dict[str, float]:
        """Counts of episodes, and means over kept samples: a turn is what was sampled without being shown a token."""
        turns, shown = [], []
        for group in self.kept:
            for sample in group.samples:
                turns.append(np.count_nonzero(np.diff(sample.response_mask.astype(np.int8)) == 1))
                after_prompt = len(sample.token_ids) - len(group.prompt.token_ids)
                shown.append(after_prompt - sample.num_response_tokens)
        means = {"episode/turns_mean": float(np.mean(turns)), "episode/shown_tokens_mean": float(np.mean(shown))}
        return means | {name: float(count) for name, count in self.episodes.items()}

    def _past_end_frac(self, samples: Sequence[Sample]) -> float | None:
        """Share of samples in which the model sampled on after the end of its turn; None if it cannot.

        What a rollout function shows there begins another turn.
        """
        if self.past_end is None:
            return None
        pairs = [each.response_mask[1:] & each.response_mask[:-1] for each in samples]
        ends = [each.token_ids[:-1] == self.past_end for each in samples]
        return float(np.mean([(one & other).any() for one, other in zip(pairs, ends, strict=True)]))


def mean_parts(samples: Iterable[Sample]) -> dict[str, float]:
    """Mean of each further number that the reward function returned, over the samples that have it."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for key, value in sample.reward_parts.items():
            values[key].append(value)
    return {key: statistics.fmean(each) for key, each in values.items()}


def _lags(samples: Sequence[Sample], *, policy_version: int) -> dict[str, float]:
    """Lag of the sampled tokens behind the step's weights, in optimizer steps."""
    versions = [sample.response_versions for sample in samples]
    lags = policy_version - np.concatenate(versions)
    return {
        "lag_mean": lags.mean(),
        "lag_max": lags.max(),
        "mixed_version_frac": float(np.mean([each.min() != each.max() for each in versions])),
    }
