"""The processes that judge responses: a pool of them, and judgments of many responses at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import orjson

from rollout.rewards.custom import MAX_SCORE
from rollout.task_config import RewardConfig
from rollout.user_code.pool import CallPool, Ended, Outcome
from rollout.user_code.worker import Kind

POLL_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgment:
    """What a function found about one response."""

    correct: bool | None = None
    """None if a custom function returned only a number."""
    extracted: str | None = None
    """The answer that a built-in rule reads off the response; None if it reads none."""
    score: float | None = None
    """The reward of a custom function."""
    metrics: dict[str, float] = field(default_factory=dict)


def read_judgment(reply: Any) -> Judgment:
    """The Judgment of a worker's reply. Raises ValueError for a reply that no worker of Parity sends."""
    correct, score, extracted = reply.get("correct"), reply.get("score"), reply.get("extracted")
    metrics = reply.get("metrics") or {}
    if not (
        isinstance(correct, bool | None)
        and isinstance(extracted, str | None)
        and (score is None or _is_score(score))
        and isinstance(metrics, dict)
        and all(_is_score(value) for value in metrics.values())
    ):
        raise ValueError("it is no judgment")
    return Judgment(correct=correct, extracted=extracted, score=score, metrics=metrics)


def _is_score(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= MAX_SCORE


def is_correct(outcome: Outcome) -> bool:
    """True if a response was judged, and is correct."""
    return outcome.value is not None and outcome.value.correct is True


def reward_pool(config: RewardConfig) -> CallPool:
    """The workers that judge with reward.function; they start with the first item."""
    kind = Kind(section="reward", module="rollout.rewards.child", read=read_judgment)
    arguments = orjson.dumps(config.arguments).decode()
    return CallPool(kind, config.function, config, max_open=config.max_open_calls, more=[arguments])


def judged(config: RewardConfig, items: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """The outcomes of `items`, each a mapping with response, answer and prompt, in their order; the workers end.

    Raises UserCodeError if the function cannot be used or no worker can be started.
    """
    outcomes: dict[int, Outcome] = {}
    with closing(reward_pool(config)) as pool:
        for key, item in enumerate(items):
            pool.submit(key, item)
        while len(outcomes) < len(items):  # the pool has deadlines of its own
            outcomes |= dict(event for event in pool.poll(POLL_S) if isinstance(event, Ended))
    return [outcomes[key] for key in range(len(items))]
