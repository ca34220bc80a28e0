"""Collector: prompts -> rewarded, filtered SampleGroups of one step.

    PromptStream -> GenerateRequests -> Sampler (the engines) -> Generations, one by one as they end -> sample filters
                 -> Scorer -> group filters -> Collected(groups, stats)

`trainer/run/loop.py` calls the collector. Groups are admitted in the order of submission, unless the config asks for
the order of completion, which prefers short answers. In the order of submission the choice of kept groups depends on
their tokens alone, never on the clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from rollout.collect.collect_stats import CollectStats, Served
from rollout.collect.dispatch import Dispatcher, Sampler
from rollout.collect.filters import DropReason, InvalidReason, is_zero_variance
from rollout.collect.pending import CollectorState, PendingGroup, PendingResponse, pack_groups, unpack_groups
from rollout.collect.requests import SeedSource, sampling_params
from rollout.config import CollectConfig, CollectOrder, DynamicCollectConfig, Routing, SamplingConfig
from rollout.data.dataset import PromptStream
from rollout.rewards import Scorer
from rollout.task_config import most_failed
from rollout.types import GenerateRequest, Prompt, SampleGroup


class UnfinishedGroups(Enum):
    """Treatment of the groups that are unfinished when a step has all its groups."""

    drop = "drop"
    """Abort the groups and discard them."""
    resume = "resume"
    """Abort the groups and resume them at the start of the next step."""
    run = "run"
    """Let the engines continue with the groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectPlan:
    """Shape of a step."""

    prompts_per_step: int
    group_size: int
    """Samples per prompt."""
    seed: int
    """Run seed; the sampling seed of a response follows from run seed, step, prompt and sample index."""
    stop_token_ids: tuple[int, ...]
    min_group_size: int
    """Minimum of valid samples for a group to be trained on: 2 where the group is the baseline."""
    max_staleness: int = 0
    """Maximum lag, in steps, of the weights that sampled a token behind the weights at the start of the step."""
    unfinished: UnfinishedGroups = UnfinishedGroups.drop
    routes: Routing = Routing.live
    """What the engines return of the routes of the tokens."""
    past_end: int | None = None
    """Token with which the chat template ends an answer, if no response ends there."""


class Collected(NamedTuple):
    """The groups of one step and the statistics of their collection."""

    groups: list[SampleGroup]
    """Groups in the order of their admission."""
    stats: CollectStats


