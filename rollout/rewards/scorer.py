"""Scorer: samples -> the same samples with text, correct and reward filled in.

`rollout/collect/dispatch.py` scores sample by sample, `rollout/collect/evaluate.py` all samples at once. The processes
of a `CallPool` judge the responses, so that sampling does not wait for rewards, and no response can stop the run
through its reward.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.data.data_files import plain_text
from rollout.rewards.answer_rules import RULES
from rollout.rewards.reward_pool import POLL_S, Judgment, judged, reward_pool
from rollout.rewards.votes import Vote, merged_votes
from rollout.task_config import RewardConfig, most_failed
from rollout.types import Prompt, Sample, SampleGroup
from rollout.user_code.custom_code import function_problem, is_custom
from rollout.user_code.pool import Ended, Failure, Outcome, Repeated, UserCodeError

LISTED_ERRORS = 5
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
    calls: Counter[Failure] = field(default_factory=Counter)
    """Failed calls, those that were made again included."""
    repeated: int = 0
    """Calls that were made again."""
    failed: int = 0
    """Responses whose scoring failed in the last try."""
    unscored: int = 0
    """Those among them without a reward: nothing proves that the response is the cause."""
    errors: dict[str, str] = field(default_factory=dict)
    """The first reasons why scoring failed, each with the first response that it met."""

    def problem(self, config: RewardConfig, *, early: bool = False) -> str | None:
        """The limit that the failures exceed, with their numbers; None if they exceed none.

        `early` is for the middle of a step: failures count as a share of EARLY responses until so many were scored.
        """
        out_of = max(self.scored, EARLY) if early else self.scored
        if self.failed <= most_failed(config.max_failed_fraction, config.min_failed, out_of):
            return None
        reasons = "; ".join(f"{place}: {reason}" for reason, place in self.errors.items())
        counts = ", ".join(f"{failure.value} {self.calls[failure]}" for failure in Failure)
        return (
            f"failed on {self.failed} of {self.scored} responses, more than reward.max_failed_fraction="
            f"{config.max_failed_fraction:g} (calls: {counts}): {reasons}"
        )

    def metrics(self) -> dict[str, float | None]:
        """reward/timeouts, crashes, errors, retries and unscored."""
        counts = {failure.value: float(self.calls[failure]) for failure in Failure}
        counts |= {"retries": float(self.repeated), "unscored": float(self.unscored)}
        return {f"reward/{name}": count for name, count in counts.items()}


class Scorer:
    """Scores samples: reward.correct or reward.incorrect (or a custom score), plus the overlong penalty.

    A response on which the function computes for ever, or crashes in every try, is wrong. If the function raised,
    waited too long or returned no score, or nobody knows what ended its worker, the response has no reward
    (`sample.reward` stays None). Failed calls are counted.
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

        Raises RewardError when scoring fails for too many responses, and UserCodeError when the function cannot be
        used at all.
        """
        early, self._early = self._early, []
        return early or self._poll_pool(timeout_s)

    def _poll_pool(self, timeout_s: float) -> list[Sample]:
        finished: list[Sample] = []
        for event in self._pool.poll(timeout_s if self._waiting else 0.0):
            match event:
                case Repeated(_, failure, _):
                    self._stats.repeated += 1
                    self._stats.calls.update([failure] if failure else [])
                case Ended(key, outcome):
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
        if problem := self._stats.problem(self._config, early=early):
            self._stats = ScoreStats()
            text = f"reward.function={self._config.function} {problem}"
            raise RewardError(
                f"{text}. Mend the function, or what it calls. A server that refuses calls for a while needs a larger "
                "reward.max_tries or reward.retry_pause_s, or a smaller reward.max_open_calls."
            )

    @property
    def files(self) -> dict[str, str]:
        """See `CallPool.files`."""
        return self._pool.files

    def take_stats(self) -> ScoreStats:
        """Statistics since the last call; resets them."""
        stats, self._stats = self._stats, ScoreStats()
        return stats

    def outage_metrics(self) -> dict[str, float | None]:
        """reward/outage_s: `CallPool.take_outage_s`; other than `take_stats` it has the calls of evaluations too."""
        return {"reward/outage_s": self._pool.take_outage_s()}

    def close(self) -> None:
        """End the workers; safe to call twice. No sample can be scored afterwards."""
        self._pool.close()

    def _fill(self, sample: Sample, outcome: Outcome) -> None:
        config, stats = self._config, self._stats
        stats.scored += 1
        if outcome.failure is not None:
            stats.calls[outcome.failure] += 1
            stats.failed += 1
            if len(stats.errors) < LISTED_ERRORS:
                stats.errors.setdefault(outcome.message, f"prompt {sample.prompt_id}/{sample.sample_index}")
            if not outcome.proven:
                stats.unscored += 1
                sample.correct = False
                return
        judgment = outcome.value or Judgment()  # a response to blame is wrong
        sample.reward_parts, sample.extracted = judgment.metrics, judgment.extracted
        sample.correct, reward = self._verdict(judgment)
        sample.reward = reward + overlong_penalty(
            sample.num_response_tokens,
            max_new_tokens=self._max_new_tokens,
            buffer_tokens=config.overlong_buffer_tokens,
            penalty=config.overlong_penalty,
        )

    def _verdict(self, judgment: Judgment) -> tuple[bool, float]:
        """(correct, reward before the overlong penalty)."""
        config = self._config
        if judgment.score is not None:
            correct = judgment.score >= config.correct if judgment.correct is None else judgment.correct
            return correct, judgment.score
        return (True, config.correct) if judgment.correct else (False, config.incorrect)


def try_reward(config: RewardConfig, prompt: Prompt, *, only_loads: bool = False) -> str:
    """Call the function in its usual process, with the prompt's own answer, with WRONG_RESPONSE and with no text.

    A function of many responses that returns one result for all of them shows with two only. Returns the reason why it
    cannot be used, with the response; "" if it gave a reward to each. `only_loads`: what it says of the responses does
    not count, because the run has another prompt.
    """
    responses = (prompt.answer, WRONG_RESPONSE, "")
    is_own = is_custom(config.function)
    items = [_item(prompt, response, raw=response if is_own else None) for response in responses]
    try:
        outcomes = judged(replace(config, num_workers=1, outage_wait_s=0.0), items)
    except UserCodeError as error:
        return error.cause
    if only_loads:
        return ""
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
