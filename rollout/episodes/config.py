"""Configuration of episodes. No torch, no Ray."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from algorithms.config import Problem
from algorithms.config.home import PathText
from algorithms.config.rules import above, at_least, ruled
from rollout.config import CollectConfig
from rollout.episodes.tools import ROLLOUTS
from rollout.task_config import CallsConfig
from rollout.user_code.custom_code import function_problem, is_custom, similar_custom


@dataclass(kw_only=True, slots=True)
class EpisodeConfig(CallsConfig):
    """Tools and environments between the turns of a response. By default a response has one turn."""

    function: PathText | None = None
    """calculator, or a custom rollout function as path/to/file.py:name; null for responses of one turn."""
    num_workers: int = ruled(1, at_least(1))
    """Processes that run rollout functions; each runs many episodes at a time and can be killed."""
    timeout_s: float = ruled(30.0, above(0))
    """Deadline in seconds between two turns."""

    def conflicts(self) -> Iterator[Problem]:
        if self.function is not None and (rule := function_problem(self.function, ROLLOUTS)):
            yield self.broken("function", rule, similar_custom(self.function))
        if self.arguments and (self.function is None or not is_custom(self.function)):
            yield self.broken("arguments", "must be {} without a function of your own")


def episode_problems(episode: EpisodeConfig, collect: CollectConfig) -> Iterator[Problem]:
    """Rules between episodes and the collection of a step's groups."""
    if episode.function is not None and collect.partial:
        yield Problem(
            key="collect.partial",
            rule=f"must be false with episode.function={episode.function}: a rollout function does not remember the "
            "first part of a response",
            value=collect.partial,
        )