class Collector:
    """Collects the groups of each step; between steps the collector keeps the unfinished groups.

    `start` submits and returns, `finish` waits for the groups of a step, `collect` returns them; each method first does
    the work that an earlier one has not done yet.
    """

    def __init__(
        self,
        *,
        sampler: Sampler,
        prompts: PromptStream,
        scorer: Scorer,
        collect: CollectConfig,
        sampling: SamplingConfig,
        plan: CollectPlan,
        take_episode_counts: Callable[[], dict[str, int]] = dict,
    ) -> None:
        """`take_episode_counts` gives those of `sampler` since its last call; none for responses of one turn."""
        self._sampler = sampler
        self._prompts = prompts
        self._collect = collect
        self._sampling = sampling
        self._plan = plan
        self._scorer = scorer
        self._take_episode_counts = take_episode_counts
        self._dispatcher = Dispatcher(sampler, scorer)
        self._max_rounds, self._least = 1, 1
        if isinstance(collect, DynamicCollectConfig):
            self._max_rounds = collect.max_rounds
            self._least = min(collect.min_prompts or plan.prompts_per_step, plan.prompts_per_step)
        self._pending: list[PendingGroup] = []
        """Undecided groups in the order of submission."""
        self._kept: list[PendingGroup] = []
        """Groups kept for the step that is being collected."""
        self._stats = CollectStats()
        self._finished_step = 0
        self._seeds = SeedSource(plan.seed, step=0)
        self._versions: dict[int, int] = {}
        """Step -> policy version at its start, for the last steps."""
        self._sampling_s = 0.0
        self._reward_s = 0.0

    # ---------------------------------------------------------------- called by the loop

    def start(self, step: int, policy_version: int, *, num_steps: int = 1) -> None:
        """Submit the groups that the `num_steps` steps from `step` on still need; returns at once.

        The engines hold weights of `policy_version`. Groups left over from earlier steps go first.
        """
        self._seeds = self._seeds_of(step)
        wanted = num_steps * math.ceil(self._collect.over_sampling * self._plan.prompts_per_step)
        self._submit(max(0, wanted - len(self._pending)), policy_version)

    def finish(self, step: int, policy_version: int) -> None:
        """Wait until the groups of `step` are complete; the engines hold weights of `policy_version`.

        collect=fixed keeps plan.prompts_per_step groups, fewer only where invalid samples left a group with less than
        plan.min_group_size. collect=dynamic samples until that many groups disagree about the answer. Raises
        RuntimeError with the counts if too many samples are invalid or too few groups are left.
        """
        if self._finished_step == step:
            return
        stats, needed = self._stats, self._plan.prompts_per_step
        begin, scored_s = time.monotonic(), stats.reward_s
        self._drop_too_old(step)
        if self._seeds.step != step:
            self.start(step, policy_version)
        else:
            self._submit(0, policy_version)
        self._decide(step)
        while len(self._kept) < needed:
            if self._pending:
                self._dispatcher.look(step, stats)
                self._decide(step)
                continue
            self._check_invalid(step, policy_version)
            if stats.rounds >= self._max_rounds:
                break
            missing = needed - len(self._kept)
            self._submit(math.ceil(self._collect.over_sampling * missing), policy_version)
        self._check_invalid(step, policy_version)
        self._scorer.check()
        stats.scoring = self._scorer.take_stats()
        stats.episodes.update(self._take_episode_counts())
        stats.kept = [group.valid_samples() for group in self._kept]
        if len(self._kept) < self._least:
            self._count_kept()
            raise RuntimeError(self._too_few(step))
        self._end_unfinished(step)
        stats.waited_s += time.monotonic() - begin - (stats.reward_s - scored_s)
        self._reward_s += stats.reward_s - scored_s
        self._finished_step = step

    def collect(self, step: int, policy_version: int) -> Collected:
        """The groups of `step`. `policy_version` is that of the weights of trainer and engines when it starts."""
        oldest_step = step - self._plan.max_staleness
        self._versions = {k: v for k, v in self._versions.items() if k >= oldest_step} | {step: policy_version}
        self.finish(step, policy_version)
        self._count_kept()
        stats, self._stats, self._kept = self._stats, CollectStats(), []
        stats.policy_version, stats.past_end = policy_version, self._plan.past_end
        stats.groups_left_over = len(self._pending)
        sampling_s = self._sampler.sampling_s()
        # A restarted engine counts its sampling seconds from 0.
        stats.sampling_s += max(0.0, sampling_s - self._sampling_s)
        self._sampling_s = sampling_s
        return Collected(groups=stats.kept, stats=stats)

    def take_reward_s(self) -> float:
        """Seconds that `finish` and `collect` spent on rewards since the last call."""
        seconds, self._reward_s = self._reward_s, 0.0
        return seconds

    def state_dict(self) -> CollectorState:
        """The state for `load_state_dict`: no prompt and no returned token is lost."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], CollectorState]:
        """Fix the present state; packing every token, which takes time, is left to the call of the result."""
        groups = [
            replace(group, responses=[replace(response) for response in group.responses])
            for group in [*self._kept, *self._pending]
        ]
        started_step, versions = self._seeds.step, [[step, version] for step, version in self._versions.items()]
        # A step that failed, for want of a judge for example, begins anew when the run goes on.
        counts = self._stats.counts() if self._finished_step == self._seeds.step else {}
        if groups and counts:
            counts["sampling_s"] += max(0.0, self._sampler.sampling_s() - self._sampling_s)
        return lambda: CollectorState(
            started_step=started_step,
            versions=versions,
            temperature=self._sampling.temperature,
            truncation=self._sampling.truncation,
            groups=pack_groups(groups),
            counts=counts,
        )

    def load_state_dict(self, state: CollectorState) -> None:
        """Continue with the unfinished groups of a checkpoint; the caller restores the prompt stream first.

        The responses start again from the prompt if the config allows no older tokens, or has another temperature,
        truncation or group size, or allows fewer tokens than they have.
        """
        sampled = (state["temperature"], state.get("truncation", SamplingConfig().truncation))
        self._versions = {step: version for step, version in state["versions"]}
        same = sampled == (self._sampling.temperature, self._sampling.truncation)
        keeps_tokens = same and self._plan.max_staleness > 0
        self._pending = unpack_groups(
            state["groups"],
            prompt=self._prompts.prompt,
            request=self._request,
            keeps_tokens=keeps_tokens,
            group_size=self._plan.group_size,
        )
        self._stats = CollectStats.of(state.get("counts", {}) if keeps_tokens else {})
        self._seeds = self._seeds_of(state["started_step"])
        for group in self._pending:
            for response in group.responses:
                if response.generation is not None and not response.is_done:
                    self._dispatcher.score(group, response)

    # ---------------------------------------------------------------- submission

    def _seeds_of(self, step: int) -> SeedSource:
        """Seeds for `step`, different from the seeds of all unfinished requests."""
        seeds = SeedSource(self._plan.seed, step=step)
        seeds.reserve(response.request.sampling.seed for group in self._pending for response in group.responses)
        return seeds

    def _submit(self, num_new: int, policy_version: int) -> None:
        """Submit every response that the engines do not have yet: groups left over first, then `num_new` new groups."""
        if num_new:
            self._pending += [PendingGroup(prompt=prompt) for prompt in self._prompts.take(num_new)]
            self._stats.rounds += 1
            self._stats.groups_generated += num_new
            self._stats.served.append(Served())
        for group in self._pending:
            if not group.responses:
                seeds = [self._seeds.draw(group.prompt.prompt_id, index) for index in range(self._plan.group_size)]
                requests = [self._request(group.prompt, index, seed) for index, seed in enumerate(seeds)]
                group.responses = [PendingResponse(request=request) for request in requests]
        self._dispatcher.submit(self._pending, policy_version=policy_version, seeds=self._seeds, stats=self._stats)

    def _request(self, prompt: Prompt, sample_index: int, seed: int) -> GenerateRequest:
        return GenerateRequest(
            prompt_id=prompt.prompt_id,
            sample_index=sample_index,
            prompt_token_ids=prompt.token_ids,
            answer=prompt.answer,
            row=prompt.row,
            sampling=sampling_params(
                self._sampling,
                seed=seed,
                stop_token_ids=self._plan.stop_token_ids,
                routes=self._plan.routes,
            ),
        )

    # ---------------------------------------------------------------- admission

    def _decide(self, step: int) -> None:
        """Keep or drop the scored groups in the order of admission."""
        stats = self._stats
        while len(self._kept) < self._plan.prompts_per_step and (group := self._next()) is not None:
            self._pending.remove(group)
            scored = group.valid_samples()
            if (reason := self._refused(group, scored, step)) is None:
                self._kept.append(group)
            else:
                stats.count(scored)
                self._drop(group, reason)
                self._add_lengths([group])

    def _count_kept(self) -> None:
        """Count the kept groups, once: a run that goes on from a checkpoint of before decides them again."""
        self._add_lengths(self._kept)
        for group, scored in zip(self._kept, self._stats.kept, strict=True):
            self._stats.count(scored)
            self._stats.wasted_tokens += group.num_tokens - sum(s.num_response_tokens for s in scored.samples)

    def _refused(self, group: PendingGroup, scored: SampleGroup, step: int) -> DropReason | None:
        """The reason for which a group is not kept; None if it is kept. `scored` are its valid samples."""
        if self._is_too_old(group, step):
            return DropReason.too_old
        if len(scored.samples) < self._plan.min_group_size:
            return DropReason.too_small
        if not isinstance(self._collect, DynamicCollectConfig):
            return None
        if self._collect.filter is not None:
            return None if self._collect.filter.answer(scored) else DropReason.filtered
        return DropReason.zero_variance if is_zero_variance(scored) else None

    def _next(self) -> PendingGroup | None:
        """The next group to decide; None while that group is not scored."""
        if self._collect.order is CollectOrder.submission:
            return self._pending[0] if self._pending and self._pending[0].is_scored else None
        scored = [group for group in self._pending if group.is_scored]
        return min(scored, key=lambda group: group.rank, default=None)

    def _is_too_old(self, group: PendingGroup, step: int) -> bool:
        """True if `group` has a token of older weights than `step` may train on."""
        oldest, known = group.oldest_version, self._versions.values()
        allowed = self._versions.get(step - self._plan.max_staleness, min(known, default=0))
        return oldest is not None and oldest < allowed

    def _drop(self, group: PendingGroup, reason: DropReason) -> None:
        group.is_dropped = True
        self._stats.groups_dropped[reason.name] += 1
        self._stats.wasted_tokens += group.num_tokens

    def _drop_too_old(self, step: int) -> None:
        old = [group for group in self._pending if self._is_too_old(group, step)]
        for group in old:
            self._drop(group, DropReason.too_old)
            self._pending.remove(group)
        self._dispatcher.stop(old, step=step, stats=self._stats)
        self._add_lengths(old)

    def _end_unfinished(self, step: int) -> None:
        """Treat the unfinished groups as the plan says, after the step has all its groups."""
        unfinished = list(self._pending)
        if self._plan.unfinished is UnfinishedGroups.drop:
            self._pending = []
            for group in unfinished:
                self._drop(group, DropReason.surplus)
        if self._plan.unfinished is not UnfinishedGroups.run:
            self._dispatcher.stop(unfinished, step=step, stats=self._stats)
        self._add_lengths(unfinished)

    def _add_lengths(self, groups: Iterable[PendingGroup]) -> None:
        """Count the lengths of groups that the step is done with, where the order of admission depends on them."""
        if self._collect.order is CollectOrder.completion:
            responses = [response for group in groups for response in group.responses]
            self._stats.all_lengths += [each.num_tokens for each in responses if each.num_tokens]

    # ---------------------------------------------------------------- errors that end the run

    def _check_invalid(self, step: int, policy_version: int) -> None:
        stats, dropped = self._stats, self._stats.samples_dropped
        # A fault of the engine's data counts from the first sample on.
        least = self._collect.min_failed if dropped.total() == dropped[InvalidReason.failed.name] else 0
        if dropped.total() <= most_failed(self._collect.max_invalid_fraction, least, stats.samples_generated):
            return
        reasons = "; ".join(
            f"{reason.name} {stats.samples_dropped[reason.name]} ({reason.value})"
            for reason in InvalidReason
            if stats.samples_dropped[reason.name]
        )
        raise RuntimeError(
            f"step {step}: {stats.samples_dropped.total()} of {stats.samples_generated} samples are invalid, more than "
            f"collect.max_invalid_fraction={self._collect.max_invalid_fraction}: {reasons}. Expected policy version "
            f"{policy_version}, got {sorted(stats.seen_versions)}. The warnings above say why, or the engine's log; "
            "a higher collect.max_invalid_fraction drops more samples instead of stopping."
        )

    def _too_few(self, step: int) -> str:
        stats = self._stats
        dropped = ", ".join(f"{reason} {stats.groups_dropped[reason]}" for reason in DropReason.__members__)
        text = (
            f"step {step}: {len(stats.kept)} of {self._least} needed groups after {stats.rounds} rounds, "
            f"{stats.groups_generated} groups and {stats.samples_generated} samples ({dropped}; accuracy of all "
            f"samples {stats.generated_accuracy:.3f})."
        )
        if not isinstance(self._collect, DynamicCollectConfig):
            return f"{text} Look at the engine's log for the invalid samples."
        if self._collect.filter is not None:
            return f"{text} Groups are kept by collect.filter={self._collect.filter.text()}: let it keep more of them."
        if self._scorer.correct_rule and not stats.samples_correct and stats.groups_equal < stats.groups_compared:
            return (
                f"{text} The rewards differ in {stats.groups_compared - stats.groups_equal} groups, but no response is "
                f"correct, and collect=dynamic looks at correct or not: {self._scorer.correct_rule}"
            )
        return (
            f"{text} An accuracy near 0 or 1 means that the prompts are too hard or too easy for this policy: choose "
            "others, or raise batch.group_size. Otherwise raise collect.max_rounds or collect.over_sampling, lower "
            "batch.prompts_per_step, or set collect.min_prompts to go on with fewer groups."
        )
