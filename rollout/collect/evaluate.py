"""Evaluation: prompts -> one greedy and k sampled responses each -> accuracy, avg@k, pass@k, maj@k.

`trainer/run/evaluation.py` calls it, in a run and for `parity eval`. Evaluation changes no state of the training:
prompts come from a list and not from the stream, and seeds belong to `EVALUATION_STEP`, which is no training step.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import xxhash

from rollout.collect.collect_stats import mean_parts
from rollout.collect.dispatch import Sampler
from rollout.collect.filters import InvalidReason, invalid_reason
from rollout.collect.requests import SeedSource, make_sample, sampling_params
from rollout.config import SamplingConfig
from rollout.engine import given_up
from rollout.rewards import Scorer, Vote
from rollout.task_config import most_failed
from rollout.types import FinishReason, GenerateRequest, Prompt, Sample, SampleGroup

logger = logging.getLogger(__name__)

EVALUATION_STEP = -1
"""Step number in sampling seeds of evaluations: no training step has it, and every evaluation draws the same seeds."""
GREEDY = 0
"""Sample index of the greedy response to a prompt; sampled responses have higher indices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalPlan:
    """Sampling of an evaluation set."""

    sampling: SamplingConfig
    """Parameters of the sampled responses; the greedy response has the same length limit."""
    num_samples: int
    """Number of sampled responses per prompt: k."""
    seed: int
    stop_token_ids: tuple[int, ...]
    max_failed_fraction: float = 0.0
    """Largest share of responses that may fail; they count as incorrect."""
    min_failed: int = 0
    """Number of responses that may fail in any case, unless all do."""
    name: str = ""
    """Name of the set, so that two sets do not share draws; empty for the task's own held-out set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """Accuracies of one evaluation. Lengths and truncation are over all responses that came, greedy and sampled."""

    accuracy: float
    """Share of prompts whose greedy response is correct."""
    accuracy_sampled: float
    """avg@k: share of correct sampled responses, every prompt with the same weight."""
    pass_at: dict[int, float]
    """pass@k by k, for 1, 2, 4, .. and the number of samples: mean over prompts of `pass_at_k`."""
    majority: float | None
    """maj@k: mean over prompts of `majority_vote`; None where the reward function extracts no answer."""
    num_prompts: int
    num_samples: int
    """Number of sampled responses per prompt."""
    num_failed: int
    """Responses, greedy and sampled, that failed: each counts as incorrect."""
    num_unscored: int
    """Responses without a reward, because the reward function failed: each counts as incorrect, none in the rewards."""
    response_tokens_mean: float
    truncated_frac: float
    policy_version: int
    reward_mean: float | None
    """Mean reward of the sampled responses, as `reward/mean` of a training step; None if none has a reward."""
    reward_parts: dict[str, float]
    """Means over the same responses of the further numbers of a reward function that returns a dict."""
    groups: list[SampleGroup] = field(compare=False, repr=False)
    """All responses, scored: per prompt the greedy one, then the sampled ones."""

    def metrics(self, prefix: str = "eval") -> dict[str, float | None]:
        """All metrics <prefix>/*. With one sample avg@1, pass@1 and maj@1 equal accuracy_sampled, and are left out."""
        found: dict[str, float | None] = {
            **self.reward_parts,
            "reward_mean": self.reward_mean,
            "accuracy": self.accuracy,
            "accuracy_sampled": self.accuracy_sampled,
            "num_prompts": float(self.num_prompts),
            "response_tokens_mean": self.response_tokens_mean,
            "truncated_frac": self.truncated_frac,
            "policy_version": float(self.policy_version),
        }
        counts = {"failed": self.num_failed, "unscored": self.num_unscored}
        found |= {name: float(count) for name, count in counts.items() if count}
        if self.num_samples > 1:
            found[f"avg@{self.num_samples}"] = self.accuracy_sampled
            found |= {f"pass@{k}": value for k, value in self.pass_at.items() if k > 1}
            found[f"maj@{self.num_samples}"] = self.majority
        return {f"{prefix}/{name}": value for name, value in found.items()}

    @property
    def accuracy_error(self) -> float | None:
        """Standard error of `accuracy` over prompts; None for one prompt."""
        return standard_error([float(group.samples[GREEDY].correct is True) for group in self.groups])

    @property
    def sampled_error(self) -> float | None:
        """Standard error of `accuracy_sampled` over prompts, whose samples are not independent; None for one prompt."""
        return standard_error([num_correct(group.samples[GREEDY + 1 :]) / self.num_samples for group in self.groups])


Keep = Callable[[EvalPlan, Sequence[SampleGroup]], None]
"""Keeps the responses of a set: per prompt the greedy one, then the sampled ones, with the rewards that they have."""


def keep_nothing(plan: EvalPlan, groups: Sequence[SampleGroup]) -> None:
    """The Keep of an evaluation whose responses nobody reads."""


def evaluate(
    sampler: Sampler, prompts: Sequence[Prompt], scorer: Scorer, plan: EvalPlan, *, keep: Keep = keep_nothing
) -> EvalResult:
    """Answer every prompt once greedily and `plan.num_samples` times by sampling, in one generate call.

    A seed depends on the plan's seed and name, the prompt and the index of the sample only: with a larger k the first
    samples stay the same.

    A response that failed is incorrect, up to plan.max_failed_fraction of them. `keep` gets the responses also if the
    reward function fails. Raises ValueError if there are no prompts, and RuntimeError if more failed, a response is
    invalid for another reason or versions are mixed: an accuracy over part of the prompts could not be compared with
    another.
    """
    if not prompts:
        raise ValueError("there are no held-out prompts to evaluate on")
    requests = evaluation_requests(prompts, plan)
    generations = sampler.generate(requests)
    if len(generations) != len(requests):
        raise RuntimeError(f"evaluation: {len(requests)} responses were asked for, {len(generations)} came back")
    policy_version = next((each.token_versions[0] for each in generations if each.token_versions), 0)
    groups = [SampleGroup(prompt=prompt) for prompt in prompts]
    invalid: Counter[InvalidReason] = Counter()
    for position, (request, generation) in enumerate(zip(requests, generations, strict=True)):
        reason = invalid_reason(request, generation, policy_version=policy_version)
        if reason is not None:
            invalid[reason] += 1
        if reason in (None, InvalidReason.failed):
            sample = make_sample(request, generation if reason is None else given_up(request))
            sample.correct = None if reason is None else False
            groups[position // (1 + plan.num_samples)].samples.append(sample)
    failed, where = invalid[InvalidReason.failed], f"evaluation at policy version {policy_version}"
    if invalid.total() > failed or failed > most_failed(plan.max_failed_fraction, plan.min_failed, len(requests)):
        reasons = ", ".join(f"{reason.name} {count} ({reason.value})" for reason, count in invalid.items())
        raise RuntimeError(
            f"{where}: {invalid.total()} of {len(requests)} responses are invalid: {reasons}. The warnings above say "
            f"why, or the engine's log. Up to collect.max_invalid_fraction={plan.max_failed_fraction} of them may fail."
        )
    if failed:
        logger.warning("%s: %d of %d responses failed and count as incorrect", where, failed, len(requests))
    came = [replace(group, samples=[each for each in group.samples if each.correct is None]) for group in groups]
    try:
        scorer.score(came)
    finally:
        scorer.take_stats()  # what a step counts is its own
        keep(plan, groups)
    result = summarize(groups, scorer, num_samples=plan.num_samples, policy_version=policy_version)
    if result.num_unscored:
        text = "%s: %d of %d responses have no reward and count as incorrect"
        logger.warning(text, where, result.num_unscored, len(requests))
    return result


def evaluation_requests(prompts: Sequence[Prompt], plan: EvalPlan) -> list[GenerateRequest]:
    """Per prompt the greedy request, then the sampled ones."""
    # A negative step number, different for every name.
    name_hash = xxhash.xxh3_64_intdigest(plan.name.encode()) >> 2 if plan.name else 0
    seeds = SeedSource(plan.seed, step=EVALUATION_STEP - name_hash)
    requests: list[GenerateRequest] = []
    for prompt in prompts:
        for index in range(GREEDY, GREEDY + 1 + plan.num_samples):
            drawn = seeds.draw(prompt.prompt_id, index)
            params = sampling_params(plan.sampling, seed=drawn, stop_token_ids=plan.stop_token_ids)
            params.with_supports = False  # nobody trains on these responses
            requests.append(
                GenerateRequest(
                    prompt_id=prompt.prompt_id,
                    sample_index=index,
                    prompt_token_ids=prompt.token_ids,
                    answer=prompt.answer,
                    row=prompt.row,
                    sampling=replace(params, temperature=0.0) if index == GREEDY else params,
                )
            )
    return requests


def summarize(groups: list[SampleGroup], scorer: Scorer, *, num_samples: int, policy_version: int) -> EvalResult:
    """Scored responses -> EvalResult."""
    samples = [sample for group in groups for sample in group.samples if sample.num_response_tokens]
    sampled = [group.samples[GREEDY + 1 :] for group in groups]
    counts = [num_correct(each) for each in sampled]
    ks = sorted({2**power for power in range(num_samples.bit_length())} | {num_samples})
    rewards = [sample.reward for each in sampled for sample in each if sample.reward is not None]
    majorities = [majority_vote(votes) for votes in scorer.votes(sampled)] if scorer.reads_answers else []
    return EvalResult(
        accuracy=sum(group.samples[GREEDY].correct is True for group in groups) / len(groups),
        accuracy_sampled=sum(counts) / (len(groups) * num_samples),
        pass_at={k: sum(pass_at_k(num_samples, count, k) for count in counts) / len(groups) for k in ks},
        majority=statistics.fmean(majorities) if majorities else None,
        num_prompts=len(groups),
        num_samples=num_samples,
        num_failed=len(groups) * (1 + num_samples) - len(samples),
        num_unscored=sum(sample.reward is None for sample in samples),
        response_tokens_mean=sum(sample.num_response_tokens for sample in samples) / max(1, len(samples)),
        truncated_frac=sum(sample.finish_reason is FinishReason.length for sample in samples) / max(1, len(samples)),
        policy_version=policy_version,
        reward_mean=statistics.fmean(rewards) if rewards else None,
        reward_parts=mean_parts(sample for each in sampled for sample in each),
        groups=groups,
    )


def num_correct(samples: Sequence[Sample]) -> int:
    """Number of samples that passed the task's check."""
    return sum(sample.correct is True for sample in samples)


def pass_at_k(num_samples: int, correct: int, k: int) -> float:
    """Probability that one of k responses is correct, unbiased from c correct of n: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al., "Evaluating Large Language Models Trained on Code", eq. 1, https://arxiv.org/abs/2107.03374.
    Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= num_samples and 0 <= correct <= num_samples):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got n={num_samples}, c={correct}, k={k}")
    return 1 - math.comb(num_samples - correct, k) / math.comb(num_samples, k)


def majority_vote(votes: Sequence[Vote]) -> float:
    """Probability that the most frequent answer is correct; votes are (answer or None, True if correct).

    Correct responses are votes for one answer, the reference, whatever its writing. Responses without an answer do not
    vote. One of several equally frequent answers is taken at random, so the result is the share of the correct one.
    """
    right = sum(correct for _, correct in votes)
    wrong = Counter(answer for answer, correct in votes if answer is not None and not correct)
    if not right or right < max(wrong.values(), default=0):
        return 0.0
    return 1 / (1 + sum(count == right for count in wrong.values()))


def standard_error(values: Sequence[float]) -> float | None:
    """Standard deviation (n - 1) of the values over the root of n; None for one value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
