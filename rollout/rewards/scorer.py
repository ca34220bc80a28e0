"""Scorer: SampleGroup -> the same group with text, correct and reward of every sample filled in.

Called by `rollout/collect.py` and `rollout/evaluate.py` once per round of generation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout.config import RewardConfig
from rollout.rewards.functions import REWARDS, reward_names
from rollout.rewards.overlong import overlong_penalty
from rollout.types import SampleGroup


class Scorer:
    """reward = reward.correct or reward.incorrect, plus the overlong penalty."""

    def __init__(self, config: RewardConfig, *, max_new_tokens: int, decode: Callable[[list[int]], str]) -> None:
        """`decode` turns response token ids into text without special tokens.

        Raises ValueError for an unknown reward.function or a buffer that leaves no unpenalised length.
        """
        if config.function not in REWARDS:
            raise ValueError(
                f"reward.function must be one of {', '.join(reward_names())}, got {config.function!r}. "
                "Add a function to rollout.rewards.functions.REWARDS for a new task."
            )
        if config.overlong_buffer_tokens >= max_new_tokens:
            raise ValueError(
                f"reward.overlong_buffer_tokens must be < sampling.max_new_tokens ({max_new_tokens}), "
                f"got {config.overlong_buffer_tokens}"
            )
        self._config = config
        self._function = REWARDS[config.function]
        self._max_new_tokens = max_new_tokens
        self._decode = decode

    def score(self, groups: Sequence[SampleGroup]) -> None:
        """Fill in text, correct and reward. Raises ValueError naming the prompt whose reference is unusable."""
        config = self._config
        for group in groups:
            for sample in group.samples:
                response = [
                    token for token, sampled in zip(sample.token_ids, sample.response_mask, strict=True) if sampled
                ]
                sample.text = self._decode(response)
                try:
                    sample.correct = self._function(sample.text, group.prompt.answer)
                except ValueError as error:
                    raise ValueError(f"prompt {group.prompt.prompt_id}: {error}") from error
                sample.reward = (config.correct if sample.correct else config.incorrect) + overlong_penalty(
                    len(response),
                    max_new_tokens=self._max_new_tokens,
                    buffer_tokens=config.overlong_buffer_tokens,
                    penalty=config.overlong_penalty,
                )
