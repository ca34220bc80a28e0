"""Token deltas of a sample -> what samples.jsonl keeps of them: texts, log-probs and Delta.

A sample takes at most MAX_TOKENS x about 30 bytes, 8 KB; TOKEN_SAMPLES of `trainer/policy/step.py` have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rollout.types import Sample
from trainer.batch.token_deltas import SampleKey, TokenDeltas


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

    deltas: Mapping[SampleKey, TokenDeltas]
    tokenizer: PreTrainedTokenizerBase

    def of(self, sample: Sample) -> SampleTokens | None:
        """Return the tokens that are kept of `sample`; None where the tokens of `sample` did not come back."""
        key = (sample.prompt_id, sample.sample_index)
        if key not in self.deltas:
            return None
        found = self.deltas[key]
        end = found.first + len(found.token_ids)
        if sample.token_ids[found.first : end].tolist() != found.token_ids:
            return None  # the prompt came back in this step, when an epoch ended: these are tokens of the other one
        prompt_size = sample.num_prompt_tokens
        texts = {token: str(self.tokenizer.decode([token])) for token in set(found.token_ids)}
        return SampleTokens(
            first=found.first - prompt_size,
            num_tokens=len(sample.token_ids) - prompt_size,
            texts=[texts[token] for token in found.token_ids],
            rollout_logprobs=[_short(value) for value in found.rollout_logprobs],
            deltas=[_short(value) for value in found.deltas],
        )


def _short(value: float | None) -> float | None:
    """Four digits: what the eye can use."""
    return None if value is None else float(f"{value:.4g}")
