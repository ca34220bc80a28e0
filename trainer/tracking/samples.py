"""Groups of a step -> the rows of samples.jsonl: text, reward, K3, and for a few the Delta of each token.

The tokens of a sample take at most MAX_TOKENS x about 30 bytes, 8 KB; TOKEN_SAMPLES of `trainer/policy/step.py` samples
have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rollout.types import FinishReason, Sample, SampleGroup
from trainer.batch.token_deltas import SampleNumber, TokenDeltas


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
    tokens: SampleTokens | None = None
    """Delta of its tokens, where it is one of those that have it; else the row has no such key."""


def sample_rows(
    groups: Sequence[SampleGroup],
    *,
    advantages: Mapping[SampleNumber, float] | None = None,
    k3: Mapping[SampleNumber, float] | None = None,
    tokens: TokenLog | None = None,
) -> list[SampleRow]:
    """The samples of a step as rows, in the order in which the step packed them."""
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
            advantage=None if advantages is None else advantages.get(number),
            num_response_tokens=sample.num_response_tokens,
            finish_reason=sample.finish_reason,
            policy_version=sample.policy_version,
            rollout_logprob_mean=float(sample.rollout_logprobs[sample.response_mask].mean()),
            k3=None if k3 is None else k3.get(number),
            tokens=None if tokens is None else tokens.of(number, sample),
        )
        for number, (prompt, sample) in enumerate(samples)
    ]


def select_rows(rows: Sequence[SampleRow], count: int) -> list[SampleRow]:
    """At most `count` rows: the worst by K3 fill half of the places, then come those with tokens, and the rest go round
    over the prompts."""
    by_k3 = sorted((row for row in rows if row.k3 is not None), key=lambda row: -(row.k3 or 0.0))
    worst = by_k3[: count // 2]
    taken = {id(row) for row in worst}  # two rows of a step may be equal
    others = [row for row in rows if id(row) not in taken]
    ordered = sorted(others, key=lambda row: (row.tokens is None, row.sample_index))
    return worst + ordered[: count - len(worst)]


def _short(value: float | None) -> float | None:
    """Four digits: what the eye can use."""
    return None if value is None else float(f"{value:.4g}")
