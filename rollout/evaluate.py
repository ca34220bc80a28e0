"""Held-out evaluation: prompts -> accuracy, greedy and sampled, in one generate call. Called by `trainer/loop.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rollout.collect import Sampler, SeedSource, make_sample, sampling_params
from rollout.config import SamplingConfig
from rollout.filters import invalid_reason
from rollout.rewards import Scorer
from rollout.types import FinishReason, GenerateRequest, Prompt, SampleGroup

EVALUATION_STEP = -1
"""Stands for the step in sampling seeds: no training step has it, and every evaluation draws the same."""
GREEDY, SAMPLED = 0, 1
"""Sample index of the two responses to a prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """What one evaluation found. Lengths and truncation are over all responses, greedy and sampled."""

    accuracy: float
    """Share of prompts whose greedy response is correct."""
    accuracy_sampled: float
    """Share of prompts whose one sampled response is correct, at the training temperature."""
    num_prompts: int
    response_tokens_mean: float
    truncated_frac: float
    policy_version: int

    def metrics(self) -> dict[str, float | None]:
        """The fields as eval/*."""
        return {f"eval/{name}": float(value) for name, value in asdict(self).items()}


def evaluate(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    *,
    sampling: SamplingConfig,
    seed: int,
    stop_token_ids: tuple[int, ...],
) -> EvalResult:
    """Answer every prompt once greedily and once as in training. Seeds depend on `seed` and the prompt only.

    Raises ValueError for no prompts, RuntimeError if a response is invalid or versions are mixed: an accuracy over
    part of the prompts could not be compared with another.
    """
    if not prompts:
        raise ValueError("there are no held-out prompts to evaluate on")
    seeds = SeedSource(seed, step=EVALUATION_STEP)
    requests: list[GenerateRequest] = []
    for prompt in prompts:
        for index in (GREEDY, SAMPLED):
            drawn = seeds.draw(prompt.prompt_id, index)
            params = sampling_params(sampling, seed=drawn, stop_token_ids=stop_token_ids)
            requests.append(
                GenerateRequest(
                    prompt_id=prompt.prompt_id,
                    sample_index=index,
                    prompt_token_ids=prompt.token_ids,
                    sampling=replace(params, temperature=0.0) if index == GREEDY else params,
                )
            )
    generations = sampler.generate(requests)
    if len(generations) != len(requests):
        raise RuntimeError(f"evaluation: {len(requests)} responses were asked for, {len(generations)} came back")
    policy_version = next((each.token_versions[0] for each in generations if each.token_versions), 0)
    groups = [SampleGroup(prompt=prompt) for prompt in prompts]
    invalid: Counter[str] = Counter()
    for position, (request, generation) in enumerate(zip(requests, generations, strict=True)):
        reason = invalid_reason(request, generation, policy_version=policy_version)
        if reason is None:
            groups[position // 2].samples.append(make_sample(request, generation))
        else:
            invalid[reason.name] += 1
    if invalid:
        reasons = ", ".join(f"{name} {count}" for name, count in invalid.items())
        raise RuntimeError(
            f"evaluation at policy version {policy_version}: {invalid.total()} of {len(requests)} responses are "
            f"invalid: {reasons}. Look at the engine's log."
        )
    scorer.score(groups)
    scorer.take_stats()  # what a step counts is its own
    samples = [sample for group in groups for sample in group.samples]
    return EvalResult(
        accuracy=sum(group.samples[GREEDY].correct is True for group in groups) / len(prompts),
        accuracy_sampled=sum(group.samples[SAMPLED].correct is True for group in groups) / len(prompts),
        num_prompts=len(prompts),
        response_tokens_mean=sum(sample.num_response_tokens for sample in samples) / len(samples),
        truncated_frac=sum(sample.finish_reason is FinishReason.length for sample in samples) / len(samples),
        policy_version=policy_version,
    )
