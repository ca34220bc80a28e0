"""Scorer: samples -> the same samples with text, correct and reward filled in.

`rollout/collect/dispatch.py` scores sample by sample, `rollout/collect/evaluate.py` all samples at once. The processes
of a `RewardPool` judge the responses, so that sampling does not wait for rewards, and no response can stop the run
through its reward.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.data.data_files import plain_text
from rollout.processes.custom_code import function_problem, is_custom
from rollout.rewards.pool import Failure, Outcome, RewardPoolError
from rollout.rewards.rules import RULES
from rollout.rewards.votes import Vote, merged_votes
from rollout.rewards.workers import POLL_S, judged, reward_pool
from rollout.task_config import RewardConfig
from rollout.types import Prompt, Sample, SampleGroup

LISTED_ERRORS = 5
MAX_UNSCORED_FRACTION = 0.05
"""Share of a step's responses without a reward that the run bears: single odd responses, not a broken function."""
MAX_FAILED_FRACTION = 0.2
"""Share of a step's responses, wrong ones included, whose scoring may fail: each costs a deadline or a worker."""
EARLY = 256
"""Responses whose scoring is enough to end a run in the middle of a step."""
WRONG_RESPONSE = "I do not know."
"""A response without an answer, of which a model writes many."""


class RewardError(RuntimeError):
    """Scoring failed for too many responses; the message has the function, their numbers and the first of them."""


@dataclass(kw_only=True, slots=True)
class ScoreStats:
    """Counts of scoring since the last `take_stats`."""

    scored: int = 0
    failures: Counter[Failure] = field(default_factory=Counter)
    unscored: int = 0
    """Responses that have no reward: failures without proof that the response is the cause."""
    errors: list[str] = field(default_factory=list)
    """The first responses whose scoring failed, each with the reason."""

    def problem(self, *, early: bool = False) -> str | None:
        """The limit that the failures exceed, with their numbers; None if they exceed none.

        `early` is for the middle of a step: only failures that cost time count then, and as a share of EARLY responses
        until so many were scored.
        """
        unscored = ("gave no reward to", self.unscored, MAX_UNSCORED_FRACTION)
        failed = ("failed on", self.failures.total(), MAX_FAILED_FRACTION)
        for what, number, bound in (failed,) if early else (unscored, failed):
            if number > bound * max(self.scored, EARLY if early else 1):
                counts = ", ".join(f"{self.failures[failure]} {failure.value}" for failure in Failure)
                listed = "; ".join(self.errors)
                return f"{what} {number} of {self.scored} responses, more than {bound:.0%} ({counts}): {listed}"
        return None

    def metrics(self) -> dict[str, float | None]:
        """reward/timeouts, crashes, errors."""
        return {f"reward/{failure.value}": float(self.failures[failure]) for failure in Failure}


