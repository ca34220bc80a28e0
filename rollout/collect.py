"""Collector: prompts -> rewarded, filtered SampleGroups of one step.

    PromptStream -> GenerateRequests -> Sampler (the engines) -> Generations
                 -> sample filters -> Scorer -> group filters -> Collected(groups, stats)

Called by `trainer/loop.py`. Groups are admitted in the order in which they were submitted, never in the order in which
they were completed: that would prefer short answers.
"""

from __future__ import annotations

import math
import struct
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from rollout.config import CollectConfig, DynamicCollectConfig, SamplingConfig
from rollout.data import PromptStream
from rollout.filters import (
    GROUP_DROP_REASONS,
    SAMPLE_FILTERS,
    SURPLUS,
    ZERO_VARIANCE,
    GroupFilter,
    invalid_reason,
    too_small,
)
from rollout.rewards import Scorer, ScoreStats
from rollout.types import FinishReason, GenerateRequest, Generation, Prompt, Sample, SampleGroup, SamplingParams


class Sampler(Protocol):
    """Whatever answers generate requests: the engine group, or one engine."""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """One response per request, in the order of the requests."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectPlan:
    """The shape of a step."""

    prompts_per_step: int
    group_size: int
    """Samples per prompt."""
    seed: int
    """Run seed; with step, prompt and sample index it decides every sampling seed."""
    stop_token_ids: tuple[int, ...]
    min_group_size: int
    """Valid samples without which a group cannot be trained on: 2 where the group is the baseline."""


class Served(NamedTuple):
    """One round of generation: what was asked for and how long the answers were."""

    requests: Sequence[GenerateRequest]
    lengths: list[int]
    """Response tokens of each request."""


class SeedSource:
    """Sampling seeds of one step: hashes of (run seed, step, prompt id, sample index), none given twice.

    The same prompt can come twice in a step (a small dataset); its second group then gets other seeds.
    """

    def __init__(self, seed: int, *, step: int) -> None:
        """`step` is >= 1 for training; evaluation uses a negative number of its own."""
        self._seed = seed
        self._step = step
        self._used: set[int] = set()

    def draw(self, prompt_id: int, sample_index: int) -> int:
        """A seed in [0, 2**31)."""
        attempt = 0
        while True:
            key = struct.pack("<5q", self._seed, self._step, prompt_id, sample_index, attempt)
            seed = xxhash.xxh3_64_intdigest(key) & 0x7FFFFFFF
            if seed not in self._used:
                self._used.add(seed)
                return seed
            attempt += 1


def make_sample(request: GenerateRequest, generation: Generation) -> Sample:
    """Prompt and valid response as one token sequence; the prompt is off the mask with log-prob 0."""
    if generation.logprobs is None:
        raise ValueError(f"sample {request.prompt_id}/{request.sample_index}: no log-probs")
    prompt = request.prompt_token_ids
    return Sample(
        prompt_id=request.prompt_id,
        sample_index=request.sample_index,
        token_ids=[*prompt, *generation.token_ids],
        response_mask=[False] * len(prompt) + [True] * len(generation.token_ids),
        rollout_logprobs=[0.0] * len(prompt) + generation.logprobs,
        token_versions=[0] * len(prompt) + generation.token_versions,
        finish_reason=generation.finish_reason,
        quantized=generation.quantized,
    )


@dataclass(kw_only=True, slots=True)
class CollectStats:
    """What one step's collection did. "Kept" is what is returned for training; everything else is cost."""

    policy_version: int
    rounds: int = 0
    groups_generated: int = 0
    groups_dropped: Counter[str] = field(default_factory=Counter)
    """By reason of rollout.filters.GROUP_DROP_REASONS."""
    samples_generated: int = 0
    samples_dropped: Counter[str] = field(default_factory=Counter)
    """Invalid samples, by name in rollout.filters.SAMPLE_FILTERS."""
    samples_correct: int = 0
    """Valid samples that passed the task's check, those of dropped groups included."""
    tokens_generated: int = 0
    served: list[Served] = field(default_factory=list)
    """Every round, dropped samples included."""
    kept: list[SampleGroup] = field(default_factory=list)
    generate_s: float = 0.0
    """Seconds in which the engines sampled."""
    reward_s: float = 0.0
    """Seconds in which responses were scored."""
    scoring: ScoreStats = field(default_factory=ScoreStats)
    """What scoring came across; responses without a score are not trained on."""

    @property
    def samples_valid(self) -> int:
        return self.samples_generated - self.samples_dropped.total()

    @property
    def generated_accuracy(self) -> float:
        """Share of correct samples among all valid ones: not biased by the choice of groups."""
        return self.samples_correct / max(1, self.samples_valid)

    def metrics(self) -> dict[str, float | None]:
        """rollout/* and reward/* of the step. Means, std (population), maximum and fractions are over kept samples."""
        samples = [sample for group in self.kept for sample in group.samples]
        lengths = np.array([sample.num_response_tokens for sample in samples])
        rewards = np.array([reward for group in self.kept for reward in group.rewards])
        truncated = [sample.finish_reason is FinishReason.length for sample in samples]
        distinct = {
            (position, tuple(sample.token_ids)) for position, group in enumerate(self.kept) for sample in group.samples
        }
        counts = {
            "policy_version": self.policy_version,
            "num_samples": len(samples),
            "rounds": self.rounds,
            "groups_generated": self.groups_generated,
            "groups_kept": len(self.kept),
            **{f"groups_dropped/{reason}": self.groups_dropped[reason] for reason in GROUP_DROP_REASONS},
            **{f"samples_dropped/{each.name}": self.samples_dropped[each.name] for each in SAMPLE_FILTERS},
            "response_tokens": lengths.sum(),
            "response_tokens_mean": lengths.mean(),
            "response_tokens_max": lengths.max(),
            "truncated_frac": np.mean(truncated),
            "wasted_tokens": self.tokens_generated - lengths.sum(),
            "tokens_per_s": self.tokens_generated / max(self.generate_s, 1e-9),
            "duplicate_frac": 1 - len(distinct) / len(samples),
        }
        return {f"rollout/{name}": float(value) for name, value in counts.items()} | {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "reward/accuracy": float(np.mean([bool(sample.correct) for sample in samples])),
            "reward/generated_accuracy": self.generated_accuracy,
            **self.scoring.metrics(),
        }


