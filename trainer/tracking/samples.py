"""Groups of a step -> the rows of samples.jsonl: text, reward, K3, and for a few the Delta of each token.

The tokens of a sample take at most MAX_TOKENS x about 30 bytes, 8 KB; TOKEN_SAMPLES of `trainer/policy/step.py` samples
have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from transformers import PreTrainedTokenizerBase

from rollout.types import FinishReason, Prompt, Sample, SampleGroup
from trainer.batch.token_deltas import SampleNumber, TokenDeltas, choose


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTokens:
    """Some consecutive tokens of what follows the prompt. M: tokens."""

    first: int
    """Tokens between the prompt and the first of them."""
    num_tokens: int
    """Tokens behind the prompt, kept here or not."""
    texts: list[str]
    """[M] each decoded by itself: a part of a character reads as a replacement character."""
    rollout_logprobs: list[float | None]
    """[M] log pi_rollout, nats; None where the model did not sample the token."""
    deltas: list[float | None]
    """[M] log pi_old - log pi_rollout, nats; None likewise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive tokens that the model sampled, or that a rollout function has shown to it."""

    sampled: bool
    text: str
    """Decoded by themselves, without special tokens."""


def segments(prompt: Prompt, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[Segment] | None:
    """The turns of a response and what stands between them; None if the model sampled all that follows the prompt."""
    begin = len(prompt.token_ids)
    tokens = list(zip(sample.response_mask[begin:].tolist(), sample.token_ids[begin:].tolist(), strict=True))
    if all(sampled for sampled, _ in tokens):
        return None
    runs = [(sampled, [token for _, token in run]) for sampled, run in groupby(tokens, key=itemgetter(0))]
    return [Segment(sampled=on, text=str(tokenizer.decode(ids, skip_special_tokens=True))) for on, ids in runs]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLog:
    """The token deltas of a step, and the tokenizer that makes them readable."""

    deltas: Mapping[SampleNumber, TokenDeltas]
    tokenizer: PreTrainedTokenizerBase

    def of(self, number: SampleNumber, sample: Sample) -> SampleTokens | None:
        """Return the tokens that are kept of sample `number` of the step; None where they did not come back."""
        if number not in self.deltas:
            return None
        scored = self.deltas[number]
        prompt_size = sample.num_prompt_tokens
        texts = {token: str(self.tokenizer.decode([token])) for token in set(scored.token_ids)}
        return SampleTokens(
            first=scored.first - prompt_size,
            num_tokens=len(sample.token_ids) - prompt_size,
            texts=[texts[token] for token in scored.token_ids],
            rollout_logprobs=[_short(value) for value in scored.rollout_logprobs],
            deltas=[_short(value) for value in scored.deltas],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """One sample as it is written to samples.jsonl; None means unknown."""

    prompt_id: int
    sample_index: int
    prompt: str
    response: str
    answer: str
    """The reference answer."""
    reward: float | None
    correct: bool | None
    advantage: float | None
    num_response_tokens: int
    finish_reason: FinishReason
    policy_version: int
    rollout_logprob_mean: float
    """Mean log pi_rollout over the response, nats per token."""
    k3: float | None = None
    """K3 of this sample: mean over its response of expm1(Delta) - Delta."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Further numbers that the reward function returned."""
    by_k3: bool = False
    """True if it was kept because its K3 is among the largest of the step; the others are picked without a look."""
    segments: list[Segment] | None = None
    """What follows the prompt, where a rollout function wrote a part of it; else the row has no such key."""
    tokens: SampleTokens | None = None
    """Delta of its tokens, where it is one of those that have it; else the row has no such key."""


def sample_rows(
    groups: Sequence[SampleGroup],
    *,
    count: int,
    k3: Mapping[SampleNumber, float],
    advantages: Mapping[SampleNumber, float],
    tokens: TokenLog,
) -> list[SampleRow]:
    """At most `count` samples of a step as rows: half by the largest K3, the rest by chance (`choose`)."""
    samples = [(group.prompt, sample) for group in groups for sample in group.samples]
    return [
        SampleRow(
            prompt_id=sample.prompt_id,
            sample_index=sample.sample_index,
            prompt=prompt.text,
            response=sample.text,
            answer=prompt.answer,
            reward=sample.reward,
            correct=sample.correct,
            advantage=advantages.get(number),
            num_response_tokens=sample.num_response_tokens,
            finish_reason=sample.finish_reason,
            policy_version=sample.policy_version,
            rollout_logprob_mean=float(sample.rollout_logprobs[sample.response_mask].mean()),
            k3=k3[number],
            reward_parts=sample.reward_parts,
            by_k3=place < count - count // 2,
            segments=segments(prompt, sample, tokens.tokenizer),
            tokens=tokens.of(number, sample),
        )
        for place, number in enumerate(choose(k3, count=count))
        for prompt, sample in [samples[number]]
    ]


def _short(value: float | None) -> float | None:
    """Four digits: what the eye can use."""
    return None if value is None else float(f"{value:.4g}")