class Scorer:
    """Scores samples: reward.correct or reward.incorrect (or a custom score), plus the overlong penalty.

    A response that makes the function hang or crash is wrong. If the function raised or returned no score, or nobody
    knows what ended its worker, the response has no reward (`sample.reward` stays None). All of these are counted.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        max_new_tokens: int,
        decode: Callable[[list[int]], str],
        decode_raw: Callable[[list[int]], str] | None = None,
    ) -> None:
        """`decode` turns response token ids into text without special tokens, `decode_raw` into text with them; None is
        `decode`, for tokens among which none is special.

        Raises ValueError for an unknown reward.function or a buffer that leaves no unpenalised length.
        """
        if problem := function_problem(config.function, RULES):
            raise ValueError(f"reward.function {problem}, got {config.function!r}")
        if config.overlong_buffer_tokens >= max_new_tokens:
            raise ValueError(
                f"reward.overlong_buffer_tokens must be < sampling.max_new_tokens ({max_new_tokens}), "
                f"got {config.overlong_buffer_tokens}"
            )
        self._config = config
        self._rule = RULES.get(config.function)
        self._max_new_tokens = max_new_tokens
        self._decode, self._decode_raw = decode, decode_raw or decode
        self._pool = reward_pool(config)
        self._keys = itertools.count()
        self._waiting: dict[int, Sample] = {}
        self._early: list[Sample] = []
        """Samples scored while `score` waited for others."""
        self._stats = ScoreStats()

    @property
    def reads_answers(self) -> bool:
        """True if the answer of a response is known apart from its verdict, as a majority vote needs."""
        return self._rule is not None

    @property
    def correct_rule(self) -> str:
        """See `RewardConfig.correct_rule`."""
        return self._config.correct_rule

    def votes(self, samples: Sequence[Sequence[Sample]]) -> list[list[Vote]]:
        """The votes of each prompt's samples, which are scored; equal answers of a prompt are equal text."""
        return merged_votes(self._config, [[(s.extracted, s.correct is True) for s in each] for each in samples])

    def submit(self, prompt: Prompt, sample: Sample) -> None:
        """Begin to score `sample`; `poll` returns the sample when it is scored."""
        # The text begins at the first sampled token: outputs of tools belong to the response too.
        tokens = sample.token_ids[sample.num_prompt_tokens :].tolist()
        sample.text = self._decode(tokens)
        key = next(self._keys)
        self._waiting[key] = sample
        raw = self._decode_raw(tokens) if self._rule is None else None
        self._pool.submit(key, _item(prompt, sample.text, raw=raw))

    def poll(self, timeout_s: float) -> list[Sample]:
        """The samples that were scored since the last call; waits at most `timeout_s` seconds for the first.

        Raises RewardError when scoring fails for too many responses, and RewardPoolError when the function cannot be
        used at all.
        """
        early, self._early = self._early, []
        return early or self._poll_pool(timeout_s)

    def _poll_pool(self, timeout_s: float) -> list[Sample]:
        finished: list[Sample] = []
        for key, outcome in self._pool.poll(timeout_s if self._waiting else 0.0):
            sample = self._waiting.pop(key)
            self._fill(sample, outcome)
            finished.append(sample)
        self.check(early=True)
        return finished

    @property
    def unfinished(self) -> int:
        """Samples that were submitted and not yet returned by `poll`."""
        return len(self._waiting) + len(self._early)

    def score(self, groups: Sequence[SampleGroup]) -> None:
        """Fill in text, correct and reward of every sample of `groups`, and return when all samples are scored.

        Samples submitted by `submit` still come back by `poll`. Raises RewardError when scoring fails for too many
        responses.
        """
        left: dict[int, Sample] = {}
        for group in groups:
            for sample in group.samples:
                self.submit(group.prompt, sample)
                left[id(sample)] = sample
        while left:
            for sample in self._poll_pool(POLL_S):
                if left.pop(id(sample), None) is None:
                    self._early.append(sample)
        self.check()

    def check(self, *, early: bool = False) -> None:
        """Raise RewardError if scoring failed for too many responses since the last `take_stats`.

        `early` is for the middle of a step.
        """
        if problem := self._stats.problem(early=early):
            self._stats = ScoreStats()
            raise RewardError(f"reward.function={self._config.function} {problem}. Mend the function or the data.")

    def take_stats(self) -> ScoreStats:
        """Statistics since the last call; resets them."""
        stats, self._stats = self._stats, ScoreStats()
        return stats

    def close(self) -> None:
        """End the workers; safe to call twice. No sample can be scored afterwards."""
        self._pool.close()

    def _fill(self, sample: Sample, outcome: Outcome) -> None:
        config, stats = self._config, self._stats
        stats.scored += 1
        if outcome.failure is not None:
            stats.failures[outcome.failure] += 1
            if len(stats.errors) < LISTED_ERRORS:
                stats.errors.append(f"prompt {sample.prompt_id}/{sample.sample_index}: {outcome.message}")
            if not outcome.proven:
                stats.unscored += 1
                sample.correct = False
                return
        sample.reward_parts, sample.extracted = outcome.metrics, outcome.extracted
        sample.correct, reward = self._verdict(outcome)
        sample.reward = reward + overlong_penalty(
            sample.num_response_tokens,
            max_new_tokens=self._max_new_tokens,
            buffer_tokens=config.overlong_buffer_tokens,
            penalty=config.overlong_penalty,
        )

    def _verdict(self, outcome: Outcome) -> tuple[bool, float]:
        """(correct, reward before the overlong penalty)."""
        config = self._config
        if outcome.score is not None:
            correct = outcome.score >= config.correct if outcome.correct is None else outcome.correct
            return correct, outcome.score
        return (True, config.correct) if outcome.correct else (False, config.incorrect)


def try_reward(config: RewardConfig, prompt: Prompt) -> str:
    """Call the function in its usual process, with the prompt's own answer, with WRONG_RESPONSE and with no text.

    A function of many responses that returns one result for all of them shows with two only. Returns the reason why it
    cannot be used, with the response; "" if it gave a reward to each.
    """
    responses = (prompt.answer, WRONG_RESPONSE, "")
    is_own = is_custom(config.function)
    items = [_item(prompt, response, raw=response if is_own else None) for response in responses]
    try:
        outcomes = judged(replace(config, num_workers=1), items)
    except RewardPoolError as error:
        return str(error.__cause__ or error)
    reasons = [(text, each.message) for text, each in zip(responses, outcomes, strict=True) if each.message]
    return next((f"{message}, for the response {plain_text(response)!r}" for response, message in reasons), "")


def _item(prompt: Prompt, response: str, *, raw: str | None) -> dict[str, Any]:
    """The message to a worker.

    A function of the user's own gets the text `raw` of the response, with special tokens, and the row, which can be
    large; None is for the built-in rules, which read neither.
    """
    texts = {"response": response, "answer": prompt.answer, "prompt": prompt.text}
    item: dict[str, Any] = {name: plain_text(text) for name, text in texts.items()}
    return item if raw is None else item | {"raw_response": plain_text(raw), "row": prompt.row}


def overlong_penalty(num_tokens: int, *, max_new_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """The soft overlong penalty, added to the reward: 0 up to max - buffer tokens, then falling linearly to -penalty at
    max; 0 everywhere with a buffer of 0.

    With L = num_tokens: -penalty * min(1, (L - (max - buffer)) / buffer) where L > max - buffer.
    Source: DAPO, arXiv:2503.14476, equation 13.
    """
    excess = num_tokens - (max_new_tokens - buffer_tokens)
    if buffer_tokens == 0 or excess <= 0:
        return 0.0
    return -penalty * min(1.0, excess / buffer_tokens)