class Collected(NamedTuple):
    """The groups of one step and how they came about."""

    groups: list[SampleGroup]
    """In the order in which their prompts were submitted."""
    stats: CollectStats


class Collector:
    """Collects one step at a time; holds nothing between steps but the prompt stream."""

    def __init__(
        self,
        *,
        sampler: Sampler,
        prompts: PromptStream,
        scorer: Scorer,
        collect: CollectConfig,
        sampling: SamplingConfig,
        plan: CollectPlan,
    ) -> None:
        self._sampler = sampler
        self._prompts = prompts
        self._scorer = scorer
        self._collect = collect
        self._sampling = sampling
        self._plan = plan

    def collect(self, step: int, policy_version: int) -> Collected:
        """Sample, score and filter the groups of `step`, all from weights of `policy_version`.

        collect=fixed returns plan.prompts_per_step groups, fewer only where invalid samples left a group with less
        than plan.min_group_size. collect=dynamic samples until that many groups disagree about the answer. Raises
        RuntimeError with the counts if too many samples are invalid or too few groups are left.
        """
        stats = CollectStats(policy_version=policy_version)
        seeds = SeedSource(self._plan.seed, step=step)
        small = too_small(self._plan.min_group_size)
        match self._collect:
            case DynamicCollectConfig(over_sampling=over_sampling, max_rounds=max_rounds, min_prompts=min_prompts):
                filters: tuple[GroupFilter, ...] = (small, ZERO_VARIANCE)
                least = min(min_prompts or self._plan.prompts_per_step, self._plan.prompts_per_step)
            case _:
                filters = (small,)
                over_sampling, max_rounds, least = 1.0, 1, 1
        while stats.rounds < max_rounds and len(stats.kept) < self._plan.prompts_per_step:
            missing = self._plan.prompts_per_step - len(stats.kept)
            prompts = self._prompts.take(math.ceil(over_sampling * missing))
            groups = self._sample_groups(prompts, stats=stats, seeds=seeds, step=step)
            begin = time.monotonic()
            self._scorer.score(groups)
            for group in groups:
                group.samples = [sample for sample in group.samples if sample.reward is not None]
            stats.reward_s += time.monotonic() - begin
            self._admit(groups, filters, stats)
        stats.scoring = self._scorer.take_stats()
        if len(stats.kept) < least:
            raise RuntimeError(self._too_few(step, stats, least=least))
        return Collected(groups=stats.kept, stats=stats)

    def _sample_groups(
        self, prompts: list[Prompt], *, stats: CollectStats, seeds: SeedSource, step: int
    ) -> list[SampleGroup]:
        """One round of generation: groups of the valid samples, unscored, in the order of `prompts`."""
        size = self._plan.group_size
        requests = [self._request(prompt, index, seeds) for prompt in prompts for index in range(size)]
        begin = time.monotonic()
        generations = self._sampler.generate(requests)
        stats.generate_s += time.monotonic() - begin
        if len(generations) != len(requests):
            raise RuntimeError(f"step {step}: {len(requests)} responses were asked for, {len(generations)} came back")
        stats.rounds += 1
        stats.served.append(Served(requests, [len(generation.token_ids) for generation in generations]))
        stats.groups_generated += len(prompts)
        stats.samples_generated += len(requests)
        groups = [SampleGroup(prompt=prompt) for prompt in prompts]
        seen_versions: set[int] = set()
        for position, (request, generation) in enumerate(zip(requests, generations, strict=True)):
            stats.tokens_generated += len(generation.token_ids)
            seen_versions.update(generation.token_versions)
            reason = invalid_reason(request, generation, policy_version=stats.policy_version)
            if reason is None:
                groups[position // size].samples.append(make_sample(request, generation))
            else:
                stats.samples_dropped[reason.name] += 1
        if stats.samples_dropped.total() > self._collect.max_invalid_fraction * stats.samples_generated:
            raise RuntimeError(self._too_many_invalid(step, stats, seen_versions))
        return groups

    def _request(self, prompt: Prompt, sample_index: int, seeds: SeedSource) -> GenerateRequest:
        return GenerateRequest(
            prompt_id=prompt.prompt_id,
            sample_index=sample_index,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling_params(
                self._sampling,
                seed=seeds.draw(prompt.prompt_id, sample_index),
                stop_token_ids=self._plan.stop_token_ids,
            ),
        )

    def _admit(self, groups: list[SampleGroup], filters: tuple[GroupFilter, ...], stats: CollectStats) -> None:
        for group in groups:
            stats.samples_correct += sum(sample.correct is True for sample in group.samples)
            rejecting = [each.name for each in filters if each.rejects(group)]
            if rejecting:
                stats.groups_dropped[rejecting[0]] += 1
            elif len(stats.kept) == self._plan.prompts_per_step:
                stats.groups_dropped[SURPLUS] += 1
            else:
                stats.kept.append(group)

    def _too_many_invalid(self, step: int, stats: CollectStats, seen_versions: set[int]) -> str:
        reasons = "; ".join(
            f"{each.name} {stats.samples_dropped[each.name]} ({each.meaning})"
            for each in SAMPLE_FILTERS
            if stats.samples_dropped[each.name]
        )
        return (
            f"step {step}: {stats.samples_dropped.total()} of {stats.samples_generated} samples are invalid, more than "
            f"collect.max_invalid_fraction={self._collect.max_invalid_fraction}: {reasons}. Expected policy version "
            f"{stats.policy_version}, got {sorted(seen_versions)}. Look at the engine's log; a higher "
            "collect.max_invalid_fraction drops more samples instead of stopping."
        )

    def _too_few(self, step: int, stats: CollectStats, *, least: int) -> str:
        dropped = ", ".join(f"{reason} {stats.groups_dropped[reason]}" for reason in GROUP_DROP_REASONS)
        text = (
            f"step {step}: {len(stats.kept)} of {least} needed groups after {stats.rounds} rounds, "
            f"{stats.groups_generated} groups and {stats.samples_generated} samples ({dropped}; accuracy of all "
            f"samples {stats.generated_accuracy:.3f})."
        )
        if not isinstance(self._collect, DynamicCollectConfig):
            return f"{text} Look at the engine's log for the invalid samples."
        return (
            f"{text} An accuracy near 0 or 1 means that the prompts are too hard or too easy for this policy: choose "
            "others, or raise batch.group_size. Otherwise raise collect.max_rounds or collect.over_sampling, lower "
            "batch.prompts_per_step, or set collect.min_prompts to go on with fewer groups."
        )


def sampling_params(config: SamplingConfig, *, seed: int, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """How one response is sampled during training."""
    return SamplingParams(
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        seed=seed,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop_token_ids=stop_token_ids,
    )
