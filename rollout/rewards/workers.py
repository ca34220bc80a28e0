"""Judgments outside of sampling: all items at once, in workers of their own that end with the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from rollout.rewards.pool import Outcome, RewardPool
from rollout.task_config import RewardConfig

MEMORY_BYTES = 16 * 2**30
"""Address space of a scoring process: room for a reward model on the CPU; a process that needs more dies alone."""
POLL_S = 5.0


def reward_pool(config: RewardConfig) -> RewardPool:
    """The workers that judge with reward.function; they start with the first item."""
    return RewardPool(
        config.function, num_workers=config.num_workers, timeout_s=config.timeout_s, memory_bytes=MEMORY_BYTES
    )


def judged(config: RewardConfig, items: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """The outcomes of `items`, each a mapping with response, answer and prompt, in their order.

    Raises RewardPoolError if the function cannot be used or no worker can be started.
    """
    outcomes: dict[int, Outcome] = {}
    with closing(reward_pool(config)) as pool:
        for key, item in enumerate(items):
            pool.submit(key, item)
        while len(outcomes) < len(items):  # the pool has deadlines of its own
            outcomes |= pool.poll(POLL_S)
    return [outcomes[key] for key in range(len(items))]
